"""One recipe from beginning to end: prepare, plan, train, evaluate, show.

The outcome of each part is stored: the prepared corpus, the plan, the checkpoint, the result. So the same call resumes
where it was interrupted, and shows the result of a finished run at once.
"""

import json
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from rich.progress import DownloadColumn, TaskProgressColumn

from tandem.comparison.plots import plot_losses, sparkline
from tandem.comparison.results import DOCUMENTS, by_document
from tandem.comparison.texts import in_words, noted, per_token, recorded, recorded_texts, text_stores
from tandem.corpus import SUBSET, Corpus, Order, Segmentation, prepare, sentences_of
from tandem.corpus.splitters import version_of
from tandem.disk import flush, replace_file
from tandem.evaluation.likelihood import Likelihood, documents_to_score, require_bytes
from tandem.export.hugging_face import refusal
from tandem.export.weights import export
from tandem.generation.generate import generate_text, starts_of
from tandem.generation.speed import Decoding, measure_decoding
from tandem.recipe import Recipe, UserError
from tandem.recipe.catalogue import columns
from tandem.training import checkpoint
from tandem.training.display import TERMINAL, Told, clock, loss_of, progress_bar, say, scaled, spikes_in_words, titled
from tandem.training.folder import RunFolder, read_part
from tandem.training.loop import train
from tandem.training.observers import Log, Step
from tandem.training.parallel import ALONE, Ranks
from tandem.training.plan import chosen, page
from tandem.training.progress import Progress
from tandem.training.run import Run
from tandem.training.speed import why_unmeasured
from tandem.training.trunk import branched, branches, steps_in_common, tells_if_dropped


def pretrain(recipe: Recipe, path: str | Path, ranks: Ranks = ALONE) -> dict[str, Any] | None:
    """Trains `recipe` in the folder `path`, or resumes there, and evaluates it; stores the result there and returns it.

    Of several processes, only the first writes, prints and returns the result.
    Raises: UserError; Stopped, after saving, when a signal asks for it.
    """
    if not isinstance(recipe, Recipe):
        raise UserError(f"recipe is {type(recipe).__name__}: pass what tandem.load(...) returns")
    path, TERMINAL.quiet = Path(path), TERMINAL.quiet or not ranks.is_first
    # Checks that can fail come before a folder is made.
    ranks.first(lambda: Log.require(recipe.log))
    run = None if ranks.first(path.exists) else require_samples(built(recipe, None, ranks, fresh=True))
    with ranks.together():
        locked = RunFolder.start(path, recipe.to_yaml()) if ranks.is_first else RunFolder(path)
    with locked as folder:
        if not ranks.first(folder.result.exists):
            run = run or require_samples(planned(folder, recipe, ranks))
            last = ranks.first(lambda: checkpoint.latest(folder.checkpoints)) or branched(run, folder)
            if last is not None:
                with tells_if_dropped(last, ranks):
                    run.progress = Progress(**checkpoint.restore(last, run.network, run.optimiser, ranks))
                run.progress.steps = run.steps
            result = _trained_and_judged(run, folder)
            if ranks.is_first:
                replace_file(folder.result, json.dumps(result, indent=1).encode())
                if find_spec("matplotlib"):
                    plot_losses(path.name, folder.records(), path / "loss.png")
        if not ranks.is_first:
            return None
        result = read_part(folder.result, note=str, spikes=int, likelihood=dict, samples=list)
        for title, text in result_page(folder, result):
            say(text, title)
        if read_part(folder.recipe).get("sampling") != recipe.values["sampling"]:
            say("`tandem generate` continues other prompts; those of this finished run stay as they are", "sampling")
    return result


def plan(recipe: Recipe) -> str:
    """What `pretrain` would do, its cost and duration, and where every value of the recipe comes from.

    Raises: UserError wherever training would refuse the recipe.
    """
    takes_over = recipe.start.run is not None  # and then may be refused
    run = require_samples(built(recipe, None, ALONE, fresh=True, weights=takes_over))
    speed = run.speed or why_unmeasured(run) or run.measure()
    lines = [titled(title, text) for title, text in page(run, speed).items()]
    if trunk := recipe.start.trunk:
        common = steps_in_common(run)
        told = "the run begins at the last checkpoint of these" if common else "all are trained"
        lines.append(titled("trunk", f"{common:,} steps in common with {trunk}; {told}"))
    values = columns((key, f"{value}  ({origin})") for key, value, origin in recipe.table())
    return "\n".join([*lines, "", values])


