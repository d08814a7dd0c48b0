"""Processes that train together, and what they run."""

import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from forked import forked

from tandem import cli
from tandem.comparison import pretrain
from tandem.recipe import UserError, load
from tandem.training import checked, checkpoint, device, parallel
from tandem.training.loop import take_step
from tandem.training.parallel import joined
from tandem.training.run import Run

WAIT = 120
"""Seconds after which a process counts as hanging."""


class Ranks:
    """`count` processes that each run `target(*arguments)`; their output goes to `log`.0, `log`.1, ..."""

    def __init__(self, count: int, log: Path, target: Callable, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.logs = [log.with_name(f"{log.name}.{rank}") for rank in range(count)]
        self.processes = []
        for rank in range(count):
            group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            env = group | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.processes.append(forked(self.logs[rank], target, *arguments, env=env))

    def wait(self) -> list[int]:
        """Exit codes, negative for signals. A process that does not end by itself is an error."""
        for process in self.processes:
            process.join(WAIT)
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
        assert not hanging, f"ranks {hanging} hang\n{self.said}"
        return [process.exitcode for process in self.processes]

    @property
    def said(self) -> str:
        return "\n".join(log.read_text() if log.exists() else "" for log in self.logs)


def command(arguments: list[str], damage: str | None = None, at: int = 0) -> None:
    """The `tandem` command, on a machine with the flaw `damage`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup pytest ignores it
    if damage == "slow":
        _write_slowly()
    # Once in a thousand kills gloo does not notice, in the middle of a message, that its receiver is gone.
    parallel.TIMEOUT = timedelta(seconds=at if damage == "impatient" else WAIT / 4)
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if damage == "full" and is_last:
        _fill_disk(at)
    if damage == "warned" and is_last:
        _warn_late(at)
    if damage == "misread" and is_last:
        _misread(".metadata")
    if damage == "no plan":
        pretrain.replace_file = lambda path, data: checked.write_durably(Path("/dev/full"), data)
    if damage == "mixed":
        device.cpu_flags = lambda: {"amx_bf16"} if os.environ["RANK"] == "0" else set()
    if damage == "edited" and is_last:
        arguments = [*arguments, "optimiser.lr=3e-2", "corpus.vocabulary=300", "checkpoint.every=2"]
    cli.main(arguments)


def _write_slowly() -> None:
    """Every file of a checkpoint is half-written for a while, and stays so when a process is killed meanwhile."""
    write_durably = checked.write_durably

    def slowly(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        time.sleep(0.01)
        write_durably(path, data)

    checked.write_durably = slowly


def _fill_disk(at: int) -> None:
    """From step `at` on, this process has no room for its checkpoints."""
    save = checkpoint.save

    def in_little_room(folder: Path, step: int, *rest):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if step >= at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            return save(folder, step, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # the log of this test is a file, too

    checkpoint.save = in_little_room


def _misread(name: str) -> None:
    """This process reads other bytes than were saved in a file of a checkpoint."""
    read_bytes = Path.read_bytes
    Path.read_bytes = lambda path: read_bytes(path)[path.name == name :]


def _warn_late(at: int) -> None:
    """While the checkpoint of step `at` is saved, only this process gets the signal that time is up."""
    save = checkpoint.save

    def meanwhile(folder: Path, step: int, *rest):
        if step == at:
            os.kill(os.getpid(), signal.SIGUSR1)
        return save(folder, step, *rest)

    checkpoint.save = meanwhile


def fail_alone(result: Path) -> None:
    """The last of three processes fails before the others gather, in nested blocks; writes what each one sees."""
    told = []
    with joined() as ranks:
        for gathers in (lambda: ranks.gather("value"), lambda: ranks.first(lambda: "value")):
            for error in (UserError("the cause"), OSError("the disk")):
                try:
                    with ranks.together():
                        if ranks.rank == 2:
                            raise error
                        with ranks.together():
                            gathers()
                except (UserError, OSError) as raised:
                    told.append([type(raised).__name__, str(raised), raised.is_told_elsewhere])
                told.append(ranks.gather(ranks.rank))  # all are at the same place again
        result.with_suffix(f".{ranks.rank}").write_text(json.dumps(told))


def stages(specs: list[dict], result: Path) -> None:
    """Trains by each of `specs` in turn and writes what the first process saw as JSON."""
    with joined() as ranks:
        found = [stage(ranks=ranks, **spec) for spec in specs]
        if ranks.is_first:
            result.write_text(json.dumps(found))


def stage(
    overrides: list[str],
    last: int,
    first: int = 0,
    load_from: str | None = None,
    save_in: str | None = None,
    compiled: bool = False,
    **given,
) -> dict:
    """Trains steps `first` to `last`: losses and gradient norms, and at the end held-out nats and weights."""
    recipe = load("decoder/tiny", overrides)
    run = Run(recipe, pretrain.prepared(recipe), **given)
    if compiled:
        run.network.compile("aot_eager")
    if load_from:
        checkpoint.restore(Path(load_from), run.network, run.optimiser, run.ranks)
    seen = []
    for step in range(first, last):
        run.enter(step)
        taken = take_step(run, step)
        seen.append([next(iter(taken.means().values())), float(taken.norm)])
    if save_in:
        state = run.network, run.optimiser, {"step": last}
        checkpoint.save(Path(save_in), last, *state, keep=1, ranks=run.ranks)
    whole = run.whole_network().state_dict()
    counts = taken.counts
    with contextlib.redirect_stdout(None):
        _, judged = pretrain.judge(run, last, 7)
    weights = {name: tensor.flatten()[:50].tolist() for name, tensor in whole.items()}
    return {"seen": seen, "counts": counts, "nats": judged["nats"], "tokens": judged["tokens"], "weights": weights}
