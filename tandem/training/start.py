"""The weights that a run starts from: random, or those of another run.

    start: {run: runs/plain}

A network takes weights of its own kind, or of the kind that it contains (`Network.start_from`). Optimiser and schedule
start afresh. The other run must have had the same tokenizer, or token ids mean nothing; its text may be another.
"""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from tandem.corpus import Corpus, Tokenizer
from tandem.networks.network import Network
from tandem.recipe import Recipe, Settings, UserError, load, register
from tandem.training import checkpoint
from tandem.training.folder import RunFolder


@register("start")
class Start:
    class Config(Settings):
        """Where a run's weights come from."""

        run: Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))] | None = None
        """Folder of a run, whose last weights are loaded; null: random weights. Its text may be another, its tokenizer
        not: corpus.tokenizer=RUN/model/tokenizer.json."""
        trunk: Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))] | None = None
        """Folder of a run that differs in budget, schedule or objective.until alone. The first steps that both have in
        common are not trained again: this run begins with the last checkpoint of them. It changes no result."""


def start(network: Network, recipe: Recipe, corpus: Corpus) -> None:
    """Loads the weights that `recipe` starts from into `network`, which is freshly initialised.

    Raises: UserError where there is no such run, it has no checkpoint, or its tokenizer or network does not fit.
    """
    path = recipe.start.run
    if path is None:
        return
    try:
        folder = RunFolder.open(path)
    except UserError as error:
        raise UserError(f"start.run = {error}") from error
    theirs, own = load(str(folder.recipe)), folder.model / "tokenizer.json"
    if not is_same_text(folder, recipe, corpus) and not (
        own.is_file() and Tokenizer.from_file(own).hash == corpus.tokenizer.hash
    ):
        cure = f"with another tokenizer; corpus.tokenizer={own} takes its own"
        if not own.is_file():
            cure = f"and its tokenizer is gone; give this run the corpus of {folder.recipe}"
        raise UserError(f"start.run = {path}: trained on another corpus, {cure}")
    last = checkpoint.latest(folder.checkpoints)
    if last is None:
        raise UserError(f"start.run = {path}: no checkpoint; train it first, or bring its checkpoints back")
    step, steps = checkpoint.step_of(last), folder.steps or 0
    if 0 < step < steps:
        raise UserError(f"start.run = {path}: stands at step {step:,} of {steps:,}; train it to its end first")
    other = theirs.choice("network").unwritten(theirs.network, network.vocabulary, theirs.batch.context)
    checkpoint.restore(last, other)
    network.start_from(other)


def is_same_text(folder: RunFolder, recipe: Recipe, corpus: Corpus) -> bool:
    """Whether the run of a folder has read what one of this recipe and corpus reads; sentences may be cut anew."""
    if folder.text:
        return folder.text[:2] == corpus.fingerprints[:2]
    return load(str(folder.recipe)).values["corpus"] == recipe.values["corpus"]
