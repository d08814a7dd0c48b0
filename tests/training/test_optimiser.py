"""Groups follow roles; a step is AdamW's."""

import pytest
import torch

from tandem.networks.decoder import Decoder
from tandem.nn.init import DECAYED, HIDDEN, roles
from tandem.recipe import UserError, load, registered
from tandem.training.optimiser import AdamW


def decoder(**options):
    config = Decoder.Config(depth=2, width=16, heads=2, **options)
    return Decoder(config, vocabulary=30, context=8, generator=torch.Generator().manual_seed(0))


def test_matrices_and_tables_decay_and_nothing_else():
    network = decoder(bias=True, norm="layer", positions="learned", qk_norm=True, tied=False)
    optimiser = AdamW(AdamW.Config(weight_decay=0.3), network)
    names = {id(p): name for name, p in network.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in optimiser.inner.param_groups)
    assert {"table.weight", "places.weight", "output.weight", "stack.0.qkv.weight"} <= decayed
    assert kept == {name for name, role in roles(network).items() if role in ("norm", "bias")}
    assert decayed | kept == set(names.values())
    assert [group["weight_decay"] for group in optimiser.inner.param_groups] == [0.3, 0.0]


def test_clipping_scales_to_the_limit_and_reports_the_norm_before():
    network = decoder()
    optimiser = AdamW(AdamW.Config(max_norm=0.5), network)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = sum(p.numel() for p in network.parameters()) ** 0.5
    assert abs(float(optimiser.clip()) / before - 1) < 1e-5
    after = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
    assert abs(float(after) - 0.5) < 1e-4


def test_the_rate_is_the_peak_times_the_multiplier():
    network = decoder()
    optimiser = AdamW(AdamW.Config(lr=0.1, weight_decay=0.0), network)
    weight = network.stack[0].output.weight
    before = weight.detach().clone()
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimiser.step(0.5) == 0.05
    assert torch.allclose(before - weight, torch.full_like(before, 0.05), atol=1e-6)  # Adam's first step is lr
    assert weight.grad is None


def at(optimiser, network):
    """(rate over the step's, decay) of every parameter by name, each met once."""
    names = {id(p): name for name, p in network.named_parameters()}
    groups = optimiser.inner.param_groups
    found = [(names[id(p)], (group["scale"], group["weight_decay"])) for group in groups for p in group["params"]]
    assert len(found) == len(names) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize("name", registered("network"))
def test_width_transfer_slows_hidden_matrices_of_every_network_and_nothing_else(name):
    for config in registered("network")[name].tiny().values():
        config = config.model_copy(update={"base_width": config.width // 4})
        network = registered("network")[name](config, 30, 16)
        expected = {
            name: (0.25 if role in HIDDEN else 1.0, 0.3 if role in DECAYED else 0.0)
            for name, role in roles(network).items()
        }
        assert at(AdamW(AdamW.Config(weight_decay=0.3), network), network) == expected


def test_parts_have_rates_of_their_own():
    network = decoder(base_width=8)
    found = at(AdamW(AdamW.Config(lr_scale={"stack": 0.3}), network), network)
    assert found["table.weight"] == (1.0, 0.1) and found["norm.weight"] == (1.0, 0.0)
    assert found["stack.0.mlp_norm.weight"] == (0.3, 0.0) and found["stack.1.qkv.weight"] == (0.15, 0.1)
    with pytest.raises(UserError, match=r"optimiser.lr_scale.stak: .*did you mean stack\? parts: table, stack, norm"):
        AdamW(AdamW.Config(lr_scale={"stak": 0.3}), network)


def test_a_group_moves_at_its_own_rate_and_decays_by_it():
    network = decoder(base_width=4)
    optimiser = AdamW(AdamW.Config(lr=0.1, weight_decay=0.5), network)
    hidden, table = network.stack[0].output.weight, network.table.weight
    before = [parameter.detach().clone() for parameter in (hidden, table)]
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimiser.step(0.5) == 0.05
    for parameter, old, rate in zip((hidden, table), before, (0.0125, 0.05), strict=True):
        torch.testing.assert_close(parameter.detach(), old * (1 - rate * 0.5) - rate, rtol=0, atol=1e-6)


def test_muon_refuses_rates_that_it_would_not_use():
    for key in ("network.base_width=8", "optimiser.lr_scale={stack: 0.3}"):
        with pytest.raises(UserError, match=rf"{key.split('=')[0]} .*: muon sets the size of its updates itself"):
            load("decoder/tiny", ["optimiser.name=muon", "network.width=16", key])
    load("decoder/tiny", ["optimiser.name=muon", "network.width=16", "network.base_width=16"])
