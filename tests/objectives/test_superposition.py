"""Bags against their definition, number by number, and against the next-token objective that they contain."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tandem.corpus import IGNORE, Batch
from tandem.networks.decoder import Decoder
from tandem.nn.head import nll_sums
from tandem.objectives.next_token import NextToken
from tandem.objectives.superposition import WEIGHTS, Superposition, entropy, mean_embedding, slot_weights
from tandem.testing.cases import VOCABULARY, Task, cases, document, pack, texts
from tandem.testing.comparing import EXACT, backward, close, same_gradients
from tandem.testing.costs import flops_run

TAKING = [case for case in cases() if not Superposition.refusal(case.network)]
HOUSE = next(case for case in cases() if case.name == "decoder-house")
Z = torch.tensor([2.0, 1.0, 0.0, 0.0])


def objective(**settings):
    return Superposition(Superposition.Config(**settings))


class Rows:
    """A network whose logits are given, (B, l, V): the head of each row is the identity."""

    terms = {}

    def __init__(self, logits):
        self.hidden = logits.requires_grad_()

    def embed(self, tokens):
        return torch.zeros(*tokens.shape, 1)

    def __call__(self, x, batch):
        return self.hidden, {}

    def count(self, batch):
        return {}

    def add_extra(self, loss, sums, extra, counts):
        return loss, sums

    def nll(self, hidden, targets, coefficients, any_of=False):
        V = hidden.shape[-1]
        return nll_sums(
            hidden.flatten(0, 1), torch.eye(V), targets.flatten(0, 1), coefficients=coefficients, any_of=any_of
        )


def ask(logits, targets, **settings):
    """(loss, sums, counts, gradient of the logits) of given logits (l, V) and targets (l, S)."""
    network, task = Rows(logits[None].clone()), objective(**settings)
    batch = Batch(torch.zeros(1, *targets.shape, dtype=torch.long), targets[None], torch.zeros(1, len(targets)))
    counts = task.count(network, batch)
    loss, sums = task.loss(network, batch, counts)
    loss.backward()
    return loss.item(), sums, counts, network.hidden.grad[0]


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_a_bag_reads_the_mean_of_its_embeddings():
    network = Decoder(Decoder.Config(width=2, heads=1, depth=1), 4, 8)
    with torch.no_grad():
        network.table.weight[:4] = torch.tensor([[1.0, 0], [0, 2], [4, 4], [-1, 3]])
    assert mean_embedding(network, torch.tensor([[[0, 1], [2, 2]]])).tolist() == [[[0.5, 1.0], [4.0, 4.0]]]


def test_the_mean_is_taken_in_float32():
    network = Decoder(Decoder.Config(width=32, heads=1, depth=1), 61, 8, torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.randint(61, (2, 3, 16))
    exact = network.table.weight.float()[tokens].mean(2)
    assert torch.equal(mean_embedding(network, tokens), exact.bfloat16())


@pytest.mark.parametrize(
    ("weights", "loss"), [("uniform", 0.993812), ("power", 0.827145), ("first", 0.493812), ("exponential", 0.762753)]
)
def test_the_loss_of_one_bag(weights, loss):
    found, sums, _, _ = ask(Z[None], torch.tensor([[0, 1]]), bag=2, weights=weights)
    assert found == pytest.approx(loss, abs=1e-6)
    floor = entropy(slot_weights(weights, 2))
    assert sums["bag_kl"].item() == pytest.approx(loss - floor, abs=1e-6)
    if weights == "uniform":
        assert sums["bag_kl"].item() == pytest.approx(0.300665, abs=1e-6)


def test_a_row_asked_for_part_of_a_bag_has_the_floor_of_that_part():
    logits = torch.eye(4)[:2] * 1e4
    loss, sums, _, _ = ask(logits, torch.tensor([[0, IGNORE], [1, IGNORE]]), bag=2)
    assert loss == 0 and abs(sums["bag_kl"].item()) < 1e-6  # the entropy of both slots would leave -2 log 2
    equal = torch.zeros(2, 4)
    equal[:, 2:] = -1e4
    loss, sums, _, _ = ask(equal, torch.tensor([[0, 1], [0, IGNORE]]), bag=2)
    least = 0.25 * math.log(3) + 0.5 * math.log(1.5)  # of the first row; its slots weigh 1/4 and 1/2
    assert loss == pytest.approx(math.log(2)) and sums["bag_kl"].item() == pytest.approx(2 * (loss - least), abs=1e-6)


def test_the_gradient_of_one_bag():
    *_, grad = ask(Z[None], torch.tensor([[0, 1]]), bag=2)
    assert grad[0].tolist() == pytest.approx([0.110296, -0.275485, 0.082595, 0.082595], abs=1e-6)


def test_a_token_met_twice_weighs_twice():
    assert ask(Z[None], torch.tensor([[0, 0]]), bag=2)[0] == pytest.approx(0.493812, abs=1e-6)


def test_any_one_of_a_bag_is_one_of_the_set():
    assert ask(Z[None], torch.tensor([[0, 1]]), bag=2, loss="mce_alt")[0] == pytest.approx(0.180550, abs=1e-6)
    once = ask(Z[None], torch.tensor([[0, IGNORE]]), bag=2, loss="mce_alt")
    twice = ask(Z[None], torch.tensor([[0, 0]]), bag=2, loss="mce_alt")
    assert twice[0] == once[0] == pytest.approx(0.493812, abs=1e-6)  # counted twice it would have probability 1.22
    assert torch.equal(twice[3], once[3])


@pytest.mark.parametrize(("reduce", "loss"), [("slots", 0.923108), ("tokens", 0.732874)])
def test_the_mean_of_slots_is_not_the_mean_of_targets(reduce, loss):
    logits = torch.stack((Z, torch.tensor([0.0, 0, 1, 3])))
    found, sums, counts, _ = ask(logits, torch.tensor([[0, 1], [3, IGNORE]]), bag=2, reduce=reduce)
    assert found == pytest.approx(loss, abs=1e-6)
    assert (sums["slot_1"].item(), counts["slot_1"]) == (pytest.approx(0.704809, abs=1e-6), 2)
    assert (sums["slot_2"].item(), counts["slot_2"]) == (pytest.approx(1.493812, abs=1e-6), 1)


@pytest.mark.parametrize(
    ("weights", "shares", "floor"),
    [
        ("uniform", [0.25] * 4, 1.386294),
        ("power", [0.48, 0.24, 0.16, 0.12], 1.242458),
        ("exponential", [0.643914, 0.236883, 0.087144, 0.032059], 0.947537),
        ("first", [1, 0, 0, 0], 0),
        ("fitted", [0.540393, 0.227207, 0.136870, 0.095529], 1.165816),
    ],
)
def test_weights(weights, shares, floor):
    w = slot_weights(weights, 4)
    assert [weight / sum(w) for weight in w] == pytest.approx(shares, abs=1e-6)
    assert entropy(w) == pytest.approx(floor, abs=1e-6)


def test_the_floor_of_six_distinct_tokens():
    logits = torch.full((1, 12), -1e4)
    logits[0, :6] = 0
    assert ask(logits, torch.arange(6)[None], bag=6)[0] == pytest.approx(1.791759, abs=1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("bag", [1, 4, 16])
def test_the_first_loss_is_log_v(bag, weights):
    """A sum in place of the mean, or targets of one slot taken for those of all, shows here."""
    network = HOUSE.fresh()
    task = Task("", objective(bag=bag, weights=weights, until=0.5))
    loss = backward(network, task.objective, task.batches([[document(20, 1), document(20, 2)]])).item()
    assert loss == pytest.approx(math.log(VOCABULARY), abs=0.1)


# ---- the definition, slowly -----------------------------------------------------------------------------------------


def slow_loss(logits_NV, targets_NS, weights, reduce="slots"):
    """Symbol by symbol."""
    total, mass = 0.0, 0.0
    for i, w in enumerate(weights):
        rows = [n for n in range(len(targets_NS)) if targets_NS[n, i] != IGNORE]
        nlls = [logits_NV[n].logsumexp(0) - logits_NV[n, targets_NS[n, i]] for n in rows]
        if nlls and reduce == "slots":
            total, mass = total + w * sum(nlls) / len(nlls), mass + w
        elif nlls:
            total, mass = total + w * sum(nlls), mass + w * len(nlls)
    return total / mass


@pytest.mark.parametrize("reduce", ["slots", "tokens"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_fused_loss_is_the_slow_one(dtype, tolerance, reduce):
    draw = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(11, 5, generator=draw), torch.randn(7, 5, generator=draw)
    targets = torch.randint(7, (11, 4), generator=draw)
    targets[torch.rand(11, 4, generator=draw) < 0.3] = IGNORE
    targets[:, 3] = IGNORE  # a slot that nobody asks
    targets[2, :2] = 5  # a token met twice
    weights = torch.rand(4, generator=draw).tolist()
    task = objective(bag=4, weights=weights, reduce=reduce)
    batch = Batch(torch.zeros(1, 11, 4, dtype=torch.long), targets[None], torch.zeros(1, 11))
    leaves = [[tensor.to(dtype).clone().requires_grad_() for tensor in (hidden, head)] for _ in range(2)]

    class Fused(Rows):
        def __init__(self):
            self.hidden = leaves[0][0][None]

        def nll(self, hidden, targets, coefficients, any_of=False):
            return nll_sums(hidden[0], leaves[0][1], targets[0], coefficients=coefficients, chunk=4)

    loss, _ = task.loss(Fused(), batch, task.count(Fused(), batch))
    slow = slow_loss(leaves[1][0] @ leaves[1][1].T, targets, weights, reduce)
    for each in (loss, slow):
        each.backward()
    close(loss, slow, tolerance, "loss")
    for fused, plain in zip(*leaves, strict=True):
        close(fused.grad, plain.grad, tolerance, "gradient")


def test_any_one_of_a_set_has_the_gradient_of_its_definition():
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 7, generator=draw)
    targets = torch.tensor([[0, 1, 2], [3, 3, 4], [6, IGNORE, IGNORE], [IGNORE] * 3, [5, 0, 5]])
    leaf = logits.clone().requires_grad_()
    sets = [set(row.tolist()) - {IGNORE} for row in targets]
    expected = sum(
        leaf[n].logsumexp(0) - leaf[n, sorted(members)].logsumexp(0) for n, members in enumerate(sets) if members
    )
    (expected / 4).backward()
    loss, _, _, grad = ask(logits, targets, bag=3, loss="mce_alt")
    assert loss == pytest.approx(expected.item() / 4, abs=1e-6)
    close(grad, leaf.grad, 1e-6, "gradient")


# ---- what a position reads ------------------------------------------------------------------------------------------


def hidden_of(network, batch):
    return network(mean_embedding(network, batch.tokens), batch)[0]


def bag_batch(bag=3, **settings):
    (batch,) = Task("", objective(bag=bag, until=0.5, **settings)).batches([[document(20, 1), document(20, 2)]])
    return batch


@pytest.mark.parametrize("case", TAKING, ids=str)
def test_a_bag_reads_no_later_bag(case):
    network, batch = case.build(), bag_batch()
    tokens = batch.tokens.clone()
    tokens[0, 6, 1] = (tokens[0, 6, 1] + 1) % VOCABULARY
    before, after = hidden_of(network, batch), hidden_of(network, replace(batch, tokens=tokens))
    close(after[:, :6], before[:, :6], EXACT, "positions before the bag that changed")
    assert not torch.equal(after[:, 6], before[:, 6])


def test_the_order_inside_a_bag_does_not_matter():
    network, batch = HOUSE.build(), bag_batch()
    turned = replace(batch, tokens=batch.tokens.flip(2))
    close(hidden_of(network, turned), hidden_of(network, batch), 1e-6, "hidden states")
    full = replace(batch, targets=batch.targets.where(batch.targets[..., -1:] != IGNORE, IGNORE))
    asked = replace(full, targets=full.targets.flip(2))
    losses = [backward(network, objective(bag=3), [each]) for each in (full, asked)]
    close(losses[0], losses[1], 1e-9, "uniform loss")


def test_a_folded_document_does_not_see_its_neighbours():
    """Another document in front changes nothing, however large its embeddings (not NaN: 0 x NaN in a shared tile)."""
    network, task = HOUSE.build(), Task("", objective(bag=3, until=0.5, boundary="fold"))
    (batch,) = task.batches([[document(8, 1), document(5, 2), document(17, 3)]])
    x = mean_embedding(network, batch.tokens)
    first = int((batch.starts[0] == 2).nonzero()[0])  # the second document has one bag, after two of the first
    assert first == 2 and batch.starts[0, 2:5].tolist() == [2, 3, 3]
    poisoned = x.clone()
    poisoned[0, :3] = 1e6
    clean, stained = (network(each, batch)[0][0, 3:8] for each in (x, poisoned))
    assert torch.equal(clean, stained)
    alone = Batch(batch.tokens[:, 3:8], batch.targets[:, 3:8], torch.zeros(1, 5, dtype=torch.long))
    close(clean, hidden_of(network, alone)[0], EXACT, "packed against alone")


# ---- what it contains -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TAKING, ids=str)
def test_bags_of_one_are_next_token_bit_for_bit(case):
    one, plain = case.build(), case.build()
    bags, tokens = Task("", objective(bag=1)), Task("", NextToken(NextToken.Config()))
    losses = [backward(net, task.objective, task.batches(texts())) for net, task in ((one, bags), (plain, tokens))]
    assert torch.equal(*losses)
    for a, b in zip(one.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_input_only_is_the_weight_of_the_first_slot():
    networks = HOUSE.build(), HOUSE.build()
    alone, first = ({"bag_out": False}, {"weights": "first"})
    losses = []
    for network, settings in zip(networks, (alone, first), strict=True):
        task = Task("", objective(bag=3, until=0.5, **settings))
        losses.append(backward(network, task.objective, task.batches(texts())))
    close(losses[0], losses[1], EXACT, "loss")
    same_gradients(*networks, "input-only against weights: first")


def test_both_phases_cost_the_same():
    network, task = HOUSE.fresh(), objective(bag=4)
    (bags,) = Task("", objective(bag=4, until=0.5)).batches(texts())
    tokens = pack(texts())
    assert bags.starts.shape == tokens.starts.shape
    of_bags, of_tokens = (flops_run(partial(backward, network, task, [batch])) for batch in (bags, tokens))
    assert of_bags == of_tokens and all(of_bags)


def test_both_phases_share_their_compiled_graphs():
    """Two for a block, whatever a position reads."""
    torch._dynamo.reset()
    network, counter = HOUSE.fresh(), CompileCounter()
    network.compile(counter)
    for task in (Task("", objective(bag=4, until=0.5)), Task("", objective(bag=1))):
        backward(network, task.objective, task.batches(texts()))
    assert counter.frame_count == 2


def test_both_phases_are_the_same_network():
    """Nothing that an objective does adds a parameter or a buffer."""
    network = HOUSE.fresh()
    before = {name: value.shape for name, value in network.state_dict().items()}
    for task in (Task("", objective(bag=4, until=0.5)), Task("", objective(bag=1))):
        backward(network, task.objective, task.batches(texts()))
        assert {name: value.shape for name, value in network.state_dict().items()} == before
