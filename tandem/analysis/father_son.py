"""Father and son: does a network know a relation as it read it, and in reverse?

    context          The son of Paul is Mark.
    normal query     The son of Paul is          -> Mark, not Paul
    reversed query   The father of Mark is       -> Paul, not Mark

    margin = nll(distractor) - nll(target), nats, at the first answer position; an error is a margin below 0
    +-     = standard error of the mean margin, the two orders of a pair averaged first: pairs share names, so each name
             is left out in turn with all its pairs (the jackknife)

Context and query are one text, joined by one space and tokenised once. For networks that read sentences the context
is a finished sentence and the query an open one; for networks that divide a text, everything before the answer is the
prompt, as in generation. The query has no trailing space: a name's token begins with one. Only names of a single token
are used, or else first tokens would be compared; their share of the list is reported.

Names differ in frequency, so every pair is tested in both orders, and each margin is reported beside that of the query
alone. A sentence's seed could carry a context right before the query without any memory, so other sentences are put in
between, and networks whose sentences have seeds are tested without them, too.

    tandem analyse father_son RUN names=names.txt pairs=200

Source: Thought Gestalt (arXiv 2512.25026); pairs by seed, both orders, fillers and the query alone are ours.
Cost: for P pairs and n tokens of a text about 20 P n tokens, twice that with seeds off.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from pydantic import Field, field_validator

from tandem.analysis.analysis import Analysis, jackknife
from tandem.corpus import ScoringBatch, Store, Tokenizer, shuffled
from tandem.corpus.boundaries import token_starts
from tandem.corpus.given import GivenTexts
from tandem.corpus.views import rows_of
from tandem.networks.network import Network
from tandem.recipe import Settings, UserError, register
from tandem.training.run import Run

FEWEST = 12
"""Fewest names whose pairs are enough to tell anything."""
COMMON = """
Adam Alan Albert Alexander Alfred Andrew Anthony Arthur Benjamin Bernard Bill Bob Brian Bruce Carl Charles Chris
Daniel David Dennis Donald Douglas Edgar Edmund Edward Eric Ernest Francis Frank Fred Frederick Geoffrey George Gerald
Gordon Graham Harold Harry Henry Herbert Howard Hugh Ian Isaac Jack Jacob James Jason Jeff Jeremy Jim Joe John Jonathan
Joseph Joshua Justin Keith Kevin Larry Lawrence Leo Leonard Lewis Louis Luke Mark Martin Matthew Max Michael Neil
Nicholas Oliver Oscar Patrick Paul Peter Philip Ralph Raymond Richard Robert Roger Ronald Roy Samuel Simon Stephen Steve
Theodore Thomas Timothy Tom Victor Walter William
"""
NAMES = COMMON.split()
FILLERS = (
    "It rained all morning.",
    "The road was long and empty.",
    "Nobody spoke for a while.",
    "The lamps had been lit early.",
)


class Condition(NamedTuple):
    query: str
    between: int | None
    """Sentences between context and query; None: no context."""
    seeds: bool


class Asked(NamedTuple):
    sentences: list[str]
    target: str
    distractor: str


@register("analysis", "father_son")
class FatherSon(Analysis):
    """Test of reversal: does "The son of Paul is Mark" also tell who the father of Mark is?"""

    asks = "score"

    class Config(Settings):
        names: str | None = None
        """Text file with a name on each line; null: 97 common ones."""
        pairs: int = Field(1000, ge=4)
        """Ordered pairs of names, each pair in both orders; fewer where the names are few."""
        between: list[Annotated[int, Field(ge=0, le=len(FILLERS))]] = [0, 1, 4]
        """Numbers of sentences to put between context and query."""
        seed: int = Field(0, ge=0)
        """Determines which pairs are drawn."""
        rows: int = Field(64, ge=1)
        """Texts read at a time."""

        @field_validator("between")
        @classmethod
        def _numbers_differ(cls, between):
            if len(set(between)) < len(between):
                raise ValueError("names a number twice; give each once")
            return between

    def measure(self, run: Run) -> dict[str, Any]:
        """How many names are kept; means over pairs by condition, nats; margins of pairs, both orders averaged.

        Raises: UserError where names are too few, or texts longer than the network can read.
        """
        network, tokenizer = run.network, run.corpus.tokenizer
        given = read_names(self.config.names)
        ids = single_tokens(given, tokenizer)
        pairs = drawn_pairs(sorted(ids), self.config.pairs, self.config.seed)
        seeded = hasattr(network, "unseeded") and network.config.seed
        variants = {True: network, False: network.unseeded()} if seeded else {False: network}  # type: ignore[operator]
        rows, margins = [], []
        for condition in self.each([*self._conditions([*variants])]):
            asked = [question(pair, condition.query, condition.between) for pair in pairs]
            nll = answers(variants[condition.seeds], tokenizer, asked, ids, self.config.rows)
            margin = nll[:, 1] - nll[:, 0]
            both = margin.reshape(2, -1).mean(0)  # over both orders of a pair: frequencies of names cancel
            margins.append(both.tolist())
            rows.append(
                {
                    **condition._asdict(),
                    "target": nll[:, 0].mean().item(),
                    "distractor": nll[:, 1].mean().item(),
                    "margin": margin.mean().item(),
                    "standard_error": error_over_names(both, pairs[: len(both)]),
                    "error": (margin < 0).mean().item(),
                }
            )
        told = {"names_given": len(given), "names_kept": len(ids), "single_token_share": len(ids) / len(given)}
        return {**told, "pairs": len(pairs), "conditions": rows, "margins": margins}

    def _conditions(self, seeds: list[bool]) -> Iterator[Condition]:
        for query in ("normal", "reversed"):
            yield Condition(query, None, seeds[0])
            for seeded in seeds:
                yield from (Condition(query, between, seeded) for between in self.config.between)

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        """Distribution of the margins of pairs in every condition with seeds on, or off where the network has none."""
        seeds = any(row["seeds"] for row in record["conditions"])
        for row, margins in zip(record["conditions"], record["margins"], strict=True):
            if row["seeds"] == seeds:
                n, line = row["between"], "-" if row["query"] == "normal" else "--"
                told, colour = ("query alone", "k") if n is None else (f"{n} sentences between", f"C{n}")
                label = f"{row['query']}, {told}, mean {row['margin']:+.3f}"
                axes.ecdf(margins, color=colour, linestyle=line, label=label)
        axes.axvline(0, color="0.6", linewidth=1)
        axes.set(xlabel="margin of a pair of names, nats", ylabel="share of pairs with less")
        axes.legend(loc="lower right", frameon=False, fontsize="small")


def read_names(path: str | None) -> list[str]:
    """Each name once, in the order of the file; lines that are not a single word are left out."""
    if path is None:
        return list(NAMES)
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"analysis.names = {path}: cannot be read ({error}); give a text file, a name on each line"
        ) from error
    return list(dict.fromkeys(line.strip() for line in lines if len(line.split()) == 1))


def single_tokens(names: list[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the names that are one token after a space.

    Raises: UserError where these are too few.
    """
    encoded = tokenizer.encode_batch([f" {name}" for name in names])[0] if names else []
    kept = {name: int(ids[0]) for name, ids in zip(names, encoded, strict=True) if len(ids) == 1}
    if len(kept) < FEWEST:
        raise UserError(
            f"analysis.names: {len(kept)} of {len(names)} names are one token of this tokenizer, and it takes "
            f"{FEWEST}; give a longer list, or train with a larger vocabulary"
        )
    return kept


