"""What every analysis is: a question about a run, answered with numbers that become a record and a picture.

@register("analysis", "mine")
class Mine(Analysis):
    asks = "streams"                       # an attribute that the network's class must have

record = Mine(Mine.Config()).measure(run)  # numbers that JSON can hold
Mine(Mine.Config()).draw(record, axes)     # of matplotlib
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from tandem.corpus import IGNORE, Batch, Store, fixed_order
from tandem.networks.network import Network
from tandem.recipe import Settings, UserError, require
from tandem.training.display import Told
from tandem.training.folder import RunFolder
from tandem.training.run import Run

T = TypeVar("T")


class Analysis:
    """Base of all analyses."""

    Config: ClassVar[Any] = Settings
    asks: ClassVar[str] = "embed"
    """Attribute of a network's class without which there is nothing to analyse; every network has `embed`."""
    trained: ClassVar[bool] = True
    """True if it looks at weights; if not, a recipe will do."""
    reads_text: ClassVar[bool] = True
    """False if it looks at the records of a run alone: neither its text nor its network is then opened."""
    numbered: ClassVar[str] = ""
    """What the numbers are that are keys of mappings in its record, for the terminal; "block", say."""
    needs_scipy: ClassVar[bool] = False
    """True if it measures or draws with scipy, which is then asked for before any work."""

    folder: RunFolder | None = None
    """The folder with the run's records, for analyses that look at its course."""
    told: Told = staticmethod(lambda done, total: None)
    """Called with the parts done and the parts in all."""

    def __init__(self, config: Any):
        self.config = config

    def measure(self, run: Run) -> dict[str, Any]:
        """Numbers by name; a list of rows, each numbers by name, is shown as a table. Where it does not read the text,
        `run` is None.

        Raises: UserError where the run's text does not suffice.
        """
        raise NotImplementedError

    def each(self, parts: Sequence[T]) -> Iterator[T]:
        """The parts of the longest work of `measure`, in turn; `told` is called after each."""
        for done, part in enumerate(parts, 1):
            yield part
            self.told(done, len(parts))

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        """Draws what `measure` found on matplotlib axes."""
        raise NotImplementedError


class Sums(dict[Any, tuple[float, int]]):
    """(sum, count) by name of all values that were added, float64."""

    def add(self, name: Any, values: Tensor) -> None:
        total, count = self.get(name, (0.0, 0))
        self[name] = total + float(values.double().sum()), count + values.numel()

    def means(self) -> dict[Any, float | None]:
        """Means by name; None where there was no value."""
        return {name: total / count if count else None for name, (total, count) in self.items()}


def chosen_documents(store: Store, number: int | None, shortest: int, order: Sequence[int] | None = None) -> list[int]:
    """At most `number` documents (None: all) of at least `shortest` tokens, ends included, in one fixed shuffled order,
    or in the one that is given.

    Raises: UserError where there are none.
    """
    places = fixed_order(store) if order is None else np.array(order)  # of all sources of a mixture
    found = places[store.lengths[places] >= shortest][:number].tolist()
    if not found:
        raise UserError(
            f"analysis.tokens: no document has the {shortest} tokens that this takes; the longest has "
            f"{store.lengths.max()}. Ask for fewer tokens, or analyse longer documents"
        )
    return found


def first_tokens(network: Network, store: Store, documents: list[int], tokens: int) -> Batch:
    """A row for each document: its first `tokens` tokens and the token after each; document ends pad shorter ones.

    Raises: UserError for a network that reads sentences, which these rows do not have, and for more tokens than it has
        learned positions for.
    """
    if network.reads_sentences:
        raise UserError(
            "this analysis shows a network bare tokens, and this one reads sentences; take a run of another"
        )
    if network.longest is not None and network.longest < tokens:
        raise UserError(
            f"analysis.tokens = {tokens}: this network has learned positions for {network.longest}; ask for no more"
        )
    rows = np.full((len(documents), tokens + 1), store.eos)
    for row, document in enumerate(documents):
        text = store.document(document)[: tokens + 1]
        rows[row, : len(text)] = text
    ids = torch.from_numpy(rows).long()
    rest = torch.arange(tokens) >= torch.from_numpy(store.lengths[documents] - 1)[:, None]
    starts = torch.where(rest, torch.arange(tokens), 0)
    return Batch(ids[:, :-1], ids[:, 1:].masked_fill(rest, IGNORE), starts)


def jackknife(without: Sequence[float]) -> float:
    """Standard error of an estimate, from the estimates without each group in turn (the jackknife)."""
    return float(np.std(without) * (len(without) - 1) ** 0.5)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """`values` smoothed by a parabola through `window` neighbours (Savitzky and Golay), as in the papers' figures."""
    window = min(window, len(values) - (len(values) + 1) % 2)  # odd, and no longer than there are values
    return require("scipy.signal", "statistics").savgol_filter(values, window, min(2, window - 1))