def built(recipe: Recipe, steps: int | None, ranks: Ranks, fresh: bool = False, weights: bool = True) -> Run:
    """The run at step 0, see `Run`. One process per machine prepares its corpus while the others wait for a lock."""
    with ranks.together():
        corpus = prepared(recipe)
    run = Run(recipe, corpus, steps, ranks, fresh, weights)
    if fresh:
        with ranks.together():
            steps_in_common(run)
    return run


def require_splitter(recipe: Recipe) -> None:
    """Raises: UserError where the network reads sentences and their splitter, needed for prompts too, is missing."""
    if recipe.choice("network").reads_sentences:
        name, sentences = recipe.value("network.name"), recipe.corpus.sentences or Segmentation()
        try:
            version_of(sentences.of_plain_text.splitter)  # prompts come without sentence boundaries
        except UserError as error:
            where = f"network {name} reads sentences, corpus.sentences.splitter {sentences.splitter}"
            raise UserError(f"{where}: {error}") from error


def prepared(recipe: Recipe) -> Corpus:
    """The corpus of a recipe; prepares it and the evaluation texts, with a progress bar, where that is not done yet."""
    require_splitter(recipe)
    with progress_bar("preparing text", DownloadColumn()) as progress:
        corpus = prepare(recipe.corpus, progress)
    texts = text_stores(recipe, corpus.tokenizer)  # report what cannot be read or scored early
    e = recipe.evaluation
    held_out = [(corpus.validation, n, e.split) for n in {e.final_documents, e.documents_of_curve}]
    asked = [*held_out, *((store, None, "all") for store in texts.values())]
    for store, documents, split in asked:
        require_bytes(store, recipe.batch.context, documents, split, e.prefix)
    if recipe.choice("network").reads_sentences:
        for store in (corpus.train, corpus.validation, *texts.values()):
            with progress_bar("finding sentences", TaskProgressColumn()) as progress:
                sentences_of(store, progress)
    return corpus


def require_samples(run: Run) -> Run:
    """Returns the run. Raises: UserError where it could be trained, but could not generate its final samples."""
    sampling = run.recipe.sampling
    with run.ranks.together():
        try:
            starts_of(run.network, run.corpus.tokenizer, sampling.prompts, sampling.tokens)
        except UserError as error:
            raise UserError(f"sampling.tokens = {sampling.tokens}, sampling.prompts: {error}") from error
    return run


def planned(folder: RunFolder, recipe: Recipe, ranks: Ranks = ALONE) -> Run:
    """The run of a folder at step 0, with the planned number of steps. Raises: UserError where its text has changed."""
    steps = ranks.first(lambda: folder.steps)
    fresh = ranks.first(lambda: not checkpoint.standing(folder.checkpoints))
    run = built(recipe, steps, ranks, fresh)
    with ranks.together():
        folder.require_text(run.corpus.fingerprints)
    return run


def _trained_and_judged(run: Run, folder: RunFolder) -> dict[str, Any]:
    recipe, ranks, keep, parting = run.recipe, run.ranks, run.recipe.checkpoint, set(branches(run).values())
    planned_seconds = _announced(run, folder)
    # Reads the source that will be exported: somebody may edit it while this run trains
    can_export = not refusal(type(run.network))

    def save() -> None:
        ranks.first(lambda: flush(folder.metrics))  # a checkpoint relies on the records before it
        at, progress = run.progress.step, vars(run.progress)
        network, optimiser = run.network, run.optimiser
        checkpoint.save(folder.checkpoints, at, network, optimiser, progress, keep.keep, ranks, parting)

    with Log(recipe.log, folder, run.progress.step, writes=ranks.is_first) as log:
        watchers = [Evaluations(run, log), Samples(run, log)]
        train(run, [log, *(w for w in watchers if w.every)], save, keep.every, parting)
        judged, texts = _judged(run, folder, log), _judged_texts(run, folder, log)
    network = run.whole_network()
    if can_export and not run.note:
        ranks.first(lambda: export(network, run.corpus.tokenizer, recipe.values, folder.model))
    return {
        "step": run.steps,
        "note": run.note,  # for `noted`; empty: this is a language model
        "tokens": run.tokens(run.steps),
        "positions": run.view.positions(run.steps),
        "flops": run.flops(run.steps),
        "training_seconds": run.progress.seconds,
        "evaluation_seconds": texts["seconds"] + sum(record["seconds"] for record in folder.records("likelihood")),
        "spikes": run.progress.spikes,
        "skipped": run.progress.skipped,
        "planned_seconds": planned_seconds,
        "parameters": run.cost.parameters,
        "likelihood": judged,
        "texts": texts["texts"],
        "samples": samples(run),
        "decoding": asdict(decoding(run)),
    }


