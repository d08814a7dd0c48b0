"""Batch systems and containers leave a process less of a machine than it sees."""

import os

import pytest

from tandem import machine
from tandem.machine import cores, memory, set_threads


def system(folder, groups, files):
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


V1 = "4:memory:/box\n2:cpu,cpuacct:/box/inner\n0::/"
V1_TIME = {"sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "250000", "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000"}
FREE = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/box/inner", {"sys/fs/cgroup/box/cpu.max": "250000 100000"}, 3),
        ("0::/box", {"sys/fs/cgroup/box/cpu.max": "max 100000", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ("0::/../elsewhere", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),  # outside of what the container sees
        ("0::/box", {"sys/fs/cgroup/box/cpu.max": "max 100000"}, 8),
        ("0::/box", {"sys/fs/cgroup/box/cpu.max": "9900000 100000"}, 8),
        (V1, V1_TIME | FREE, 3),
        (V1, FREE, 8),
        ("4:memory:/box\n3:cpuset:/box", V1_TIME, 8),
    ],
)
def test_cores_are_those_that_control_groups_leave(groups, files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert cores(system(tmp_path, groups, files)) == expected


def test_a_machine_without_control_groups_has_all_its_cores(tmp_path):
    assert cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/box/inner", {"sys/fs/cgroup/box/memory.max": "5000", "sys/fs/cgroup/box/inner/memory.max": "max"}, 5000),
        (V1, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "7000"}, 7000),
        (V1, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("2:cpu:/box", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "7000"}, None),
    ],
)
def test_memory_is_what_control_groups_leave(groups, files, expected, tmp_path):
    all_of_it = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory(system(tmp_path, groups, files)) == (expected or all_of_it)


@pytest.mark.parametrize(
    ("left", "given", "expected"), [(2, {}, "2"), (2, {"OMP_NUM_THREADS": "5"}, "5"), (8, {}, None)]
)
def test_threads_are_as_many_as_there_are_cores_unless_the_environment_says_how_many(
    left, given, expected, monkeypatch
):
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "cores", lambda: left)
    set_threads()
    assert os.environ.get("OMP_NUM_THREADS") == expected
