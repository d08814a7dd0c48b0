"""Further texts that a trained network is scored on, each under a name, in the same way as the held-out text.

    evaluation: {texts: {books: books/*.txt, news: [a.jsonl, b.jsonl]}}
    tandem evaluate RUN --texts poems=poems.txt

Each is tokenized once with the run's tokenizer, into a separate store beside the run's corpus.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.progress import DownloadColumn, TaskProgressColumn
from torch import Tensor

from tandem.corpus import Store, Tokenizer, prepare_texts
from tandem.corpus.partition import BOUNDS
from tandem.evaluation.likelihood import Likelihood, joined, likelihood, require_bytes
from tandem.networks.network import Network
from tandem.recipe import Recipe, UserError, counted
from tandem.training.display import Told, progress_bar
from tandem.training.parallel import ALONE, Ranks
from tandem.training.run import Run

HELD_OUT = "held-out text"


@dataclass(frozen=True)
class Exported:
    """An exported model, as far as scoring needs a run: with the recipe that it was trained by, but not its text."""

    network: Network
    tokenizer: Tokenizer
    recipe: Recipe
    ranks: Ranks = ALONE
    note: str = ""

    def whole_network(self) -> Network:
        return self.network


def text_stores(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Store]:
    """The recipe's evaluation.texts by name, prepared where they are not yet."""
    return prepared_texts(recipe, tokenizer, recipe.evaluation.texts, "evaluation.texts.")


def given_stores(recipe: Recipe, tokenizer: Tokenizer, given: Iterable[str]) -> dict[str, Store]:
    """Texts given as NAME=PATH; several with one name form one text. Raises: UserError for anything else."""
    texts: dict[str, list[str]] = {}
    for word in given:
        name, separator, path = word.partition("=")
        if not (name and separator and path):
            raise UserError(f"--texts {word}: write NAME=PATH, such as books=books.txt")
        if name in recipe.evaluation.texts:
            raise UserError(
                f"--texts {word}: the run has a text {name} already, which is scored too; take another name"
            )
        texts.setdefault(name, []).append(path)
    return prepared_texts(recipe, tokenizer, texts, "--texts ")


def prepared_texts(
    recipe: Recipe, tokenizer: Tokenizer, texts: Mapping[str, str | list[str]], prefix: str
) -> dict[str, Store]:
    """The texts as stores; error messages call each one by `prefix` and its name."""
    if HELD_OUT in texts:
        raise UserError(f"{prefix}{HELD_OUT}: that is what the run's own text is called; take another name")
    stores = {}
    for name, paths in texts.items():
        with progress_bar(f"preparing {name}", DownloadColumn()) as progress:
            stores[name] = prepare_texts(recipe.corpus, prefix + name, paths, tokenizer, progress)
    return stores


def scored(
    run: Run | Exported,
    store: Store,
    documents: int | None = None,
    split: str = "all",
    progress: Told = lambda done, total: None,
    whole: bool = True,
    blocks: Callable[[Tensor], Tensor] | None = None,
) -> Likelihood:
    """Likelihood of a store under the run's network (evaluation/likelihood.py); every process scores its share.

    Raises: UserError where there is no text to score.
    """
    ranks, recipe = run.ranks, run.recipe
    require_bytes(store, recipe.batch.context, documents, split, recipe.evaluation.prefix)
    found = likelihood(
        run.whole_network(),
        store,
        context=recipe.batch.context,
        rows=recipe.evaluation.rows,
        documents=documents,
        split=split,
        prefix=recipe.evaluation.prefix,
        whole=whole,
        blocks=blocks,
        share=(ranks.rank, ranks.count),
        progress=progress,
    )
    return joined(ranks.gather(found))


def recorded(
    run: Run | Exported,
    store: Store,
    documents: int | None = None,
    split: str = "all",
    progress: Told = lambda done, total: None,
    windows: bool = True,
    bounds: bool = False,
) -> tuple[Likelihood, dict[str, Any]]:
    """What `scored` finds, and its record: sums and their ratios.

    `prefix`: only what follows the break points of documents was scored. `by_position` (without break points): nats per
    token of tokens 1, 2 to 3, 4 to 7, .. of a document, whose first is 0, by the first of them. A network that is given
    sentence boundaries also has nats per token that include them, and as published. With `windows`, one that reads
    documents whole also has its likelihood in windows of the context; with `bounds`, one that draws partitions of a
    text also has it under the `BOUNDS` of them (corpus/partition.py). What the tokenizer does not read is there, too.
    """
    windows = windows and run.network.reads_whole
    others = BOUNDS if bounds and hasattr(run.network, "partition") and not run.recipe.evaluation.prefix else {}
    parts = 1 + windows + len(others)
    found = scored(run, store, documents, split, _part(progress, 0, parts))
    record: dict[str, Any] = {"prefix": True} if run.recipe.evaluation.prefix else {}
    record |= {"nats_per_token": found.nll, "bits_per_byte": found.bits_per_byte, "nats": found.nats}
    record |= {"tokens": found.tokens, "bytes": found.bytes, "documents": found.documents}
    if not run.recipe.evaluation.prefix:
        record["by_position"] = {str(position): nats for position, nats in found.nll_by_position.items()}
    if found.nll_paper is not None:
        record |= {"nats_per_token_with_boundaries": found.nll_with_boundaries}
        record |= {"nats_per_token_as_published": found.nll_paper}
    record |= unread(store, found.order)
    if windows:
        again = scored(run, store, documents, split, _part(progress, 1, parts), whole=False)
        record["in_windows"] = per_token(again)
    for number, (name, blocks) in enumerate(others.items(), parts - len(others)):
        again = scored(run, store, documents, split, _part(progress, number, parts), blocks=blocks)
        record.setdefault("bounds", {})[name] = again.nll
    return found, record


