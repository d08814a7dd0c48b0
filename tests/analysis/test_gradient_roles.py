"""Norms without copies against copies, and what becomes of them."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from tandem.analysis.gradient_roles import RATIO, RESAMPLES, GradientRoles, _by_offset, _ratios, slots, squared_norms
from tandem.networks.decoder import Decoder
from tandem.networks.sps import SPS
from tandem.testing.cases import Case, document, pack

SETTINGS = {
    "standard": (Decoder, {}),
    "sps": (SPS, {"window": 3}),
    "reverse_sps": (SPS, {"window": 3, "persistent": "predictions", "read": "inputs"}),
    "gpt2": (Decoder, {"norm": "layer", "mlp": "gelu", "bias": True}),
    "grouped": (SPS, {"window": 0, "key_heads": 2, "qk_norm": True}),
}


class PerSlot(nn.Module):
    """A module whose parameters every slot has for itself: (slots, T, ..)."""

    def __init__(self, module, slots, T):
        super().__init__()
        self.module = [module]  # in a list it stays a stranger
        for name, value in module.named_parameters():
            setattr(self, name, nn.Parameter(value.detach().expand(slots, T, *value.shape).clone()))

    def forward(self, x):
        (module,) = self.module
        bias = getattr(self, "bias", None)
        if isinstance(module, nn.Linear):
            y = torch.einsum("stoi,sti->sto", self.weight, x)
            return y if bias is None else y + bias
        if isinstance(module, nn.LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        y = x * (x.square().mean(-1, keepdim=True) + module.eps).rsqrt()
        weight = self.weight if y.ndim == 3 else self.weight[:, :, None]
        return y * weight if bias is None else y * weight + bias


def with_copies(network, slots, T):
    """Replaces what has parameters in the blocks; returns these copies."""
    copies = []
    for block in network.blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear | nn.RMSNorm | nn.LayerNorm):
                owner = block.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], PerSlot(module, slots, T))
                copies.append(getattr(owner, name.rpartition(".")[2]))
    return copies


@pytest.mark.parametrize("name", SETTINGS)
def test_norms_are_those_of_a_copy_of_the_parameters_for_every_slot(name):
    cls, settings = SETTINGS[name]
    T, targets = 48, torch.tensor([[7, 20, 46]])
    case, batch = Case("", cls, cls.Config(width=16, heads=4, depth=2, **settings)), pack([[document(T, 1)]])
    network, copied = case.build(), case.build()
    slots, copied.whole = len(network.streams), True
    copies = with_copies(copied, slots, T)
    entered = []
    copied.blocks[0].register_forward_pre_hook(lambda block, args: entered.append(args[0]))
    nll = copied.score(batch)[0]
    if name == "sps":  # a network just trained with compiled blocks
        network.compile("eager").score(batch).sum().backward()
    for column, parts in enumerate(squared_norms(network, batch, targets)):
        owned = [*entered, *(p for copy in copies for p in copy.parameters())]
        grads = torch.autograd.grad(nll[targets[0, column]], owned, retain_graph=True, materialize_grads=True)
        expected = sum(g.reshape(slots, T, -1).square().sum(-1) for g in grads)
        found = sum(parts.values())[:, 0]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert found[:, int(targets[0, column]) + 1 :].sum() == 0 < found[-1, : int(targets[0, column]) + 1].sum()


@pytest.mark.parametrize(("length", "end"), [(578, 65), (1000, 487), (1024, 511), (1025, 512), (9000, 512)])
def test_slots_are_those_of_the_paper(length, end):
    """p in [64, min(512, length - 513)), of a document of so many tokens, its end included."""
    assert slots(min(length - 1, 1024), 1024) == range(64, end)


def test_ratios_are_of_pairs_of_targets_within_the_horizon():
    targets = np.array([[2, 3, 7, 20]])
    norms = np.arange(1.0, 4 * 2 * 30 + 1).reshape(4, 2, 1, 30)  # (J, S, B, T)
    found = _ratios(norms, targets, end_of_slots=[7], horizon=5, first_document=4)
    assert [tuple(x)[:3] for x in found.tolist()] == [(4, s, k) for s in (0, 1) for k in (1, 5, 4)]
    assert found["ratio"][0] == norms[1, 0, 0, 2] / norms[0, 0, 0, 2]
    assert found["ratio"][5] == norms[2, 1, 0, 3] / norms[1, 1, 0, 3]
    norms[0, 1, 0, 2] = 0  # no gradient from its own loss: two pairs of the second stream go
    left = _ratios(norms, targets, end_of_slots=[7], horizon=5, first_document=4)
    assert [tuple(x)[:3] for x in left.tolist()] == [(4, 0, 1), (4, 0, 5), (4, 0, 4), (4, 1, 4)]


def test_offsets_are_summed_up_with_intervals_over_documents():
    ratios = np.zeros(60, RATIO)
    ratios["document"], ratios["offset"] = np.arange(60) % 30, np.where(np.arange(60) < 30, 1, 3)
    ratios["ratio"] = np.where(np.arange(60) < 30, np.linspace(1, 3, 60), 0.0)
    found = _by_offset(ratios, horizon=3, documents=30)
    values = ratios["ratio"][:30]
    assert found["pairs"] == [30, 0, 30]
    assert found["mean"][0] == pytest.approx(values.mean()) and found["median"][0] == pytest.approx(np.median(values))
    assert found["geometric_mean"][0] == pytest.approx(np.exp(np.log(values).mean()))
    low, high = found["mean_interval"][0]
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 30**0.5, rel=0.2) and low < values.mean() < high
    weights = np.random.default_rng(0).multinomial(30, [1 / 30] * 30, RESAMPLES)  # how often each is drawn again
    for name, drawn in (("mean", weights @ values / 30), ("geometric", np.exp(weights @ np.log(values) / 30))):
        assert found[f"{name}_interval"][0] == pytest.approx(np.quantile(drawn, (0.025, 0.975)).tolist())
    assert all(found[name][1] is None for name in ("mean", "median", "geometric_mean", "mean_interval"))
    assert found["mean"][2] == 0.0 and found["geometric_mean"][2] < 1e-300
    ratios["document"][-30:] = 0  # of the second offset only one document is left
    found = _by_offset(ratios, horizon=3, documents=30)
    assert found["mean"][2] == 0.0 and found["mean_interval"][2] is found["geometric_interval"][2] is None
    assert None not in (found["mean_interval"][0], found["geometric_interval"][0])


def test_the_line_that_is_drawn_is_of_ratios():
    axes, curve = Figure().subplots(), {"mean": [0.25] * 24, "mean_interval": [[0.2, 0.3]] * 24}
    record = {"streams": {"inputs": curve}, "horizon": 24, "documents": 2}
    GradientRoles(GradientRoles.Config()).draw(record, axes)
    assert [*axes.lines[0].get_xdata()] == [*range(1, 25)]
    assert [*axes.lines[0].get_ydata()] == pytest.approx([0.25] * 24)
