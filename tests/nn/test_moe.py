"""The mixture against a masked reference that runs every expert on every token, and the balance it is held in."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tandem.networks.context_ready import ContextReady
from tandem.networks.decoder import Decoder
from tandem.networks.double_decoder import DoubleDecoder
from tandem.nn.mlp import MLP
from tandem.nn.moe import Mixture, MixtureConfig, Routing, mixture_terms
from tandem.objectives.next_token import NextToken
from tandem.recipe import UserError, load
from tandem.testing.cases import document, pack

C, INNER = 6, 5


def mixture(experts=8, active=2, dtype=torch.float64):
    torch.manual_seed(0)
    built = Mixture(MixtureConfig(experts=experts, active=active), C, INNER).to(dtype)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter)
    return built


def masked(mixture, x_NC):
    """Every expert on every token, weighed by zero where it was not chosen."""
    p_NE = (x_NC @ mixture.router.weight.T).softmax(-1)
    kept_NE = p_NE * (p_NE >= p_NE.topk(mixture.active).values[:, -1:])
    gate_NE = kept_NE / kept_NE.sum(-1, keepdim=True)
    gate_ENF, h_ENF = torch.einsum("nc,efc->enf", x_NC, mixture.up.weight).chunk(2, dim=-1)
    y_ENC = torch.einsum("enf,ecf->enc", F.silu(gate_ENF) * h_ENF, mixture.down.weight)
    return torch.einsum("ne,enc->nc", gate_NE, y_ENC)


def test_the_weights_of_the_chosen():
    built = mixture(experts=4)
    with torch.no_grad():
        built.router.weight.copy_(torch.tensor([[2.0, 1, 0, -1]]).T * torch.eye(C)[0])
        built.up.weight.fill_(1.0)
        built.down.weight.copy_(torch.arange(4.0)[:, None, None].expand_as(built.down.weight))
    x = torch.eye(C, dtype=torch.float64)[:1]
    one = F.silu(torch.ones((), dtype=torch.float64)) * INNER  # what expert 1 gives; expert 0 gives 0
    assert (built(x)[0] / one).tolist() == pytest.approx([0.268941] * C, abs=1e-6)


@pytest.mark.parametrize("active", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_experts_on_their_own_tokens_are_all_experts_masked(active, tokens):
    built, plain = mixture(active=active), mixture(active=active)
    x = torch.randn(tokens, C, dtype=torch.float64)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    y = torch.randn_like(x)
    (built(xs[0][None])[0] * y).sum().backward()
    (masked(plain, xs[1]) * y).sum().backward()
    torch.testing.assert_close(built(x[None])[0], masked(plain, x), atol=1e-12, rtol=0)
    torch.testing.assert_close(xs[0].grad, xs[1].grad, atol=1e-11, rtol=0)
    for (name, a), b in zip(built.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-11, rtol=0, msg=name)
    if active > 1:
        assert built.router.weight.grad.any()


def test_one_expert_is_the_mlp():
    built, mlp = mixture(experts=1, active=1), MLP("swiglu", C, INNER, bias=False).double()
    with torch.no_grad():
        mlp.up.weight.copy_(built.up.weight[0])
        mlp.down.weight.copy_(built.down.weight[0])
    x = torch.randn(3, 4, C, dtype=torch.float64)
    ys = [net(x) for net in (built, mlp)]
    torch.testing.assert_close(*ys, atol=1e-12, rtol=0)
    for y in ys:
        y.square().sum().backward()
    torch.testing.assert_close(built.up.weight.grad[0], mlp.up.weight.grad, atol=1e-11, rtol=0)
    torch.testing.assert_close(built.down.weight.grad[0], mlp.down.weight.grad, atol=1e-11, rtol=0)


def test_no_token_is_dropped_however_uneven_the_load():
    """All tokens to one expert, and each still gets what that expert gives it alone."""
    built = mixture(experts=8, active=1)
    with torch.no_grad():
        built.router.weight.zero_()
        built.router.weight[3, 0] = 100.0
    x = torch.randn(50, C, dtype=torch.float64).abs()
    routings = []
    together = built(x[None], routings.append)[0]
    assert routings[0].share_E.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    alone = torch.cat([built(row[None]) for row in x])
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=0)
    assert together.abs().amax(-1).min() > 0


def test_the_router_is_float32_under_autocast():
    built = mixture(dtype=torch.float32)
    routings, x = [], torch.randn(2, 9, C)
    with torch.autocast("cpu", torch.bfloat16):
        y = built(x, routings.append)
    expected = (x @ built.router.weight.T).softmax(-1).mean((0, 1))
    torch.testing.assert_close(routings[0].probability_E, expected, atol=1e-6, rtol=0)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize(("experts", "busy"), [(8, 8), (8, 2), (4, 1)])
def test_balance_is_one_where_even_and_e_over_k_where_collapsed(experts, busy):
    even = torch.zeros(experts)
    even[:busy] = 1 / busy
    terms = mixture_terms([Routing(even, even), Routing(even, even)])
    assert terms["balance"].item() == pytest.approx(experts / busy)
    assert terms["load_max"].item() == pytest.approx(experts / busy)
    assert terms["load_min"].item() == (1 if busy == experts else 0)


def network(**moe):
    config = Decoder.Config(depth=2, width=32, heads=2, mlp_width=24, moe=MixtureConfig(experts=8, active=2, **moe))
    return Decoder(config, 61, 40, torch.Generator().manual_seed(0))


def test_the_balance_loss_evens_the_load_and_is_recorded():
    """From a router that sends nearly everything to two experts."""
    net, task = network(balance=1.0), NextToken(NextToken.Config())
    with torch.no_grad():
        for block in net.blocks:
            block.mlp_norm.weight[0] = 5.0
            block.mlp.router.weight[:2] += 0.5
    batch = pack([[document(40, seed)] for seed in range(8)])
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    seen = []
    for _ in range(40):
        counts = task.count(net, batch)
        loss, sums = task.loss(net, batch, counts)
        seen.append({name: (total / counts[name]).item() for name, total in sums.items()})
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert list(seen[0]) == ["nll", "balance", "load_max", "load_min"]
    assert seen[-1]["load_max"] < 1.5 < 1.8 < seen[0]["load_max"]
    assert seen[-1]["balance"] < 1.1 and seen[-1]["load_min"] > 0.5
    assert seen[-1]["nll"] < seen[0]["nll"]


def test_the_balance_loss_is_weighed_once_a_step_and_survives_recomputation():
    batch, task = pack([[document(40, 1)], [document(40, 2)]]), NextToken(NextToken.Config())
    losses = {}
    for name, balance, recompute in (("without", 0.0, False), ("with", 0.5, False), ("recomputed", 0.5, True)):
        net = network(balance=balance)
        net.recompute = recompute
        for _ in range(2):  # the second pass must know nothing of the first
            net.zero_grad()
            loss, sums = task.loss(net, batch, task.count(net, batch))
            loss.backward()
        losses[name] = loss.item(), sums["balance"].item() / 80, net.blocks[0].mlp.router.weight.grad
    assert losses["with"][0] - losses["without"][0] == pytest.approx(0.5 * losses["with"][1], abs=1e-5)
    assert losses["recomputed"][:2] == losses["with"][:2]
    assert torch.equal(losses["recomputed"][2], losses["with"][2])
    assert not torch.equal(losses["with"][2], losses["without"][2])


@pytest.mark.parametrize("cls", [ContextReady, Decoder, DoubleDecoder])
@pytest.mark.parametrize("method", ["read", "score"])
def test_a_score_with_gradients_leaves_no_graph_behind(cls, method):
    moe = MixtureConfig(experts=4, active=2)
    net = cls(cls.Config(width=32, heads=2, mlp_width=24, moe=moe), 61, 40)
    getattr(net, method)(pack([[document(9, 1)]]))
    copy.deepcopy(net)  # which refuses tensors of a graph


def test_parameters_and_work_of_a_layer():
    """C 64, F 32, E 8, k 2: 49,664 parameters, 12,800 of them active."""
    sizes = {"depth": 1, "width": 64, "heads": 2, "mlp_width": 32}
    moe = Decoder.Config(**sizes, moe=MixtureConfig(experts=8, active=2))
    with torch.device("meta"):
        costs = [Decoder(config, 61, 40).cost() for config in (moe, Decoder.Config(**sizes))]
    one_mlp = 3 * 64 * 32
    assert costs[0].total_parameters - costs[1].total_parameters == 49_664 - one_mlp
    assert costs[0].linear - costs[1].linear == 12_800 - one_mlp
    assert costs[0].parameters["experts"] + costs[0].parameters["experts_out"] + costs[0].parameters["router"] == 49_664


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["network.moe.experts=2", "network.moe.active=3"], "active 3 is more than experts 2"),
        (["network.moe.experts=2", "network.moe.active=1", "network.mlp=gelu"], "experts are swiglu"),
        (["network.moe.experts=2"], "network.moe.active: required"),
    ],
)
def test_settings_that_make_no_mixture_are_refused(overrides, reason):
    with pytest.raises(UserError, match=reason):
        load("decoder/tiny", overrides)


def test_an_interrupted_pass_leaves_nothing_to_the_next():
    net = Decoder(Decoder.Config(width=32, heads=2, mlp_width=24, moe=MixtureConfig(experts=4, active=2)), 61, 40)
    batch = pack([[document(9, 1)]])
    _, wanted = net(net.embed(batch.tokens), batch)
    hook = net.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(net.embed(batch.tokens), batch)
    hook.remove()
    _, found = net(net.embed(batch.tokens), batch)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
