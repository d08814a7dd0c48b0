"""What is Thought Gestalt's own; what it shares with all networks is in test_contract.py."""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tandem.corpus import Segmentation
from tandem.corpus.streams import Stream, StreamBatch, stream_totals
from tandem.generation.generate import generate
from tandem.generation.sampling import Sampler, row_generators
from tandem.networks import gestalt_layout, gestalt_reading
from tandem.networks.decoder import Decoder
from tandem.networks.gestalt import Gestalt, GestaltDropout
from tandem.networks.gestalt_blocks import ThoughtHead, rank_table
from tandem.networks.gestalt_layout import CHUNK, Layout, PackedReader
from tandem.networks.gestalt_reading import NO_DROPOUT, Reading
from tandem.nn.dropout import drawn, tokens_dropped
from tandem.nn.init import DECAYED, roles
from tandem.objectives.next_token import NextToken
from tandem.recipe import UserError, load
from tandem.testing.cases import EOS, VOCABULARY, Case
from tandem.testing.comparing import EXACT, FLOAT, backward, close, same_gradients
from tandem.testing.costs import flops_run
from tandem.testing.gestalt_loop import literal_loss, literal_sentence

RAGGED = [[3, 1, 5, 2, 7, 4, 2], [2, 6, 3], [4], [1, 1, 7, 3, 2]]
KINDS = ["alternate", "self_then_cross", "parallel", "self"]
SOME = GestaltDropout(residual=0.1, attention=0.2, token=0.3, thought=0.15)
PAPER = {"mlp": "gelu", "norm": "layer", "bias": True, "positions": "learned"}


def build(seed_of_weights=0, **settings) -> Gestalt:
    given = {"width": 16, "heads": 2, "depth": 4, "cap": 7, "memory": 3, "thought_from": 3, "dropout": NO_DROPOUT}
    return Case("", Gestalt, Gestalt.Config(**given | settings)).build(seed_of_weights)


def streams(lengths, seed=1, **more) -> StreamBatch:
    """Random text, cut into streams of sentences of these lengths; every stream ends its document."""
    generator, tokens, targets = torch.Generator().manual_seed(seed), [], []
    for stream in lengths:
        text = torch.randint(1, VOCABULARY, (sum(stream),), generator=generator)
        text[-1:] = EOS
        tokens.append(text)
        targets += [torch.cat((part, torch.tensor([VOCABULARY]))) for part in text.split(stream)]
    made = [Stream(i, 0, stream) for i, stream in enumerate(lengths)]
    rows_at, tokens_at = stream_totals(made)
    given = {"end_weight": 0.05, "document_end": EOS, "rows_at": rows_at, "tokens_at": tokens_at} | more
    ids, offsets = list(range(len(lengths))), [0] * len(lengths)
    empty = [torch.empty(0, dtype=torch.long)]
    return StreamBatch(torch.cat(tokens + empty), torch.cat(targets + empty)[None], lengths, ids, offsets, **given)


def trained(network, *parts):
    return backward(network, NextToken(NextToken.Config()), list(parts))


def with_settings(network, **settings):
    network.config = network.config.model_copy(update=settings)
    return network


def thoughts_of(network, batch):
    """[(thoughts, |r|)] by sentence step."""
    told = []
    handle = network.thought.register_forward_hook(lambda module, args, out: told.append(out))
    network(network.embed(batch.tokens), batch)
    handle.remove()
    return told


# ---- two phases against the definition --------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["steps", "tokens"])
@pytest.mark.parametrize("seed", [True, False])
@pytest.mark.parametrize("blocks", KINDS)
def test_two_packed_phases_are_the_sentence_loop(blocks, seed, reduction):
    """Memory below its capacity and above, rows of all lengths, gradients included."""
    settings = {"norm": "layer", "bias": True, "mlp": "gelu", "positions": "learned"} if seed else {}
    assert_is_the_sentence_loop(blocks=blocks, seed=seed, reduction=reduction, **settings)


def assert_is_the_sentence_loop(**settings):
    networks, batch = [build(**settings) for _ in range(2)], streams(RAGGED)
    loss = trained(networks[0], batch)
    expected = literal_loss(networks[1], batch)
    expected.backward()
    close(loss, expected.detach().double(), 1e-5, "loss")
    for (name, one), other in zip(networks[0].named_parameters(), networks[1].parameters(), strict=True):
        grad = torch.zeros_like(other) if other.grad is None else other.grad
        close(one.grad, grad, 1e-5, f"gradient of {name}")


@pytest.mark.parametrize("thought_from", [1, 2, 4, None])
@pytest.mark.parametrize("blocks", ["alternate", "self"])
def test_thoughts_from_any_block(blocks, thought_from):
    network, batch = build(blocks=blocks, thought_from=thought_from), streams(RAGGED)
    close(trained(network, batch), literal_loss(network, batch).detach().double(), 1e-5, "loss")


@pytest.mark.parametrize("settings", [{"memory": 0}, {"memory": 0, "seed": False}, {"memory": 1}, {"detach": True}])
@pytest.mark.parametrize("blocks", KINDS)
def test_ablations_are_the_sentence_loop(blocks, settings):
    assert_is_the_sentence_loop(blocks=blocks, **settings)


