"""A trained run, opened for use: to evaluate it again, generate text with it, analyse it or export it.

This works for finished runs and for runs still in training, at their last checkpoint or at that of a given step.
Exported models can generate text and be scored, too.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from rich.progress import TaskProgressColumn

from tandem.analysis.analysis import Analysis
from tandem.comparison.plots import drawable, picture
from tandem.comparison.pretrain import built, planned
from tandem.comparison.prompts import print_records, print_texts
from tandem.comparison.table import NONE
from tandem.comparison.texts import (
    HELD_OUT,
    Exported,
    by_position_in_words,
    given_stores,
    in_words,
    noted,
    recorded_texts,
    text_stores,
)
from tandem.corpus import Tokenizer
from tandem.disk import made, replace_file
from tandem.export.files import CONFIG, read_config
from tandem.export.weights import export, load_exported
from tandem.generation.generate import stream_text
from tandem.generation.sampling import Sampler
from tandem.networks.network import Network
from tandem.recipe import (
    SECTIONS,
    Recipe,
    UserError,
    changed,
    configure,
    counted,
    did_you_mean,
    load,
    register_all,
    registered,
    require,
)
from tandem.recipe.catalogue import columns
from tandem.recipe.document import is_path, names_recipe
from tandem.recipe.resolve import saved
from tandem.training import checkpoint
from tandem.training.device import Training, choose_device
from tandem.training.display import progress_bar
from tandem.training.folder import PLACES, RunFolder
from tandem.training.parallel import ALONE
from tandem.training.progress import Progress
from tandem.training.run import Run

SHOWN = 16
"""Longest list of an analysis that is printed."""


class NotFree(UserError):
    """A setting that a trained network cannot be given."""


def open_trained(
    path: str | Path, unfinished: bool = False, step: int | None = None, overrides: Iterable[str] = ()
) -> Run:
    """The run in `path` at its last checkpoint, or at that of `step`.

    `overrides`: `network.key=value` for settings that shape no weight (`Network.free`).
    Raises: UserError where it has none, or one that is no language model yet, unless `unfinished` allows that; and for
    any other setting.
    """
    path = Path(path)
    folder = RunFolder.open(path)
    last = checkpoint.latest(folder.checkpoints, step)
    is_left = (folder.model / CONFIG).is_file()
    still = "can still generate text and be scored, and is an export"
    model = f"{folder.model} {still}" if is_left else "its model is gone, too"
    if last is None and (others := checkpoint.standing(folder.checkpoints)):
        there = ", ".join(str(checkpoint.step_of(other)) for other in others)
        raise UserError(f"{path}: no checkpoint of step {step}; there are those of {there}")
    if last is None:
        again = f"tandem train {quote(str(folder.recipe))} --run {quote(path.name)} --runs {quote(str(path.parent))}"
        if not folder.result.exists():
            raise UserError(f"{path}: no checkpoint yet; train it first: {again}")
        cure = f"bring them back, or delete result.json and train it anew: {again}"
        raise UserError(f"{path}: finished, but its checkpoints are gone; {model}; {cure}")
    try:
        run = planned(folder, _recipe(folder, overrides))
    except UserError as error:  # its text may be elsewhere, or have changed
        raise UserError(f"{error}; {model}") if is_left and not overrides else error from None
    run.progress = Progress(**_restored(folder, run, last, step))
    if run.note and not unfinished:
        raise UserError(
            f"{path}: step {run.progress.step:,} of {run.steps:,} is no language model yet: it has read {run.note}; "
            "train it further, or take it as it is with --unfinished"
        )
    return run


def _recipe(folder: RunFolder, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a run, which may have been trained on a GPU, for here: without one, and without a compiler, as
    everything here runs eagerly; with `overrides` of settings that shape no weight."""
    elsewhere = ["training.compile=false", *([] if torch.cuda.is_available() else ["training.device=auto"])]
    recipe = load(str(folder.recipe), elsewhere)
    free = [f"network.{key}" for key in recipe.choice("network").free]
    overrides = [overrides] if isinstance(overrides, str) else [*overrides]
    for override in overrides:
        if ".".join(override.partition("=")[0].strip().split(".")[:2]) not in free:
            raise NotFree(
                f"{override}: only a setting that shapes no weight may be given for a trained network; "
                f"of {recipe.value('network.name')}: {', '.join(free) or 'none'}"
            )
    return changed(recipe, overrides) if overrides else recipe


