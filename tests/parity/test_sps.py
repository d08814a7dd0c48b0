"""State-Prediction Separation against numbers that the authors' code made, all variants.

Every size, id and window is taken from inputs.pt, so another set of the same layout passes through the same test.
The tolerances are those of the numbers: float32 on another implementation of every product.
"""

import golden
import pytest
import torch
from golden import close

from tandem.analysis.gradient_roles import squared_norms
from tandem.corpus import IGNORE, Batch
from tandem.networks.sps import SPS, stream_spans
from tandem.nn.attention import Source, attend
from tandem.nn.init import Embedding
from tandem.nn.spans import causal

LOGITS, LOSS, GRADIENT, RELATIVE, KERNEL = 1e-4, 1e-5, 2e-5, 1e-4, 1e-2
FAMILIES = {
    "standard": {"persistent": "inputs", "read": "inputs"},
    "sps": {"persistent": "inputs", "read": "predictions"},
    "delayed_state": {"persistent": "predictions", "read": "predictions"},
    "reverse_sps": {"persistent": "predictions", "read": "inputs"},
}
VARIANTS = ("standard", "sps", "sps_w0", "two_x_memory", "delayed_state", "delayed_state_w0", "reverse_sps",
            "reverse_sps_w0")  # fmt: skip


def load(name):
    return golden.load("sps", "inputs.pt", f"{name}.pt")


@pytest.fixture(scope="module")
def inputs():
    return load("inputs")


def network_of(inputs, name):
    """The variant with the authors' weights: its prediction vector a row of the table, all rows in the softmax."""
    cfg, (family, window) = inputs["cfg"], inputs["variants"][name]
    config = SPS.Config(
        width=cfg["d"],
        depth=cfg["n_layer"],
        heads=cfg["n_head"],
        mlp_width=cfg["ffn"],
        norm_eps=cfg["eps"],
        rope_base=cfg["rope_theta"],
        window=window or 0,
        predict_in_vocabulary=True,
        **FAMILIES[family],
    )
    network = SPS(config, vocabulary=cfg["predict"], context=cfg["T"])
    network.table = Embedding(cfg["vocab"], cfg["d"])
    network.load_state_dict(ours(inputs["state_dict"]))
    return network


