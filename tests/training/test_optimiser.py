"""Groups follow roles; a step is AdamW's."""

import torch

from tandem.networks.decoder import Decoder
from tandem.nn.init import roles
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
