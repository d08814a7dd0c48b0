"""One recipe from beginning to end: prepare, plan, train, judge, show.

Every part is done once and found again: the prepared corpus, the plan, the checkpoint, the result. So the same call
goes on where it was interrupted, and on a finished run shows the result at once.
"""

import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.comparison.plots import plot_losses, sparkline
from tandem.corpus import Corpus, prepare
from tandem.evaluation.likelihood import Likelihood, likelihood
from tandem.export.weights import export
from tandem.generation.generate import generate_text
from tandem.recipe import Recipe
from tandem.training import checkpoint
from tandem.training.display import clock, scaled
from tandem.training.folder import RunFolder, replace_file
from tandem.training.loop import train
from tandem.training.observers import Log, Step
from tandem.training.plan import page
from tandem.training.run import Progress as RunProgress
from tandem.training.run import Run

Say = Callable[[str], object]


def pretrain(recipe: Recipe, path: Path, console: Console | None = None) -> dict[str, Any]:
    """Trains `recipe` in the folder `path`, or goes on there, and judges it; returns the result, which is also there.

    Raises: UserError; Stopped, after saving, when a signal asks for it.
    """
    terminal = console or Console(highlight=False)

    def say(text: str) -> None:
        terminal.print(text, markup=False, soft_wrap=True)

    # What can be refused is refused before a folder is made.
    run = None if path.exists() else Run(recipe, prepared(recipe, console))
    with RunFolder.start(path, recipe.to_yaml()) as folder:
        result_file = path / "result.json"
        if not result_file.exists():
            result = _trained_and_judged(go_on(folder, run or planned(folder, recipe, console)), folder, say)
            if find_spec("matplotlib"):
                plot_losses({path.name: folder.records()}, path / "loss.png")
            replace_file(result_file, json.dumps(result, indent=1).encode())
        result = json.loads(result_file.read_text())
        for line in result_page(folder, result):
            say(line)
    return result


def plan(recipe: Recipe, console: Console | None = None) -> str:
    """What `pretrain` would do, cost and take, and where every value of the recipe comes from."""
    run = Run(recipe, prepared(recipe, console))
    lines = [f"{title:<11} {text}" for title, text in page(run, run.speed or run.measure()).items()]
    width = max(len(key) for key, _, _ in recipe.table())
    values = [f"{key:<{width}}  {value}  ({origin})" for key, value, origin in recipe.table()]
    return "\n".join([*lines, "", *values])


