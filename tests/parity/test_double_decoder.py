"""Block-Based Double Decoders against numbers that the authors' code made.

Sizes, ids and options are those of each file, so another set of the same layout passes through the same test. What
their networks scale by constants (attention by the square root of a base head width over D, logits by that of a base
width over C) is put into our weights: the same function, whose gradients are then those with respect to these weights.
"""

import math

import golden
import numpy as np
import pytest
import torch
from golden import close

from tandem.corpus import IGNORE, Batch
from tandem.corpus.partition import draw_splits
from tandem.networks.decoder import Decoder
from tandem.networks.double_decoder import DoubleDecoder
from tandem.nn.attention import Source
from tandem.nn.init import Embedding
from tandem.nn.rope import Rotation
from tandem.nn.spans import causal, prefix

LOGITS, LOSS, GRADIENT, SPLIT, DEVIATION = 5e-5, 1e-5, 1e-5, 1e-4, 0.03
BLOCK = {"out_proj": "output", "norm1": "attention_norm", "norm2": "mlp_norm", "0": "mlp.up", "2": "mlp.down"}
"""Parts of a block, theirs and ours."""


def load(name):
    return golden.load("double_decoder", "dd_pretrain.pt", f"{name}.pt")


def settings(config):
    """Those of a block, by our names."""
    shape = {"width": config["dim"], "heads": config["num_heads"]}
    return shape | {"mlp": "gelu_tanh", "norm_eps": torch.finfo(torch.float32).eps, "init": "xavier"}


def double_decoder(config, **more):
    given = {
        "context_layers": config["num_encoder_layers"],
        "generation_layers": config["num_decoder_layers"],
        "shared_kv": config.get("shared", True),
        "mixing": "biased" if config.get("logit_biases") else "softmax",
        "final_norm": "layer",
    }
    return DoubleDecoder(DoubleDecoder.Config(**settings(config) | given | more), config["vocab_size"], 2048)


def decoder(config):
    given = settings(config) | {"depth": config["num_layers"], "final_norm": "layer"}
    return Decoder(Decoder.Config(**given), config["vocab_size"], 2048)


def with_weights(network, theirs, config):
    table = theirs["embedding.weight"]
    network.table = Embedding(*table.shape)
    network.load_state_dict(ours(theirs, config, network.state_dict()))
    return network


def factors(config):
    """(of the logits, of the queries), beside 1 and 1/sqrt(D)."""
    head = config["dim"] // config["num_heads"]
    logits = math.sqrt(config["mup_base_dim"] / config["dim"])
    return logits, math.sqrt(config["mup_base_head_dim"] / head)


def ours(theirs, config, names, of_gradients=False):
    """Weights, or gradients, by our names."""
    logits, queries = (1 / f if of_gradients else f for f in factors(config))

    def scaled(q):
        q = q.clone()
        q[: config["dim"]] *= queries
        return q

    found = {"table.weight": theirs["embedding.weight"]}
    for name, value in theirs.items():
        stack, _, rest = name.partition(".")
        if stack == "encoder_norm":
            found[f"context_stack.norm.{rest}"] = value
        elif stack == "output_norm":
            found[("generation_stack.norm." if "context_stack.norm.bias" in names else "norm.") + rest] = value * logits
        elif stack.endswith("layers"):
            layer, _, rest = rest.partition(".")
            own = {"encoder_layers": "context_stack.blocks", "decoder_layers": "generation_stack.blocks"}
            block = f"{own.get(stack, 'stack')}.{layer}."
            prefix = f"{stack}.{layer}.combo_attn."
            if rest.endswith("q_proj.weight"):
                kv = next(theirs[prefix + n] for n in ("kv_proj.weight", "dec_kv_proj.weight") if prefix + n in theirs)
                found[block + "qkv.weight"] = scaled(torch.cat((value, kv)))
            elif rest.endswith("qkv.weight"):
                found[block + "qkv.weight"] = scaled(value)
            elif rest.endswith("enc_kv_proj.weight"):
                found[block + "kv.weight"] = value
            elif "logit_bias_proj" in rest:
                found[block + "mixing.bias"] = value.T.flatten()
            elif "mix_temp" in rest:
                found[block + "mixing.temperature"] = value.flatten()
            elif "kv_proj" not in rest:
                found[block + BLOCK[rest.split(".")[-2]] + ".weight"] = value
    return found


