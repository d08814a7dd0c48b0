"""The encoder-decoder, prefix LM and span corruption against numbers that the authors' code made.

Every size, id and option comes from the files. Tolerances: float32 on another implementation of every product.
"""

import numpy as np
import pytest
import test_double_decoder
import torch
from golden import close
from test_double_decoder import BLOCK, GRADIENT, LOGITS, LOSS, batch_of, factors, load, settings, with_weights

from tandem.corpus.corruption import Corruption, corrupt, in_one_row
from tandem.corpus.prefixes import break_points
from tandem.corpus.views import IGNORE, Batch
from tandem.networks.encoder_decoder import EncoderDecoder
from tandem.nn.init import Embedding, roles

CROSS = {"cross_attn.q_proj": "cross_q", "cross_attn.kv_proj": "cross_kv", "cross_attn.out_proj": "cross_output",
         "norm2": "cross_norm", "norm3": "mlp_norm"}  # fmt: skip


def named(theirs, encoder_layers):
    """By our names; the head is the table."""
    found = {"table.weight": theirs["embedding.weight"]}
    for name, value in theirs.items():
        stack, _, rest = name.partition(".")
        layer, _, part = rest.removesuffix(".weight").partition(".")
        if stack in ("encoder_norm", "output_norm"):
            found[f"{'latents_norm' if stack == 'encoder_norm' else 'norm'}.{rest}"] = value
        elif stack == "encoder_layers":
            found[f"stack.{layer}.{own(part)}.weight"] = value
        elif stack == "decoder_layers":
            found[f"stack.{int(layer) + encoder_layers}.{CROSS.get(part) or own(part)}.weight"] = value
    return found


def own(part):
    part = part.split(".")[-1]
    return BLOCK.get(part, part)


def ours(theirs, config, of_gradients=False):
    """Weights, or gradients, by our names, with the factors that are theirs."""
    logits, queries = (1 / f if of_gradients else f for f in factors(config))
    found = {name: value.clone() for name, value in named(theirs, config["num_encoder_layers"]).items()}
    for name, value in found.items():
        if name.startswith("norm."):
            value *= logits
        elif name.endswith(("qkv.weight", "cross_q.weight")):
            value[: config["dim"]] *= queries
    return found


def encoder_decoder(file, **more):
    cfg = file["config"]
    layers = {"encoder_layers": cfg["num_encoder_layers"], "decoder_layers": cfg["num_decoder_layers"]}
    given = settings(cfg) | {"sentinels": 0, "final_norm": "layer"} | layers | more
    network = Theirs(EncoderDecoder.Config(**given), vocabulary=cfg["vocab_size"], context=cfg["seq_len"])
    network.table = Embedding(cfg["vocab_size"], cfg["dim"])  # no rows to spare
    network.load_state_dict(ours(file["state_dict"], cfg))
    return network


class Theirs(EncoderDecoder):
    """Positions end with the row: the token beyond its last one, which they take the place of, has the last one's."""

    def rotation(self, places, like):
        return super().rotation(places.clamp_max(self.context - 1), like)


def check(network, batch, file, logits, expected_logits):
    out = file["outputs"]
    total, sums = network.nll(network(network.embed(batch.tokens), batch)[0], batch.targets)
    count = (batch.targets != IGNORE).sum()
    close(logits, expected_logits, LOGITS)
    close(sums[0] / count, out["loss"], LOSS)
    close(network.score(batch).sum() / count, out["loss"], LOSS)
    (total / count).backward()
    theirs = ours(out["grads"], file["config"], of_gradients=True)
    for name, value in network.named_parameters():
        close(value.grad, theirs[name], GRADIENT)


@torch.no_grad()
def logits_of(network, batch):
    return network(network.embed(batch.tokens), batch)[0] @ network.head.T


