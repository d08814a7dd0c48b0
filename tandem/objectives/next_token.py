"""The next-token objective: predict the token after each token.

An objective has three main methods. `phases` says how a run reads the text, step by step (objectives/phases.py).
`count` counts a batch's targets by name, before any backward pass; the loop adds these counts over micro-batches and
processes. `loss` then returns the batch's share of the step's mean, so that the losses of all micro-batches simply
add up, and sums in nats for the record. Other objectives extend this one and define only what differs.
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
    """Predict every token of a document, and the document end, from the tokens before it."""

    class Config(Settings):
        pass

    def __init__(self, config: Any):
        self.config = config

    @classmethod
    def tiny(cls) -> dict[str, Any]:
        """Settings by name, with which the contract is tested."""
        return {"": cls.Config()}

    crosses_documents = False
    """Whether what is asked in a document may lie in the next one."""

    @classmethod
    def refusal(cls, network: type[Network]) -> str:
        """Why this objective cannot train a network; empty if it can."""
        return network.suffixes_only

    @classmethod
    def check(cls, recipe: Recipe) -> Iterator[tuple[str, str]]:
        """(key, reason) of what the recipe cannot have; the recipe's objective may be one whose first phase is this."""
        if reason := cls.refusal(recipe.choice("network")):
            yield "objective.name", f"network {recipe.value('network.name')} {reason}"

    def phases(self, rows: PackedRows, steps: int) -> list[Phase]:
        """The phases of a run of `steps` steps: one."""
        return [Phase(0, rows)]

    def count(self, network: Network, batch: Batch) -> dict[str, int]:
        """The number of targets, whatever their ids, and the counts of the network's own terms by name."""
        return {"nll": int((batch.targets != IGNORE).sum())} | network.count(batch)

    def floor(self, batch: Batch) -> float:
        """The least mean loss of a network that has memorised the batch, nats."""
        return 0.0

    def loss(self, network: Network, batch: Batch, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """(share of the step's mean, with its gradient; sums in nats by name, detached)."""
        hidden, extra = network(network.embed(batch.tokens), batch)
        return network.add_extra(*network.asked(hidden, batch, counts), extra, counts)


def asked_loss(
    network: Network, batch: Batch, counts: dict[str, int], head: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the positions that have a target; only these reach the head."""
    hidden, extra = network(network.embed(batch.tokens), batch)
    asked = batch.targets != IGNORE
    loss, sums = network.nll(hidden[asked][None], batch.targets[asked][None], head=head)
    return network.add_extra(loss / max(1, counts["nll"]), {"nll": sums[0]}, extra, counts)