def prepared(recipe: Recipe, console: Console | None = None) -> Corpus:
    """The corpus of a recipe, under a progress bar where it has to be prepared first."""
    columns = TextColumn("preparing text"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("text", total=None, visible=False)
        corpus = prepare(recipe.corpus, lambda done, total: bar.update(task, completed=done, total=total, visible=True))
    return corpus


def planned(folder: RunFolder, recipe: Recipe, console: Console | None = None) -> Run:
    """The run of a folder at step 0, as long as it was planned."""
    plan_file = folder.path / "plan.json"
    steps = json.loads(plan_file.read_text())["steps"] if plan_file.exists() else None
    return Run(recipe, prepared(recipe, console), steps)


def go_on(folder: RunFolder, run: Run) -> Run:
    """The run at the last checkpoint of the folder, if there is one."""
    last = checkpoint.latest(folder.checkpoints)
    if last is not None:
        run.progress = RunProgress(**checkpoint.restore(last, run.network, run.optimiser))
    return run


def _trained_and_judged(run: Run, folder: RunFolder, say: Say) -> dict[str, Any]:
    recipe, step = run.recipe, run.progress.step
    plan_file = folder.path / "plan.json"
    if not plan_file.exists():
        speed = run.speed or run.measure()
        made = {"steps": run.steps, "page": page(run, speed), "seconds": speed.seconds(run.flops(run.steps))}
        replace_file(plan_file, json.dumps(made, indent=1).encode())
    plan = json.loads(plan_file.read_text())
    folder.truncate_metrics(step or None)
    say(f"{'run':<11} {folder.path}, {f'going on at step {step:,}' if step else 'new'}, seed {recipe.seed}")
    for title, text in plan["page"].items():
        say(f"{title:<11} {text}")
    keep = recipe.checkpoint

    def save() -> None:
        progress = vars(run.progress)
        checkpoint.save(
            folder.checkpoints, run.progress.step, run.network, run.optimiser, progress, keep.keep, keep.milestones
        )

    with Log(recipe.log, folder, step) as log:
        watchers = [Evaluations(run, log), Samples(run, log)]
        train(run, [log, *(w for w in watchers if w.every)], save, keep.every)
        judged = next((r for r in folder.records("likelihood") if r["step"] == run.steps), None)
        if judged is None:
            judged = {"kind": "likelihood", "step": run.steps, **judge(run, documents=None)}
            log.write(judged, noted(run.note, in_words(judged)))
    if not run.note:
        export(run.network, run.corpus.tokenizer, recipe.values, folder.path / "model")
    return {
        "step": run.steps,
        "tokens": run.tokens(run.steps),
        "positions": run.view.positions(run.steps),
        "flops": run.flops(run.steps),
        "training_seconds": run.progress.seconds,
        "evaluation_seconds": judged["seconds"],
        "planned_seconds": plan["seconds"],
        "likelihood": judged,
        "samples": samples(run),
    }


class Evaluations:
    """The ruler on some held-out documents, on the way."""

    def __init__(self, run: Run, log: Log):
        self.run, self.log, self.config = run, log, run.recipe.evaluation
        self.every = self.config.every

    def after_step(self, step: Step) -> None:
        if step.step < self.run.steps:  # the end is judged on all documents
            judged = judge(self.run, self.config.documents)
            words = noted(self.run.note, in_words(judged))
            self.log.write({"kind": "likelihood", "step": step.step, **judged}, words)

    def close(self) -> None:
        pass


class Samples:
    """A few lines of text, on the way."""

    def __init__(self, run: Run, log: Log):
        self.run, self.log = run, log
        self.every = run.recipe.sampling.every

    def after_step(self, step: Step) -> None:
        for prompt, text in samples(self.run):
            words = noted(self.run.note, prompt + text)
            self.log.write({"kind": "sample", "step": step.step, "prompt": prompt, "text": text}, words)

    def close(self) -> None:
        pass


def judge(run: Run, documents: int | None) -> dict[str, Any]:
    """Likelihood of held-out documents, as a record."""
    network, config = run.network.eval(), run.recipe.evaluation
    began = time.perf_counter()
    with torch.no_grad():
        found = likelihood(
            network, run.corpus.validation, context=run.recipe.batch.context, rows=config.rows, documents=documents
        )
    run.network.train()
    return {**as_record(found), "seconds": time.perf_counter() - began}


def as_record(found: Likelihood) -> dict[str, Any]:
    """Sums, and what they divide to."""
    return {
        "nats_per_token": found.nll,
        "bits_per_byte": found.bits_per_byte,
        "nats": found.nats,
        "tokens": found.tokens,
        "bytes": found.bytes,
        "documents": found.documents,
    }


def noted(note: str, words: str) -> str:
    """`words` with what the network does at this step of the run in place of reading tokens, one at a time."""
    return f"{words} (one token at a time, after {note})" if note else words


def in_words(judged: dict[str, Any]) -> str:
    return (
        f"{judged['nats_per_token']:.3f} nats/token, {judged['bits_per_byte']:.3f} bits/byte on held-out text: "
        f"{judged['tokens']:,} tokens, {judged['bytes']:,} bytes, {judged['documents']:,} documents"
    )


def samples(run: Run) -> list[tuple[str, str]]:
    """(prompt, what follows) for the prompts of the recipe."""
    recipe, prompts = run.recipe, run.recipe.sampling.prompts
    sampler = recipe.choice("sampling")(recipe.sampling)
    network = run.network.eval()
    texts = generate_text(
        network, run.corpus.tokenizer, prompts, sampler=sampler, max_tokens=recipe.sampling.tokens, seed=recipe.seed
    )
    run.network.train()
    return list(zip(prompts, texts, strict=True))


def result_page(folder: RunFolder, result: dict[str, Any]) -> list[str]:
    """What the run did, and where everything lies."""
    losses = [next(iter(record["terms"].values())) for record in folder.records("step")]
    spent, planned = result["training_seconds"], result["planned_seconds"]
    lines = {
        "done": f"{scaled(result['tokens'])} tokens, {result['flops']:.2e} FLOP, training {clock(spent)}, "
        f"evaluation {clock(result['evaluation_seconds'])}",
        "vs plan": f"{clock(spent)} of {clock(planned)}, "
        f"{scaled(result['tokens'] / spent)} of {scaled(result['tokens'] / planned)} tokens/s",
        "loss": f"{losses[0]:.2f} {sparkline(losses)} {losses[-1]:.2f}",
        "likelihood": in_words(result["likelihood"]),
    }
    curve, model = folder.path / "loss.png", folder.path / "model"
    paths = {
        "recipe": folder.recipe,
        "record": folder.metrics,
        "loss curve": curve if curve.exists() else "not drawn; pip install 'tandem-lm[plots]' brings matplotlib",
        "checkpoint": folder.checkpoints / f"step-{result['step']:08d}",
        "model": model if model.exists() else "not written; the run ends in a phase that is no language model",
    }
    said = [f"{title:<11} {text}" for title, text in lines.items()]
    said += [f"{'sample':<11} {(prompt + text).strip()}" for prompt, text in result["samples"]]
    said += [f"{title:<11} {path}" for title, path in paths.items()]
    return [*said, f"{'go on':<11} tandem generate {folder.path} 'Once upon a time'"]
