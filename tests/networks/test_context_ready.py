"""What is the Context-Ready Transformer's own; what it shares with all networks is in test_contract.py."""

import math
from collections import Counter
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from tandem.networks.context_ready import WALKED, ContextReady, ContextReadySPS
from tandem.networks.decoder import Decoder
from tandem.networks.head_ffn import HeadFFN
from tandem.networks.sps import SPS
from tandem.nn.moe import MixtureConfig
from tandem.objectives.next_token import NextToken
from tandem.recipe import UserError, load
from tandem.testing.cases import Case, document, halving, pack, texts
from tandem.testing.comparing import backward, same_gradients
from tandem.testing.costs import check_flops
from tandem.training.checkpoint import restore, save
from tandem.training.optimiser import AdamW
from tandem.training.run import keyed

CORRECTIONS = ["add", "token_blind", "concat", "block_head", "tied"]
WRAPPING = {Decoder: ContextReady, SPS: ContextReadySPS}
FIRST_EXACT = {"token_blind", "block_head"}  # c is 0 at the first position, so that one pass is exact there


def build(cls=ContextReady, **settings) -> ContextReady:
    config = cls.Config(**{"width": 16, "heads": 2, "depth": 1, "passes_min": None} | settings)
    return Case("", cls, config).build()


def at(network, passes, batch):
    """Hidden states after a number of passes, or streaming ("walk": position by position)."""
    e = network.wrapped.placed(network.embed(batch.tokens), batch)
    return network._walk(e, batch) if passes == "walk" else network._pass(e, batch, passes)


def with_settings(network, **settings):
    network.config = network.config.model_copy(update=settings)
    return network


# ---- the correction -------------------------------------------------------------------------------------------------