def unread(store: Store, documents: np.ndarray) -> dict[str, Any]:
    """`unknown`: share of the documents' bytes that the tokenizer does not know; `altered`: which characters it
    changes, or white space that it drops. Neither where there is none."""
    found = {"unknown": store.unknown(documents), "altered": store.tokenizer.altered}
    return {name: lost for name, lost in found.items() if lost}


def recorded_texts(
    run: Run | Exported, stores: Mapping[str, Store], documents: int | None = None, bounds: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the record of each text as it is scored, over all its documents or so many; of the held-out text,
    over the recipe's split.

    Raises: UserError, before any is scored, where no document of one can be.
    """
    e = run.recipe.evaluation
    splits = {name: e.split if name == HELD_OUT else "all" for name in stores}
    for name, store in stores.items():
        require_bytes(store, run.recipe.batch.context, documents, splits[name], e.prefix)
    for name, store in stores.items():
        with progress_bar(f"scoring {name}", TaskProgressColumn()) as progress:
            _, record = recorded(run, store, documents, splits[name], progress, bounds=bounds)
        yield name, record


def _part(progress: Told, number: int, parts: int) -> Told:
    """The progress of one of several equal parts of a work."""
    return lambda done, total: progress(done + number * (total or 0), parts * total if total else None)


def per_token(found: Likelihood) -> dict[str, float]:
    """The part of a record that is kept of a second likelihood of the same documents, or of some of them."""
    return {"nats_per_token": found.nll, "nats_per_token_with_boundaries": found.nll_with_boundaries}


# Records in words -------------------------------------------------------------------------------------------------


def noted(note: str, words: str) -> str:
    """`words`; where the network is no language model yet, with `note`, which says what it has read instead."""
    return f"{words} (one token at a time, after {note})" if note else words


def by_position_in_words(judged: dict[str, Any]) -> Iterator[str]:
    """The likelihood by position of a record, as a line; none where it has none."""
    if found := judged.get("by_position"):
        shown = ", ".join(f"{position}: {nats:.3f}" for position, nats in found.items())
        yield f"  by position in the document (its first token is 0), from token {shown}"


def lost_in_words(judged: dict[str, Any]) -> str:
    """What a tokenizer does not read of a record's text, which bits per byte count as if it were; empty: nothing."""
    lost = [f"{judged['unknown']:.1%} unknown to the tokenizer"] if judged.get("unknown") else []
    lost += [f"the tokenizer changes or drops {judged['altered']}"] if judged.get("altered") else []
    return "; ".join(lost)


def in_words(judged: dict[str, Any], text: str = HELD_OUT) -> str:
    """A record of the likelihood of `text` as a line."""
    paid, published = judged.get("nats_per_token_with_boundaries"), judged.get("nats_per_token_as_published")
    text = f"what follows the break points of {text}" if judged.get("prefix") else text
    windowed = [f"{nats:.3f}" for nats in judged.get("in_windows", {}).values()]
    cut = f"; {' and '.join(windowed)} in windows of the context" if windowed else ""
    lost = f" ({lost})" if (lost := lost_in_words(judged)) else ""
    bounds = ", ".join(f"{name} {nats:.3f}" for name, nats in judged.get("bounds", {}).items())
    return (
        f"{judged['nats_per_token']:.3f} nats/token"
        + (f" ({paid:.3f} with the sentence boundaries paid for, {published:.3f} as published{cut})" if paid else "")
        + (f" (bounds: {bounds})" if bounds else "")
        + f", {judged['bits_per_byte']:.3f} bits/byte on {text}: "
        f"{counted(judged['tokens'], 'tokens')}, {counted(judged['bytes'], 'bytes')}{lost}, "
        + counted(judged["documents"], "documents")
    )