def batch_of(given, blocks=None):
    tokens = given["input_ids"]
    starts = torch.zeros_like(tokens)
    if blocks is not None:
        edges = torch.cat((torch.zeros(1, dtype=torch.long), blocks))
        number = torch.searchsorted(blocks, torch.arange(tokens.shape[1]), right=True)
        blocks = edges[number].expand_as(tokens)
    return Batch(tokens, given["labels"], starts, blocks=blocks)


def compare(network, batch, expected, config, residuals):
    """Logits, activations, loss and gradients."""
    seen = {}
    for name, module in residuals.items():
        module.register_forward_hook(lambda module, args, x, name=name: seen.__setitem__(name, x))
    hidden, _ = network(network.embed(batch.tokens), batch)
    asked = batch.targets != IGNORE
    close((hidden @ network.head.T)[asked], expected["logits"][asked], LOGITS)
    for name, x in seen.items():
        close(x[asked], expected["acts"][name][asked], LOGITS)
    assert seen.keys() == expected["acts"].keys()
    total, sums = network.nll(hidden, batch.targets)
    close(sums[0] / asked.sum(), expected["loss"], LOSS)
    close(network.score(batch)[asked], expected["token_loss"][asked], LOGITS)
    (total / asked.sum()).backward()
    theirs = ours(expected["grads"], config, network.state_dict(), of_gradients=True)
    for name, parameter in network.named_parameters():
        close(parameter.grad, theirs[name], GRADIENT)


def stacks(network):
    """Modules whose output is an activation of theirs."""
    found = {"encoder_norm": network.context_stack.norm}
    for theirs, stack in (("encoder_layers", network.context_stack), ("decoder_layers", network.generation_stack)):
        found |= {f"{theirs}.{i}": block for i, block in enumerate(stack.blocks)}
    return found


@pytest.mark.parametrize("sink", [False, True], ids=["paper", "sink"])
@pytest.mark.parametrize("name", ["dd_pretrain", "dd_pretrain_d128", "dd_pretrain_unshared"])
def test_blocks(name, sink):
    file = load(name)
    outputs = "outputs" if sink else "outputs_nosink"
    if outputs not in file:
        pytest.skip(f"{name} has no {outputs}")
    network = with_weights(double_decoder(file["config"], sink=sink), file["state_dict"], file["config"])
    batch = batch_of(file["batch"], file["batch"]["blocks"])
    compare(network, batch, file[outputs], file["config"], stacks(network))


class Continuing:
    """Generation tokens at positions of their own, after a context that is a sequence by itself."""

    def __init__(self, network, latents, positions):
        D, N, T = network.config.head_width, latents.shape[1], len(positions)
        self.network, self.latents = network, latents
        self.rotation, self.of_latents = Rotation(positions, D), Rotation(torch.arange(N), D)
        self.spans = causal(torch.zeros(1, T, dtype=torch.long)), prefix(N, T)

    def __call__(self, layer, q, k, v):
        block = self.network.generation_stack.blocks[layer]
        latents = Source(*block.keys_of(self.latents, self.of_latents), self.spans[1])
        return block.read(q, Source(k, v, self.spans[0]), latents)


def test_a_prefix_is_continued_from_a_start_token():
    file = load("dd_prefixlm")
    given, expected, config = file["batch"], file["outputs"], file["config"]
    network = with_weights(double_decoder(config), file["state_dict"], config)
    asked, nll = given["labels"] != IGNORE, []
    for row, n in enumerate(given["blocks"].tolist()):
        x = network.embed(given["encoder_input_ids"][row : row + 1, :n])
        latents = network.latents(x, torch.zeros(1, n, dtype=torch.long))
        reader = Continuing(network, latents, given["decoder_input_positions"][row])
        x = network.embed(given["decoder_input_ids"][row : row + 1])
        hidden = network.generation_stack(x, reader, network.run_block)
        close((hidden @ network.head.T)[0][asked[row]], expected["logits"][row][asked[row]], LOGITS)
        nll.append(network.nll(hidden, given["labels"][row : row + 1])[0])
    loss = sum(nll) / asked.sum()
    close(loss, expected["loss"], LOSS)
    loss.backward()
    theirs = ours(expected["grads"], config, network.state_dict(), of_gradients=True)
    for name, parameter in network.named_parameters():
        close(parameter.grad, theirs[name], GRADIENT)


