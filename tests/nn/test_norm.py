import pytest
import torch

from tandem.nn.block import BlockConfig
from tandem.nn.norm import NormKind, final_norm, norm


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_rms_divides_by_the_root_of_the_mean_square_and_eps(eps, scale):
    x = scale * torch.randn(3, 7, 16, dtype=torch.float64)
    module = norm("rms", 16, eps).double()
    module.weight.data.uniform_(0.5, 2)
    expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * module.weight
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_removes_the_mean_first(bias):
    x = torch.randn(3, 7, 16, dtype=torch.float64) + 5
    module = norm("layer", 16, 1e-3, bias=bias).double()
    for parameter in module.parameters():
        parameter.data.uniform_(0.5, 2)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * module.weight
    expected = expected + (module.bias if bias else 0)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "bias", "count"), [("rms", True, 1), ("layer", False, 1), ("layer", True, 2)])
def test_only_a_layer_norm_that_is_asked_has_a_bias(kind, bias, count):
    assert len(list(norm(kind, 8, 1e-6, bias=bias).parameters())) == count


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_compute_in_float32_under_mixed_precision(kind):
    x = torch.randn(4, 32)
    module = norm(kind, 32, 1e-6)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), expected)  # dtype included


@pytest.mark.parametrize(("kind", "bias"), [("rms", False), ("layer", True)])
def test_a_scale_multiplies_what_comes_out_and_is_no_parameter(kind, bias):
    x, plain, scaled = torch.randn(4, 32), norm(kind, 32, 1e-6, bias=bias), norm(kind, 32, 1e-6, bias=bias, scale=0.25)
    scaled.load_state_dict(plain.state_dict())
    assert torch.equal(scaled(x), plain(x) / 4)


class Config(BlockConfig):
    final_norm: NormKind | None = None


def test_the_final_norm_is_as_in_blocks_or_with_a_bias_and_an_eps_of_its_own():
    def said(module):
        return type(module), module.eps, [name for name, _ in module.named_parameters()]

    blocks = Config(width=8, heads=2, norm="layer", norm_eps=1e-3)
    assert said(final_norm(blocks)) == (torch.nn.LayerNorm, 1e-3, ["weight"])
    assert said(final_norm(blocks.model_copy(update={"final_norm": "rms"}))) == (torch.nn.RMSNorm, 1e-3, ["weight"])
    layer = Config(width=8, heads=2, final_norm="layer")
    assert said(final_norm(layer)) == (torch.nn.LayerNorm, 1e-5, ["weight", "bias"])
    assert final_norm(layer, scale=0.5)(torch.ones(1, 8)).abs().sum() == 0 and final_norm(layer, scale=0.5).scale == 0.5
