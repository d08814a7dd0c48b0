"""The command as it is typed, in this process; and what other processes find installed."""

import os
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from tandem.cli import main


def tandem(*arguments, given=None):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=given)


def hiding(modules: Sequence[str], folder: Path) -> str:
    """PYTHONPATH of processes that shall not find `modules`; what hides them lies in `folder`."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({modules})\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