def test_encoder_decoder_on_texts_with_gaps():
    """From the rows that they were cut from: encoder input, decoder input and labels, then what is made of them."""
    file = load("sed_span")
    special, given = file["meta"]["special"], file["batch"]
    rows, generator = np.array(file["rows"]), np.random.default_rng(44)
    corruption = Corruption(sentinels=special["n_sentinel"], sampler="poisson")
    ordinary = rows >= special["sentinel0"] + special["n_sentinel"]
    texts = [
        corrupt(row, corruption.cut(open_, generator), special["sentinel0"], special["eos"])
        for row, open_ in zip(rows, ordinary, strict=True)
    ]
    for (context, asked), read, labels in zip(texts, given["encoder_input_ids"], given["labels"], strict=True):
        assert context.tolist() == read[read != special["pad"]].tolist()
        assert asked.tolist() == labels[labels != IGNORE].tolist()
    network, batch = encoder_decoder(file), in_one_row(texts, special["bos"])
    supervised = given["labels"] != IGNORE
    assert batch.tokens[batch.targets != IGNORE].tolist() == given["decoder_input_ids"][supervised].tolist()
    logits = logits_of(network, batch)[batch.targets != IGNORE]
    check(network, batch, file, logits, file["outputs"]["logits"][supervised])


def test_encoder_decoder_on_prefixes():
    """Theirs starts from <bos> in place of the prompt's last token, and ends with an end that the text has not."""
    file = load("sed_prefixlm")
    special, given = file["meta"]["special"], file["batch"]
    lengths, T = given["blocks"].tolist(), file["config"]["seq_len"]
    tokens, targets, blocks = [], [], []
    for n, context, written, labels in zip(
        lengths, given["encoder_input_ids"], given["decoder_input_ids"], given["labels"], strict=True
    ):
        asked = labels[labels != IGNORE]
        assert written[0] == special["bos"] and n + len(asked) == T + 1
        tokens.append(torch.cat((context[:n], written[1 : len(asked)])))
        targets.append(torch.cat((torch.full((n - 1,), IGNORE), asked)))
        blocks.append(torch.tensor([0] * (n - 1) + [n - 1] * len(asked)))
    tokens, targets, blocks = map(torch.stack, (tokens, targets, blocks))
    network = encoder_decoder(file, start=special["bos"], decoder_positions="offset")
    batch = Batch(tokens, targets, torch.zeros_like(tokens), blocks=blocks)
    check(network, batch, file, logits_of(network, batch)[targets != IGNORE],
          file["outputs"]["logits"][given["labels"] != IGNORE])  # fmt: skip


def test_decoder_on_prefixes():
    file = load("dec_prefixlm")
    network = with_weights(test_double_decoder.decoder(file["config"]), file["state_dict"], file["config"])
    test_double_decoder.compare(network, batch_of(file["batch"]), file["outputs"], file["config"],
                                {f"layers.{i}": block for i, block in enumerate(network.stack)})  # fmt: skip


def test_break_points():
    expected, generator = load("samplers_and_init")["prefix_breakpoints"], np.random.default_rng(42)
    assert [int(break_points(generator, 2046)) for _ in expected] == [int(n) for n in expected]


@pytest.mark.parametrize("width", [64, 128, 256])
def test_initial_deviations(width):
    stats = load("samplers_and_init")["init_stats"][f"sed_d{width}"]
    layers = [
        sum(name.endswith(kind) for name in stats) for kind in ("self_attn.qkv.weight", "cross_attn.q_proj.weight")
    ]
    config = EncoderDecoder.Config(
        **settings({"dim": width, "num_heads": 1}), final_norm="layer", sentinels=0,
        encoder_layers=layers[0] - layers[1], decoder_layers=layers[1],
    )  # fmt: skip
    vocabulary = stats["embedding.weight"][0][0] - 2
    network = EncoderDecoder(config, vocabulary, 64, torch.Generator().manual_seed(0))
    theirs, role = named(stats, config.encoder_layers), roles(network)
    for name, value in network.named_parameters():
        shape, deviation, _ = theirs[name]
        assert tuple(value.shape) == tuple(shape)
        if value.ndim > 1:
            assert abs(float(value.detach().std()) / float(deviation) - 1) < 0.03, (name, role[name])
