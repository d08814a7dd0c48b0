"""The weights that a run starts from: random, or those of another run.

    start: {run: runs/plain}

A network takes weights of its own kind, or of the kind that it contains (`Network.start_from`). The optimiser starts
afresh. The other run must have been trained on the same corpus: token ids mean nothing under another tokenizer.
"""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from tandem.corpus import Corpus
from tandem.networks.network import Network
from tandem.recipe import Recipe, Settings, UserError, load, register
from tandem.training import checkpoint
from tandem.training.folder import RunFolder


@register("start")
class Start:
    class Config(Settings):
        """Where a run's weights come from."""

        run: Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))] | None = None
        """Folder of a run, whose last checkpoint is loaded; null: random weights."""


def start(network: Network, recipe: Recipe, corpus: Corpus) -> None:
    """Loads the weights that `recipe` starts from into `network`, which is freshly initialised.

    Raises: UserError where there is no such run, it has no checkpoint, or its corpus or network does not fit.
    """
    path = recipe.start.run
    if path is None:
        return
    try:
        folder = RunFolder.open(path)
    except UserError as error:
        raise UserError(f"start.run = {error}") from error
    theirs = load(str(folder.recipe))
    tokens = corpus.fingerprints[:2]  # sentences may be cut anew
    if theirs.values["corpus"] != recipe.values["corpus"] and (folder.text or [])[:2] != tokens:
        raise UserError(f"start.run = {path}: trained on another corpus; give this run the corpus of {folder.recipe}")
    folder.require_text(tokens)
    last = checkpoint.latest(folder.checkpoints)
    if last is None:
        raise UserError(f"start.run = {path}: no checkpoint; train it first, or bring its checkpoints back")
    step, steps = checkpoint.step_of(last), folder.steps or 0
    if 0 < step < steps:
        raise UserError(f"start.run = {path}: stands at step {step:,} of {steps:,}; train it to its end first")
    other = theirs.choice("network").unwritten(theirs.network, network.vocabulary, theirs.batch.context)
    checkpoint.restore(last, other)
    network.start_from(other)