def ours(theirs):
    """Weights, or gradients, by our names; the head is the table."""
    names = {"attn.c_attn": "qkv", "attn.c_proj": "output", "attention_norm": "attention_norm", "mlp_norm": "mlp_norm"}
    found = {
        "table.weight": theirs["transformer.wte.weight"],
        "norm.weight": theirs["transformer.output_norm.weight"],
    }
    for layer in range(sum(name.endswith("attn.c_attn.weight") for name in theirs)):
        own, block = f"transformer.h.{layer}.", f"stack.{layer}."
        found |= {f"{block}{n}.weight": theirs[f"{own}{name}.weight"] for name, n in names.items()}
        gate, up, down = (theirs[f"{own}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        found |= {f"{block}mlp.up.weight": torch.cat((gate, up)), f"{block}mlp.down.weight": down}
    return found


def batch_of(inputs, tokens="tokens", targets="targets"):
    """An <eos> belongs to the document that it ends, and every pad is a document; neither is asked for what follows."""
    tokens, targets, cfg = inputs[tokens], inputs[targets], inputs["cfg"]
    closes = (tokens == cfg["eos"]) | (tokens == cfg["pad"])
    opens = torch.cat((torch.ones_like(closes[:, :1]), closes[:, :-1]), dim=1)
    starts = torch.where(opens, torch.arange(tokens.shape[1]), 0).cummax(1).values
    return Batch(tokens, targets.masked_fill(closes, IGNORE), starts)


@torch.no_grad()
def logits_of(network, batch):
    hidden, _ = network(network.embed(batch.tokens), batch)
    return hidden @ network.head.T


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_gradients(inputs, name):
    expected, network, batch = load(name), network_of(inputs, name), batch_of(inputs)
    close(logits_of(network, batch), expected["logits"], LOGITS)
    hidden, _ = network(network.embed(batch.tokens), batch)
    total, sums = network.nll(hidden, batch.targets)
    count = (batch.targets != IGNORE).sum()
    assert count == expected["nll_count"]
    close(sums[0] / count, torch.as_tensor(expected["loss"]), LOSS)
    close(network.score(batch).sum() / count, torch.as_tensor(expected["loss"]), LOSS)
    if "grads" in expected:
        (total / count).backward()
        grads = ours(expected["grads"])
        for parameter, value in network.named_parameters():
            close(value.grad, grads[parameter], GRADIENT)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_of_both_streams(inputs, name):
    expected, network, batch = load(name)["hidden"], network_of(inputs, name), batch_of(inputs)
    network.whole, residuals = True, []
    for block in network.blocks:
        block.register_forward_hook(lambda block, args, x: residuals.append(x))
    with torch.no_grad():
        network(network.embed(batch.tokens), batch)
        residuals.append(network.norm(residuals[-1]))
    for x, slots in zip(residuals, expected, strict=True):  # x_0, p_0, x_1, p_1, ..
        close(torch.stack(x.chunk(len(network.streams)), dim=2).flatten(1, 2), slots, LOGITS)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_padded_on_the_left(inputs, name):
    expected, network = load(name)["logits_left_padded"], network_of(inputs, name)
    batch = batch_of(inputs, "tokens_left_padded")
    real = batch.tokens != inputs["cfg"]["pad"]
    assert not real.all()
    close(logits_of(network, batch)[real], expected[real], LOGITS)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_a_restricted_state(inputs, name):
    expected, network = load(name)["logits_persistent_window"], network_of(inputs, name)
    close(logits_of(network.restricted(4), batch_of(inputs)), expected, LOGITS)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_continuation(inputs, name):
    """The reference goes on over <eos> with a new document: a session of its own here."""
    expected, network, cfg = load(name)["greedy"], network_of(inputs, name), inputs["cfg"]
    barred = [cfg["pad"], cfg["predict"]]
    for text in expected.tolist():
        read, prompt = [], 40
        for token in text[:prompt]:
            read = [token] if read[-1:] == [cfg["eos"]] else [*read, token]
        session = network.session(1)
        logits = session.prefill([read])
        for i, token in enumerate(text[prompt:], start=prompt):
            assert logits.index_fill(1, torch.tensor(barred), -torch.inf).argmax() == token, f"token {i}"
            if text[i - 1] == cfg["eos"]:
                session = network.session(1)
                logits = session.prefill([[token]])
            else:
                logits = session.step(torch.tensor([token]))


@pytest.mark.parametrize("name", ["standard", "sps", "delayed_state"])
def test_gradient_norms_of_slots(inputs, name):
    """Of present and future losses, for all parameters of a slot and by layer and kind."""
    file, network = load("gradient_ratio"), network_of(inputs, name)
    batch = batch_of(inputs, "tokens_one_document", "targets_one_document")
    slots, streams = file["positions"], ["input_token", "predict_token"]
    targets = torch.tensor(slots)[:, None] + torch.arange(file["horizon"] + 1)
    found = list(squared_norms(network, batch, targets))
    for stream, row, present, future in file[name]["pooled"]:
        at = streams.index(stream), row, slots[row]
        close_norms([sum(squares[at] for squares in parts.values()) for parts in found], [present, *future])
    for stream, row, layer, kind, present, future in file[name]["rows"]:
        squares = [parts[layer, kind][streams.index(stream), row, slots[row]] for parts in found]
        close_norms(squares, [present, *future])


def close_norms(squares, expected):
    torch.testing.assert_close(torch.stack(squares).sqrt(), torch.tensor(expected), rtol=RELATIVE, atol=1e-6)


@pytest.mark.parametrize("backend", ["dense", "tiled"])
@pytest.mark.parametrize("name", ["full", "sps", "reverse_sps"])
def test_attention_kernels(name, backend):
    """Made in float16: two streams of interleaved slots, or one."""
    file = load("kernels")
    given = {key: value.float() for key, value in file[name].items()}
    streams = 1 if name == "full" else 2
    documents = file["documents"]
    opens = torch.cat((torch.ones_like(documents[:, :1]), documents.diff(dim=1)), dim=1) != 0
    starts = torch.where(opens, torch.arange(documents.shape[1]), 0).cummax(1).values
    if streams == 1:
        spans = ((causal(starts),),)
    else:
        spans = stream_spans(SPS.Config(window=file["window"], **FAMILIES[name]), starts)
    q, k, v, do = (tuple(given[x][:, :, s::streams] for s in range(streams)) for x in ("q", "k", "v", "do"))
    leaves = [x.clone().requires_grad_() for x in (*q, *k, *v)]
    q, k, v = (tuple(leaves[i : i + streams]) for i in range(0, len(leaves), streams))
    y = attend(q, [Source(*source) for source in zip(k, v, spans, strict=True)], backend=backend)
    grads = torch.autograd.grad(y, leaves, do)
    found = [y, *(grads[i : i + streams] for i in range(0, len(leaves), streams))]
    for x, what in zip(found, ("o", "dq", "dk", "dv"), strict=True):
        close(torch.stack(x, dim=3).flatten(2, 3), given[what], KERNEL)
