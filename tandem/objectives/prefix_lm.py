"""Prefix LM: what follows a break point, given all before it; one task for networks of every kind.

    document   a0 a1 a2 | a3 a4 $       break point 3
    decoder    reads causally, and is asked for a3 a4 $
    double decoder      its context stack reads a0 a1, its generation stack a2 a3 a4
    encoder-decoder     its encoder reads a0 a1, its decoder a2 a3 a4

All three read the same rows with the same break points and are asked for the same tokens (corpus/prefixes.py), so their
losses compare, and what generates starts as it does in a session: from the last token of the prompt. Runs of it usually
start from trained ones (`start: {run: ...}`); those that learn an encoder from it alone start from nothing.

Source: Block-Based Double Decoders (workshop AdaptFM, 2026), the fine-tuning before its comparison.
"""

from torch import Tensor

from tandem.corpus import IGNORE, Batch, PackedRows, PrefixRows
from tandem.corpus.prefixes import Scope
from tandem.networks.network import Network
from tandem.objectives.phases import Phase
from tandem.recipe import Recipe, Settings, register


@register("objective", "prefix_lm")
class PrefixLM:
    """Predict every token of a document from a random break point on."""

    class Config(Settings):
        scope: Scope = "document"
        """What gets a break point: each document, or the row, whatever its documents."""
        shared: bool = False
        """All rows of a step draw alike."""

    def __init__(self, config: Config):
        self.config = config

    @classmethod
    def tiny(cls) -> dict[str, Config]:
        """Settings by name at which the contract is tested."""
        return {"": cls.Config()}

    @classmethod
    def refusal(cls, network: type[Network]) -> str:
        """Why a network can not be asked so; empty: it can."""
        return "reads sentences, and break points lie anywhere" if network.reads_sentences else ""

    @classmethod
    def check(cls, recipe: Recipe):
        if reason := cls.refusal(recipe.choice("network")):
            yield "objective.name", f"network {recipe.values['network']['name']} {reason}"

    def phases(self, rows: PackedRows, steps: int) -> list[Phase]:
        """Of a run of `steps` steps: one."""
        view, T = PrefixRows(rows, self.config.scope, self.config.shared), rows.context
        return [Phase(0, view, parts=(T // 2, T - T // 2))]

    def count(self, network: Network, batch: Batch) -> dict[str, int]:
        """Targets, and what the network adds."""
        return {"nll": int((batch.targets != IGNORE).sum())} | network.count(batch)

    def floor(self, batch: Batch) -> float:
        """The least mean that a batch allows a network that knows it by heart, nats."""
        return 0.0

    def loss(self, network: Network, batch: Batch, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """(share of the step's mean, with its gradient; sums in nats by name, detached)."""
        return asked_loss(network, batch, counts)


def asked_loss(
    network: Network, batch: Batch, counts: dict[str, int], head: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the positions that are asked anything, which alone reach the head."""
    hidden, extra = network(network.embed(batch.tokens), batch)
    asked = batch.targets != IGNORE
    loss, sums = network.nll(hidden[asked][None], batch.targets[asked][None], head=head)
    return network.add_extra(loss / max(1, counts["nll"]), {"nll": sums[0]}, extra, counts)