@pytest.mark.parametrize("blocks", KINDS)
def test_recomputation_draws_the_same_masks_bit_by_bit(blocks):
    networks = [build(blocks=blocks, dropout=SOME).float() for _ in range(2)]
    networks[1].recompute = True
    batch = streams(RAGGED, key=7)
    losses = [trained(network, batch) for network in networks]
    assert torch.equal(*losses)
    for (name, one), other in zip(networks[0].named_parameters(), networks[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_masks_are_a_function_of_the_key_and_the_text():
    network, batch = build(dropout=SOME), streams(RAGGED, key=7)
    state = torch.get_rng_state()
    loss = trained(network, batch)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    assert trained(network, batch) == loss
    assert trained(network, replace(batch, key=8)) != loss
    assert trained(network, replace(batch, documents=[9, *batch.documents[1:]])) != loss  # another micro-batch
    assert trained(network, replace(batch, key=None)) == trained(build(), batch)
    with torch.no_grad():
        assert torch.equal(network.score(batch), network.score(replace(batch, key=None)))


def test_every_phase_and_step_draws_masks_of_its_own(monkeypatch):
    places = []
    told = lambda key, device, *place: (places.append(place), drawn(key, device, *place))[1]
    monkeypatch.setattr(gestalt_reading, "drawn", told)
    trained(build(dropout=SOME), streams(RAGGED, key=7))
    assert len(places) == len(set(places)) == 1 + max(map(len, RAGGED)) + 1  # embeddings, sentence steps, one chunk


def test_tokens_are_dropped_from_text_alone_at_their_rate_and_by_place():
    text, x = torch.arange(8000) % 2 == 0, torch.ones(8000, 2)

    def dropped_at(*place):
        with drawn(7, x.device, *place):
            return (tokens_dropped(x, 0.3, text) == 0).all(1)

    out = dropped_at("sentences", 1)
    assert not out[~text].any() and out[text].float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(out, dropped_at("sentences", 1))
    assert not torch.equal(out, dropped_at("sentences", 2)) and not torch.equal(out, dropped_at("embedding"))


def test_dropouts_of_tokens_and_thoughts_are_warmed_in():
    own = {"residual": 0.0, "attention": 0.0}
    for rates in ({"token": 1.0, "thought": 0.0}, {"token": 0.0, "thought": 1.0}):
        network, batch = build(dropout=GestaltDropout(**own, **rates)), streams(RAGGED, key=7)
        plain = trained(network, replace(batch, key=None))
        assert trained(network, replace(batch, dropout=0.0)) == plain
        assert trained(network, batch) != plain


def rates(**own):
    return NO_DROPOUT.model_copy(update=own)


def read_by_modules(network, batch, *chosen):
    """Everything that the modules of these names read in one pass, in the order of their calls; and hidden states."""
    told = []
    for name, module in network.named_modules():
        if name.endswith(chosen):
            module.register_forward_pre_hook(lambda module, args: told.append(args[0]))
    return told, network(network.embed(batch.tokens), batch)[0]


def test_tokens_are_dropped_with_their_position_and_nothing_else_is():
    """Not [BOS], not the thought in its place, not [EOS], not a document end; what stays is not scaled up."""
    batch = streams([[5, 4], [6]], key=7)
    for rate in (0.5, 1.0):
        network = build(positions="learned", dropout=rates(token=rate))
        (first, second), _ = read_by_modules(network, batch, "stack.0")
        (thought, _), *_ = thoughts_of(network, batch)  # the same masks
        table, places = network.table.weight, network.places.weight
        text, begin, end = table[batch.tokens], table[network.begin] + places[0], table[network.end]
        starts, ends = [begin, begin], [end + places[6], end + places[7]]
        whole = [*starts, *(text[:5] + places[1:6]), *(text[9:] + places[1:7]), *ends]
        later = [thought[0] + places[0], *(text[5:9] + places[1:5]), end + places[5]]
        is_dropped = []
        for found, expected in zip((*first[0], *second[0]), (*whole, *later), strict=True):
            is_dropped.append(not found.any())
            assert is_dropped[-1] or torch.equal(found, expected)
        may = torch.tensor([0, 0, *[1] * 5, *[1] * 5, 0, 0, 0, 0, *[1] * 3, 0, 0]).bool()
        assert not torch.tensor(is_dropped)[~may].any()
        assert (rate == 1.0) == torch.tensor(is_dropped)[may].all() and any(is_dropped)


@pytest.mark.parametrize("blocks", KINDS)
def test_at_a_residual_rate_of_one_nothing_enters_and_nothing_is_added(blocks):
    """Embeddings, what attention of both kinds and the MLP add, and the inner channels of the MLP."""
    network = build(blocks=blocks, dropout=rates(residual=1.0), **PAPER)
    told, hidden = read_by_modules(network, streams(RAGGED, key=7), *(f"stack.{i}" for i in range(4)), "mlp.down")
    assert told and not any(x.any() for x in told)
    assert torch.equal(hidden, network.norm(torch.zeros_like(hidden)))


@pytest.mark.parametrize("blocks", KINDS)
def test_at_an_attention_rate_of_one_nothing_is_read_of_own_tokens_or_thoughts(blocks):
    network = build(blocks=blocks, dropout=rates(attention=1.0))
    told, _ = read_by_modules(network, streams(RAGGED, key=7), ".output")
    assert told and not any(x.any() for x in told)


def test_at_a_rate_of_one_a_thought_is_what_its_bias_says():
    """Dropout comes behind the norm and before the projection."""
    network = build(dropout=rates(thought=1.0), **PAPER)
    bias = network.thought.project.bias
    for thoughts, _ in thoughts_of(network, streams(RAGGED, key=7)):
        close(thoughts, (bias / bias.norm()).expand_as(thoughts), EXACT, "thoughts")


def test_rates_of_tokens_and_thoughts_alone_are_multiplied_on_the_way():
    network, batch = build(dropout=SOME), streams(RAGGED, key=7, dropout=0.5)
    reading = Reading(network, network.layout(batch, torch.device("cpu")), batch)
    assert (reading.residual, reading.attention, reading.token, reading.thought) == (0.1, 0.2, 0.15, 0.075)


@pytest.mark.parametrize("blocks", KINDS)
def test_memory_grows_by_inputs_of_steps_alone_with_recomputation(blocks):
    """Bytes kept for the backward, for 4 sentence steps and for 12."""

    def kept(recompute, steps):
        network, batch = build(blocks=blocks, depth=8, thought_from=7).float(), streams([[7] * steps] * 4)
        network.recompute, seen = recompute, {}
        pack = lambda x: seen.setdefault(x.untyped_storage().data_ptr(), (x.untyped_storage().nbytes(), x)) and x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            network(network.embed(batch.tokens), batch)
        return sum(size for size, _ in seen.values())

    growth, without = (kept(recompute, 12) - kept(recompute, 4) for recompute in (True, False))
    assert growth < 0.5 * without


@pytest.mark.parametrize("settings", [{}, {"blocks": "self"} | PAPER, {"blocks": "parallel", "seed": False}])
def test_bfloat16_products_have_few_sizes_on_a_cpu(monkeypatch, settings):
    """And what fills them up has no part in states or gradients."""

    def read(dtype):
        network, batch, sizes = build(**settings).float(), streams(RAGGED), set()
        for block in network.stack:
            block.register_forward_pre_hook(lambda block, x: sizes.add(x[0].shape[1]))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            hidden, _ = network(network.embed(batch.tokens), batch)
        (hidden.float() ** 2).sum().backward()
        return sizes, [hidden.float(), *(p.grad for p in network.parameters() if p.grad is not None)]

    rounded, found = read(torch.bfloat16)
    assert all(size % gestalt_reading.ROUND == 0 for size in rounded)
    monkeypatch.setattr(gestalt_reading, "ROUND", 1)
    exact, expected = read(torch.bfloat16)
    assert any(size % 16 for size in exact) and len(rounded) < len(exact) and read(torch.float32)[0] == exact
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("blocks", KINDS)
def test_no_value_is_read_on_the_host_while_a_batch_is_read(blocks, monkeypatch):
    """On tensors that have shapes alone: asking one for a value, or for where it is not 0, is an error."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none to leave on this device
    network, given = build(blocks=blocks, dropout=SOME).float().to("meta"), streams(RAGGED, key=3)
    network.recompute = True
    layout = network.layout(given, torch.device("meta"))
    x = torch.empty(len(given.tokens), 16, device="meta", requires_grad=True)
    hidden, lengths = Reading(network, layout, replace(given, tokens=given.tokens.to("meta"))).run(x)
    (hidden.sum() + lengths.sum()).backward()
    assert x.grad is not None


# ---- gradients and memory --------------------------------------------------------------------------------------


def later_loss_by_first_thought(network, lengths):
    """Norm of the gradient of the last sentence's scores with respect to the first thought."""
    batch, told = streams([lengths]), []
    network.thought.register_forward_hook(lambda module, args, out: told.append(out[0]))
    hidden, _ = network(network.embed(batch.tokens), batch)
    own = slice(-lengths[-1] - 1, None)
    last = torch.nn.functional.cross_entropy(hidden[0][own] @ network.head.T, batch.targets[0][own])
    (grad,) = torch.autograd.grad(last, told[0], allow_unused=True)
    return 0.0 if grad is None else grad.norm().item()


@pytest.mark.parametrize("blocks", KINDS)
def test_gradients_reach_the_first_sentence_through_chains_of_thoughts(blocks):
    """Four memory slots, eight sentences: the first thought is long forgotten."""
    lengths = [3, 4, 2, 5, 3, 2, 4, 3]
    assert later_loss_by_first_thought(build(blocks=blocks, memory=4), lengths) > 0
    assert later_loss_by_first_thought(build(blocks=blocks, memory=4, detach=True), lengths) == 0


def test_detach_cuts_memory_and_seed_alike():
    for settings in ({"memory": 0}, {"seed": False}, {}):
        assert later_loss_by_first_thought(build(**settings), [3, 4]) > 0
        assert later_loss_by_first_thought(build(detach=True, **settings), [3, 4]) == 0


def read_by(network, layer, thoughts):
    """What cross-attention of a layer reads of thoughts (F, C), oldest first, by random queries."""
    lengths, memory = [[2] * (len(thoughts) + 1)], network.config.memory
    layout = Layout(lengths, memory=memory, in_context=False, recurrent=True, device="cpu")
    reader = PackedReader(layout.steps[-1], None, 0.0)
    projected = network.stack[layer].memory.project(thoughts)[None]
    reader.thoughts[layer] = projected, network.ranks([layer], thoughts)[layer]
    q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(1), dtype=thoughts.dtype)
    return reader.remember(layer, q)


def test_ranks_stand_in_keys_alone():
    network = build()
    thoughts = torch.randn(3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = thoughts[[2, 0, 1]]
    assert (read_by(network, 1, thoughts) - read_by(network, 1, turned)).abs().max() > 1e-3
    same = thoughts[:1].expand(3, -1)  # whatever the ranks do to the weights, these sum to one
    value = network.stack[1].memory.project(same)[0, 16:].unflatten(0, (2, 8))
    close(read_by(network, 1, same), value[None, :, None].expand(1, 2, 4, 8), EXACT, "values")
    network.ranks = lambda layers, like: dict.fromkeys(layers, like.new_zeros(3, 16))
    close(read_by(network, 1, thoughts), read_by(network, 1, turned), EXACT, "a permutation without ranks")


def test_thoughts_are_float32_under_autocast():
    head = ThoughtHead(Gestalt.Config(width=32, heads=4))
    v = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    expected = head.double()(v.double())
    with torch.autocast("cpu", torch.bfloat16):
        thoughts = head.float()(v)
    for actual, exact in zip(thoughts, expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=1e-6)
    assert head.bfloat16()(v.bfloat16())[0].dtype == torch.float32


def test_a_thought_has_length_one_however_short_r_is_and_zero_stays_zero():
    head, v = ThoughtHead(Gestalt.Config(width=32, heads=4)).double(), torch.eye(32, dtype=torch.float64)[:3]
    head.project.weight.data *= 1e-6
    head.project.bias.data.zero_()
    thoughts, lengths = head(v)
    assert (lengths < 1e-4).all()
    close(thoughts.norm(dim=1), torch.ones(3, dtype=torch.float64), 1e-6, "length")
    head.project.weight.data.zero_()
    assert not head(v)[0].any()


def test_ranks_have_the_length_of_a_thought():
    table = rank_table(5, 16)
    close(table.norm(dim=1), torch.ones(5), 1e-6, "length")
    close(table[0], (2 / 16) ** 0.5 * torch.tensor([0.0, 1.0] * 8), 1e-6, "rank 0")


def test_an_empty_memory_adds_exactly_nothing():
    """Also of one row beside rows that remember: bias, gate and all."""
    network = build(bias=True)
    block = network.stack[3]
    finish, seen = type(block).finish, []

    def told(self, x, y, filled, drop=0.0):
        seen.append((self.memory.increment(y, filled), filled))
        return finish(self, x, y, filled, drop)

    type(block).finish = told
    try:
        network(network.embed(streams(RAGGED).tokens), streams(RAGGED))
    finally:
        type(block).finish = finish
    increment, filled = seen[-1]  # the chunk of a later block, all sentences side by side
    assert filled.any() and not filled.all()
    assert not increment[0][~filled].any()
    assert increment[0][filled].abs().amin(-1).min() > 0


def test_each_part_of_its_blocks_is_compiled_once():
    """Whatever the lengths of sentences, whether rows are filled up, and where memory is empty."""
    torch._dynamo.reset()
    network, counter = build().bfloat16(), CompileCounter()
    network.compile(counter)
    for lengths in ([[7], [7]], RAGGED, [[6, 4, 2], [7]]):
        batch = streams(lengths)
        hidden, _ = network(network.embed(batch.tokens), batch)
        network.nll(hidden, batch.targets)[0].backward()
    assert counter.frame_count == 4, "parts: two of each kind of block"


def test_both_attentions_side_by_side_are_self_attention_where_memory_is_empty():
    both, plain = build(blocks="parallel", bias=True), build(blocks="self", memory=0, bias=True)
    plain.load_state_dict(both.state_dict(), strict=False)
    batch = streams([[5], [3]])
    assert torch.equal(*(network(network.embed(batch.tokens), batch)[0] for network in (both, plain)))


def test_memory_is_first_in_first_out():
    layout = build().layout(streams(RAGGED), "cpu")
    assert layout.widths == [4, 3, 3, 2, 2, 1, 1]
    assert [layout.filled(t) for t in range(7)] == [0, 1, 2, 3, 3, 3, 3]
    (chunk,) = layout.chunks
    begins = [0, 3, 6, 8, 10, 11]  # of the thoughts of each step that a next sentence reads
    rows = chunk.windows[sum(layout.widths[:5]) :].tolist()  # the longest stream, sentences 5 and 6
    assert rows == [[begins[j] for j in (2, 3, 4)], [begins[j] for j in (3, 4, 5)]]


def test_chunks_of_more_than_one_step_count_the_thoughts_that_lie_in_them(monkeypatch):
    for lengths in ([[25] * 60] * 13, [[60] * 50] * 60):
        layout = Layout(lengths, memory=40, in_context=True, recurrent=True, device="cpu")
        sizes = [len(rows.places) for rows in layout.chunks]
        assert all(size <= CHUNK or len(group) == 1 for size, group in zip(sizes, layout.groups, strict=True))
        assert min(a + b for a, b in pairwise(sizes)) > CHUNK
    monkeypatch.setattr(gestalt_layout, "CHUNK", 30)
    assert 1 < len(build(blocks="self").layout(streams(RAGGED), "cpu").chunks) < 7
    assert_is_the_sentence_loop(blocks="self")


def test_exchanged_memories_change_scores_and_only_of_those_who_read_them():
    network = build(seed=False)
    batch = streams([[4, 4, 4], [4, 4, 4]])
    mixed = batch.tokens.view(2, 3, 4).clone()
    mixed[:, 0] = mixed[[1, 0], 0]
    scores, other = (network.score(replace(batch, tokens=x)).view(2, 3, 5) for x in (batch.tokens, mixed.flatten()))
    assert (scores[:, 1:] - other[:, 1:]).abs().min() > 0


# ---- parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", KINDS)
def test_weights_are_drawn_as_in_the_release_and_gates_are_open(blocks):
    """Queries, keys and values each on their own square, everything else N(0, 0.02)."""
    C, settings = 96, {"depth": 2, "thought_from": 1, "width": 96, "init": "xavier_qkv", "cap": 64, "memory": 3}
    network = Case("", Gestalt, Gestalt.Config(blocks=blocks, heads=2, **settings, **PAPER)).fresh()
    squares, bound = 0, math.sqrt(3 / C)
    for name, weight in network.named_parameters():
        if weight.ndim == 1:
            is_one = name.endswith("weight")  # of norms and gates
            assert torch.equal(weight, torch.full_like(weight, is_one)), name
        elif name.split(".")[-2] in ("qkv", "q", "kv"):
            for part in weight.split(C):
                assert 0.99 * bound < part.abs().max() <= bound, name
                squares += 1
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=4 / math.sqrt(2 * weight.numel())), name
    assert squares == {"alternate": 6, "self": 6}.get(blocks, 12)
    lengths = network(network.embed(streams(RAGGED).tokens), streams(RAGGED))[1]["thought_length"] / sum(
        map(len, RAGGED)
    )
    assert lengths.item() == pytest.approx(0.02 * C, rel=0.1)


def test_matrices_and_tables_decay_and_norms_biases_and_gates_do_not():
    network = build(blocks="self_then_cross", **PAPER)
    decays = {name for name, role in roles(network).items() if role in DECAYED}
    assert decays == {name for name, parameter in network.named_parameters() if parameter.ndim > 1}


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_every_norm_adds_what_the_settings_say(kind):
    network = build(blocks="self_then_cross", norm=kind, norm_eps=1e-3, bias=kind == "layer")
    norms = [module for module in network.modules() if isinstance(module, nn.RMSNorm | nn.LayerNorm)]
    assert len(norms) == 4 * 3 + 2 and {module.eps for module in norms} == {1e-3}
    assert all(isinstance(module, nn.LayerNorm) and module.bias is not None for module in norms) == (kind == "layer")


# ---- batches ----------------------------------------------------------------------------------------------------


def parts_of(batch, *groups):
    """Micro-batches of the streams in each group, with the totals of the whole."""
    tokens = batch.tokens.split([sum(stream) for stream in batch.lengths])
    targets = batch.targets[0].split([sum(stream) + len(stream) for stream in batch.lengths])
    empty = torch.empty(0, dtype=torch.long)
    return [
        replace(
            batch,
            tokens=torch.cat([empty, *(tokens[i] for i in group)]),
            targets=torch.cat([empty, *(targets[i] for i in group)])[None],
            lengths=[batch.lengths[i] for i in group],
            documents=[batch.documents[i] for i in group],
            offsets=[batch.offsets[i] for i in group],
        )
        for group in groups
    ]


@pytest.mark.parametrize("reduction", ["steps", "tokens"])
@pytest.mark.parametrize("groups", [[(3, 1, 0, 2)], [(0, 2), (3, 1)], [(0,), (1,), (2,), (3,)], [(0, 1, 2, 3), ()]])
def test_order_and_micro_batches_change_nothing(groups, reduction):
    """Some of them without a stream, or with fewer sentence steps than others."""
    whole, cut, batch = build(reduction=reduction), build(reduction=reduction), streams(RAGGED)
    loss = trained(whole, batch)
    close(trained(cut, *parts_of(batch, *groups)), loss, 1e-6, "loss")
    for (name, one), other in zip(cut.named_parameters(), whole.named_parameters(), strict=True):
        close(one.grad, other[1].grad, 1e-6, f"gradient of {name}")


def test_streams_do_not_hear_of_each_other():
    network, batch = build(), streams(RAGGED)
    scores = network.score(batch)[0].split([sum(stream) + len(stream) for stream in RAGGED])
    for i, part in enumerate(parts_of(batch, *((i,) for i in range(4)))):
        close(network.score(part)[0], scores[i], EXACT, f"stream {i} alone")


def test_sentence_ends_weigh_what_they_should_and_document_ends_count_in_full():
    network, lengths = build(hinge=0.0), [[2, 3]]
    batch = streams(lengths, end_weight=0.25)
    nll = network.score(batch)[0].detach()
    first, second = nll[:3], nll[3:]
    w = torch.tensor([1, 1, 0.25]), torch.tensor([1, 1, 1, 0.25])
    expected = sum((weights * part).sum() / weights.sum() for weights, part in zip(w, (first, second), strict=True))
    close(trained(network, batch), expected.double(), 1e-6, "loss of steps")
    everything = torch.cat(w)
    expected = (everything * nll).sum() / everything.sum()
    close(trained(with_settings(network, reduction="tokens"), batch), expected.double(), 1e-6, "loss of tokens")


def test_the_hinge_is_a_mean_over_rows():
    batch = streams([[2, 3], [4, 1], [3]])
    losses = [trained(build(hinge=weight), batch) for weight in (0.0, 0.5)]
    network = build(hinge=0.5)
    told = []
    network.thought.register_forward_hook(lambda module, args, out: told.append(out[1]))
    _, terms = network(network.embed(batch.tokens), batch)
    close(terms["thought_length"], torch.cat(told).sum(), EXACT, "sum of lengths, for the record")
    off = lambda r: (0.9 - r).clamp_min(0) ** 2 + (r - 1.1).clamp_min(0) ** 2
    expected = 0.5 * sum(off(lengths).mean() for lengths in told)
    close(losses[1] - losses[0], expected.detach().double(), 1e-6, "hinge")


@pytest.mark.parametrize("lengths", [RAGGED, [[3], [5]], []], ids=["ragged", "alone", "none"])
@pytest.mark.parametrize("settings", [{}, {"detach": True}, {"memory": 0, "seed": False}, {"blocks": "self"}], ids=str)
def test_what_serves_nothing_has_a_gradient_of_zero(settings, lengths):
    """Other processes wait for one, and a checkpoint holds what the optimiser has of every parameter."""
    network = build(hinge=0.0, **settings)
    trained(network, streams(lengths))
    assert not [name for name, parameter in network.named_parameters() if parameter.grad is None]


# ---- the ruler --------------------------------------------------------------------------------------------------


def test_a_boundary_has_a_probability_and_a_beginning_has_none():
    network = build()
    assert len(network.head) == VOCABULARY + 1 and network.begin == VOCABULARY + 1
    batch = streams([[3, 2]])
    every = [network.score(replace(batch, targets=torch.full_like(batch.targets, i))) for i in range(VOCABULARY + 1)]
    close(torch.cat(every).neg().exp().sum(0), torch.ones(7, dtype=torch.float64), EXACT, "sum over text and [EOS]")
    whole = build(boundary_logits="all")  # in sessions, too
    assert len(whole.head) == whole.session(1).prefill([[5]]).shape[1] == VOCABULARY + 3


def test_scores_depend_on_earlier_sentences_and_never_on_later_ones():
    network, batch = build(), streams([[3, 4, 2, 5, 3, 2]])
    x = network.embed(batch.tokens).detach().requires_grad_()
    nll = network.score(batch, x)[0]
    label = 0
    for t, n in enumerate(batch.lengths[0]):
        for _ in range(n + 1):
            (grad,) = torch.autograd.grad(nll[label], x, retain_graph=True)
            seen = grad.abs().amax(-1) > 0
            before = label - t  # tokens before this label
            assert not seen[before:].any(), f"label {label} reads later tokens"
            assert t == 0 or seen[0], f"label {label} does not read the first token"
            label += 1


# ---- contained baseline -----------------------------------------------------------------------------------------


def test_without_memory_and_with_documents_of_one_sentence_it_is_the_decoder():
    """Fed [BOS] and the document, asked the document and its end."""
    settings = {"blocks": "self", "memory": 0, "seed": False, "hinge": 0.0, "cap": 20, "positions": "learned",
                "norm": "layer", "bias": True, "mlp": "gelu"}  # fmt: skip
    network = build(**settings)
    shared = {key: value for key, value in settings.items() if key in Decoder.Config.model_fields}
    config = Decoder.Config(width=16, heads=2, depth=4, **shared)
    decoder = Decoder(config, VOCABULARY + 1, 22).double()
    state = network.state_dict()
    decoder.load_state_dict({name: state[name] for name in decoder.state_dict()})
    lengths = [[9], [20], [1]]
    batch = streams(lengths, end_weight=1.0)
    loss = trained(network, batch)

    from tandem.corpus import IGNORE, Batch

    tokens, targets = torch.zeros(3, 22, dtype=torch.long), torch.full((3, 22), IGNORE)
    for row, (text, (n,)) in enumerate(zip(batch.tokens.split([9, 20, 1]), lengths, strict=True)):
        tokens[row, : n + 1] = torch.cat((torch.tensor([network.begin]), text))
        targets[row, : n + 1] = torch.cat((text, torch.tensor([network.end])))
    expected = trained(decoder, Batch(tokens, targets, torch.zeros_like(tokens)))
    close(loss, expected, 1e-6, "loss")
    same_gradients(decoder, network, "the decoder's")


# ---- sessions ---------------------------------------------------------------------------------------------------


def full_logits(network, sentences, seed_of_text=3):
    """Log-probabilities of what follows each position of some sentences, the last of them open, by the definition."""
    thoughts, found = [], []
    for i, text in enumerate(sentences):
        read = literal_sentence(network, torch.tensor(text), thoughts, closed=i + 1 < len(sentences))
        found.append((read.hidden @ network.head.T).log_softmax(-1))
        thoughts.append(read.thought)
    return found


@pytest.mark.parametrize("blocks", KINDS)
@torch.no_grad()
def test_a_session_closes_sentences_where_it_is_told_to(blocks):
    """Token by token, and prompts in pieces, past two evictions."""
    network = build(blocks=blocks, memory=2)
    generator = torch.Generator().manual_seed(2)
    sentences = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 5, 2, 4, 3, 6)]
    expected = full_logits(network, sentences)
    flat = [(t, i, token) for t, text in enumerate(sentences) for i, token in enumerate([*text, network.end])][:-1]
    for first in (1, 4, 10, 18):
        session = network.session(1)
        logits = session.prefill([[token for _, _, token in flat[:first]]])
        for t, i, token in [*flat[first:], (None, None, None)]:
            at, place, last = flat[first - 1] if t is None else flat[flat.index((t, i, token)) - 1]
            where = (at + 1, 0) if last == network.end else (at, place + 1)
            if t is None:
                where = (len(sentences) - 1, len(sentences[-1]))
            close(logits.log_softmax(-1)[0].double(), expected[where[0]][where[1]], FLOAT, f"after {where}")
            if t is not None:
                logits = session.step(torch.tensor([token]))


