"""The folder of a run: all that is needed to read it, evaluate it and resume it.

    runs/sps-7f3c91/
        recipe.yaml          the resolved recipe, every default written out
        plan.json            what it was planned to do, and fingerprints of its text (comparison/pretrain.py)
        environment.json     one entry for every process that trained here: versions, commit, machine, command; where
                             it took over steps of a trunk, also the entries there
        metrics.jsonl        the record, one JSON object a line; each has a `kind` and the `step` it was made after
        checkpoints/         training/checkpoint.py
        tensorboard/         the same record once more, where log.tensorboard asks for it
        wandb/ wandb.json    what log.wandb leaves here, and how far it has come
        result.json, ...     what it reached (comparison/pretrain.py)
        model/               the network at its end, exported (export/weights.py)
        .lock                held by the process that trains here; the system lets go of it when that process dies

An interrupted run leaves a record that may be ahead of its last checkpoint, and a last line that may be cut short.
`truncate_metrics` removes both, so that the finished record is that of a run that was never interrupted.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np
import torch
import yaml

import tandem
from tandem.disk import lock, made, replace_file
from tandem.machine import memory
from tandem.recipe import UserError, did_you_mean, plugins
from tandem.training.checkpoint import latest, read_progress

LOCK = ".lock"
MAY_DIFFER = ("checkpoint.", "sampling.", "log.", "training.compile", "training.parallel", "training.recompute")
MAY_DIFFER += ("evaluation.rows", "batch.micro_batches", "start.trunk")
"""Keys that may change when a run resumes: what a process saves, shows and holds, not what the run learns (but for the
balance of experts, which is that of a micro-batch). Not training.device, on which the automatic precision depends."""
PLACES = ("corpus.texts", "corpus.validation", "corpus.tokenizer", "corpus.folder", "evaluation.texts")
PLACES += ("start.run", "start.trunk")
"""Keys that hold paths: another machine may spell them in another way."""
CURES = {
    "recipe.yaml": "bring it back from a copy: it says what the rest of this folder is; or give this run another name",
    "plan.json": "delete it: the run is planned again, and only the fingerprints of its text are lost",
    "environment.json": "delete it and delete result.json beside it, and train the run again: it goes on from its last "
    "checkpoint, and only the versions and machines of earlier processes are lost",
    "result.json": "delete it and train the run again: it goes on from its last checkpoint, and nothing is lost",
    "judged.json": "delete it: the study then no longer tells that seeds, rates or arms were added after a look",
    "study.yaml": "delete it if all runs here are of this study: the same command writes it again",
}
"""By file, what to do where it is missing or damaged; any other is deleted, and made again when it is needed."""


class RunFolder:
    """`open` reads a run, `start` trains in it; the attributes are the paths of its parts."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.plan = path / "plan.json"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.result = path / "result.json"
        self.model = path / "model"
        self._lock: TextIO | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run. Raises: UserError naming the runs that are there instead."""
        folder = cls(path)
        if not folder.recipe.is_file():
            if (above := run_above(path)) is not None:
                raise UserError(f"{path}: inside the run {above}, which is the folder to give")
            if (path / "config.json").is_file():
                raise UserError(
                    f"{path}: a model, no run: `tandem evaluate` and `tandem generate` take it; else give the "
                    "run that it was exported from, or that `tandem import` makes of one trained elsewhere"
                )
            if inside := sorted(recipe.parent.name for recipe in path.glob("*/recipe.yaml")):
                raise UserError(f"{path}: holds runs, and is none: give one of {', '.join(inside)}")
            others = sorted(recipe.parent.name for recipe in path.parent.glob("*/recipe.yaml"))
            near = did_you_mean(path.name, others, f"{path.parent}/")
            there = f"runs in {path.parent}: {', '.join(others)}" if others else f"{path.parent} holds no run"
            raise UserError(f"{path}: no run here; {near}{there}")
        read_part(folder.recipe)
        return folder

    @classmethod
    def start(cls, path: Path, recipe: str) -> Self:
        """The folder of a new run, or of the same run to be resumed, locked until `close` or the process ends; or of
        the same run, finished, which may stand where nothing can be written.

        `recipe` is the resolved recipe as YAML.
        Raises: UserError where another process trains in it, or it holds the run of another recipe.
        """
        folder = cls(path)
        if folder.result.exists() and folder.recipe.exists():  # nothing is written there any more
            folder.require_same_recipe(recipe)
            return folder
        try:
            folder._lock = lock(made(path, "a run") / LOCK)
        except OSError as error:
            raise UserError(f"{path}: cannot be the folder of a run ({error.strerror})") from None
        if folder._lock is None:
            raise UserError(
                f"{path}: process {(path / LOCK).read_text()} is training this run; "
                "wait for it, or give this run another name"
            )
        try:
            begun = folder.plan, folder.metrics, folder.checkpoints, folder.result
            if folder.recipe.exists():
                folder.require_same_recipe(recipe)
            elif there := [part.name for part in begun if part.exists()]:
                raise UserError(f"{path}: {', '.join(there)} of a run stand here; {damaged(folder.recipe, 'missing')}")
            replace_file(folder.recipe, recipe.encode())
            entries = read_part(folder.environment, list) if folder.environment.exists() else []
            replace_file(folder.environment, json.dumps([*entries, environment()], indent=1).encode())
        except BaseException:
            folder.close()
            raise
        return folder

    def differences(self, asked: str, may: tuple[str, ...] = MAY_DIFFER) -> list[str]:
        """A line for every key that differs in the recipe `asked`, YAML, but for those that begin with one of `may`."""
        read_part(self.recipe)
        # Every scalar is read as text: both texts come from one writer, so equal values look equal.
        texts = self.recipe.read_text("utf-8"), asked
        held, wanted = (dict(leaves(yaml.load(text, yaml.BaseLoader))) for text in texts)
        keys = [key for key in wanted | held if held.get(key) != wanted.get(key) and not key.startswith(may)]
        return [f"  {key}: {held.get(key, 'absent')} there, {wanted.get(key, 'absent')} asked" for key in keys]

    def require_same_recipe(self, asked: str) -> None:
        """Raises: UserError where this is the run of another recipe than the one `asked`, which is YAML."""
        if lines := self.differences(asked):
            may = ", ".join(key.removesuffix(".") for key in MAY_DIFFER)
            told = f"{self.path}: holds the run of another recipe; give this run another name. It differs in"
            lines += [f"A run that goes on may change only {may}"]
            lines += [f"To train its weights otherwise, or longer, start another run from them: start.run={self.path}"]
            raise UserError("\n".join([told, *lines]))

    def executes(self, **how: Any) -> None:
        """Adds to the entry of the environment that this process has written, the last."""
        *before, mine = read_part(self.environment, list)
        replace_file(self.environment, json.dumps([*before, mine | how], indent=1).encode())

    @property
    def steps(self) -> int | None:
        """Steps of the whole run by its plan or, where that is gone, record or checkpoint; None: it has none of these.

        A budget in seconds would give another number each time it is measured.
        """
        if self.plan.exists():
            return read_part(self.plan, steps=int)["steps"]
        if found := next((record["steps"] for record in self.records("step")), None):
            return found
        last = latest(self.checkpoints)
        return read_progress(last).get("steps") if last else None

    @property
    def text(self) -> list[str] | None:
        """Fingerprints of the corpus that this run was planned with; None: it has no plan yet."""
        return read_part(self.plan).get("corpus") if self.plan.exists() else None

    def require_text(self, fingerprints: list[str]) -> None:
        """Raises: UserError where this run was planned with other tokens than those of this corpus, or with other
        sentences where both have some."""
        differ = [there != here for there, here in zip(self.text or [], fingerprints, strict=False)]
        if any(differ[:2]):
            raise UserError(
                f"{self.path}: was trained on other tokens than its texts give now: these, or the tokenizer trained on "
                "them, have changed. Bring them back, or begin another run"
            )
        if any(differ):
            raise UserError(
                f"{self.path}: was trained on other sentences than its text is cut into now: the package that finds "
                "them, or its weights, have changed (corpus.sentences). Bring them back, or begin another run"
            )

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The record so far, in order; of one `kind`, if given. A last line that is still being written is left out.

        Numbers that JSON does not have (`as_line` in training/sinks.py) are restored.
        Raises: UserError naming file and line where the record is damaged.
        """
        return [record for _, record in self._lines() if kind in (None, record["kind"])]

    def truncate_metrics(self, step: int | None) -> None:
        """Drops what was recorded after `step`, the checkpoint to resume from; None: there is none, all is dropped."""
        kept = [line for line, record in self._lines() if step is not None and record["step"] <= step]
        replace_file(self.metrics, b"".join(kept))

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        lines = self.metrics.read_bytes().splitlines(keepends=True) if self.metrics.exists() else []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
                raise UserError(f"{self.metrics}:{number}: not a record; delete this line to use the others")
            yield line, _restored(record, record.pop("not_finite", {}))


