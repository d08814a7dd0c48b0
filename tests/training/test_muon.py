"""Muon against its published rule, against PyTorch's own, and against itself on two processes."""

import math

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tandem.corpus import prepare
from tandem.networks.decoder import Decoder
from tandem.nn.init import Linear, roles
from tandem.nn.mlp import MLP
from tandem.nn.moe import Mixture, MixtureConfig
from tandem.recipe import load
from tandem.training import checkpoint
from tandem.training.loop import take_step
from tandem.training.muon import HIDDEN, Muon, orthogonalised
from tandem.training.parallel import joined
from tandem.training.progress import Progress
from tandem.training.run import Run

RATE = 0.01


def decoder(**options):
    config = Decoder.Config(depth=2, width=16, heads=2, **options)
    return Decoder(config, vocabulary=30, context=8, generator=torch.Generator().manual_seed(0))


def fill_gradients(network, step):
    """Gradients that depend on name and step alone, wherever the parameters lie."""
    for number, (_, parameter) in enumerate(network.named_parameters()):
        draw = torch.Generator().manual_seed(1000 * step + number)
        yield parameter, torch.randn(parameter.shape, generator=draw) / 10


def take(optimiser, network, steps, first=0):
    for step in range(first, first + steps):
        for parameter, gradient in fill_gradients(network, step):
            parameter.grad = gradient
        optimiser.step(1.0)


def newton_schulz(update):
    """The published iteration, in float64."""
    x = update / update.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def test_hidden_matrices_are_muons_and_nothing_else_is():
    network = decoder(bias=True, norm="layer", positions="learned", qk_norm=True, tied=False)
    optimiser = Muon(Muon.Config(weight_decay=0.3), network)
    names = {id(p): name for name, p in network.named_parameters()}
    groups = [({names[id(p)] for p in g["params"]}, g) for g in optimiser.inner.param_groups]
    muons = set().union(*(held for held, group in groups if "momentum" in group))
    assert muons == {n for n, r in roles(network).items() if r in ("attention", "attention_out", "mlp", "mlp_out")}
    assert {"table.weight", "places.weight", "output.weight"} <= set(names.values()) - muons
    for held, group in groups:
        decays = held & muons or held & {"table.weight", "output.weight"}
        assert group["weight_decay"] == (0.3 if decays else 0.0)
    assert sum(len(held) for held, _ in groups) == len(names)
    assert "embedding" not in HIDDEN and "head" not in HIDDEN


def test_a_step_is_the_published_one_for_each_stacked_matrix():
    network = decoder()
    qkv, parts = network.stack[0].qkv.weight, network.stack[0].qkv.parts
    assert len(parts) == 3
    optimiser = Muon(Muon.Config(lr=RATE, weight_decay=0.5), network)
    expected, mean = qkv.detach().double(), torch.zeros(qkv.shape, dtype=torch.float64)
    for step in range(3):
        (gradient,) = (g.double() for p, g in fill_gradients(network, step) if p is qkv)
        mean = 0.95 * mean + 0.05 * gradient
        update = 0.05 * gradient + 0.95 * mean
        expected = (1 - RATE * 0.5) * expected
        moved = [0.2 * math.sqrt(max(part.shape)) * newton_schulz(part) for part in update.split(parts)]
        expected = expected - RATE * torch.cat(moved)
        take(optimiser, network, 1, step)
    # bfloat16 rounds by 2^-9 in each of 15 products: a few per cent of entries of about 0.2 lr
    error = (qkv.double() - expected).detach()
    assert error.pow(2).mean().sqrt() < 0.05 * 0.2 * RATE
    assert error.abs().max() < 0.3 * 0.2 * RATE


def test_unstacked_matrices_move_as_pytorchs_muon_moves_them():
    network, other = decoder(), decoder()
    down, theirs = network.stack[1].mlp.down.weight, other.stack[1].mlp.down.weight
    optimiser = Muon(Muon.Config(lr=RATE), network)
    reference = torch.optim.Muon([theirs], lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        (theirs.grad,) = (g for p, g in fill_gradients(other, step) if p is theirs)
        reference.step()
    take(optimiser, network, 4)
    assert torch.allclose(down, theirs, rtol=0, atol=1e-7)  # a float32 rounding or two of weights of 0.02


def test_singular_values_come_near_one_whatever_the_shape():
    for shape in [(16, 16), (7, 33), (64, 5)]:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalised(drawn * 1e-4).float())
        assert values.min() > 0.4 and values.max() < 1.3
    assert not orthogonalised(torch.zeros(3, 4)).any()