@pytest.mark.parametrize("seed", [True, False])
@pytest.mark.parametrize("blocks", KINDS)
@torch.no_grad()
def test_a_session_without_memory_reads_what_the_definition_says(blocks, seed):
    network = build(blocks=blocks, memory=0, seed=seed, bias=True)
    generator = torch.Generator().manual_seed(2)
    sentences = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 5, 2, 4, 3)]
    *closed, last = sentences
    prompt = [token for text in closed for token in (*text, network.end)]
    expected = full_logits(network, sentences)[-1]
    at_once, stepping = network.session(1), network.session(1)
    for token in prompt:
        stepped = stepping.step(torch.tensor([token]))
    for i, logits in enumerate((at_once.prefill([prompt]), *(at_once.step(torch.tensor([token])) for token in last))):
        close(logits.log_softmax(-1)[0].double(), expected[i], FLOAT, f"after {i} tokens")
        close(stepped.double(), logits.double(), FLOAT, "token by token")
        if i < len(last):
            stepped = stepping.step(torch.tensor([last[i]]))


@torch.no_grad()
def test_rows_stand_at_different_sentences_and_full_ones_are_closed():
    network = build(memory=2)
    generator = torch.Generator().manual_seed(4)
    texts = torch.randint(1, VOCABULARY, (3, 30), generator=generator).tolist()
    for row, every in ((1, 4), (2, 6)):  # row 0 is never told
        texts[row] = [network.end if i % every == every - 1 else token for i, token in enumerate(texts[row])]
    together, alone = network.session(3), [network.session(1) for _ in texts]
    together.prefill([text[: 2 + row] for row, text in enumerate(texts)])
    for row, session in enumerate(alone):
        session.prefill([texts[row][: 2 + row]])
    for step in range(20):
        logits = together.step(torch.tensor([text[2 + row + step] for row, text in enumerate(texts)]))
        for row, session in enumerate(alone):
            close(session.step(torch.tensor([texts[row][2 + row + step]]))[0], logits[row], FLOAT, f"row {row}")
    assert alone[0].held[0] == together.held[0] == 2  # 22 tokens, 7 a sentence: a seed and one token are open
    assert together.closed_by_force.tolist() == [session.closed_by_force[0] for session in alone] == [3, 0, 0]
    fork = together.fork(torch.tensor([1, 0]))
    fork.step(torch.randint(1, VOCABULARY, (2, 14), generator=generator))
    assert fork.closed_by_force.tolist() == [2, 5] and together.closed_by_force.tolist() == [3, 0, 0]
    at_once = network.session(3)
    at_once.prefill([text[:23] for text in texts])
    assert at_once.closed_by_force.tolist() == [3, 0, 0]


