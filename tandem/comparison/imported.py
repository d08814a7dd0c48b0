"""A decoder trained elsewhere, imported as a run: to evaluate, convert, train further and compare like any other.

Its recipe is the given one with the network and tokenizer of the folder, and where positions are learned with a context
of as many; its weights are the checkpoint of step 0.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.comparison.pretrain import built
from tandem.disk import unmade
from tandem.export.foreign import load_foreign
from tandem.recipe import Recipe, UserError, load
from tandem.training import checkpoint
from tandem.training.folder import RunFolder
from tandem.training.parallel import ALONE


def import_run(source: Path, reference: str, overrides: Sequence[str], path: Callable[[Recipe], Path]) -> str:
    """Creates the run `path(recipe)` from the decoder in `source`, at step 0; returns a line that says where it is.

    Raises: UserError as `load_foreign` and `load` do, where there is a run already, and for what the folder decides.
    """
    for override in overrides:
        key, _, value = (part.strip() for part in override.partition("="))
        if (key, value) == ("corpus.vocabulary", "null"):  # as it is here, and as other commands with a tokenizer ask
            continue
        if key.partition(".")[0] in ("network", "start") or key in ("corpus", "corpus.tokenizer", "corpus.vocabulary"):
            raise UserError(f"{override}: network, tokenizer and weights are those of {source}; leave {key} out")
    network, _ = load_foreign(source)
    options = {"name": "decoder", **network.config.model_dump(mode="json")}
    given = [f"network.{key}={json.dumps(value)}" for key, value in options.items()]
    tokenizer = [f"corpus.tokenizer={json.dumps(str(source.absolute()), ensure_ascii=False)}", "corpus.vocabulary=null"]
    bound = [] if network.longest is None else [f"batch.context={network.longest}"]
    recipe = load(reference, [*given, *tokenizer, "start.run=null", *bound, *overrides])
    if network.longest not in (None, context := recipe.batch.context):
        raise UserError(
            f"batch.context = {context}: {source} has learned positions for {network.longest}; leave it out"
        )
    target = path(recipe)
    taken = UserError(f"{target}: exists already; give the run another name with --run")
    if target.exists():
        raise taken
    run = built(recipe, None, ALONE)  # fails, if it must, before a folder is made
    run.network.start_from(network)
    with unmade(target, "--runs") as partial:  # a run without its weights would train from random ones
        if partial is None:
            raise taken
        with RunFolder.start(partial, recipe.to_yaml()) as folder:
            saved = checkpoint.save(folder.checkpoints, 0, run.network, run.optimiser, vars(run.progress), keep=1)
    return f"{target / saved.relative_to(partial)}: {network.cost().total_parameters:,} parameters of {source}"
