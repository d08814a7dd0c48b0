"""What of its machine a process may use, and how PyTorch's threads use it; imported before torch."""

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def set_threads() -> None:
    """What torch reads when it is imported; the user's environment takes precedence.

    A waiting thread spins 10,000 times, then sleeps. The runtime's default spins for milliseconds, so that beside one
    busy process a step takes five to twelve times as long; sleeping at once makes small products up to three times as
    slow on an idle machine. A container that has two cores' worth of time on a machine of 64 sees all 64, and so would
    PyTorch: threads beyond those two cost their own coordination and add nothing. Figures: docs/log.md.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if cores() < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))


def cores(system: Path = Path("/")) -> int:
    """Cores that a batch system or a container leaves to this process; `system`: where /proc and /sys are."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(system))]))


def memory(system: Path = Path("/")) -> int:
    """Bytes of memory of this machine, or of what a batch system or a container leaves of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group, is_old in _groups("memory", system):
        with suppress(OSError):
            limit = (group / ("memory.limit_in_bytes" if is_old else "memory.max")).read_text().strip()
            limits += [int(limit)] if limit.isdecimal() else []
    return min(limits)


def end_with_parent(number: int, parent: int) -> None:
    """Asks Linux to send this process the signal `number` when `parent`, which started it, dies; if it has, ends."""
    parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    ctypes.CDLL(None).prctl(parent_death_signal, number)
    if os.getppid() != parent:  # it died before Linux was asked
        os._exit(1)


def _quotas(system: Path) -> Iterator[float]:
    """The time, in cores, that control groups of this process are limited to."""
    for group, is_old in _groups("cpu", system):
        try:
            if is_old:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (group / "cpu.max").read_text().split()
        except OSError:
            continue
        if quota.strip() not in ("max", "-1"):
            yield int(quota) / int(period)


def _groups(controller: str, system: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of control groups that limit this process, and whether they are of cgroup v1."""
    try:
        groups = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in groups):
        if controllers and controller not in controllers.split(","):
            continue
        top = system / "sys/fs/cgroup" / (controller if controllers else "")
        own = top / path.lstrip("/")  # a container's own group may be mounted as the top one
        yield from ((group, bool(controllers)) for group in (own, *own.parents[: len(own.parts) - len(top.parts)]))


NO_FOLDER = ("No space left on device", "Disk quota exceeded", "Read-only file system", "failed to map segment")
"""What PyTorch's compiler says where its folders are full, or allow no code."""


def compiler_without_folder(error: Exception) -> str | None:
    """The cure of a compiler's error, where that is about the folders it writes to; None for any other error."""
    lines = str(error).splitlines() if hasattr(error, "inner_exception") else []
    if (line := next((line for line in lines if any(words in line for words in NO_FOLDER)), None)) is None:
        return None
    return (
        f"blocks cannot be compiled ({line.strip()[:300]}): give TMPDIR and TORCHINDUCTOR_CACHE_DIR a folder with "
        "room, whose files may be executed, or write training.compile=false"
    )