def test_the_plain_decoder():
    file = load("dec_pretrain")
    network = with_weights(decoder(file["config"]), file["state_dict"], file["config"])
    blocks = {f"layers.{i}": block for i, block in enumerate(network.stack)}
    compare(network, batch_of(file["batch"]), file["outputs"], file["config"], blocks)


def test_a_prompt_is_read_and_continued():
    """Theirs starts with a token of its own at the prompt's end; all of the prompt is context."""
    file = load("dd_generate")
    network = with_weights(double_decoder(file["config"]), file["state_dict"], file["config"])
    session = network.session(1, keep="extendable")
    session.prefill(file["prompt"].tolist())
    session.commit()
    close(session.latents, file["latents"], LOGITS)
    assert file["positions"][0, 0] == file["prompt"].shape[1]
    for token, expected in zip(file["tokens"][0], file["step_logits"][0], strict=False):
        close(session.step(token[None])[0], expected, LOGITS)


def test_a_boundary_splits_a_forward_into_prefill_and_steps():
    """Theirs has the sink, which only the first block notices."""
    file = load("dd_generate")
    network = with_weights(double_decoder(file["config"], sink=True), file["state_dict"], file["config"])
    given = file["split"]
    tokens, boundary = given["tokens"], int(given["boundary"])
    blocks = torch.where(torch.arange(tokens.shape[1]) < boundary, 0, boundary).expand_as(tokens)
    batch = Batch(tokens, tokens, torch.zeros_like(tokens), blocks=blocks)
    full = network(network.embed(tokens), batch)[0] @ network.head.T
    close(full[:, boundary:], given["tail_logits"], SPLIT)
    close(full, given["full_logits"], SPLIT)
    session = network.session(1)
    logits = session.prefill([tokens[0, : boundary + 1].tolist()])
    for i, token in enumerate(tokens[0, boundary + 1 :]):
        close(logits, given["tail_logits"][:, i], SPLIT)
        logits = session.step(token[None])


def test_partitions():
    generator = np.random.default_rng(np.random.SeedSequence([42, 0, 0]))
    for expected in load("samplers_and_init")["block_partitions"]:
        assert draw_splits(generator, range(2, 2047), 2048).tolist() == expected.tolist()


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", ["dd", "dec"])
def test_initial_deviations(kind, width):
    """By role: of matrices of one shape and place in a block, all layers together."""
    stats = load("samplers_and_init")["init_stats"]
    expected = {k: v for k, v in stats[f"{kind}_d{width}"].items() if k != "output_projection.weight"}
    layers = sum(name.endswith("norm1.weight") for name in expected)
    context = sum(name.startswith("encoder_layers") and name.endswith("norm1.weight") for name in expected)
    config = {"dim": width, "num_heads": 1, "vocab_size": 32766, "num_encoder_layers": context}
    config |= {"num_layers": layers, "num_decoder_layers": layers - context}
    cls, made = (DoubleDecoder, double_decoder) if kind == "dd" else (Decoder, decoder)
    network = cls(made(config).config, 32766, 2048, torch.Generator().manual_seed(0))
    kinds = {"output.weight": "out_proj", "mlp.up.weight": "mlp.0", "mlp.down.weight": "mlp.2", "table": "embedding"}
    for own, theirs in kinds.items():
        near(deviation(network, own), deviation_of(expected, theirs))
    context_qkv, generation_qkv = ("context_stack", "generation_stack") if kind == "dd" else ("stack", None)
    near(deviation(network, "qkv.weight", context_qkv), deviation_of(expected, ".qkv."))
    if generation_qkv:
        q, kv = (slice(width), "q_proj"), (slice(width, None), ".kv_proj")
        for rows, name in (q, kv):
            near(deviation(network, "qkv.weight", generation_qkv, rows), deviation_of(expected, name))


def deviation(network, name, stack="", rows=slice(None)):
    found = [p[rows].flatten() for n, p in network.named_parameters() if name in n and n.startswith(stack)]
    return torch.cat(found).std().item()


def deviation_of(stats, name):
    return float(np.sqrt(np.mean([std**2 for n, (_, std, _) in stats.items() if name in n])))


def near(actual, expected):
    assert actual == pytest.approx(expected, rel=DEVIATION)