def _restored(folder: RunFolder, run: Run, last: Path, step: int | None) -> dict[str, Any]:
    """Reads the checkpoint `last`, or a newer one with which training has replaced it meanwhile."""
    try:
        return checkpoint.restore(last, run.network)
    except (UserError, OSError):
        newest = checkpoint.latest(folder.checkpoints, step)
        if newest is None or newest == last:
            raise
    return _restored(folder, run, newest, step)


def open_model(
    path: str | Path, unfinished: bool = False, step: int | None = None, overrides: Iterable[str] = ()
) -> tuple[Network, Tokenizer]:
    """Network and tokenizer of a run's folder, as `open_trained` takes it, or of an exported model's."""
    path = Path(path)
    if (path / CONFIG).is_file():
        if step is not None:
            raise UserError(f"{path}: an exported model is of one step; --step is for runs")
        if overrides:
            cure = "export its run with others: tandem export RUN FOLDER network.KEY=VALUE"
            raise NotFree(f"{path}: an exported model keeps the settings that it was exported with; {cure}")
        network, tokenizer = load_exported(path)
        return network.to(choose_device(Training.Config()).value), tokenizer
    run = open_trained(path, unfinished, step, overrides)
    return run.network, run.tokenizer


def open_scored(path: Path, unfinished: bool, step: int | None, overrides: Sequence[str]) -> Run | Exported:
    """The run in `path`, or the model exported there."""
    if not (path / CONFIG).is_file():
        return open_trained(path, unfinished, step, overrides)
    network, tokenizer = open_model(path, step=step, overrides=overrides)
    recipe = read_config(path).get("recipe")
    if recipe is None:
        raise UserError(f"{path}: was not trained by Tandem; `tandem import` makes it a run, which can be scored")
    for place in PLACES:  # on the machine that trained it
        section, _, key = place.partition(".")
        if isinstance(options := recipe.get(section), dict):
            options.pop(key, None)
    return Exported(network, tokenizer, saved(recipe, str(path / CONFIG)))


def evaluate(
    path: Path,
    documents: int | None,
    given: Sequence[str] = (),
    unfinished: bool = False,
    step: int | None = None,
    overrides: Sequence[str] = (),
) -> Iterator[str]:
    """Yields the likelihood of the run's held-out text, of its evaluation texts and of those given as NAME=PATH, in
    words, as each is scored, and by position in the document; of an exported model, of those given alone."""
    run = open_scored(path, unfinished, step, overrides)
    stores = given_stores(run.recipe, run.tokenizer, given)
    if isinstance(run, Run):
        stores = {HELD_OUT: run.corpus.validation} | text_stores(run.recipe, run.tokenizer) | stores
    if not stores:
        raise UserError(f"{path}: an exported model has no text of its own; name some: --texts NAME=PATH")
    at = [f"step {run.progress.step:,} of {run.steps:,}", *overrides] if isinstance(run, Run) else []
    begins = f"{', '.join(at)}: " if at else ""
    for name, record in recorded_texts(run, stores, documents, bounds=True):
        yield begins + noted(run.note, in_words(record, name))
        yield from by_position_in_words(record)
        begins = ""


