"""Processes forked from one that has imported everything: each starts in a fraction of a second."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tandem import cli

ROOT = Path(__file__).parents[1]
CHECKPOINTS = ["torch.distributed.checkpoint", "torch.distributed.fsdp"]
COMMANDS = ["tandem.cli", "tandem.comparison.pretrain", "tandem.training.stored"]
NAMED = ["tandem.networks", "tandem.objectives", "tandem.analysis"]
COMPILER = ["torch._dynamo"]  # which every optimiser imports


def forked(log: Path, target: Callable, *arguments, env: Mapping[str, object] | None = None) -> BaseProcess:
    """A process that runs `target(*arguments)` on one thread; its output goes to `log`."""
    os.environ["PYTHONPATH"] = str(ROOT)  # read by the server, which imports before it gets sys.path
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*CHECKPOINTS, *COMMANDS, *NAMED, *COMPILER])
    given = {key: str(value) for key, value in (env or {}).items()}
    process = context.Process(target=_begin, args=(given, log, target, arguments), daemon=True)
    process.start()
    return process


def _begin(env: dict[str, str], log: Path, target: Callable, arguments: tuple) -> None:
    os.environ.update(env)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    sys.modules["matplotlib"] = None  # a second of every run
    try:
        target(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Forked:
    """Stands in for subprocess.Popen: runs `python -P -m tandem ...` in a fork of this process."""

    def __init__(self, command, *, stdin, stdout, stderr, env, start_new_session, preexec_fn):
        assert command[1:4] == ["-P", "-m", "tandem"] and start_new_session
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code: object = 1
        try:
            os.setsid()
            preexec_fn()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for file, descriptor in (stdout, 1), (stderr, 2):
                if file is not None:
                    os.dup2(file.fileno(), descriptor)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the locks of the parent, above all
            os.environ.update(env)
            cli.main([str(argument) for argument in command[4:]])
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
