import math

import pytest
import torch

from tandem.nn.mlp import MLP, inner_width


def test_swiglu_gates_one_half_by_the_silu_of_the_other():
    mlp = MLP("swiglu", 6, 10, bias=True).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gate, up = mlp.up.weight[:10], mlp.up.weight[10:]
    g, u = x @ gate.T + mlp.up.bias[:10], x @ up.T + mlp.up.bias[10:]
    expected = (g / (1 + torch.exp(-g)) * u) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gelu_is_the_form_that_its_name_says(kind):
    mlp = MLP(kind, 6, 10, bias=False).double()
    h = (x := 3 * torch.randn(2, 3, 6, dtype=torch.float64)) @ mlp.up.weight.T
    exact = torch.erf(h / 2**0.5)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))
    expected = h * 0.5 * (1 + (exact if kind == "gelu" else tanh)) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)
    assert (exact - tanh).abs().max() > 1e-5  # or the two forms could be swapped unseen


@pytest.mark.parametrize(
    ("kind", "width", "inner"),
    [("swiglu", 24, 64), ("swiglu", 192, 512), ("swiglu", 193, 576), ("swiglu", 512, 1408), ("gelu", 768, 3072)],
)
def test_inner_width_is_the_house_rule(kind, width, inner):
    assert inner_width(kind, width) == inner