def test_a_sentence_that_is_full_is_not_closed_twice():
    network, text = build(), list(range(1, 12))
    whole = [*text[:7], network.end, *text[7:]]
    told = network.session(1).prefill([whole])
    assert torch.equal(told, network.session(1).prefill([text]))
    for first in (0, 1, 7, 8):
        session = network.session(1)
        logits = session.prefill([whole[:first]]) if first else session.logits
        before = session.fork()
        for token in whole[first:]:
            logits = session.step(torch.tensor([token]))
        close(logits.double(), told.double(), FLOAT, f"prefill of {first}, then token by token")
        assert session.known[0] == 1
        if first == 7:
            assert torch.equal(before.step(torch.tensor([network.end])), before.logits)


def test_a_sentence_without_tokens_is_none():
    network = build()
    told = network.session(1).prefill([[1, 2, 3]])
    assert torch.equal(told, network.session(1).prefill([[network.end, 1, 2, 3]]))  # a prompt cut at its oldest token
    session = network.session(1)
    opened = session.step(torch.tensor([network.end]))
    assert torch.equal(opened, network.session(1).prefill([[network.end]]))
    assert session.known[0] == 0 and torch.equal(session.step(torch.tensor([[1, 2, 3]])), told)


@pytest.mark.parametrize("memory", [1, 2])
def test_forks_share_thoughts_until_one_of_them_closes_a_sentence(memory):
    network = build(memory=memory)
    session = network.session(2)
    session.prefill([[1, 2, network.end, 3], [4, network.end, 5, 6]])
    other, kept = session.fork(), {layer: thoughts.clone() for layer, thoughts in session.thoughts.items()}
    assert kept and all(other.thoughts[layer] is session.thoughts[layer] for layer in kept)
    other.step(torch.tensor([network.end, 7]))
    for layer, thoughts in kept.items():
        assert torch.equal(session.thoughts[layer], thoughts) and not torch.equal(other.thoughts[layer], thoughts)


