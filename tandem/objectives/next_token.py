"""The next-token objective: tokens in, the token after each asked.

An objective answers three questions. `phases` says how a run reads the text, step by step (objectives/phases.py).
`count` says how many targets of each name a batch asks, before any backward; the loop adds the answers over
micro-batches and processes. `loss` is then the batch's share of the step's mean, so that the losses of all
micro-batches simply add up, and sums of nats for the record. Others extend this one, and say what differs.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tandem.corpus import IGNORE, Batch, PackedRows
from tandem.networks.network import Network
from tandem.objectives.phases import Phase
from tandem.recipe import Recipe, Settings, register


@register("objective", "next_token", default=True)
class NextToken:
    """Predict every token of a document from those before it; the document end is asked, too."""

    class Config(Settings):
        pass

    def __init__(self, config: Any):
        self.config = config

    @classmethod
    def tiny(cls) -> dict[str, Any]:
        """Settings by name at which the contract is tested."""
        return {"": cls.Config()}

    @classmethod
    def refusal(cls, network: type[Network]) -> str:
        """Why a network can not be asked so; empty: it can."""
        return network.suffixes_only

    @classmethod
    def check(cls, recipe: Recipe, config: Any = None) -> Iterator[tuple[str, str]]:
        """`config`: its own in place of the recipe's objective, which asks it first."""
        if reason := cls.refusal(recipe.choice("network")):
            yield "objective.name", f"network {recipe.values['network']['name']} {reason}"

    def phases(self, rows: PackedRows, steps: int) -> list[Phase]:
        """Of a run of `steps` steps: one."""
        return [Phase(0, rows)]

    def count(self, network: Network, batch: Batch) -> dict[str, int]:
        """Targets, whatever ids they are, and by name what the network's own terms count."""
        return {"nll": int((batch.targets != IGNORE).sum())} | network.count(batch)

    def floor(self, batch: Batch) -> float:
        """The least mean that a batch allows a network that knows it by heart, nats."""
        return 0.0

    def loss(self, network: Network, batch: Batch, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """(share of the step's mean, with its gradient; sums in nats by name, detached)."""
        hidden, extra = network(network.embed(batch.tokens), batch)
        return network.add_extra(*network.asked(hidden, batch, counts), extra, counts)


def asked_loss(
    network: Network, batch: Batch, counts: dict[str, int], head: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the positions that are asked anything, which alone reach the head."""
    hidden, extra = network(network.embed(batch.tokens), batch)
    asked = batch.targets != IGNORE
    loss, sums = network.nll(hidden[asked][None], batch.targets[asked][None], head=head)
    return network.add_extra(loss / max(1, counts["nll"]), {"nll": sums[0]}, extra, counts)