def test_an_update_is_as_large_as_adamws():
    network = decoder()
    before = network.stack[0].mlp.up.weight.detach().clone()
    take(Muon(Muon.Config(lr=RATE, weight_decay=0.0), network), network, 1)
    moved = (network.stack[0].mlp.up.weight - before).pow(2).mean().sqrt()
    assert 0.6 < moved / (0.2 * RATE) < 1.2


def test_experts_are_moved_each_for_itself():
    class Experts(nn.Module):
        role = "mlp"

        def __init__(self, drawn):
            super().__init__()
            self.weight = nn.Parameter(drawn)

    drawn = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    stack, alone = Experts(drawn.clone()), [Linear(6, 8, bias=False, role="mlp") for _ in drawn]
    optimiser = Muon(Muon.Config(), stack)
    stack.weight.grad = drawn.flip(0).contiguous()
    optimiser.step(1.0)
    for expert, weight, gradient in zip(alone, drawn, drawn.flip(0), strict=True):
        expert.weight.data, expert.weight.grad = weight.clone(), gradient.clone()
        Muon(Muon.Config(), expert).step(1.0)
    assert torch.equal(stack.weight, torch.stack([expert.weight for expert in alone]))


def test_one_expert_moves_as_the_mlp():
    """Gate and up are two matrices, in a stack of experts, too."""
    mixture, mlp = Mixture(MixtureConfig(experts=1, active=1), 8, 12), MLP("swiglu", 8, 12, bias=False)
    drawn, gradient = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(1)).unbind()
    for net, stack in ((mixture, (1, 24, 8)), (mlp, (24, 8))):
        net.up.weight.data, net.up.weight.grad = drawn.clone().view(stack), gradient.clone().view(stack)
        Muon(Muon.Config(), net).step(1.0)
    assert torch.equal(mixture.up.weight[0], mlp.up.weight) and not torch.equal(mlp.up.weight, drawn)


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, small_corpus):
    def steps(first, last, run):
        for step in range(first, last):
            take_step(run, step)
        return run

    size = ["network.depth=1", "network.width=16", "batch.rows=2", "batch.context=16", "training.compile=false"]
    recipe = load("decoder/tiny", [*size, *small_corpus, "optimiser.name=muon"])
    whole, cut, again = (Run(recipe, prepare(recipe.corpus)) for _ in range(3))
    steps(0, 4, whole)
    steps(0, 2, cut)
    kept = checkpoint.save(tmp_path, 2, cut.network, cut.optimiser, vars(cut.progress), keep=1)
    again.progress = Progress(**checkpoint.restore(kept, again.network, again.optimiser))
    steps(2, 4, again)
    assert all(torch.equal(a, b) for a, b in zip(whole.network.parameters(), again.network.parameters(), strict=True))
    assert again.progress == whole.progress
    mine, theirs = (run.optimiser.state_dict() for run in (again, whole))
    assert mine["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        assert all(torch.equal(value, mine["state"][index][key]) for key, value in state.items())


def sharded(expected):
    with joined():
        mesh = init_device_mesh("cpu", (2,))
        network = decoder()
        for block in network.stack:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        optimiser = Muon(Muon.Config(lr=RATE), network)
        for step in range(3):
            for parameter, gradient in fill_gradients(network, step):
                assert isinstance(parameter, DTensor)
                parameter.grad = distribute_tensor(gradient, mesh, parameter.placements)
            optimiser.step(1.0)
        for (name, parameter), want in zip(network.named_parameters(), expected, strict=True):
            assert (parameter.full_tensor() - want).abs().max() < 1e-6, name


@pytest.mark.slow
def test_two_processes_with_shards_move_as_one_does(tmp_path):
    network = decoder()
    take(Muon(Muon.Config(lr=RATE), network), network, 3)
    expected = [p.detach() for p in network.parameters()]
    ranks = Ranks(2, tmp_path / "log", sharded, expected)
    assert ranks.wait() == [0, 0], ranks.said
