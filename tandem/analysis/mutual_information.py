"""How much a token tells about the token d places on, and what weights that suggests for the slots of a bag.

    I(d) = sum over a, b of  p_d(a, b) ln (p_d(a, b) / p(a) p(b))     nats, pairs (x_t, x_(t + d)) of one document

In text I falls like a power of the distance. With few pairs for many cells the estimate is too high by about
cells / 2N at every distance: it is corrected (Miller and Madow 1955), and reported beside the same estimate for
shuffled pairs, the floor below which nothing can be seen. Rare ids form one class, for the same reason.

    C + a d^k is fitted;  slot i of a bag weighs i^k     objective.weights: fitted has k = -1.25, as found in DCLM

C holds what a finite sample leaves, and more; it is not interpreted. The interval of k is Student's, from the fits
without each of a few groups of documents in turn (a jackknife). In a bootstrap, documents that are drawn twice would
add pairs, but no new cells, so that the correction falls short, and every resample lies to one side of the estimate.

Cost: one pass over the pairs of each distance for the estimate, one for the floor, and one for each group left out.
Source: Token Superposition Training (arXiv 2605.06546), where DCLM is measured; estimator, sample and classes are ours.
Shapes: N pairs, M classes, K distances, D documents.
"""

from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from tandem.analysis.analysis import Analysis, chosen_documents, jackknife
from tandem.corpus import Order
from tandem.objectives.superposition import EXPONENT
from tandem.recipe import Settings, register, require
from tandem.training.run import Run


class PowerLaw(NamedTuple):
    """floor + scale d^exponent."""

    floor: float
    scale: float
    exponent: float

    def __call__(self, distance: np.ndarray) -> np.ndarray:
        return self.floor + self.scale * distance**self.exponent


@register("analysis", "mutual_information")
class MutualInformation(Analysis):
    """Mutual information of tokens of the training text, by distance, and a power law fitted to it."""

    trained = False
    needs_scipy = True

    class Config(Settings):
        tokens: int = Field(2_000_000, ge=1000)
        """Tokens of training text, in whole documents of five tokens or more; all of it where it has fewer."""
        classes: int = Field(1024, ge=2)
        """How many of the most frequent ids are a class each; all others form one more."""
        longest: int = Field(128, ge=4)
        """The longest distance; measured are all up to 16, then 16 more, evenly spaced in their logarithm."""
        groups: int = Field(20, ge=0)
        """Groups of documents, each left out once for the interval of the exponent; below 2, or with a single document:
        no interval."""
        slots: int = Field(8, ge=1)
        """Slots of the bag for which weights are suggested."""

    def measure(self, run: Run) -> dict[str, Any]:
        c = self.config
        ids, document = _text(Order(run.corpus.train, run.recipe.seed), c.tokens)
        classes = _classes(ids, c.classes)
        lengths = np.bincount(document)
        distances = [d for d in distances_to(c.longest) if d < lengths.max()]
        draw = np.random.default_rng(run.recipe.seed)
        found = [information(classes, document, d) for d in distances]
        floor = [information(classes, document, d, shuffled=draw) for d in distances]
        law = fit(distances, found)
        exponents, groups = [], min(c.groups, len(lengths))
        group = draw.permutation(len(lengths)) % max(1, groups)
        for g in self.each(range(groups if groups > 1 else 0)):
            left = group[document] != g
            within = [d for d in distances if d < lengths[group != g].max()]  # the longest may be left out
            exponents.append(fit(within, [information(classes[left], document[left], d) for d in within]).exponent)
        half = half_of_interval(exponents) if exponents else None
        return {
            "tokens": len(ids),
            "documents": len(lengths),
            **{"law_floor": law.floor, "law_scale": law.scale, "law_exponent": law.exponent},
            "exponent_low": None if half is None else law.exponent - half,
            "exponent_high": None if half is None else law.exponent + half,
            "weights": [round(slot**law.exponent, 6) for slot in range(1, c.slots + 1)],
            "distance": distances,
            "information": found,
            "shuffled": floor,
        }

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        distance = np.array(record["distance"])
        law = PowerLaw(record["law_floor"], record["law_scale"], record["law_exponent"])
        axes.loglog(distance, record["information"], "o", markersize=4, label="pairs of the text")
        axes.loglog(distance, law(distance), label=f"{law.floor:.3g} + {law.scale:.3g} d^{law.exponent:.3g}")
        theirs = law._replace(exponent=EXPONENT)
        axes.loglog(distance, theirs(distance), "--", color="grey", label=f"exponent {EXPONENT}, found in DCLM")
        axes.loglog(distance, np.maximum(record["shuffled"], 1e-6), ".", color="grey", label="shuffled pairs")
        axes.set(xlabel="distance (tokens)", ylabel="mutual information (nats)")
        axes.legend(frameon=False)