def continue_texts(
    path: Path,
    prompts: list[dict[str, Any]],
    tokens: int,
    options: dict[str, Any],
    seed: int,
    unfinished: bool = False,
    rows: int | None = None,
    as_json: bool = False,
    step: int | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Prints the continuation of each prompt as it is generated, or a JSON line for each (comparison/prompts.py).

    `prompts`: records with "prompt".
    """
    given = [f"sampling.{key}={value}" for key, value in options.items() if value is not None]
    sampler = Sampler(configure("sampling", overrides=given))
    try:
        network, tokenizer = open_model(path, unfinished, step, overrides)
    except NotFree as error:
        raise UserError(f"{error}; to continue it as a text, give it by --file") from error
    texts = [record["prompt"] for record in prompts]
    pieces = stream_text(network, tokenizer, texts, sampler=sampler, max_tokens=tokens, seed=seed, rows=rows)
    if as_json:
        print_records(prompts, pieces)
    else:
        print_texts(texts, pieces)


def analyse(name: str, path: Path, options: list[str], unfinished: bool = False, step: int | None = None) -> str:
    """Runs an analysis on the run in `path`; numbers and picture go to its folder, under analysis.

    An analysis that needs no trained weights takes runs without a checkpoint, too, and `path` may be a recipe's name;
    numbers and picture then go to analysis/<recipe>. `section.key=value` among the options is for that recipe or, as in
    `open_trained`, for the run.

    Raises: UserError for an unknown analysis or option, and where the network does not support the analysis.
    """
    cls = _analysis(name)
    is_run = any(file.is_file() for file in (RunFolder(path).recipe, path / CONFIG))
    is_recipe, asks_run = names_recipe(str(path)) and not is_run, cls.trained or not cls.reads_text
    if is_recipe and asks_run:
        what = "analyses trained weights" if cls.trained else "reads the record of a run"
        raise UserError(f"{path}: a recipe; {name} {what}: give the folder of a run")
    # A path in a folder that is there is meant to be a run, if it is neither
    takes_recipe = is_recipe or not (is_run or asks_run or path.parent.is_dir())
    if not cls.trained and step is not None:
        raise UserError(f"--step {step}: {name} looks at no trained weights; leave it out")
    overrides = [option for option in options if option.partition(".")[0] in SECTIONS]
    own = [f"analysis.{o.removeprefix('analysis.')}" for o in options if o not in overrides]
    config = configure("analysis", name, own)
    if cls.needs_scipy:
        require("scipy", "statistics")
    run: Any = None
    if takes_recipe:
        recipe = load(str(path), [*overrides, "budget=1 steps"])
        run = built(recipe, None, ALONE)
        folder = Path("analysis") / str(path.with_suffix("") if is_path(str(path)) else path).replace("/", "-")
    else:
        here, folder = RunFolder.open(path), path / "analysis"
        recipe = _recipe(here, overrides)
        if cls.trained:
            run = open_trained(path, unfinished, step, overrides)
        elif cls.reads_text:
            run = built(recipe, here.steps or 1, ALONE)
            here.require_text(run.corpus.fingerprints)
    network = recipe.value("network.name")
    if not getattr(recipe.choice("network"), cls.asks, None):
        able = [other for other, has in registered("network").items() if getattr(has, cls.asks, None)]
        raise UserError(
            f"analyse {name}: it asks a network for `{cls.asks}`, and {network} has none; networks with it: "
            + ", ".join(able)
        )
    analysis = cls(config)
    if not takes_recipe:
        analysis.folder = RunFolder.open(path)
    with picture(made(folder, "analyses") / f"{name}.png") as axes:  # before it is measured
        used: dict[str, Any] = {"network": network, "options": config.model_dump(mode="json")}
        used |= {"step": run.progress.step} if cls.trained else {}
        used |= {"note": run.note} if run and run.note else {}
        used |= {"overrides": overrides} if overrides else {}
        with progress_bar(f"analysing {name}", TaskProgressColumn()) as analysis.told:
            record = {"analysis": name, **used, **analysis.measure(run)}
        replace_file(folder / f"{name}.json", json.dumps(record, allow_nan=False).encode())
        analysis.draw(record, axes)
        at = [f"step {run.progress.step:,}"] if cls.trained else []
        axes.set_title(drawable(", ".join([path.name, *at, *overrides])))
    said = [*_numbers(record, cls.numbered), ("record", f"{folder / name}.json"), ("picture", f"{folder / name}.png")]
    return "\n".join([*_tables(record), columns(said)])


def _analysis(name: str) -> type[Analysis]:
    register_all()
    known = registered("analysis")
    if name not in known:
        raise UserError(f"analyse {name}: no such analysis; {did_you_mean(name, known)}there are {', '.join(known)}")
    if not issubclass(cls := known[name], Analysis):
        raise TypeError(f"analysis {name}: {cls.__qualname__} has to extend tandem.analysis.analysis.Analysis")
    return cls


def _tables(record: dict[str, Any]) -> Iterator[str]:
    """Tables from the lists of a record whose items are mappings of plain values, a column for each key."""
    for key, rows in record.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            values = [[*row.values()] for row in rows]
            if not any(isinstance(value, list | dict) for row in values for value in row):
                yield f"{key}\n{columns([[*rows[0]], *([*map(_cell, row)] for row in values)], right=True)}\n"


def _numbers(record: dict[str, Any], numbered: str = "") -> Iterator[tuple[str, str]]:
    """Names and plain values of a record, those of a mapping one by one, in which a number counts what `numbered` says;
    also lists of up to SHOWN of them."""
    for key, value in record.items():
        if isinstance(value, dict) and key != "options":
            for inner, shown in _numbers(value, numbered):
                yield f"{key}, {f'{numbered} {inner}'.strip() if inner.isdecimal() else inner}", shown
        elif value is None or isinstance(value, str | int | float):
            yield key, _cell(value)
        elif isinstance(value, list) and 0 < len(value) <= SHOWN and not any(isinstance(v, list | dict) for v in value):
            yield key, ", ".join(map(_cell, value))


def _cell(value: object) -> str:
    return NONE if value is None else f"{value:#.4g}" if isinstance(value, float) else str(value)


def converted(path: Path, overrides: list[str]) -> Recipe:
    """The recipe of the run in `path` for the network that wraps its own and starts as the same function.

    Raises: UserError where no network wraps it, or an override names another run to start from.
    """
    own = str(RunFolder.open(path).recipe)
    if other := [override for override in overrides if override.split("=")[0].strip().split(".")[0] == "start"]:
        raise UserError(f"{other[0]}: it starts from {path}; to start from another run, convert that one")
    recipe = load(own)
    plain = recipe.choice("network")
    wrapping = [name for name, cls in registered("network").items() if getattr(cls, "Wrapped", None) is plain]
    if not wrapping:
        reason = f": it {plain.unwrapped}" if plain.unwrapped else ""
        raise UserError(f"{path}: no network wraps {recipe.value('network.name')}, so it cannot be converted{reason}")
    options = recipe.values["network"] | {"name": wrapping[0]}
    given = [f"network.{key}={json.dumps(value)}" for key, value in options.items()]
    return load(own, [*given, f"start.run={json.dumps(str(path), ensure_ascii=False)}", *overrides])


def write_model(
    path: Path, folder: Path, unfinished: bool = False, step: int | None = None, overrides: Sequence[str] = ()
) -> str:
    """Exports the run in `path` to a new `folder`; returns a message about it. The recipe there is that of training;
    the network there has the `overrides`, too.

    Interrupted, it leaves a `.partial` there, with which the next export to this folder begins afresh.
    Raises: UserError where the folder is not empty, or where it or a folder above it is a file.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"{there}: a file; export to a new folder")
    partial = folder / ".partial"
    if folder.exists() and any(folder.iterdir()) and not partial.exists():
        raise UserError(f"{folder}: not empty; export to a new folder")
    run = open_trained(path, unfinished, step, overrides)
    recipe = load(str(RunFolder.open(path).recipe))  # as it was trained
    shutil.rmtree(partial, ignore_errors=True)
    export(run.network, run.corpus.tokenizer, recipe.values, partial)
    for file in partial.iterdir():
        file.rename(folder / file.name)
    partial.rmdir()
    names = sorted(file.name for file in folder.iterdir())
    named = [name for name in names if not name.startswith("tandem_")]  # as the rest of the source is
    source = f"{counted(len(names) - len(named), 'files')} of its source"
    at = ", ".join([f"step {run.progress.step:,}", *overrides])
    said = f"{folder}: {', '.join(named)} and {source} ({at})"
    if run.network.ids == run.network.vocabulary:
        return said
    way = f"tandem generate {quote(str(folder))}"
    return f"{said}\nunder transformers no sentence ends, in a prompt or after it; as in training: {way}"
