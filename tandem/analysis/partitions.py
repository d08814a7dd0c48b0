"""What blocks are worth: nats of held-out text under the partitions of a double decoder, and two bounds.

    training      the mean over those by which a score is defined
    every_token   every token its own block: all context comes through latents
    single        one block a document: the generation stack alone, a plain decoder of as many blocks (with `sink`, it
                  also reads the latent of the first token)

Where `training` is no better than `single`, the context stack is of no use.
"""

from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tandem.analysis.analysis import Analysis, Sums, chosen_documents
from tandem.corpus import IGNORE, Batch, scoring_rows
from tandem.corpus.partition import BOUNDS
from tandem.networks.network import Network
from tandem.recipe import Settings, register
from tandem.training.run import Run


def under_partitions(network: Network, batch: Batch) -> dict[str, Tensor]:
    """Nats (B, T) by the name of the partition."""
    bounds = {name: replace(batch, blocks=blocks(batch.starts)) for name, blocks in BOUNDS.items()}
    return {name: network.score(given) for name, given in ({"training": batch} | bounds).items()}


@register("analysis", "partitions")
class Partitions(Analysis):
    """Nats per token of held-out text: partitions as in scoring, all context through latents, and no context stack."""

    asks = "partition"

    class Config(Settings):
        documents: int | None = Field(400, ge=1)
        """Held-out documents that are scored; null: all."""

    @torch.no_grad()
    def measure(self, run: Run) -> dict[str, Any]:
        store, network = run.corpus.validation, run.network
        chosen = chosen_documents(store, self.config.documents, shortest=2)
        sums = Sums()
        rows = scoring_rows(store, run.recipe.batch.context, run.recipe.evaluation.rows, chosen)
        for scoring in self.each([*rows]):
            batch = scoring.batch.to(run.device.value)
            for name, nats in under_partitions(network, batch).items():
                sums.add(name, nats[batch.targets != IGNORE])
        return {"documents": len(chosen), "nats_per_token": sums.means()}

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        found = record["nats_per_token"]
        axes.barh(list(found), list(found.values()))
        axes.set_xlim(left=0.95 * min(found.values()))
        axes.set_xlabel("nats per token")