def _announced(run: Run, folder: RunFolder) -> float:
    """Plans the run if that is not done, drops what was recorded after its checkpoint, and tells of both; returns the
    planned seconds."""
    step, ranks = run.progress.step, run.ranks
    if not ranks.first(folder.plan.exists):
        speed = run.speed or run.measure()
        seconds = speed.seconds(run.flops(run.steps))
        made = {"steps": run.steps, "page": page(run, speed), "seconds": seconds, "corpus": run.corpus.fingerprints}
        ranks.first(lambda: replace_file(folder.plan, json.dumps(made, indent=1).encode()))
    plan = ranks.first(lambda: read_part(folder.plan, page=dict, seconds=float))
    ranks.first(lambda: folder.truncate_metrics(step or None))
    begun = "from its weights of step 0" if checkpoint.standing(folder.checkpoints) else "new"
    say(f"{folder.path}, {f'going on at step {step:,}' if step else begun}, seed {run.recipe.seed}", "run")
    how = chosen(run)
    ranks.first(lambda: folder.executes(device=run.device.value.type, precision=how["precision"].partition(" (")[0]))
    kept = {*map(checkpoint.step_of, checkpoint.standing(folder.checkpoints))}
    if parts := {budget: at for budget, at in branches(run).items() if at > step or at in kept}:  # else it is too late
        told = "; ".join(f"{budget}, step {at:,}" for budget, at in parts.items())
        say(f"{told}: checkpoints are kept there, for runs of these budgets (start.trunk={folder.path})", "branches")
    for title, text in (plan["page"] | how).items():  # measured as planned, executed as this process does
        say(text, title)
    return plan["seconds"]


def _judged(run: Run, folder: RunFolder, log: Log) -> dict[str, Any]:
    """The record of the likelihood at the end, made and logged if there is none; also writes the arrays by document."""
    ranks = run.ranks
    judged = ranks.first(lambda: _of_the_end(folder, "likelihood", run))
    if judged is not None and ranks.first((folder.path / DOCUMENTS).exists):
        return judged
    with progress_bar("scoring held-out text", TaskProgressColumn()) as progress:
        found, again = judge(run, run.steps, run.recipe.evaluation.final_documents, progress, end=True)
    # Write the file first: the record marks it as done.
    ranks.first(lambda: replace_file(folder.path / DOCUMENTS, by_document(found)))
    if judged is None:
        ranks.first(lambda: log.write(again))  # the page of the result tells it
    return judged or again


def _judged_texts(run: Run, folder: RunFolder, log: Log) -> dict[str, Any]:
    """The record of the likelihood of the recipe's evaluation texts, made and logged if there is none."""
    texts = run.ranks.first(lambda: _of_the_end(folder, "texts", run)) or {"seconds": 0.0, "texts": {}}
    if texts["texts"].keys() == run.recipe.evaluation.texts.keys():
        return texts
    stores, began = text_stores(run.recipe, run.tokenizer), time.perf_counter()
    found = dict(recorded_texts(run, stores))
    texts = {"kind": "texts", "step": run.steps, "texts": found, "seconds": time.perf_counter() - began}
    run.ranks.first(lambda: log.write(texts))
    return texts


def _of_the_end(folder: RunFolder, kind: str, run: Run) -> dict[str, Any] | None:
    """The record of one kind made after the last step; None where there is none yet."""
    return next((record for record in folder.records(kind) if record["step"] == run.steps), None)


