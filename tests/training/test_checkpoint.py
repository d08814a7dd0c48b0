"""A checkpoint is whole or not there, whatever happens to the process or the disk."""

import errno
import itertools
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tandem.recipe import UserError
from tandem.training import checked
from tandem.training.checkpoint import SaveFailed, latest, restore, save, standing, step_of

FILES = ["__0_0.distcp", ".metadata", "progress.json", "manifest.json"]
PROGRESS = {"step": 0, "tokens": 2**53 + 1, "seconds": 0.1 + 0.2, "by kind": {"saving": 1e-300}}


class Net(nn.Module):
    def __init__(self, width: int = 5, extra: bool = False):
        super().__init__()
        self.inner = nn.Linear(7, width)
        self.norm = nn.LayerNorm(width)
        if extra:
            self.gate = nn.Linear(3, 3)
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]))


class AdamW(torch.optim.AdamW):
    def step(self, multiplier: float = 1.0):
        for group in self.param_groups:
            group["lr"] = 0.01 * multiplier
        super().step()


def build(seed: int = 0) -> tuple[Net, AdamW]:
    torch.manual_seed(seed)
    network = Net()
    return network, AdamW(network.parameters(), fused=True)


def train(network: nn.Module, optimiser: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        network.norm(network.inner(x)).pow(4).mean().backward()
        optimiser.step()
        optimiser.zero_grad()


def bits(network: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy(force=True).tobytes() for name, tensor in network.state_dict().items()}


@pytest.fixture
def stages(tmp_path) -> tuple[Path, list[tuple[Net, AdamW]]]:
    """A folder in which step 1 stands, and the run after 0, 1, 2 and 3 steps."""
    found = []
    for steps in range(4):
        found.append(build())
        train(*found[-1], 0, steps)
    folder = tmp_path / "checkpoints"
    save(folder, 1, *found[1], PROGRESS, keep=1)
    return folder, found


def require_sound(folder: Path, stages: list[tuple[Net, AdamW]], allowed: set[int]) -> int:
    """The newest checkpoint is one of `allowed`, loads bit for bit, and the run can save again; returns its step."""
    path = latest(folder)
    assert path is not None
    assert step_of(path) in allowed
    network, optimiser = build(seed=9)
    assert restore(path, network, optimiser) == PROGRESS
    assert bits(network) == bits(stages[step_of(path)][0])
    train(network, optimiser, step_of(path), 3)
    assert bits(network) == bits(stages[3][0])
    save(folder, 3, network, optimiser, PROGRESS, keep=1)
    assert [p.name for p in folder.iterdir()] == ["step-00000003"]
    return step_of(path)


def in_child(action: Callable[[], object]) -> int:
    """Runs `action` in a process of its own; its exit status, negative for the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
    network, optimiser = build()
    train(network, optimiser, 0, 3)
    path = save(tmp_path, 3, network, optimiser, PROGRESS, keep=1)
    train(network, optimiser, 3, 6)

    again, its_optimiser = build(seed=1)
    assert restore(path, again, its_optimiser) == PROGRESS
    assert bits(again) != bits(network)
    train(again, its_optimiser, 3, 6)
    assert bits(again) == bits(network)


def test_the_network_can_be_restored_alone(stages):
    folder, found = stages
    network, _ = build(seed=1)
    restore(folder / "step-00000001", network)
    assert bits(network) == bits(found[1][0])


def test_each_piece_is_read_and_checked_once(stages, monkeypatch):
    folder, _ = stages
    monkeypatch.setattr(checked, "read", read := Mock(wraps=checked.read))
    path = latest(folder)
    assert path is not None
    restore(path, *build(seed=1))
    assert [call.args[1] for call in read.call_args_list].count("__0_0.distcp") == 1


def test_no_folder_holds_no_checkpoint(tmp_path):
    assert latest(tmp_path / "nothing") is None
    (tmp_path / ".step-00000004").mkdir()
    (tmp_path / "step-of-mine").mkdir()
    assert latest(tmp_path) is None


def test_killed_before_any_file_operation_a_save_leaves_a_whole_checkpoint(stages, tmp_path):
    folder, found = stages
    reached = []
    for event in itertools.count():
        copy = tmp_path / f"killed at {event}"
        shutil.copytree(folder, copy)

        def killed_save(copy=copy, event=event):
            operations = itertools.count()

            def hook(name, _):
                if name in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"} and next(operations) == event:
                    die()

            sys.addaudithook(hook)
            save(copy, 2, *found[2], PROGRESS, keep=1)

        status = in_child(killed_save)
        assert status in (0, -signal.SIGKILL)
        reached.append(require_sound(copy, found, {1, 2}))
        if status == 0:
            break
    assert reached == sorted(reached)
    assert reached.count(1) == 9  # a folder, made and found, four files, the rename of one, a flush, a rename
    assert reached.count(2) >= 8  # a flush, a rename, four files and a folder to delete, none


@pytest.mark.parametrize("file", FILES)
def test_killed_inside_a_file_a_save_leaves_the_checkpoint_before(stages, monkeypatch, file):
    folder, found = stages
    write_durably = checked.write_durably

    def half(path: Path, data: bytes) -> None:
        if path.name.removesuffix(".tmp") == file:
            path.write_bytes(data[: len(data) // 2])
            die()
        write_durably(path, data)

    monkeypatch.setattr(checked, "write_durably", half)
    assert in_child(lambda: save(folder, 2, *found[2], PROGRESS, keep=1)) == -signal.SIGKILL
    monkeypatch.undo()
    require_sound(folder, found, {1})


def test_a_full_disk_leaves_the_checkpoint_before(stages):
    folder, found = stages

    def save_in_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(SaveFailed, match=r"step-00000002: not saved .*File too large.*step-00000001 still stands"):
            save(folder, 2, *found[2], PROGRESS, keep=1)

    assert in_child(save_in_little_room) == 0
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    require_sound(folder, found, {1})


@pytest.mark.parametrize("flush", range(6))
def test_a_disk_that_fails_in_any_flush_is_reported_and_leaves_a_whole_checkpoint(stages, monkeypatch, flush):
    folder, found = stages
    flushes = itertools.count()

    def fail(_):
        if next(flushes) == flush:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SaveFailed, match="Input/output error"):
        save(folder, 2, *found[2], PROGRESS, keep=1)
    monkeypatch.undo()
    assert not list(folder.glob(".*"))
    require_sound(folder, found, {1} if flush < 5 else {1, 2})  # the last comes after the rename


@pytest.mark.parametrize("flush", range(6))
def test_an_interrupt_in_any_flush_stays_one_and_leaves_a_whole_checkpoint(stages, monkeypatch, flush):
    folder, found = stages
    monkeypatch.setattr(os, "fsync", Mock(side_effect=[*[None] * flush, *[KeyboardInterrupt] * 2]))
    with pytest.raises(KeyboardInterrupt):
        save(folder, 2, *found[2], PROGRESS, keep=1)
    monkeypatch.undo()
    require_sound(folder, found, {1} if flush < 5 else {2})


def test_the_first_save_can_fail_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: os.stat(tmp_path / "nothing"))
    with pytest.raises(SaveFailed, match="none stands yet"):
        save(tmp_path / "checkpoints", 1, *build(), PROGRESS, keep=1)
    assert latest(tmp_path / "checkpoints") is None


@pytest.mark.parametrize(("keep", "left"), [(1, [50]), (2, [40, 50]), (9, [10, 20, 30, 40, 50])])
def test_the_newest_are_kept(tmp_path, keep, left):
    run = build()
    for step in (10, 20, 30, 40, 50):
        assert save(tmp_path, step, *run, PROGRESS, keep) == latest(tmp_path)
    assert [step_of(path) for path in standing(tmp_path)] == left
    assert len(list(tmp_path.iterdir())) == len(left)


def test_a_lower_keep_makes_room_before_the_next_is_written(tmp_path, monkeypatch):
    run = build()
    for step in (10, 20, 30):
        save(tmp_path, step, *run, PROGRESS, keep=3)
    monkeypatch.setattr(os, "fsync", lambda _: os.stat(tmp_path / "nothing"))
    with pytest.raises(SaveFailed, match="step-00000030 still stands"):
        save(tmp_path, 40, *run, PROGRESS, keep=2)
    assert [step_of(path) for path in standing(tmp_path)] == [20, 30]


def test_a_step_that_stands_is_left_as_it_is(stages):
    folder, found = stages
    before = (folder / "step-00000001").stat()
    save(folder, 1, *found[1], PROGRESS, keep=1)
    assert (folder / "step-00000001").stat() == before
    require_sound(folder, found, {1})


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_checkpoint_is_refused_by_name_and_never_passed_over(stages, file, damage):
    folder, found = stages
    save(folder, 2, *found[2], PROGRESS, keep=2)
    path = folder / "step-00000002" / file
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-1])
    if damage == "changed":
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

    network, optimiser = build(seed=1)
    before = bits(network)
    named = file if file != "manifest.json" or damage != "changed" else "progress.json"  # the last it speaks of
    assert latest(folder) == path.parent
    for given in ([network], [network, optimiser]):
        with pytest.raises(UserError) as error:
            restore(path.parent, *given)
        assert str(path.parent / named) in str(error.value)
        assert f"Delete {path.parent} to go on from step-00000001" in str(error.value)
        if damage == "missing" or file != "manifest.json":
            told = {"cut": f"{len(data) - 1:,} bytes, of {len(data):,} that were saved", "missing": "missing"}
            words = told.get(damage, "not the contents that were saved")
            assert f"{path}: {words}; this checkpoint is damaged." in str(error.value)
    if file == "__0_0.distcp":
        assert bits(network) == before

    shutil.rmtree(path.parent)
    require_sound(folder, found, {1})


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), MemoryError(), torch.OutOfMemoryError("CUDA")]
)
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_cannot_be_read_is_an_error_of_its_own(stages, monkeypatch, file, error):
    folder, _ = stages
    read_bytes = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: Mock(side_effect=error)() if path.name == file else read_bytes(path)
    )
    with pytest.raises(type(error)):
        restore(folder / "step-00000001", *build())


@pytest.mark.parametrize("entry", [None, 3, {}, {"bytes": "8"}])
def test_a_file_that_the_manifest_does_not_describe_is_refused(stages, entry):
    folder, found = stages
    path = save(folder, 2, *found[2], PROGRESS, keep=2)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"progress.json": entry}))
    with pytest.raises(UserError, match=r"progress\.json: not described in manifest\.json; this checkpoint is damaged"):
        restore(path, build()[0])


def test_a_file_in_the_place_of_a_checkpoint_is_refused_by_name(stages):
    folder, _ = stages
    file = folder / "step-00000009"
    file.touch()
    with pytest.raises(UserError, match=rf"is damaged. Delete {file} to go on from step-00000001"):
        restore(file, build()[0])


def test_weights_of_another_network_are_refused_name_by_name(stages):
    folder, _ = stages
    path = folder / "step-00000001"
    with pytest.raises(UserError) as error:
        restore(path, Net(width=6, extra=True))
    assert "  inner.weight: float32 [5, 7], in this run float32 [6, 7]" in str(error.value)
    assert "  gate.bias: absent, in this run float32 [3]" in str(error.value)
    assert "odd" not in str(error.value)
    with pytest.raises(UserError, match=r"inner.weight: float32 \[5, 7\], in this run bfloat16 \[5, 7\]"):
        restore(path, Net().bfloat16())  # copying would round and say nothing
    with pytest.raises(UserError, match=r"norm.weight: float32 \[5\], in this run absent"):
        restore(path, nn.Linear(1, 1))


def test_the_state_of_another_optimiser_is_refused(stages):
    class SGD(torch.optim.SGD):
        def step(self, multiplier):
            super().step()

    folder, _ = stages
    network = Net()
    optimiser = SGD(network.parameters(), lr=0.0, momentum=0.9)
    with pytest.raises(UserError, match=r"not the state of this optimiser") as error:
        restore(folder / "step-00000001", network, optimiser)
    assert "  state.0.exp_avg: float32 [5, 7], in this run absent" in str(error.value)
    assert "  state.0.momentum_buffer: absent, in this run float32 [5, 7]" in str(error.value)
