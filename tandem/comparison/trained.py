"""A run, opened for use: scored again, asked for text, exported.

Finished runs and runs still in training serve alike, by their last checkpoint; an exported model generates, too.
"""

from pathlib import Path
from typing import Any

from tandem.comparison.pretrain import as_record, go_on, in_words, noted, planned
from tandem.corpus import Tokenizer
from tandem.evaluation.likelihood import likelihood
from tandem.export.weights import CONFIG, export, load_exported
from tandem.generation.generate import generate_text
from tandem.generation.sampling import Sampler
from tandem.networks.network import Network
from tandem.recipe import UserError, configure, load
from tandem.training import checkpoint
from tandem.training.folder import RunFolder
from tandem.training.run import Run


def open_trained(path: Path, unfinished: bool = False) -> Run:
    """The run in `path` at its last checkpoint.

    Raises: UserError where it has none yet, or one that is no language model yet, unless `unfinished` is taken, too.
    """
    folder = RunFolder.open(path)
    if not checkpoint.standing(folder.checkpoints):
        raise UserError(f"{path}: no checkpoint yet; train it first: tandem train {folder.recipe} --run {path.name}")
    run = go_on(folder, planned(folder, load(str(folder.recipe))))
    if run.note and not unfinished:
        raise UserError(
            f"{path}: step {run.progress.step:,} of {run.steps:,} is no language model yet: it has read {run.note}; "
            "train it further, or take it as it is with --unfinished"
        )
    return run


def open_model(path: Path, unfinished: bool = False) -> tuple[Network, Tokenizer]:
    """Network and tokenizer of a run's folder, or of an exported model's."""
    if (path / CONFIG).is_file():
        return load_exported(path)
    run = open_trained(path, unfinished)
    return run.network, run.corpus.tokenizer


def evaluate(path: Path, documents: int | None, unfinished: bool = False) -> str:
    """Likelihood of the run's held-out text, in words."""
    run = open_trained(path, unfinished)
    config = run.recipe.evaluation
    found = likelihood(
        run.network.eval(),
        run.corpus.validation,
        context=run.recipe.batch.context,
        rows=config.rows,
        documents=documents,
    )
    return f"step {run.progress.step:,} of {run.steps:,}: {noted(run.note, in_words(as_record(found)))}"


def continue_texts(
    path: Path, prompts: list[str], tokens: int, options: dict[str, Any], seed: int, unfinished: bool = False
) -> None:
    """Prints what follows each prompt: one as it appears, several one after the other."""
    network, tokenizer = open_model(path, unfinished)
    given = [f"sampling.{key}={value}" for key, value in options.items() if value is not None]
    sampler = Sampler(configure("sampling", overrides=given))
    pieces: list[str] = []

    def show(row: int, piece: str) -> None:
        if len(prompts) == 1:
            print(piece if pieces else prompts[0] + piece, end="", flush=True)
            pieces.append(piece)

    texts = generate_text(
        network.eval(), tokenizer, prompts, sampler=sampler, max_tokens=tokens, seed=seed, on_text=show
    )
    print("" if pieces else "\n\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)))


def write_model(path: Path, folder: Path, unfinished: bool = False) -> str:
    """Exports the run in `path` to a new `folder`. Raises: UserError where there is something already."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: not empty; export to a new folder")
    run = open_trained(path, unfinished)
    export(run.network, run.corpus.tokenizer, run.recipe.values, folder)
    return f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))} (step {run.progress.step:,})"
