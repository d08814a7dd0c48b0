"""What the contract says of mistakes that a new method can make."""

from dataclasses import replace

import pytest
import torch

from tandem.networks.cost import Cost
from tandem.networks.decoder import Decoder, DecoderSession
from tandem.networks.network import Network
from tandem.nn.init import Linear, initialise
from tandem.nn.spans import causal
from tandem.objectives.next_token import NextToken
from tandem.recipe.settings import _registry
from tandem.testing.cases import Case, Task, cases, texts
from tandem.testing.comparing import backward
from tandem.testing.contract import check_initialisation, check_restricted, check_steps
from tandem.testing.costs import check_flops, check_pairs
from tandem.testing.learning import check_loss, check_targets

(MIXTURE,) = (case for case in cases() if case.name == "decoder-mixture")


def test_a_network_without_tiny_settings_is_named(monkeypatch):
    monkeypatch.setitem(_registry["network"], "mine", type("Mine", (Network,), {}))
    with pytest.raises(NotImplementedError, match=r"Mine has no tiny settings .* define its `tiny`"):
        cases()


def test_a_network_without_blocks_is_named():
    with pytest.raises(NotImplementedError, match=r"Mine has no blocks: keep them as `stack`, or define `blocks`"):
        type("Mine", (Network,), {})(None, vocabulary=5, context=4).compile()


class CountsTargetsAlone(NextToken):
    def count(self, network, batch):
        return {"nll": super().count(network, batch)["nll"]}


class LeavesOutTerms(NextToken):
    def loss(self, network, batch, counts):
        hidden, _ = network(network.embed(batch.tokens), batch)
        return network.asked(hidden, batch, counts)


class KeepsTheGraph(NextToken):
    def loss(self, network, batch, counts):
        loss, sums = super().loss(network, batch, counts)
        return loss, sums | {"nll": loss}


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (CountsTargetsAlone, r"records \['balance', 'load_max', 'load_min'\], which `count` does not count"),
        (LeavesOutTerms, r"leaves out the network's \['balance', .*: end it with network.add_extra"),
        (KeepsTheGraph, r"records \['nll'\] with a gradient: detach them"),
    ],
)
def test_a_loss_that_can_not_be_recorded_is_told(objective, told):
    task = Task("mine", objective(objective.Config()))
    with pytest.raises(AssertionError, match=told):
        backward(MIXTURE.build(), task.objective, task.batches(texts()))


class CrossesUnrecorded(NextToken):
    """Also asks for the token after the next one, which may lie in the next document; its record has only the next."""

    def loss(self, network, batch, counts):
        loss, sums = super().loss(network, batch, counts)
        after = replace(batch, targets=batch.tokens.roll(-2, 1))
        return loss + super().loss(network, after, counts)[0], sums


def test_a_loss_that_crosses_documents_is_told_whatever_is_recorded(monkeypatch):
    case = next(case for case in cases() if case.name == "decoder-house")
    monkeypatch.setitem(_registry["objective"], "mine", CrossesUnrecorded)
    with pytest.raises(AssertionError, match="mine: loss of two documents together and apart: off by"):
        check_targets(case)


class OneKeyTooFew(Decoder):
    def cost(self):
        cost, depth = super().cost(), self.config.depth
        return replace(cost, pair=cost.pair // depth, keys=lambda n: depth * (n + 1) - 1)


def test_a_missing_key_of_one_layer_is_told():
    config = Decoder.Config(width=32, heads=4, depth=2)
    with pytest.raises(AssertionError, match=r"attention in a step: 10,240, cost says 10,112: 79 keys of 128"):
        check_flops(Case("mine", OneKeyTooFew, config))


class ReadsWithoutWindow(Decoder):
    def span(self, starts, positions=None):
        return causal(starts, None, positions)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"pairs": lambda n: 0}, "on documents of .40,. tokens"),
        ({"pairs": lambda n: n * n}, "on documents of .40,. tokens"),
        ({"keys": lambda n: 40}, "of attention at index 3"),
        ({"prefill_pairs": lambda n: 0}, "in a prompt of 3 tokens"),
    ],
)
def test_attention_that_costs_other_than_its_spans_is_told(wrong, told):
    class Mine(Decoder):
        def cost(self):
            return replace(super().cost(), **wrong)

    with pytest.raises(AssertionError, match=told):
        check_pairs(Case("mine", Mine, Decoder.Config(width=32, heads=4, depth=2)))


class Forgetful(Cost):
    def decode(self, n):
        return super().decode(n) - 2 * (n == 20)


def test_a_step_that_costs_more_at_some_index_is_told():
    class Mine(Decoder):
        def cost(self):
            return Forgetful(**vars(super().cost()))

    with pytest.raises(AssertionError, match="FLOPs of matrices at index 20"):
        check_pairs(Case("mine", Mine, Decoder.Config(width=32, heads=4, depth=2)))


def test_an_inherited_restriction_that_does_not_hold_is_told(monkeypatch):
    case = Case("mine", ReadsWithoutWindow, Decoder.Config(width=32, heads=4, depth=2))
    with pytest.raises(AssertionError, match=r"predicted by reading \(row, position\) \[.*see `restricted`"):
        check_restricted(case)
    monkeypatch.setattr(ReadsWithoutWindow, "restricted", None)
    check_restricted(case)


class HasATermOfItsOwn(Decoder):
    def __init__(self, config, vocabulary, context, generator=None):
        super().__init__(config, vocabulary, context, generator)
        self.own = Linear(config.width, 1, bias=False, role="mlp")

    def forward(self, x, batch):
        hidden, extra = super().forward(x, batch)
        return hidden, extra | {"own": self.own(hidden).sum()}


def test_a_module_that_serves_an_extra_term_alone_is_no_mistake():
    check_loss(Case("mine", HasATermOfItsOwn, Decoder.Config(width=32, heads=4, depth=1)))


class HasAConvolution(Decoder):
    def __init__(self, config, vocabulary, context, generator=None):
        super().__init__(config, vocabulary, context)
        self.taps = torch.nn.Conv1d(config.width, config.width, 3, groups=config.width, bias=False)
        initialise(self, config.init, config.depth, generator)


def test_a_module_that_initialise_does_not_draw_is_told():
    case = Case("mine", HasAConvolution, Decoder.Config(width=32, heads=4, depth=1))
    with pytest.raises(AssertionError, match=r"taps\.weight is not drawn from the generator .*: see `initialise`"):
        check_initialisation(case)


class TakesAnyShape(DecoderSession):
    def enter(self, tokens):
        return self.network.embed(tokens.reshape(self.rows, -1))


def test_a_session_that_takes_tokens_of_any_shape_is_told(monkeypatch):
    monkeypatch.setattr(Decoder, "session", lambda network, rows: TakesAnyShape(network, rows))
    case = Case("mine", Decoder, Decoder.Config(width=32, heads=4, depth=1))
    with pytest.raises(AssertionError, match=r"does not refuse tokens of shape \(3, 2\): see `columns_of`"):
        check_steps(case)