class Evaluations:
    """Likelihood of some held-out documents, during training."""

    def __init__(self, run: Run, log: Log):
        self.run, self.log, self.config = run, log, run.recipe.evaluation
        self.every = self.config.every or (self.config.points and -(-run.steps // self.config.points))

    def after_step(self, step: Step) -> None:
        if step.step < self.run.steps:  # the end is evaluated separately
            _, judged = judge(self.run, step.step, self.config.documents_of_curve)
            self.log.write(judged, noted(self.run.note, in_words(judged)))


class Samples:
    """A few lines of generated text, during training."""

    def __init__(self, run: Run, log: Log):
        self.run, self.log = run, log
        self.every = run.recipe.sampling.every

    def after_step(self, step: Step) -> None:
        for prompt, text in samples(self.run):
            words = noted(self.run.note, prompt + text)
            self.log.write({"kind": "sample", "step": step.step, "prompt": prompt, "text": text}, words)


def judge(
    run: Run, step: int, documents: int | None, progress: Told = lambda done, total: None, end: bool = False
) -> tuple[Likelihood, dict[str, Any]]:
    """Likelihood of held-out documents after `step` steps, and its record; at the `end`, also in windows, and of those
    documents that are scored during training."""
    began = time.perf_counter()
    split = run.recipe.evaluation.split
    found, judged = recorded(run, run.corpus.validation, documents, split, progress, windows=end)
    if end:
        few = documents_to_score(run.corpus.validation, run.recipe.evaluation.documents_of_curve, split)
        judged["of_curve"] = per_token(found.of(few))
    clocks = {"seconds": time.perf_counter() - began, "training_seconds": run.progress.seconds}
    spent = {"training_tokens": run.tokens(step), "training_flops": run.flops(step)}
    seen = {"gates": run.whole_network().gates} if hasattr(type(run.network), "gates") else {}
    seen |= {"note": run.note} if run.note else {}
    return found, {"kind": "likelihood", "step": step, **judged, **seen, **spent, **clocks}


def decoding(run: Run) -> Decoding:
    """The cost of continuing half a context of held-out text by a quarter of a context, at most 64 tokens."""
    context = run.recipe.batch.context
    stored, _ = Order(run.corpus.validation, SUBSET).read(0, context // 2)
    network, tokenizer = run.whole_network(), run.corpus.tokenizer
    prompt = network.prompt(tokenizer, tokenizer.decode(stored)) or [tokenizer.eos]
    return measure_decoding(network, prompt, max(1, min(64, context // 4)))


def samples(run: Run) -> list[tuple[str, str]]:
    """(prompt, continuation) for each prompt of the recipe."""
    recipe, prompts = run.recipe, run.recipe.sampling.prompts
    sampler, tokens = recipe.choice("sampling")(recipe.sampling), recipe.sampling.tokens
    model = run.whole_network(), run.corpus.tokenizer
    texts = generate_text(*model, prompts, sampler=sampler, max_tokens=tokens, seed=recipe.seed)
    return list(zip(prompts, texts, strict=True))


def result_page(folder: RunFolder, result: dict[str, Any]) -> list[tuple[str, object]]:
    """(title, text) of lines: what the run did, and where its files are."""
    losses = [loss_of(record) for record in folder.records("step")]
    spent, planned, note = result["training_seconds"], result["planned_seconds"], result["note"]
    last, model = checkpoint.latest(folder.checkpoints, result["step"]), folder.model
    trained = f"{scaled(result['tokens'])} tokens, {result['flops']:.2e} FLOP, training {clock(spent)}"
    speeds = f"{scaled(result['tokens'] / spent)} of {scaled(result['tokens'] / planned)} tokens/s"
    said: list[tuple[str, object]] = [
        ("done", f"{trained}, evaluation {clock(result['evaluation_seconds'])}"),
        ("vs plan", f"{clock(spent)} of {clock(planned)}, {speeds}"),
        ("loss", f"{losses[0]:.2f} {sparkline(losses)} {losses[-1]:.2f}" if losses else "the record holds no step"),
        *([("spikes", spikes_in_words(result))] if result["spikes"] else []),
        ("likelihood", noted(note, in_words(result["likelihood"]))),
        *(("text", noted(note, in_words(text, name))) for name, text in result["texts"].items()),
        *(("sample", noted(note, (prompt + text).strip())) for prompt, text in result["samples"]),
        ("recipe", folder.recipe),
        ("record", folder.metrics),
        ("loss curve", _curve(folder, bool(losses))),
        ("checkpoint", last or "gone"),
        ("model", _model(folder, note, last is not None)),
    ]
    if note or not (last or model.exists()):
        return said
    recipe, asked = read_part(folder.recipe), "'Once upon a time'"
    if result["samples"] and recipe["network"].get("positions") == "learned":  # which may be too few for these
        asked = f"{quote(result['samples'][0][0])} --tokens {recipe['sampling']['tokens']}"
    ready = model if model.exists() else folder.path  # the model needs no text, which may have changed since
    return [*said, ("go on", f"tandem generate {quote(str(ready))} {asked}")]


def _curve(folder: RunFolder, has_losses: bool) -> Path | str:
    """The picture of the training loss, or why there is none."""
    curve = folder.path / "loss.png"
    if curve.exists():
        return curve
    if not has_losses:
        return "not drawn; the record holds no step"
    return "not there" if find_spec("matplotlib") else "not drawn; pip install 'tandem-lm[plots]' brings matplotlib"


def _model(folder: RunFolder, note: str, has_checkpoint: bool) -> Path | str:
    """The exported model, or why there is none."""
    model = folder.model
    if model.exists():
        return model
    if note:
        return "not written; the run ends in a phase that is no language model"
    if not has_checkpoint:
        return "gone"
    return f"not there; `tandem export {quote(str(folder.path))} {quote(str(model))}` writes it, or says why it cannot"
