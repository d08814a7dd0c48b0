"""Prefix LM: predict what follows a break point from all before it; one task for networks of every kind.

    document   a0 a1 a2 | a3 a4 $       break point 3
    decoder    reads causally, and is asked for a3 a4 $
    double decoder      its context stack reads a0 a1, its generation stack a2 a3 a4
    encoder-decoder     its encoder reads a0 a1, its decoder a2 a3 a4

All three read the same rows with the same break points and predict the same tokens (corpus/prefixes.py), so their
losses are comparable, and generation starts as it does in a session: from the last token of the prompt.

Networks learn it after another objective: in a run that starts from a trained one (`start: {run: ...}`), or at the end
of the same run, which continues in the text with the same optimiser and schedule:

    objective: {name: prefix_lm, after: span_corruption, since: 0.9}

So one study can compare several kinds of network, and a learning rate is judged by the final result.

Source: Block-Based Double Decoders (workshop AdaptFM, 2026), the fine-tuning before its comparison.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from tandem.corpus import Batch, PackedRows, PrefixRows
from tandem.corpus.prefixes import Scope
from tandem.networks.cost import Parts
from tandem.networks.network import Network
from tandem.objectives.next_token import NextToken, asked_loss
from tandem.objectives.phases import Phase, require_reached, whole_steps
from tandem.objectives.span_corruption import SpanCorruption
from tandem.recipe import Recipe, Settings, register

FIRST: dict[str, Any] = {"next_token": NextToken, "span_corruption": SpanCorruption}


@register("objective", "prefix_lm")
class PrefixLM(NextToken):
    """Predict every token of a document from a random break point on."""

    class Config(Settings):
        scope: Scope = "document"
        """What gets a break point: each document, or the row as a whole."""
        shared: bool = False
        """All rows of a step share the same draws."""
        after: Literal["next_token", "span_corruption"] | None = None
        """Objective of the run's first phase, with its default options; null: none."""
        since: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] | None = None
        """Where the first phase ends: a step, or a share of the run's steps, rounded down; 0.9 unless given."""

        def derive(self) -> dict[str, Any]:
            if self.after is None and self.since is not None:
                raise ValueError(f"since = {self.since}: where what is asked first ends; name it in after")
            return {"since": 0.9} if self.after else {}

    def __init__(self, config: Config):
        super().__init__(config)
        self.first = FIRST[config.after](FIRST[config.after].Config()) if config.after else None

    @classmethod
    def refusal(cls, network: type[Network]) -> str:
        return "reads sentences, and break points lie anywhere" if network.reads_sentences else ""

    @classmethod
    def check(cls, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if after := recipe.objective.after:
            yield from (("objective.after", reason) for _, reason in FIRST[after].check(recipe))

    def phases(self, rows: PackedRows, steps: int) -> list[Phase]:
        """The phases of a run of `steps` steps: those of the first objective, if any, and its own."""
        c, T, found, since = self.config, rows.context, [], 0
        if self.first is not None and (since := whole_steps(c.since or 0, steps)):
            found = self.first.phases(rows, steps)
            rows = rows.from_token(found[-1].view.read(since))
        return [*found, Phase(since, PrefixRows(rows, c.scope, c.shared), parts=Parts(T // 2, T - T // 2))]

    def require(self, steps: int) -> None:
        """Raises: UserError where a run of `steps` steps would end before prefix LM begins."""
        if self.config.since is not None:
            require_reached("objective.since", self.config.since, steps, "come to prefix LM", "none of it")

    def loss(self, network: Network, batch: Batch, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.first is not None and _is_of_first(network, batch):
            return self.first.loss(network, batch, counts)
        return asked_loss(network, batch, counts)


def _is_of_first(network: Network, batch: Batch) -> bool:
    """True for a batch of the first phase: next-token has no blocks, and only span corruption has sentinel targets."""
    return batch.blocks is None or bool((batch.targets >= network.vocabulary).any())