def test_bytes_are_those_of_thoughts_and_open_positions():
    network = build(memory=2).float()
    session, C = network.session(1), 16
    for token in [*([1] * 3), network.end, 1, 1, network.end, *([1] * 4), network.end, 1]:
        session.prefill([[token]]) if not session.held.any() else session.step(torch.tensor([token]))
    assert session.bytes == 4 * (2 * 2 * C * 2 + 2 * 2 * C * 2)  # two blocks each; two thoughts, two positions
    assert network.cost().held(3, 2) * 4 == session.bytes


def test_generation_reads_the_ends_it_draws_and_stops_at_the_document_end():
    network = build(seed_of_weights=3).float()
    network.table.weight.data[network.end] += 2 * network.table.weight.data[network.end].sign()
    session, closed = network.session(10), []
    network.session = lambda rows: session
    step = session.step
    session.step = lambda tokens: (closed.append((tokens == network.end).any()), step(tokens))[1]
    options, rows = {"sampler": Sampler(Sampler.Config()), "max_tokens": 40, "stop": EOS}, [[] for _ in range(10)]
    for row, token in generate(network, [[5, 2]] * 10, row_generators(0, 10), **options):
        rows[row].append(token)
    assert any(closed) and all(token < VOCABULARY for row in rows for token in row)
    assert not any(EOS in row[:-1] for row in rows)
    assert {len(row) == 40 for row in rows if row[-1] != EOS} == {True} and any(len(row) < 40 for row in rows)


