"""The next-token objective: tokens in, the token after each asked.

An objective answers two questions. `count` says how many targets of each name a batch asks, before any
backward; the loop adds the answers over micro-batches and processes. `loss` is then the batch's share of the
step's mean, so that the losses of all micro-batches simply add up, and sums of nats for the record.
"""

from torch import Tensor

from tandem.corpus import IGNORE, Batch
from tandem.networks.network import Network
from tandem.recipe import Settings, register


@register("objective", "next_token", default=True)
class NextToken:
    """Predict every token of a document from those before it; the document end is asked, too."""

    class Config(Settings):
        pass

    def __init__(self, config: Config):
        self.config = config

    def count(self, batch: Batch) -> dict[str, int]:
        """Targets by name."""
        return {"nll": int((batch.targets != IGNORE).sum())}

    def loss(self, network: Network, batch: Batch, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """(share of the step's mean, with its gradient; sums in nats by name, detached)."""
        hidden, extra = network(network.embed(batch.tokens), batch)
        assert not extra, f"{list(extra)}: extra terms need a count and a weight here"
        loss, sums = network.nll(hidden, batch.targets)
        return loss / max(1, counts["nll"]), {"nll": sums[0]}
