"""Evaluates a trained network on named tasks: scores with standard errors, as a table and as files of the run.

    RUN/tasks/hellaswag.json           metrics, errors, settings, versions, data, machine
    RUN/tasks/hellaswag.items.jsonl    one line for each item: its log-likelihoods and metrics
    RUN/tasks/brown.json               a text: nats per token and bits per byte

evaluation/harness.py runs harness tasks, evaluation/likelihood.py scores texts; evaluation/task_files.py reads both.
"""

import json
import math
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import TaskProgressColumn

from tandem.comparison.texts import Exported, lost_in_words, prepared_texts, scored, unread
from tandem.comparison.trained import open_scored
from tandem.corpus.tokenizer import content_hash
from tandem.disk import made, replace_file
from tandem.evaluation.likelihood import ratio_error
from tandem.evaluation.task_files import TaskFile, Texts, file_of, read_tasks
from tandem.recipe import require
from tandem.recipe.catalogue import columns
from tandem.training.display import progress_bar, say
from tandem.training.folder import environment
from tandem.training.run import Run

Record = dict[str, Any]


def judge_tasks(
    path: Path,
    names: str,
    limit: int | None = None,
    rows: int | None = None,
    unfinished: bool = False,
    step: int | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Evaluates the run or the exported model in `path` on tasks by name, shows the scores and stores them in its
    `tasks/`, task by task.

    Args:
        limit: items of each task, documents of each text; None: all.
        rows: prompts of a task read at once; None: the run's evaluation.rows.
    Raises: UserError where a task cannot be read, or the network cannot do it; as `open_scored`.
    """
    files = read_tasks(names)  # report a wrong name before opening anything
    run, folder = open_scored(path, unfinished, step, overrides), path / "tasks"
    if any(isinstance(file, TaskFile) for file in files):
        require("lm_eval", "harness")
    made(folder, "tasks")  # before anything is measured
    step = run.progress.step if isinstance(run, Run) else None
    notes, table = [], [("task", "metric", "value", "standard error", "items")]
    shared = {"step": step, "note": run.note, "overrides": [*overrides], "limit": limit, "environment": environment()}
    try:
        for file in files:
            if isinstance(file, Texts):
                found = _text_records(run, file, limit)
            else:
                found = _task_records(run, file, limit, rows or run.recipe.evaluation.rows)
            for record, items in found:
                _keep(folder / file_of(record["task"]), shared | record, items)
                if lost := lost_in_words(record):
                    notes.append(f"{record['task']}: {lost}")
                for metric, reached in record["metrics"].items():
                    error = "unknown" if reached["error"] is None else f"{reached['error']:#.3g}"
                    table.append((record["task"], metric, f"{reached['value']:#.4g}", error, f"{record['items']:,}"))
    finally:  # also of those before one that fails, or is interrupted
        if len(table) > 1:
            title = [] if step is None else [" ".join(filter(None, (f"step {step:,}", run.note, *overrides)))]
            say("\n".join([*title, columns(table, right=True), *notes, f"kept in {folder}"]))


def _task_records(
    run: Run | Exported, file: TaskFile, limit: int | None, rows: int
) -> Iterator[tuple[Record, list[Record]]]:
    """The record of each harness task, and records of its items."""
    from tandem.evaluation.harness import REQUEST_ORDER, RESAMPLES, Harness, run_tasks

    network, tokenizer = run.whole_network(), run.tokenizer
    with progress_bar(f"asking {file.name}", TaskProgressColumn()) as progress:
        adapter = Harness(network, tokenizer, rows=rows, told=progress)
        results = run_tasks(adapter, [file], limit)
    settings = {"rows": rows, "context": network.context, "request_order": REQUEST_ORDER, "resamples": RESAMPLES}
    for result in results:
        yield (
            {
                "task": result.name,
                "metrics": {name: metric._asdict() for name, metric in result.metrics.items()},
                "items": result.count,
                "settings": {"precision": "float32", **settings, "task": result.settings},
                "versions": {"task": result.version, "lm_eval": version("lm_eval"), "tokenizer": tokenizer.hash},
                "data": {str(path): content_hash(path.read_bytes()) for path in file.data},
            },
            result.items,
        )


def _text_records(run: Run | Exported, file: Texts, limit: int | None) -> Iterator[tuple[Record, list[Record]]]:
    """Likelihood of each text, and of each of its documents; also per word, as papers report it, where documents are
    scored whole; of a network that is told of sentence boundaries with their nats, too."""
    prefix = run.recipe.evaluation.prefix
    stores = prepared_texts(run.recipe, run.tokenizer, file.texts, f"{file.name}: texts.")
    for name, store in stores.items():
        with progress_bar(f"scoring {name}", TaskProgressColumn()) as progress:
            found = scored(run, store, limit, progress=progress)
        units = {
            "nats per token": (found.tokens_by_document, 1),
            "bits per byte": (found.bytes_by_document, math.log(2)),
        }
        if store.tokenizer.is_lossless and not prefix:
            words = [len(store.tokenizer.decode(store.document(i)).split()) for i in found.order]
            units["nats per word"] = np.array(words), 1
        nats = {"": found.nats_by_document}
        if found.nll_paper is not None:
            nats[" with boundaries"] = found.nats_by_document + found.end_nats_by_document
        metrics = {}
        for (unit, (size, scale)), (what, sums) in product(units.items(), nats.items()):
            value, error = sums.sum() / (size.sum() * scale), ratio_error(sums, size) / scale
            metrics[unit + what] = {"value": value, "error": None if math.isnan(error) else error}
        columns = found.order, found.nats_by_document, found.end_nats_by_document
        columns += found.tokens_by_document, found.bytes_by_document
        rows = zip(*(column.tolist() for column in columns), strict=True)
        yield (
            {
                "task": name,
                "metrics": metrics,
                "items": found.documents,
                **unread(store, found.order),
                "settings": {
                    **({"prefix": True} if prefix else {}),
                    "precision": "float32",
                    "rows": run.recipe.evaluation.rows,
                    "context": run.recipe.batch.context,
                },
                "versions": {"tokenizer": run.tokenizer.hash},
                "data": dict.fromkeys(store.manifest.sources, store.fingerprint),
            },
            [dict(zip(("item", "nats", "end_nats", "tokens", "bytes"), row, strict=True)) for row in rows],
        )


def _keep(path: Path, record: Record, items: list[Record]) -> None:
    lines = "".join(json.dumps(item) + "\n" for item in items)
    replace_file(path.with_name(f"{path.name}.items.jsonl"), lines.encode())
    replace_file(path.with_name(f"{path.name}.json"), json.dumps(record, indent=1).encode())