def drawn_pairs(names: list[str], count: int, seed: int) -> list[tuple[str, str]]:
    """At most `count` (father, son), each pair of names in both orders, drawn by the seed."""
    every = list(combinations(names, 2))
    chosen = [every[i] for i in shuffled(len(every), seed)[: count // 2]]
    return [*chosen, *((son, father) for father, son in chosen)]


def error_over_names(margins: np.ndarray, pairs: Sequence[tuple[str, str]]) -> float | None:
    """Standard error of the mean of (P,) margins of pairs; None where all pairs share a name."""
    without = [margins[[name not in pair for pair in pairs]] for name in sorted({*chain(*pairs)})]
    if not all(map(len, without)):
        return None
    return jackknife([left.mean() for left in without])


def question(pair: tuple[str, str], query: str, between: int | None) -> Asked:
    """The question for one pair; `between` None leaves the context out."""
    father, son = pair
    context = [] if between is None else [f"The son of {father} is {son}.", *FILLERS[:between]]
    if query == "normal":
        return Asked([*context, f"The son of {father} is"], son, father)
    return Asked([*context, f"The father of {son} is"], father, son)


def answers(network: Network, tokenizer: Tokenizer, asked: list[Asked], ids: dict[str, int], rows: int) -> np.ndarray:
    """(questions, 2): -log p of target and distractor right after each question, nats.

    Raises: UserError where texts or sentences are longer than the network can read.
    """
    texts = []
    for one, sentences in zip(asked, read_sentences(tokenizer, [one.sentences for one in asked]), strict=True):
        texts += [[*sentences[:-1], [*sentences[-1], ids[name]]] for name in (one.target, one.distractor)]
    given = GivenTexts(texts, network.vocabulary)
    read, sentence = int(given.lengths.max()) - 1, max(len(sentence) for text in texts for sentence in text)
    if network.longest is not None and read > network.longest:
        raise UserError(
            f"analysis.between: a text has {read} tokens to read, and this network has learned positions for "
            f"{network.longest}; ask for fewer sentences between, or a run with a longer batch.context"
        )
    if sentence > (cap := getattr(network.config, "cap", sentence)):
        raise UserError(
            f"network.cap = {cap}: a sentence of this analysis has {sentence} tokens; ask a run with a cap of "
            f"{sentence} or more, or with a larger vocabulary"
        )
    nll, device = np.full(len(texts), np.nan), network.head.device
    for scoring in _scoring(network, given, rows):
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            found = network.score(scoring.batch.to(device)).double().cpu().numpy()
        document, index = scoring.document.numpy(), scoring.index.numpy()
        last = (document >= 0) & (index == given.lengths[document] - 1)
        nll[document[last]] = found[last]
    return nll.reshape(-1, 2)


def _scoring(network: Network, given: GivenTexts, rows: int) -> Iterator[ScoringBatch]:
    """Texts as batches; a network that divides them reads all before the last token as a session reads its prompt."""
    store, context = cast(Store, given), int(given.lengths.max())
    if not network.divides:
        return network.scoring(store, context, rows)
    return rows_of(
        ((i, 0, n - 1, n - 2) for i, n in enumerate(given.lengths.tolist())), store, context, rows, divided=True
    )


def read_sentences(tokenizer: Tokenizer, texts: list[list[str]]) -> Iterator[list[list[int]]]:
    """The tokens of each sentence of `texts`, each text tokenised as a whole, with spaces between sentences."""
    joined = [[*(f"{sentence} " for sentence in text[:-1]), text[-1]] for text in texts]
    ids, sizes = tokenizer.encode_batch(["".join(text) for text in joined])
    for text, tokens, size in zip(joined, ids, sizes, strict=True):
        yield [part.tolist() for part in np.split(tokens, token_starts(text, size)[1:])]