# ---- cost -------------------------------------------------------------------------------------------------------


def paper(**settings):
    given = {**PAPER, "depth": 12, "width": 768, "heads": 12}
    with torch.device("meta"):
        return Gestalt(Gestalt.Config(**given | settings), 50_257, 1024)


SWEEP = [(48, 1, 341_814, 342_582), (96, 2, 1_351_782, 1_353_318), (192, 3, 5_376_198, 5_379_270),
         (384, 6, 21_442_950, 21_449_094), (768, 12, 85_648_134, 85_660_422)]  # fmt: skip


@pytest.mark.parametrize(("width", "heads", "gelu", "swiglu"), SWEEP)
def test_parameters_of_the_width_sweep(width, heads, gelu, swiglu):
    for mlp, inner, expected in (("gelu", None, gelu), ("swiglu", 8 * round(width / 3), swiglu)):
        network = paper(width=width, heads=heads, mlp=mlp, mlp_width=inner)
        roles = network.cost().parameters
        assert network.cost().total_parameters - roles["embedding"] == expected
        assert roles["embedding"] == (50_304 + 66) * width


@pytest.mark.parametrize(
    ("blocks", "gelu", "swiglu"),
    [
        ("self_then_cross", 114_014_988, 114_027_276),
        ("parallel", 114_014_988, 114_027_276),
        ("self", 85_648_128, 85_660_416),
    ],
)
def test_parameters_of_the_variants(blocks, gelu, swiglu):
    for mlp, inner, expected in (("gelu", None, gelu), ("swiglu", 2048, swiglu)):
        parameters = paper(blocks=blocks, mlp=mlp, mlp_width=inner).cost().parameters
        assert sum(parameters.values()) - parameters["embedding"] == expected


