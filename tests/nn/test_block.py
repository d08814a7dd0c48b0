"""The block against its formula, symbol by symbol, in float64."""

import pytest
import torch
from pydantic import ValidationError

from tandem.nn.block import Block, BlockConfig, compile_blocks, linear_work
from tandem.nn.init import initialise
from tandem.nn.rope import Rotation, rotate

B, T = 2, 7
SHAPES = {
    "house": BlockConfig(width=24, heads=3),
    "gpt2": BlockConfig(width=24, heads=3, mlp="gelu", norm="layer", bias=True, positions="learned"),
    "grouped": BlockConfig(width=24, heads=6, key_heads=2, head_width=10, qk_norm=True, positions="halves"),
    "eps": BlockConfig(width=24, heads=3, norm_eps=0.1, qk_norm=True, mlp_width=20),
}


class Causal:
    """Plain causal attention over the whole row."""

    def __init__(self, config, length=T, dtype=torch.float64):
        learned = config.positions == "learned"
        pairing = "adjacent" if learned else config.positions
        table = Rotation(torch.arange(length), config.head_width, pairing=pairing, dtype=dtype)
        self.rotation = None if learned else table
        self.layers = []

    def __call__(self, layer, q, k, v):
        self.layers.append(layer)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        closed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(closed, -torch.inf)
        return scores.softmax(-1) @ v


def block_of(config, layer=0):
    block = Block(config, layer)
    initialise(block, "torch", 1, torch.Generator().manual_seed(layer))
    for parameter in block.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.rand_like(parameter))
    return block


def normed(c, module, x):
    x = x - x.mean(-1, keepdim=True) if c.norm == "layer" else x
    x = x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * module.weight
    return x + module.bias if getattr(module, "bias", None) is not None else x


@pytest.mark.parametrize("name", SHAPES)
def test_the_block_is_its_formula(name):
    c = SHAPES[name]
    block, reader = block_of(c).double(), Causal(c)
    x = torch.randn(B, T, c.width, dtype=torch.float64)

    bias = block.qkv.bias if c.bias else 0
    projected = normed(c, block.attention_norm, x) @ block.qkv.weight.T + bias
    heads = projected.view(B, T, -1, c.head_width)  # all query heads, then key heads, then value heads
    q, k, v = heads[:, :, : c.heads], heads[:, :, c.heads : -c.key_heads], heads[:, :, -c.key_heads :]
    if c.qk_norm:
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * module.weight
            for y, module in ((q, block.q_norm), (k, block.k_norm))
        )
    if reader.rotation is not None:
        table = reader.rotation
        q, k = (rotate(y, table.cos_TJ, table.sin_TJ, table.pairing) for y in (q, k))
    y = reader(0, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(-2)
    x1 = x + y @ block.output.weight.T + (block.output.bias if c.bias else 0)
    expected = x1 + block.mlp(normed(c, block.mlp_norm, x1))

    torch.testing.assert_close(block(x, Causal(c)), expected, rtol=1e-10, atol=1e-10)


def test_the_reader_is_told_the_layer_and_handed_heads_before_tokens():
    c = SHAPES["grouped"]
    seen = []

    def reader(layer, q, k, v):
        seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q

    reader.rotation = None
    block_of(c, layer=5).double()(torch.randn(B, T, c.width, dtype=torch.float64), reader)
    assert seen == [(5, (B, 6, T, 10), (B, 2, T, 10), (B, 2, T, 10))]


@pytest.mark.parametrize("name", SHAPES)
def test_under_mixed_precision_the_reader_gets_one_dtype_and_the_residual_stays_float32(name):
    c, seen = SHAPES[name], []

    def reader(layer, q, k, v):
        seen.extend((q.dtype, k.dtype, v.dtype))
        return q

    reader.rotation = Causal(c, dtype=torch.float32).rotation
    with torch.autocast("cpu", torch.bfloat16):
        assert block_of(c)(torch.randn(B, T, c.width), reader).dtype == torch.float32
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize("name", SHAPES)
def test_compiled_blocks_share_one_pair_of_graphs_and_equal_eager_ones(name):
    c = SHAPES[name]
    blocks = [block_of(c, layer) for layer in range(3)]
    x = torch.randn(B, T, c.width, requires_grad=True)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run():
        reader, y = Causal(c, dtype=torch.float32), x
        for block in blocks:
            y = block(y, reader)
        return y

    def run_and_grads():
        y = run()
        return y, *torch.autograd.grad(y.sum(), list(blocks[1].parameters()))

    eager = run_and_grads()
    torch._dynamo.reset()
    compile_blocks(blocks, count)
    compiled = run_and_grads()
    assert len(graphs) == 2 and len({block.kernels for block in blocks}) == 1
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        run()
        blocks[0](x[:, :3], Causal(c, 3, torch.float32))  # another length, but no gradient: eager
    assert len(graphs) == 2


@pytest.mark.parametrize("name", SHAPES)
def test_linear_work_is_the_number_of_weights_that_multiply(name):
    block = block_of(SHAPES[name])
    assert linear_work(SHAPES[name]) == sum(p.numel() for p in block.parameters() if p.ndim == 2)


def test_what_is_left_open_is_derived():
    c = BlockConfig(width=96, heads=4)
    assert (c.key_heads, c.head_width, c.mlp_width) == (4, 24, 256)
    assert BlockConfig(width=96, heads=4, mlp="gelu").mlp_width == 384
    assert BlockConfig(width=96, heads=4, key_heads=2, head_width=32).head_width == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 100, "heads": 3}, "width 100 is not a multiple of heads 3"),
        ({"heads": 4, "key_heads": 3}, "key_heads 3 does not divide heads 4"),
        ({"width": 12, "heads": 4}, "even head width"),
        ({"head_width": 7}, "even head width"),
        ({"mlp": "relu"}, "swiglu"),
        ({"width": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        BlockConfig(**settings)


def test_learned_positions_allow_an_odd_head_width():
    assert BlockConfig(width=12, heads=4, positions="learned").head_width == 3