def spelled(x, mlp):
    """Linear, GELU, Linear."""
    return F.linear(F.gelu(F.linear(x, mlp.up.weight, mlp.up.bias)), mlp.down.weight, mlp.down.bias)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_is_its_formula(correction):
    network = build(correction=correction, depth=2, mlp="gelu", bias=True)
    h, e = torch.randn(2, 1, 3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first = torch.tensor([True, False, False])[None, :, None]
    own, carried = network.correction, torch.cat((torch.zeros(1, 1, 16), h[:, 1:]), dim=1)
    norm = lambda u: F.layer_norm(u, (16,), own.norm.weight, own.norm.bias, 1e-6)
    expected = {
        "add": lambda: spelled(norm(carried + e), own.F),
        "token_blind": lambda: spelled(norm(carried), own.F) * torch.tensor([0, 1, 1])[:, None],
        "concat": lambda: spelled(torch.cat((norm(carried), e), dim=-1), own.F),
        "block_head": lambda: carried,
        "tied": lambda: spelled(norm(carried + e), network.blocks[1].mlp),
    }[correction]()
    torch.testing.assert_close(network.correct(h, e, first), expected, rtol=0, atol=1e-12)


# ---- passes and streaming -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_pass_makes_one_more_position_equal_to_streaming(correction, depth):
    network = build(correction=correction, depth=depth)
    _equal_after_each_pass(network, correction)


@pytest.mark.parametrize("persistent", ["inputs", "predictions"])
@pytest.mark.parametrize("correction", ["add", "block_head"])
@pytest.mark.parametrize("from_token", [False, True])
def test_two_streams_become_streaming_in_passes_too(correction, persistent, from_token):
    settings = {"correction": correction, "depth": 2, "window": 2, "persistent": persistent}
    settings |= {"start_from_token": from_token}
    network = build(ContextReadySPS, **settings)
    _equal_after_each_pass(network, correction)
    batch = pack([[document(9, 1)]])
    e = network.embed(batch.tokens)
    z = network.wrapped.states(e, network.wrapped.reader(e, batch))
    started = network.wrapped.first_predictions(e) if correction == "block_head" else 0
    torch.testing.assert_close(network.carry(e, z), z - started)  # what the blocks added to the stream that is read


@pytest.mark.parametrize("unroll", ["passes", "bptt"])
def test_experts_of_all_passes_are_told_of_once(unroll):
    moe = MixtureConfig(experts=4, active=2, balance=1.0)
    settings = {"moe": moe, "mlp_width": 8, "passes": 3, "unroll": unroll, "depth": 2}
    networks, objective = [build(**settings), build(**settings)], NextToken(NextToken.Config())
    networks[1].recompute = unroll == "passes"
    for length in (9, 6):  # what was recomputed for the first step is no part of the second
        batch = pack([[document(length, 1)]])
        losses = [backward(network, objective, [batch]) for network in networks]
        torch.testing.assert_close(losses[1], losses[0])
        same_gradients(*networks, "recomputed")
        _, extra = networks[0](networks[0].embed(batch.tokens), batch)
        assert extra.keys() == networks[0].terms.keys() == {"balance", "load_max", "load_min"}


def _equal_after_each_pass(network, correction):
    T = 9
    batch = pack([[document(T, 1)]])
    streamed = at(network, "walk", batch)
    for K in range(1, T + 2):
        off = (at(network, K, batch) - streamed).abs().amax(-1)[0]
        exact = min(T, K if correction in FIRST_EXACT else K - 1)
        assert (off[:exact] < 1e-9).all(), (K, off)
        assert (off[exact:] > 1e-6).all(), (K, off)  # and no other


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_sessions_and_scores_are_streaming_in_float32(correction, depth):
    text, settings = document(12, 3), {"width": 32, "heads": 4, "depth": depth, "correction": correction}
    network = Case("", ContextReady, ContextReady.Config(**settings, prefill="stream")).fresh()
    batch, session = pack([[text]]), network.session(1)
    nll = network.score(batch)[0]
    hidden = network.wrapped.norm(at(network, len(text) + 1, batch))
    logits = torch.cat([session.prefill([text[:1]]), *(session.step(torch.tensor([token])) for token in text[1:])])
    torch.testing.assert_close(logits, (hidden @ network.head.T)[0], rtol=0, atol=1e-5)
    expected = -logits.log_softmax(-1)[range(len(text) - 1), text[1:]]
    torch.testing.assert_close(nll[:-1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", [ContextReady, ContextReadySPS])
def test_many_rows_scored_side_by_side_are_scored_as_in_passes(cls):
    """Streaming by either way: documents that begin anywhere, a window, in float32."""
    settings = {"width": 32, "heads": 4, "depth": 2, "window": 7}
    network = Case("", cls, cls.Config(**settings, tolerance=1e-7)).fresh()
    rows = [[document(5 + row, row), document(19 - row, row)] for row in range(WALKED)]
    walked = []
    network._walk = lambda *given: walked.append(0) or type(network)._walk(network, *given)
    with torch.no_grad():
        many = network.score(pack(rows))
        few = torch.cat([network.score(pack(rows[i : i + 4])) for i in range(0, WALKED, 4)])
        assert len(walked) == 1
        two = [network.score(pack(rows), passes=2)[:4], network.score(pack(rows[:4]), passes=2)]
    torch.testing.assert_close(many, few, rtol=0, atol=1e-5)
    torch.testing.assert_close(*two, rtol=0, atol=1e-5)  # a number of passes stays one


def test_passes_worked_out_by_hand():
    """c(K) - c(K-1) halves with every pass."""
    network, batch = halving(), pack([[document(8, 1)]])
    e = network.embed(batch.tokens)
    shown = {1: [1, 1, 1, 1], 2: [1.5, 2, 2, 2], 3: [1.5, 2.25, 2.5, 2.5], 4: [1.5, 2.25, 2.625, 2.75]}
    shown[5] = [1.5, 2.25, 2.625, 2.8125]
    for K, z in shown.items():
        assert network._pass(e, batch, K)[0, :4, 0].tolist() == z
    assert network._walk(e, batch)[0, :4, 0].tolist() == shown[5]


def test_a_pass_depends_on_its_corrections_and_on_no_pass_before():
    network, batch = build(), pack([[document(9, 1)]])
    e = network.embed(batch.tokens)
    reader, starts = network.wrapped.reader(e, batch), batch.starts
    c = torch.randn(e.shape, generator=torch.Generator().manual_seed(0), dtype=e.dtype)
    first = (torch.arange(9) == 0)[None, :, None]
    alone = network.next(e, c, reader, first)
    passed = list(islice(network.corrections(e, reader, starts), 4))
    assert torch.equal(network.next(e, c, reader, first), alone)
    two = network.next(e, network.next(e, None, reader, first), reader, first)
    assert torch.equal(passed[1], two)


@pytest.mark.parametrize(
    ("wrapped", "setting"),
    [
        *((Decoder, name) for name in ("house", "gpt2", "qwen", "windowed", "mixture")),
        *((SPS, name) for name in ("separated", "reverse_sps", "side_read")),
    ],
)
def test_one_pass_is_the_plain_network_to_the_last_bit(wrapped, setting):
    plain = wrapped.tiny()[setting]
    config = WRAPPING[wrapped].Config(**plain.model_dump(), passes=1, passes_min=None)
    network, plain_network = (
        Case("", *given).fresh(seed=5) for given in ((WRAPPING[wrapped], config), (wrapped, plain))
    )
    batch, hidden = pack(texts()), []
    for net in (network, plain_network):
        hidden.append(net(net.embed(batch.tokens), batch)[0])
        net.nll(hidden[-1], batch.targets)[0].backward()
    assert torch.equal(*hidden)
    own = dict(network.named_parameters())
    for name, parameter in plain_network.named_parameters():
        assert torch.equal(own[f"wrapped.{name}"].grad, parameter.grad), name
    assert not any(p.grad.any() for p in network.correction.parameters())


def test_a_last_matrix_of_zeros_says_nothing_in_any_pass():
    config = ContextReady.Config(width=16, heads=2, correction_init="zero")
    network, batch = Case("", ContextReady, config).fresh(), pack(texts())
    assert torch.equal(at(network, 4, batch), at(network, 1, batch))


def test_a_run_of_one_pass_goes_on_from_its_checkpoint(tmp_path):
    """What no pass has used yet has a place in the optimiser's state, too."""
    network, other = (build(passes=1) for _ in range(2))
    optimiser = AdamW(AdamW.Config(), network)
    backward(network, NextToken(NextToken.Config()), [pack(texts())])
    optimiser.step(1.0)
    restore(save(tmp_path, 1, network, optimiser, {}, keep=1), other, AdamW(AdamW.Config(), other))
    assert all(torch.equal(*pair) for pair in zip(network.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_parameter_learns_with_two_passes(correction):
    network = build(correction=correction, passes=2)
    batch = pack(texts())
    network.nll(network(network.embed(batch.tokens), batch)[0], batch.targets)[0].backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())


@pytest.mark.parametrize("passes", [1, 2, 3, "stream"])
def test_a_score_depends_on_the_past_of_its_document_alone(passes):
    """At every number of passes: large changes of the future, a longer row, and what else lies in the row."""
    network = with_settings(build(width=32, depth=2), score_passes=passes, tolerance=1e-2)
    for parameter in network.correction.F.parameters():
        parameter.data *= 0.7  # so that passes converge, each position in its time
    first, second = document(9, 1), document(14, 2)
    alone, packed = (network.score(pack([row])) for row in ([second], [first, second]))
    torch.testing.assert_close(packed[:, 9:], alone, rtol=0, atol=1e-9)
    x = network.embed(pack([[second]]).tokens).detach()
    x[:, 6:] = 1e3
    torch.testing.assert_close(network.score(pack([[second]]), x)[:, :6], alone[:, :6], rtol=0, atol=1e-9)
    shorter = pack([[second[:8]]])
    torch.testing.assert_close(network.score(shorter)[:, :7], alone[:, :7], rtol=0, atol=1e-9)


@pytest.mark.parametrize("window", [1, 2, 5, 12])
def test_a_windowed_cache_reads_what_a_windowed_mask_does(window):
    network, batch = build(window=window, depth=2), pack([[document(12, 1)]])
    torch.testing.assert_close(at(network, "walk", batch), at(network, 13, batch), rtol=0, atol=1e-9)


def test_a_trained_row_goes_through_time_as_through_all_passes():
    """Gradients of the recurrence are those of T + 1 passes, documents and all."""
    batch = pack(texts())
    T = batch.tokens.shape[1]
    walked, passed = build(unroll="bptt", window=6), build(passes=T + 1, window=6)
    losses = []
    for network in (walked, passed):
        losses.append(network.nll(network(network.embed(batch.tokens), batch)[0], batch.targets)[0])
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for (name, one), other in zip(walked.named_parameters(), passed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10, msg=name)


# ---- the number of passes -------------------------------------------------------------------------------------------


def test_passes_are_drawn_uniformly_by_the_step_alone():
    network = build(passes=5, passes_min=2)
    keys = [keyed(7, f"step/{s}") for s in range(10_000)]
    drawn = [network._drawn(key) for key in keys]
    counts, n = Counter(drawn), len(drawn)
    assert set(counts) == {2, 3, 4, 5}
    assert all(abs(count - n / 4) < 3 * math.sqrt(n * 0.25 * 0.75) for count in counts.values())
    assert [build(passes=5, passes_min=2)._drawn(key) for key in keys[5000:5100]] == drawn[5000:5100]
    assert network._drawn(None) == 5  # evaluation draws nothing


def test_position_by_position_no_passes_are_drawn():
    network = build(unroll="bptt", passes=1, passes_min=2)
    assert network.cost_of(7).training(16) == network.cost().training(16)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("prefill=0", "network.prefill = 0: must be converge, stream or a whole number >= 1"),
        ("score_passes=0", "network.score_passes = 0: must be stream or a whole number >= 1"),
        ("passes=1", "passes_min 2 is more than passes 1; lower passes_min, or take passes_min: null"),
    ],
)
def test_a_number_of_passes_that_cannot_be_is_refused(given, told):
    with pytest.raises(UserError, match=f"{told}$"):
        load("context_ready/tiny", [f"network.{given}"])


def test_a_prompt_is_not_read_in_other_passes_than_it_is_scored_in():
    with pytest.raises(UserError, match="prefill 3: with score_passes 2, prompts are read in so many passes"):
        load("context_ready/tiny", ["network.score_passes=2", "network.prefill=3"])


def test_micro_batches_of_a_step_share_their_key(small_corpus, monkeypatch):
    from tandem.corpus import prepare
    from tandem.training.run import Run

    given = ["network.depth=1", "budget=3 steps", "batch.micro_batches=2", "training.device=cpu", *small_corpus]
    recipe = load("context_ready/tiny", given)
    run = Run(recipe, prepare(recipe.corpus))
    keys = [[batch.key for batch in run.batches(step)] for step in range(3)]
    assert all(one == other for one, other in keys) and len({one for one, _ in keys}) == 3
    assert run.batches(1)[0].to("cpu").key == keys[1][0]


def test_one_compiled_block_serves_every_number_of_passes():
    torch._dynamo.reset()
    counter, network = CompileCounterWithBackend("eager"), build(passes=5, width=32, heads=4)
    network.compile(counter)
    batch = pack(texts())
    for K in (1, 2, 3, 4, 5):
        with_settings(network, passes=K)
        network(network.embed(batch.tokens), batch)[0].sum().backward()
    assert counter.frame_count <= 2


def test_recomputing_passes_gives_the_same_gradients_and_keeps_less():
    batch, kept, networks = pack(texts()), [], [build(passes=4, depth=2), build(passes=4, depth=2)]
    for network, recompute in zip(networks, (False, True), strict=True):
        network.recompute, held = recompute, set()
        keep = lambda tensor, held=held: held.add(tensor.untyped_storage().data_ptr()) or tensor
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden, _ = network(network.embed(batch.tokens), batch)
        network.nll(hidden, batch.targets)[0].backward()
        kept.append(len(held))
    for plain, recomputed in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert torch.equal(plain.grad, recomputed.grad)
    assert kept[1] < 0.5 * kept[0]


# ---- sessions -------------------------------------------------------------------------------------------------------


def test_a_prompt_can_be_read_in_passes_or_token_by_token():
    network, text = build(width=32, heads=4, depth=2, tolerance=1e-9), document(20, 2)
    logits, prompts = {}, [text[:12], text[:5]]
    for how in ("converge", "stream", 3):
        session = with_settings(network, prefill=how).session(2)
        logits[how] = [session.prefill(prompts), *(session.step(torch.tensor([7, token])) for token in text[5:9])]
        logits[how] = torch.stack(logits[how])
        assert session.passes == {"stream": None, 3: 3}.get(how, session.passes)
    torch.testing.assert_close(logits["converge"], logits["stream"], rtol=0, atol=1e-5)
    assert (logits[3] - logits["stream"]).abs().max() > 1e-3
    x = with_settings(network, prefill=3).session(1)
    batch = pack([[text[:12]]])
    hidden = network.wrapped.norm(at(network, 3, batch))[:, -1]
    torch.testing.assert_close(x.prefill([text[:12]]).double(), hidden @ network.head.T, rtol=0, atol=1e-4)
    (carried,) = at(network, 3, batch)[:, -1]  # from the same pass as the caches
    torch.testing.assert_close(x.carry[0, 0], carried, rtol=0, atol=1e-9)


@pytest.mark.parametrize("how", ["converge", "stream"])
@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_session_in_passes_is_the_network_in_these_passes(correction, K, how):
    config = ContextReady.Config(width=32, heads=4, depth=2, correction=correction, score_passes=K, prefill=how)
    network, long, short = Case("", ContextReady, config).fresh(), document(14, 3), document(9, 4)
    session = network.session(2)
    logits = [session.prefill([long[:8], short[:3]])]
    logits += [session.step(torch.tensor(pair)) for pair in zip(long[8:], short[3:], strict=True)]
    turned = session.fork(torch.tensor([1, 0, 1]))
    again = turned.step(torch.tensor([5, 6, 5]))
    for row, text in enumerate((long, short)):
        x = at(network, K, pack([[[*text, 6 - row]]]))
        expected = (network.wrapped.norm(x) @ network.head.T)[0]
        found = torch.stack(logits)[:, row]
        torch.testing.assert_close(found, expected[-len(found) - 1 : -1], rtol=0, atol=1e-5)
        torch.testing.assert_close(again[1 - row], expected[-1], rtol=0, atol=1e-5)
    torch.testing.assert_close(again[0], again[2], rtol=0, atol=1e-5)  # threads may divide rows
    assert session.passes == (None if how == "stream" else K)


@pytest.mark.parametrize("seed", [0, 1])
def test_at_the_default_tolerance_and_the_recipes_initialisation_passes_are_streaming(seed):
    """Prompts and scores, in float32; other networks may be off by more, the larger the smaller their table is."""
    config = ContextReady.Config(width=64, heads=4, depth=2, init="torch", tied=False)
    network, text, logits = Case("", ContextReady, config).fresh(seed), document(40, 2), []
    for how in ("converge", "stream"):
        session = with_settings(network, prefill=how).session(1)
        read = [session.prefill([text[:30]]), *(session.step(torch.tensor([token])) for token in text[30:])]
        logits.append(torch.cat(read))
        assert session.passes is None or session.passes < 15
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    rows = [[document(40, row)] for row in range(WALKED)]
    with torch.no_grad():
        few = torch.cat([network.score(pack(rows[:4])), network.score(pack(rows[4:]))])
        torch.testing.assert_close(network.score(pack(rows)), few, rtol=0, atol=1e-5)


@pytest.mark.parametrize("correction", ["add", "block_head"])
def test_a_prompt_in_bfloat16_settles_where_rounding_begins(correction):
    """As near to what is read token by token as rounding lets that be to float32."""
    config = ContextReady.Config(width=32, heads=4, depth=2, init="torch", tied=False, correction=correction)
    network, text, logits = Case("", ContextReady, config).fresh(), document(32, 2), {}
    for dtype, how in ((torch.float32, "stream"), (torch.bfloat16, "stream"), (torch.bfloat16, "converge")):
        session = with_settings(network.to(dtype), prefill=how).session(1)
        logits[how, dtype] = session.prefill([text]).float()
    read, walked = logits["converge", torch.bfloat16], logits["stream", torch.bfloat16]
    assert session.passes < 16
    assert (read - walked).abs().max() < 2 * (walked - logits["stream", torch.float32]).abs().max()


def test_a_session_holds_one_vector_beside_the_caches():
    network = Case("", ContextReady, ContextReady.Config(width=32, heads=4, depth=3)).fresh()
    session = network.session(2)
    session.prefill([[1, 2, 3], [4, 5]])
    assert session.bytes == session.inner.bytes + 2 * 32 * 4
    carried, fork = session.carry.clone(), session.fork()
    fork.step(torch.tensor([1, 2]))
    assert torch.equal(session.carry, carried) and not torch.equal(fork.carry, carried)


# ---- conversion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapped", "setting", "correction"),
    [
        *((Decoder, "house", name) for name in CORRECTIONS[:3]),
        *((SPS, name, "add") for name in ("separated", "reverse_sps")),
    ],
)
def test_a_converted_network_is_the_old_one_to_the_last_bit(wrapped, setting, correction):
    plain = wrapped.tiny()[setting]
    config = WRAPPING[wrapped].Config(**plain.model_dump(), correction=correction, passes_min=None)
    plain_network = Case("", wrapped, plain).fresh(seed=3)
    network = Case("", WRAPPING[wrapped], config).fresh(seed=4)
    network.start_from(plain_network)
    batch, text = pack(texts()), document(9, 1)
    expected = plain_network(plain_network.embed(batch.tokens), batch)[0]
    for K in range(1, 7):
        assert torch.equal(with_settings(network, passes=K)(network.embed(batch.tokens), batch)[0], expected)
    assert torch.equal(network.score(batch), plain_network.score(batch))
    for how, told in (("stream", 1), ("converge", len(text) - 1)):  # tokens of the prompt
        sessions = [plain_network.session(1), with_settings(network, prefill=how).session(1)]
        assert torch.equal(*(session.prefill([text[:told]]) for session in sessions))
        for token in text[told:]:
            assert torch.equal(*(session.step(torch.tensor([token])) for session in sessions))
    first, last = network.correction.F.up, network.correction.F.down
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    for learns in (False, True):  # the first matrix learns once the last has left zero
        optimiser.zero_grad()
        network.nll(network(network.embed(batch.tokens), batch)[0], batch.targets)[0].backward()
        assert last.weight.grad.any() and bool(first.weight.grad.any()) is learns
        optimiser.step()


def test_experts_are_refused_where_there_is_no_pass_to_balance():
    given = ["network.moe={experts: 4, active: 2}", "network.mlp_width=24"]
    load("context_ready/tiny", given)
    with pytest.raises(UserError, match=r"network.moe.*: experts share the load of a pass, and position by position"):
        load("context_ready/tiny", [*given, "network.unroll=bptt"])


def test_what_can_not_be_converted_is_refused():
    decoder = Case("", Decoder, Decoder.tiny()["house"]).fresh()
    for correction in ("block_head", "tied"):
        network = Case("", ContextReady, ContextReady.Config(**decoder.config.model_dump(), correction=correction))
        with pytest.raises(UserError, match="take add, token_blind or concat"):
            network.fresh().start_from(decoder)
        with pytest.raises(ValueError, match="no matrix of its own"):
            ContextReady.Config(correction=correction, correction_init="zero")
    with pytest.raises(UserError, match="window"):
        Case("", ContextReady, ContextReady.Config(**Decoder.tiny()["windowed"].model_dump())).fresh().start_from(
            decoder
        )


def test_the_bias_of_the_last_matrix_is_zeroed_too():
    """The authors' initialisation draws it."""
    plain = Case("", Decoder, Decoder.Config(width=16, heads=2, depth=1, init="torch", tied=False)).fresh(seed=3)
    network = Case("", ContextReady, ContextReady.Config(**plain.config.model_dump(), passes_min=None)).fresh(seed=4)
    assert network.correction.F.down.bias.any()
    network.start_from(plain)
    assert not network.correction.F.down.bias.any() and network.correction.F.up.bias.any()
    batch = pack(texts())
    assert torch.equal(at(network, 3, batch), at(network, 1, batch))
    assert torch.equal(network.score(batch), plain.score(batch))


def test_how_a_trained_network_is_read_may_change_and_its_correction_may_not():
    shape = {"width": 16, "heads": 2, "depth": 1}
    trained = Case("", ContextReady, ContextReady.Config(**shape)).fresh(seed=3)
    free = {"passes": 3, "passes_min": None, "score_passes": 2, "unroll": "bptt", "tolerance": 1e-3}
    network = Case("", ContextReady, ContextReady.Config(**shape, **free, correction_init="zero")).fresh(seed=4)
    network.start_from(trained)
    for name, value in network.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name
    other = Case("", ContextReady, ContextReady.Config(**shape, correction="token_blind")).fresh(seed=4)
    with pytest.raises(UserError, match="correction: add there, token_blind here"):
        other.start_from(trained)


def test_recomputation_is_refused_where_there_is_no_pass_to_recompute():
    load("context_ready/tiny", ["training.recompute=true"])
    with pytest.raises(UserError, match=r"training.recompute.*: position by position .* there is no pass to recompute"):
        load("context_ready/tiny", ["training.recompute=true", "network.unroll=bptt"])


# ---- the baseline ---------------------------------------------------------------------------------------------------


def test_the_mlp_at_the_head_is_added_to_what_the_blocks_give():
    network, batch = Case("", HeadFFN, HeadFFN.Config(width=16, heads=2, depth=1)).build(), pack(texts())
    e = network.embed(batch.tokens)
    z = Decoder.states(network, e, network.reader(e, batch))
    normed = F.layer_norm(z, (16,), network.ffn_norm.weight, network.ffn_norm.bias, 1e-6)
    expected = network.norm(z + spelled(normed, network.ffn))
    torch.testing.assert_close(network(e, batch)[0], expected, rtol=0, atol=1e-12)


# ---- cost -----------------------------------------------------------------------------------------------------------


def on_meta(cls, **settings):
    """A model of the paper: biases everywhere (ours has none in the head), table and head of 32,000 rows each."""
    with torch.device("meta"):
        own = {"norm": "layer", "mlp": "gelu", "bias": True, "tied": False, "heads": 16}
        return cls(cls.Config(**own | settings), 31_998, 256)  # and two spare rows


@pytest.mark.parametrize(
    ("cls", "depth", "width", "parameters", "multiply_adds", "cache"),
    [
        (ContextReady, 1, 2048, 215_035_136, 149_422_080, 4_096),
        (ContextReady, 5, 1120, 157_094_080, 121_139_200, 11_200),
        (ContextReady, 6, 1024, 149_543_168, 116_654_080, 12_288),
        (Decoder, 6, 1088, 154_980_608, 120_045_568, 13_056),
        (Decoder, 12, 768, 134_240_000, 109_510_656, 18_432),
    ],
)
def test_counts_of_the_models_of_the_paper(cls, depth, width, parameters, multiply_adds, cache):
    cost = on_meta(cls, depth=depth, width=width).cost()
    assert cost.total_parameters == parameters - 32_000
    assert cost.linear + cost.head == multiply_adds - 2 * width
    assert cost.cache(10) == 10 * cache + (width if cls is ContextReady else 0)


@pytest.mark.parametrize(
    ("correction", "parameters"),
    [("token_blind", 149_543_168), ("concat", 153_737_472), ("block_head", 141_147_392), ("tied", 141_149_440)],
)
def test_parameters_of_other_corrections(correction, parameters):
    cost = on_meta(ContextReady, depth=6, width=1024, correction=correction).cost()
    assert cost.total_parameters == parameters - 32_000
    correction_work = {"block_head": 0, "concat": 12}.get(correction, 8)
    assert cost.linear == (12 * 6 + correction_work) * 1024**2


def test_an_mlp_at_the_head_costs_what_a_correction_does():
    context, head = (on_meta(cls, depth=3, width=446, heads=1).cost() for cls in (ContextReady, HeadFFN))
    assert context.linear == head.linear == 44 * 446**2
    assert context.total_parameters == head.total_parameters


@pytest.mark.parametrize(
    ("depth", "width", "passes", "passes_min", "multiply_adds"),
    [
        (6, 1024, 5, None, 443_809_792),
        (6, 1024, 5, 2, 317_980_672),
        (5, 1120, 5, None, 452_300_800),
        (5, 1120, 5, 2, 324_352_000),
        (1, 2048, 5, None, 451_411_968),
        (1, 2048, 10, None, 870_842_368),
        (1, 2048, 5, 2, 325_582_848),
        (1, 2048, 10, 2, 535_298_048),
    ],
)
def test_training_costs_every_pass(depth, width, passes, passes_min, multiply_adds):
    cost = on_meta(ContextReady, depth=depth, width=width, passes=passes, passes_min=passes_min).cost()
    flops = cost.training(256)
    assert (flops["linear"] + flops["head"]) / (6 * 256) == multiply_adds - 2 * width
    plain = on_meta(Decoder, depth=depth, width=width).cost().training(256)
    assert flops["attention"] == (passes + (passes_min or passes)) / 2 * plain["attention"]


@pytest.mark.parametrize(("window", "prefill"), [(0, "stream"), (3, 3)])
def test_a_prompt_of_two_streams_costs_both(window, prefill):
    """Corrections are made of the stream that is read, so none can wait for the last token."""
    given = {"width": 32, "heads": 4, "depth": 2, "passes": 3, "passes_min": None, "prefill": prefill}
    check_flops(Case("", ContextReadySPS, ContextReadySPS.Config(window=window, **given)))


def test_a_prompt_in_passes_costs_every_one():
    walked, passed = (on_meta(ContextReady, depth=2, width=64, prefill=how).cost() for how in ("stream", 3))
    assert walked.prefill(10) == 10 * 2 * (24 + 8) * 64**2 + 4 * 64 * 2 * 55
    assert passed.prefill(10) == 10 * 2 * (3 * 24 + 2 * 8) * 64**2 + 3 * 4 * 64 * 2 * 55