def test_parameters_by_role():
    roles, named = paper().cost().parameters, dict(paper().named_parameters())
    assert sum(roles.values()) == 124_332_294 and roles["gate"] == 6 and roles["norm"] == 39_936
    count = lambda *words: sum(p.numel() for name, p in named.items() if any(word in name for word in words))
    assert count("qkv", "output", "memory.q.", "memory.kv.") == 28_348_416
    assert count("mlp.up", "mlp.down") == 56_669_184
    assert count("thought.project") == 590_592
    assert count("places") == 50_688


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [("tiny", 304_323), ("width_48", 341_814), ("paper", 85_648_134), ("in_context", 85_648_128)],
)
def test_parameters_of_the_recipes(recipe, parameters):
    with torch.device("meta"):
        found = Gestalt(load(f"gestalt/{recipe}").network, 50_257, 1024).cost().parameters
    assert sum(found.values()) - found["embedding"] == parameters


def test_parameters_of_the_published_opponent():
    with torch.device("meta"):
        found = Decoder(load("gestalt/gpt2").network, 50_257, 1024).cost().parameters
    assert sum(found.values()) - found["embedding"] == 85_056_000


STREAM = [25] * 30
FLOPS = [(48, 1, 2_126_863_872, 12_852_296_352), (96, 2, 4_740_691_968, 28_626_378_048),
         (192, 3, 11_429_240_832, 68_939_897_472), (384, 6, 30_649_909_248, 184_628_360_448),
         (768, 12, 92_465_528_832, 556_250_982_912)]  # fmt: skip


def cost_of(**settings):
    """With a softmax of 50,304 ids."""
    given = {**PAPER, "depth": 12, "width": 768, "heads": 12}
    with torch.device("meta"):
        return Gestalt(Gestalt.Config(**given | settings), 50_303, 1024).cost()


def multiply_adds(cost):
    """Of a stream, without attention."""
    flops = cost.stream(STREAM)
    return (flops["linear"] + flops["head"]) // 6


@pytest.mark.parametrize(("width", "heads", "work", "training"), FLOPS)
def test_flops_of_a_stream(width, heads, work, training):
    cost = cost_of(width=width, heads=heads)
    assert multiply_adds(cost) == work
    assert sum(cost.stream(STREAM).values()) == training
    assert sum(cost.training(750).values()) == training
    assert cost.stream(STREAM)["attention"] == 14 * width * 135_585


def test_flops_of_longer_streams_and_of_both_attentions_in_a_block():
    assert sum(cost_of(blocks="self_then_cross").stream(STREAM).values()) == 660_433_227_264
    for S, pairs, training in ((78, 538_392, 1_448_318_988_288), (138, 1_052_832, 2_563_521_527_808)):
        found = cost_of().stream([25] * S)
        assert sum(found.values()) == training and found["attention"] == 14 * 768 * pairs
    # 6 M N_C C^2 counts a gradient with respect to the ranks, which do not take one
    assert cost_of().once * 6 // 4 == 849_346_560


def test_without_memory_the_mlps_of_its_blocks_stay_and_nothing_else():
    """Below the thought four blocks of attention and three of an MLP alone, above it two and three."""
    positions, labels, C, S = 810, 780, 48, 30
    lower, upper = (attention * 4 * C**2 + 8 * C**2 * mlps for attention, mlps in ((4, 7), (2, 5)))
    expected = positions * lower + labels * upper + S * C**2 + labels * 50_304 * C
    assert multiply_adds(cost_of(width=C, heads=1, memory=0)) == expected


def test_flops_of_decoding():
    cost = cost_of()
    assert cost.decode(40 * 64 + 11) == 233_957_376
    assert cost.sentence_end(26, 40) == 108_048_384
    assert cost_of(blocks="self").sentence_end(26, 40) == 101_710_848  # the 40 thoughts in context are read, too
    assert 2 * (cost.linear + cost.head) + 4 * cost.pair * cost.keys_at(0, 40) == 233_736_192
    assert cost.held(12, 10) * 2 == 405_504
    assert cost.held(40, 66) * 2 == 1_953_792


# Width, heads, parameters, FLOPs of a row of 1,024, those of thoughts per token of text over it, share after phase 1
DECODER = [(48, 1, 339_360, 21_105_672_192, 0.831, 0.931), (96, 2, 1_342_272, 46_288_207_872, 0.844, 0.876),
           (192, 3, 5_338_752, 108_883_869_696, 0.864, 0.795), (384, 6, 21_294_336, 282_997_555_200, 0.891, 0.694),
           (768, 12, 85_056_000, 826_914_373_632, 0.918, 0.595)]  # fmt: skip


def decoder_cost(width, heads, vocabulary=50_304):
    shape = {"width": width, "heads": heads, "depth": 12, **PAPER}
    with torch.device("meta"):
        cost = Decoder(Decoder.Config.model_validate(shape), 50_257, 1024).cost()
    return replace(cost, head=vocabulary * width)


@pytest.mark.parametrize(("width", "heads", "parameters", "training", "ratio", "share"), DECODER)
def test_the_decoder_beside_it(width, heads, parameters, training, ratio, share):
    decoder, cost = decoder_cost(width, heads), cost_of(width=width, heads=heads)
    assert sum(decoder.parameters.values()) - decoder.parameters["embedding"] == parameters
    assert sum(decoder.training(1024).values()) == training
    found = (sum(cost.stream(STREAM).values()) / sum(STREAM)) / (training / 1024)
    assert round(found, 3) == ratio
    # All steps at once: the blocks behind the thought and the head, keys and values of thoughts left out
    later = (sum(STREAM) + len(STREAM)) * (cost.upper.work + cost.head)
    assert round(later / multiply_adds(cost), 3) == share


def test_a_session_makes_every_thought_also_where_training_makes_none():
    one, other = (cost_of(blocks="self", memory=0, seed=False, hinge=hinge) for hinge in (0.0, 0.01))
    assert multiply_adds(one) < multiply_adds(other) and one.prefill(500) == other.prefill(500)


def test_flops_of_decoding_by_the_decoder():
    assert decoder_cost(768, 12).decode(1023) == 284_884_992