def read_part(path: Path, kind: type = dict, **keys: Any) -> Any:
    """What a small file of a run or a study holds, JSON or YAML: a `kind`, with these keys of these types.

    Raises: UserError with the file's cure where it is missing or damaged.
    """
    found: Any = None
    try:
        data = path.read_bytes()
        found = yaml.safe_load(data) if path.suffix == ".yaml" else json.loads(data)
    except FileNotFoundError:
        raise damaged(path, "missing") from None
    except (ValueError, yaml.YAMLError):
        pass
    if not isinstance(found, kind) or not all(key in found and isinstance(found[key], keys[key]) for key in keys):
        raise damaged(path)
    return found


def damaged(path: Path, how: str = "damaged") -> UserError:
    cure = CURES.get(path.name, "delete it, and start the same command again")
    return UserError(f"{path}: {how}; {re.sub('^delete it(:|,? and) ', '', cure) if how == 'missing' else cure}")


def _restored(record: dict[str, Any], odd: dict[str, str], above: str = "") -> dict[str, Any]:
    """A record with its non-finite numbers restored from `odd`, which has them by dotted key."""
    for key, value in record.items():
        if isinstance(value, dict):
            _restored(value, odd, f"{above}{key}.")
        elif above + key in odd:
            record[key] = float(odd[above + key])
    return record


def environment() -> dict[str, Any]:
    """What a result may depend on besides the recipe."""
    commit, dirty = code_version()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "tandem": tandem.__version__,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "plugins": plugins(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": memory(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def code_version() -> tuple[str | None, bool | None]:
    """The commit of the running code, and whether the code differs from it; None where it is not in a git tree."""
    if not _git("ls-files", "__init__.py"):  # installed, and the environment may lie in another project's tree
        return None, None
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", "."))


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(tandem.__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, "") or platform.processor() or platform.machine()


def run_above(path: Path) -> Path | None:
    """The run in whose folder `path` lies; None where it lies in none."""
    return next((p for p in path.parents if RunFolder(p).recipe.exists() and RunFolder(p).environment.exists()), None)


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a record or a recipe that is not a mapping itself."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
