import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tandem.nn.init import DECAYED, HIDDEN, Embedding, Experts, Linear, initialise, roles
from tandem.nn.mlp import MLP
from tandem.nn.moe import Mixture, MixtureConfig
from tandem.nn.norm import norm

C, F, DEPTH = 96, 160, 8


class Net(nn.Module):
    """One parameter of every role."""

    def __init__(self):
        super().__init__()
        self.table = Embedding(400, C)
        self.qkv = Linear(C, 2 * C, bias=True, role="attention", parts=(C, C // 2, C // 2))
        self.out = Linear(C, C, bias=True, role="attention_out")
        self.up = Linear(C, F, bias=True, role="mlp")
        self.down = Linear(F, C, bias=True, role="mlp_out")
        self.norm = norm("layer", C, 1e-6, bias=True)
        self.head = Linear(C, 400, bias=False, role="head")
        self.router = Linear(C, 4, bias=False, role="router")
        self.experts = Experts(4, C, F, role="experts")
        self.experts_down = Experts(4, F, C, role="experts_out")


def drawn(scheme, seed=0):
    net = Net()
    for parameter in net.parameters():
        parameter.data.fill_(torch.nan)
    initialise(net, scheme, DEPTH, torch.Generator().manual_seed(seed))
    return net


def uniform(bound):
    return bound / math.sqrt(3)


DEEP = 0.02 / math.sqrt(2 * DEPTH)
STD = {  # of weights: table, stacked qkv, attention output, up, down, head
    "normal": (0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
    "scaled": (0.02, 0.02, DEEP, 0.02, DEEP, 0.02),
    "scaled_attention": (0.02, 0.02, DEEP, 0.02, 0.02, 0.02),
    "xavier": tuple(math.sqrt(2 * 2 / total) for total in (400 + C, 3 * C, 2 * C, C + F, C + F, C + 400)),
    "per_matrix": tuple(
        math.sqrt(4 / total) if total else None for total in (400 + C, 0, 2 * C, C + F, C + F, C + 400)
    ),
    "per_matrix_scaled": (
        *(math.sqrt(4 / total) if total else None for total in (400 + C, 0)),
        *(math.sqrt(4 / total / deep) for total, deep in ((2 * C, 2 * DEPTH), (C + F, 1), (C + F, 2 * DEPTH))),
        math.sqrt(4 / (C + 400)),
    ),
    "xavier_qkv": (0.02, None, 0.02, 0.02, 0.02, 0.02),
    "torch": (1.0, *(uniform(1 / math.sqrt(inputs)) for inputs in (C, C, C, F, C))),
}


@pytest.mark.parametrize("scheme", STD)
def test_every_role_is_drawn_as_the_scheme_says(scheme):
    net = drawn(scheme)
    weights = (net.table, net.qkv, net.out, net.up, net.down, net.head)
    for module, std in zip(weights, STD[scheme], strict=True):
        if std is not None:
            # 4 standard errors of a deviation estimated from the smallest matrix, 96 x 96
            assert module.weight.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * C * C))
            assert abs(module.weight.mean().item()) < 4 * std / C
    assert torch.equal(net.norm.weight, torch.ones(C)) and torch.equal(net.norm.bias, torch.zeros(C))


@pytest.mark.parametrize("scheme", STD)
def test_every_expert_is_drawn_as_the_mlp_is(scheme):
    net = drawn(scheme)
    for mlp, experts in ((net.up, net.experts), (net.down, net.experts_down)):
        for matrix in experts.weight:
            assert matrix.std().item() == pytest.approx(mlp.weight.std().item(), rel=8 / math.sqrt(2 * C * F))
        assert not torch.equal(experts.weight[0], experts.weight[1])


@pytest.mark.parametrize("scheme", ["xavier_qkv", "per_matrix", "per_matrix_scaled"])
def test_queries_keys_and_values_are_each_drawn_on_their_own_shape(scheme):
    q, k, v = drawn(scheme).qkv.weight.split((C, C // 2, C // 2))
    for part, outputs in ((q, C), (k, C // 2), (v, C // 2)):
        bound = math.sqrt(6 / (C + outputs))
        assert 0.99 * bound < part.abs().max() <= bound


@pytest.mark.parametrize("scheme", ["xavier", "per_matrix", "per_matrix_scaled"])
def test_gate_and_up_of_an_expert_are_drawn_as_those_of_the_mlp(scheme):
    mixture, mlp = Mixture(MixtureConfig(experts=1, active=1), C, F), MLP("swiglu", C, F, bias=False)
    for net in (mixture, mlp):
        initialise(net, scheme, DEPTH, torch.Generator().manual_seed(0))
    largest, bound = (float(net.up.weight.detach().abs().max()) for net in (mixture, mlp))
    assert largest == pytest.approx(bound, rel=1e-3)


@pytest.mark.parametrize("scheme", STD)
def test_a_row_apart_from_its_table_is_drawn_like_one_of_it(scheme):
    table, apart = Embedding(4000, C), Embedding(1, C, like=4000)
    for embedding in (table, apart):
        initialise(embedding, scheme, DEPTH, torch.Generator().manual_seed(0))
    assert apart.weight.std().item() == pytest.approx(table.weight.std().item(), rel=8 / math.sqrt(2 * C))


@pytest.mark.parametrize("scheme", ["xavier", "per_matrix", "per_matrix_scaled", "torch"])
def test_uniform_draws_are_uniform(scheme):
    weight = drawn(scheme).up.weight
    assert weight.abs().max() <= 1.001 * weight.std() * math.sqrt(3) * (1 + 4 / math.sqrt(2 * C * F))


@pytest.mark.parametrize("scheme", STD)
def test_biases_are_zero_in_all_schemes_but_torch(scheme):
    for name, inputs in (("qkv", C), ("out", C), ("up", C), ("down", F)):
        bias = getattr(drawn(scheme), name).bias
        bound = 1 / math.sqrt(inputs) if scheme == "torch" else 0.0
        assert 0.9 * bound <= bias.abs().max() <= bound


@pytest.mark.parametrize("scheme", STD)
def test_width_transfer_shrinks_hidden_matrices_of_fixed_deviation_alone(scheme):
    net, plain = Net(), drawn(scheme)
    net.config = SimpleNamespace(width_ratio=9.0)
    initialise(net, scheme, DEPTH, torch.Generator().manual_seed(0))
    fixed = ("normal", "scaled", "scaled_attention", "xavier_qkv")
    for name, parameter in net.named_parameters():
        role = roles(net)[name]
        shrinks = scheme in fixed and role in HIDDEN and (scheme, role) != ("xavier_qkv", "attention")
        expected = dict(plain.named_parameters())[name] * (1 / 3 if shrinks else 1)
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=0)


def test_the_draw_is_a_function_of_the_generator_alone():
    torch.manual_seed(1)
    first = drawn("scaled").state_dict()
    torch.manual_seed(2)
    second, other = drawn("scaled").state_dict(), drawn("scaled", seed=1).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["qkv.weight"], other["qkv.weight"])


def test_every_parameter_has_the_role_of_its_module():
    found = roles(Net())
    expected = {"table": "embedding", "qkv": "attention", "out": "attention_out", "up": "mlp", "down": "mlp_out",
                "norm": "norm", "head": "head", "router": "router", "experts": "experts",
                "experts_down": "experts_out"}  # fmt: skip
    for name, role in found.items():
        module, _, kind = name.partition(".")
        assert role == ("bias" if kind == "bias" and module != "norm" else expected[module])
    assert set(found) == {name for name, _ in Net().named_parameters()}
    assert set(expected.values()) - {"norm"} == DECAYED - {"thought"}


def test_a_tied_parameter_is_counted_once_and_a_stranger_is_refused():
    net = Net()
    net.head.weight = net.table.weight
    assert roles(net)["table.weight"] == "embedding" and "head.weight" not in roles(net)
    net.stray = nn.Conv1d(2, 2, 1)
    with pytest.raises(AssertionError, match=r"Conv1d\.weight has no role: give its module one of attention, "):
        roles(net)
    net.stray = Linear(2, 2, bias=False, role="atention")  # which would not decay
    with pytest.raises(AssertionError, match=r"Linear\.weight has role 'atention': give its module one of attention, "):
        roles(net)