def distances_to(longest: int) -> list[int]:
    """All distances up to 16, then 16 more, evenly spaced in their logarithm."""
    first = min(16, longest)
    return sorted({*range(1, first + 1), *(round(d) for d in np.geomspace(first, longest, 17))})


def information(
    classes: np.ndarray,
    document: np.ndarray,
    distance: int,
    shuffled: np.random.Generator | None = None,
) -> float:
    """Mutual information, nats, of classes `distance` apart in one document.

    Args:
        classes: (N,) from 0, one for each token.
        document: (N,) the document of each token, non-decreasing.
        shuffled: takes the second token of each pair from another pair.
    """
    kept = document[:-distance] == document[distance:]
    first, second = classes[:-distance][kept], classes[distance:][kept]
    if shuffled is not None:
        second = shuffled.permutation(second)
    size = int(classes.max()) + 1
    joint = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    pairs, cells = joint.sum(), (joint > 0).sum()
    p, q = joint.sum(1) / pairs, joint.sum(0) / pairs
    a, b = joint.nonzero()
    share = joint[a, b] / pairs
    bias = (cells - (p > 0).sum() - (q > 0).sum() + 1) / (2 * pairs)
    return float((share * np.log(share / (p[a] * q[b]))).sum() - bias)


def fit(distances: list[int], found: list[float]) -> PowerLaw:
    """The power law by least squares. Raises: UserError where scipy is missing."""
    d, nats = np.array(distances, float), np.array(found)
    start = (nats.min(), nats[0] - nats.min(), -1.0)

    def misses(law: np.ndarray) -> np.ndarray:
        return PowerLaw(*law)(d) - nats

    solved = require("scipy.optimize", "statistics").least_squares(misses, start, xtol=1e-12, ftol=1e-12, gtol=1e-12)
    return PowerLaw(*solved.x.tolist())


def half_of_interval(estimates: list[float]) -> float:
    """Half the width of a 95 % interval, from the estimates without each group in turn."""
    t = require("scipy.special", "statistics").stdtrit(len(estimates) - 1, 0.975)
    return float(t * jackknife(estimates))


def _text(order: Order, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of whole documents without their ends, as a run reads them until a source is used up; and the number of each
    id's document, from 0.

    Each document has pairs at the first four distances, so that any of them are enough to fit a power law.
    """
    store, (read, _) = order.store, order.documents(0, order.once)
    found = np.array(chosen_documents(store, None, 6, [*dict.fromkeys(read.tolist())]))
    found = found[: int(np.searchsorted((store.lengths[found] - 1).cumsum(), tokens)) + 1]
    ids = np.concatenate([store.document(d)[:-1] for d in found]).astype(np.int64)
    return ids, np.repeat(np.arange(len(found)), store.lengths[found] - 1)


def _classes(ids: np.ndarray, classes: int) -> np.ndarray:
    """The most frequent ids by rank, all others as one class."""
    counts = np.bincount(ids)
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return np.minimum(rank, classes)[ids]