@pytest.mark.parametrize("lengths", [[[5] * 6] * 3, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("blocks", KINDS)
def test_flops_of_a_step_are_those_that_are_run(blocks, lengths):
    network = build(blocks=blocks).float()
    batch, cost = streams(lengths), network.cost()
    matrices, attention = flops_run(lambda: trained(network, batch))
    of_streams = [cost.stream(stream) for stream in lengths]
    assert matrices == sum(one["linear"] + one["head"] for one in of_streams) + cost.once
    # Of rectangles: two products forward and four backward, where cost counts those that a kernel does again, too
    layout = network.layout(batch, torch.device("cpu"))
    cells = lambda rows, of: rows.rows * rows.columns * (of.selfs * rows.columns + of.crosses * rows.windows.shape[1])
    run = sum(cells(rows, cost.lower) for rows in layout.steps) + sum(cells(rows, cost.upper) for rows in layout.chunks)
    assert attention == 12 * cost.pair * run
    assert 14 * cost.pair * run >= sum(one["attention"] for one in of_streams)


# ---- recipes ----------------------------------------------------------------------------------------------------


HOW = {  # the paper's settings, and where it has none the release's
    "network": {"width": 768, "heads": 12, "depth": 12, "mlp": "gelu", "mlp_width": 3072, "norm": "layer",
                "norm_eps": 1e-6, "bias": True, "positions": "learned", "init": "xavier_qkv", "base_width": None,
                "blocks": "alternate", "memory": 40, "cap": 64, "seed": True, "detach": False, "thought_from": 7,
                "hinge": 0.01, "reduction": "steps", "boundary_logits": "eos",
                "dropout": {"residual": 0.1, "attention": 0.2, "token": 0.15, "thought": 0.15},
                "streams": {"sentences": 30, "grow": 12, "every": 5, "end_weight": 0.05, "end_weight_from": 1,
                            "half_dropout_from": 2000, "full_dropout_from": 7000}},
    "corpus": {"vocabulary": 50_257, "sentences": None},
    "batch": {"rows": 20, "context": 1000},
    "optimiser": {"name": "adamw", "lr": 2.5e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01,
                  "max_norm": 1.0, "lr_scale": {}},
    "schedule": {"name": "cosine", "warmup": 0.02, "floor": 0.1, "warmup_from_zero": False},
    "training": {"precision": "float32", "recompute": True},
    "evaluation": {"every": None, "points": 100, "split": "all"},
    "objective": {"name": "next_token"},
}  # fmt: skip


def test_the_papers_recipe_has_its_settings():
    """Fifty epochs of 30 M tokens are 75,000 steps of 20,000, evaluated at every half of an epoch."""
    values = load("gestalt/paper").values
    for section, expected in HOW.items():
        assert {name: values[section][name] for name in expected} == expected
    assert values["budget"] == "1500000000 tokens" and values["corpus"]["train_tokens"] == 30_000_000
    assert Segmentation().cap == 64


OF_SWEEP = ["budget=2500e6 tokens", "corpus.train_tokens=50000000"]
VARIANTS = {
    "self_then_cross": ["network.blocks=self_then_cross"],
    "parallel": ["network.blocks=parallel"],
    "in_context": ["network.blocks=self"],
    "no_memory": ["network.blocks=self", "network.memory=0", "network.seed=false"],
    "detach": ["network.detach=true"],
    "last_block": ["network.thought_from=null"],
    "no_seed": ["network.seed=false"],
    "ends_in_full": ["network.streams.end_weight=1.0"],
    "no_curriculum": ["network.streams.sentences=40", "network.streams.grow=0"],
    "cap_32": ["network.cap=32", "corpus.sentences.cap=32"],
    "width_48": [*OF_SWEEP, "network.width=48", "network.heads=1", "network.dropout.token=0.0"],
    "width_96": [*OF_SWEEP, "network.width=96", "network.heads=2", "network.dropout.token=0.0"],
    "width_192": [*OF_SWEEP, "network.width=192", "network.heads=3"],
    "width_384": [*OF_SWEEP, "network.width=384", "network.heads=6"],
    "common": [
        *("network.norm=rms", "network.bias=false", "network.mlp=swiglu", "network.positions=adjacent"),
        *("network.init=normal", "training.precision=auto"),
    ],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_from_the_papers_recipe_by_what_its_name_says(name):
    assert load(f"gestalt/{name}").values == load("gestalt/paper", VARIANTS[name]).values


@pytest.mark.parametrize("name", ["1m", "3m", "85m"])
def test_in_one_pass_everything_changes_by_shares_of_the_run(name):
    shares = {"every": 0.2, "end_weight_from": 0.1, "half_dropout_from": 0.05, "full_dropout_from": 0.15}
    found = load(f"gestalt/{name}").values["network"]["streams"]
    assert {key: found[key] for key in shares} == shares and found["end_weight"] == 0.05
    assert load(f"gestalt/{name}").corpus.train_tokens is None


def test_the_smallest_recipe_is_the_papers_block():
    c = load("gestalt/tiny").network
    assert (c.depth, c.width, c.heads, c.memory, c.cap, c.thought_from) == (6, 64, 4, 8, 32, 5)
    assert (c.mlp, c.norm, c.bias, c.positions, c.init) == ("gelu", "layer", True, "learned", "xavier_qkv")


def test_the_published_opponent_has_the_same_text_steps_and_rates():
    """In rows of 1,024 tokens."""
    values, own = load("gestalt/gpt2").values, load("gestalt/paper").values
    shared = ("budget", "corpus", "optimiser", "schedule", "training", "evaluation", "objective")
    assert {key: values[key] for key in shared} == {key: own[key] for key in shared}
    assert (values["batch"]["rows"], values["batch"]["context"]) == (20, 1024)
    shape = ("width", "heads", "depth", "mlp", "mlp_width", "norm", "norm_eps", "bias", "positions")
    assert {name: values["network"][name] for name in shape} == {name: own["network"][name] for name in shape}
    assert values["network"]["name"] == "decoder"


def refusal(*overrides):
    with pytest.raises(UserError) as raised:
        load("gestalt/tiny", overrides)
    return str(raised.value)


def test_what_makes_no_sense_is_refused_as_the_recipe_is_read():
    assert "network.cap" in refusal("network.cap=20")
    spans = "corpus.sentences={splitter: every, every: 32, cap: null}"  # the last one of a document holds its end, too
    assert "make it 33" in refusal(spans)
    assert load("gestalt/tiny", [spans, "network.cap=33"]).network.cap == 33
    assert "make it 64" in refusal("corpus.sentences=null")
    assert load("gestalt/tiny", [spans, "network.cap=64"]).network.cap == 64
    assert "make it 16, or write corpus.sentences.cap: 32" in refusal("corpus.sentences.cap=16")
    assert "thought_from" in refusal("network.thought_from=99")
    assert "moe" in refusal("network.moe.experts=4")
    assert "sentences" in refusal("objective.name=superposition")
    assert "weights" in refusal("corpus.sentences.splitter=sat")
    assert "corpus.texts" in refusal("corpus.texts={a.txt: 1, b.txt: 2}")
