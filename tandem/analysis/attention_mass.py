"""Does a double decoder use its context? How much of its attention lies on the tokens of the query's own block.

    own mass = sum of the attention weights on own tokens       mean over heads, and over queries that have context

It also reports, for both stacks and every layer, signs of a collapsed stack: the deviation of a query's scores over
what it reads (root of the mean variance), the entropy of its weights (nats), and the RMS of the residual stream after
the block. Nearly one-hot attention has scores that deviate by ten or more and an entropy near zero. A plain decoder has
these signs as well, to compare with.

Cost: a forward pass, with all scores of a layer for one row at once. Text is read under the first scoring partition.
Source: Block-Based Double Decoders, the authors' probe, whose "gate" is the own mass.
Shapes: B rows, H heads, T tokens, N keys of a source.
"""

import contextlib
import functools
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tandem.analysis.analysis import Analysis, Sums, chosen_documents, first_tokens
from tandem.corpus import Batch
from tandem.networks.decoder import Decoder
from tandem.networks.double_decoder import DoubleDecoder
from tandem.nn.attention import Source, scores
from tandem.recipe import Settings, UserError, register
from tandem.training.run import Run


@torch.no_grad()
def add_by_layer(sums: Sums, network: Decoder | DoubleDecoder, batch: Batch) -> None:
    """Adds every measure of a batch by (stack, layer, name): variances for the scores' deviation, squares for RMS."""

    def watch(stack: str, layer: int, q: Tensor, sources: list[Source]) -> None:
        score, _ = scores(q.double(), sources)
        p, read = score.softmax(-1), score.isfinite()
        size = read.sum(-1)
        mean = score.masked_fill(~read, 0).sum(-1, keepdim=True) / size[..., None]
        variance = (score - mean).masked_fill(~read, 0).square().sum(-1) / size
        measures = {"variance": variance[size > 1], "entropy": torch.special.entr(p).sum(-1).flatten()}
        if stack == "generation":
            own, latents = (x.sum(-1) for x in p.tensor_split([sources[0].k.shape[2]], dim=-1))
            assert torch.allclose(own + latents, torch.ones_like(own))
            # By the spans: with a sink the first block reads a latent but still has no context
            block, document = (source.span.lo.to(own.device) for source in sources)  # type: ignore[union-attr]
            has_context = (block > document)[:, None].expand_as(own)
            measures["own_mass"] = own[has_context]
        for name, x in measures.items():
            sums.add((stack, layer, name), x)

    def add_squares(name: tuple[str, int, str], module: Any, given: Any, x: Tensor) -> None:
        sums.add(name, x.double().square())

    with contextlib.ExitStack() as hooks:
        for stack, blocks in network.stacks.items():
            for layer, block in enumerate(blocks):
                hook = functools.partial(add_squares, (stack, layer, "residual"))
                hooks.enter_context(block.register_forward_hook(hook))
        network.watch = watch
        hooks.callback(setattr, network, "watch", None)
        network(network.embed(batch.tokens), batch)


@register("analysis", "attention_mass")
class AttentionMass(Analysis):
    """Share of attention on own tokens by layer, and signs that either stack has collapsed."""

    asks = "stacks"

    class Config(Settings):
        documents: int = Field(64, ge=1)
        """Held-out documents, at most."""
        tokens: int | None = Field(None, ge=2)
        """Tokens of each document; null: the context of the run."""

    def measure(self, run: Run) -> dict[str, Any]:
        """Each measure of each stack, as a list with a value for each layer."""
        c, store, network = self.config, run.corpus.validation, run.network
        assert isinstance(network, Decoder | DoubleDecoder)
        if isinstance(network, DoubleDecoder) and network.config.mixing != "softmax":
            raise UserError(
                "network.mixing = biased: its two sources share no softmax, so there is no share to measure"
            )
        tokens = c.tokens or run.recipe.batch.context
        sums = Sums()
        chosen = chosen_documents(store, c.documents, shortest=2)
        for document in self.each(chosen):
            has = int(store.lengths[document]) - 1  # padding of the row is no query
            batch = first_tokens(network, store, [document], min(tokens, has)).to(run.device.value)
            add_by_layer(sums, network, batch)
        record: dict[str, Any] = {"documents": len(chosen)}
        for (stack, _, name), mean in sorted(sums.means().items(), key=lambda item: item[0][:2]):
            told = {"variance": "score_deviation", "residual": "residual_rms"}.get(name, name)
            value = mean**0.5 if mean is not None and told != name else mean
            record.setdefault(f"{stack}_{told}", []).append(value)
        return record

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        if own := record.get("generation_own_mass"):
            values, stack, what = own, "generation stack", "attention on own tokens"
            axes.set_ylim(0, 1)
        else:
            values, stack, what = record["decoder_entropy"], "decoder", "entropy of attention weights, nats"
        layers = range(1, len(values) + 1)
        axes.bar(layers, [value or 0 for value in values], color="C0")
        axes.set(xticks=layers, xlabel=f"block of the {stack}", ylabel=what)
