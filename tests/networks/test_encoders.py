"""What the contract does not ask: lengths, counts, FLOPs of the paper, and one task for three networks."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tandem.corpus import IGNORE, Batch, CorruptedRows, Corruption, PrefixRows
from tandem.corpus.corruption import in_one_row
from tandem.networks.cost import Parts
from tandem.networks.decoder import Decoder
from tandem.networks.encoder_decoder import EncoderDecoder, divide
from tandem.nn.spans import readable
from tandem.objectives.prefix_lm import PrefixLM
from tandem.objectives.span_corruption import SpanCorruption
from tandem.recipe import UserError, load
from tandem.testing.cases import EOS, VOCABULARY, Task, cases, document, pack, packed, texts
from tandem.testing.comparing import backward
from tandem.testing.costs import check_cache

HOUSE = next(case for case in cases() if case.name == "encoder_decoder-house")
WIDTHS = [("tuning", 64, 263_104), ("6m", 192, None), ("12m", 256, None), ("25m", 448, None), ("50m", 576, None),
          ("100m", 832, None)]  # fmt: skip


def prefix_batch():
    (batch,) = Task("", PrefixLM(PrefixLM.Config())).batches(texts())
    return batch


@pytest.mark.parametrize("reads_all", [False, True])
def test_positions_are_sorted_by_what_becomes_of_them(reads_all):
    """Documents of contexts 2, 0 and 3 tokens, and generated ones."""
    starts = torch.tensor([[0, 0, 0, 0, 4, 4], [0, 0, 0, 0, 0, 0]])
    blocks = torch.tensor([[0, 0, 2, 2, 4, 4], [0, 0, 0, 3, 3, 3]])
    d = divide(starts, blocks, reads_all)
    if not reads_all:
        assert d.context.tolist() == [0, 1, 6, 7, 8] and d.context_places.tolist() == [0, 1, 0, 1, 2]
    else:  # the first generated one is context, too
        assert d.context.tolist() == [0, 1, 2, 4, 6, 7, 8, 9] and d.context_places.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert d.generated.tolist() == [2, 3, 4, 5, 9, 10, 11] and d.generated_places.tolist() == [0, 1, 0, 1, 0, 1, 2]
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2])
    context, generated = documents[d.context], documents[d.generated]
    assert torch.equal(readable(d.read, len(context))[0], context[:, None] == context)
    assert torch.equal(readable(d.cross, len(context))[0], generated[:, None] == context)
    causal = torch.arange(7)[:, None] >= torch.arange(7)
    assert torch.equal(readable(d.own, 7)[0], (generated[:, None] == generated) & causal)
    if reads_all:
        first = divide(starts, blocks, torch.tensor([[True] * 4 + [False] * 2, [False] * 6]))  # of one document alone
        assert first.context.tolist() == [0, 1, 2, 6, 7, 8] and torch.equal(first.generated, d.generated)


def test_a_document_alone_gives_what_it_gives_in_a_batch_of_gaps():
    network, generator = HOUSE.build(), torch.Generator().manual_seed(0)
    made = [torch.randint(1, VOCABULARY, (n,), generator=generator).numpy() for n in (7, 4, 1, 9, 12, 2)]
    pairs = list(zip(made[::2], made[1::2], strict=True))
    whole, parts = in_one_row(pairs, VOCABULARY + 1), [in_one_row([pair], VOCABULARY + 1) for pair in pairs]
    torch.testing.assert_close(network.score(whole), torch.cat([network.score(p) for p in parts], dim=1))


def test_it_refuses_a_whole_text_and_says_why():
    network = HOUSE.build()
    for ask in (
        lambda: network.score(pack(texts())),
        lambda: network(network.embed(pack(texts()).tokens), pack(texts())),
    ):
        with pytest.raises(UserError, match=r"targets included.*evaluation\.prefix: true"):
            ask()


@pytest.mark.parametrize(("overrides", "reason"), [
    (["evaluation.prefix=false"], "evaluation.prefix = false: network encoder_decoder reads in both directions"),
    (["objective.name=next_token"], "network encoder_decoder reads in both directions"),
    (["objective.name=superposition"], "network encoder_decoder reads in both directions"),
    (["objective.sentinels=101"], "network.sentinels is 100"),
    (["network.name=decoder"], "network decoder has no encoder that could read a text with gaps; encoder_decoder has"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_when_the_recipe_is_read(overrides, reason):
    with pytest.raises(UserError) as error:
        load("encoder_decoder/tiny", overrides)
    assert reason in str(error.value)


def test_generation_starts_from_an_id_of_the_table():
    with pytest.raises(UserError, match=r"network.start = 128: the token table ends at id 127"):
        EncoderDecoder(EncoderDecoder.Config(width=8, heads=2, start=128, sentinels=5), 61, 8)


def test_compiled_blocks_serve_rows_of_any_length():
    torch._dynamo.reset()
    network, counter = HOUSE.build(), CompileCounter()
    network.compile(counter)
    counts = []
    for rows in (texts(), [[document(30, 1)]], [[document(9, 2), document(14, 3)]]):
        batch = CorruptedRows(packed(rows), Corruption(sentinels=5)).batch(0)
        batch = replace(batch, targets=batch.targets.clamp_max(VOCABULARY - 1))
        network.nll(network(network.embed(batch.tokens), batch)[0], batch.targets)[0].backward()
        counts.append((batch.tokens.shape[1], counter.frame_count))
    assert len({length for length, _ in counts}) == 3, counts
    assert {frames for _, frames in counts} == {5}, "parts: two of an encoder's block, three of a decoder's"


def test_texts_are_corrupted_as_the_recipe_says():
    config = SpanCorruption.Config(density=0.3, span=2.0, sentinels=5, sampler="poisson")
    (phase,) = SpanCorruption(config).phases(packed(texts()), steps=3)
    assert phase.view.corruption == config


# ---- the definition, by hand ----------------------------------------------------------------------------------------


def attention(q, k, v, heads, may):
    """Dense; q (M, C), k and v (N, C), all rotated; may (M, N)."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
    score = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~may, -torch.inf)
    return (score.softmax(-1) @ v).transpose(0, 1).flatten(1)


def turned(x, places, heads):
    """(M, C) rotated by adjacent pairs, as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (heads, -1, 2)).contiguous())
    D = x.shape[-1] // heads
    angle = places[:, None] * 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(1)


def by_hand(network, context, generated, first):
    """Hidden states of generated tokens at positions from `first` on, after a context of at least one token."""
    H, E = network.config.heads, network.config.encoder_layers
    places = [torch.arange(len(context)), torch.arange(len(generated)) + first]
    normed = lambda x, weight: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.weight

    def own(block, x, places, may):
        q, k, v = (normed(x, block.attention_norm) @ block.qkv.weight.T).chunk(3, dim=-1)
        return block.output(attention(turned(q, places, H), turned(k, places, H), v, H, may))

    def thought(block, x):
        gate, up = (normed(x, block.mlp_norm) @ block.mlp.up.weight.T).chunk(2, dim=-1)
        return block.mlp.down(gate * gate.sigmoid() * up)

    x, y = network.table.weight[context], network.table.weight[generated]
    for block in network.stack[:E]:
        x = x + own(block, x, places[0], torch.ones(len(x), len(x), dtype=torch.bool))
        x = x + thought(block, x)
    latents = normed(x, network.latents_norm)
    for block in network.stack[E:]:
        y = y + own(block, y, places[1], torch.ones(len(y), len(y), dtype=torch.bool).tril())
        q, (k, v) = block.cross_q(normed(y, block.cross_norm)), block.cross_kv(latents).chunk(2, dim=-1)
        may = torch.ones(len(y), len(x), dtype=torch.bool)
        y = y + block.cross_output(attention(turned(q, places[1], H), turned(k, places[0], H), v, H, may))
        y = y + thought(block, y)
    return normed(y, network.norm)


@pytest.mark.parametrize("positions", ["own", "offset"])
def test_an_encoder_and_a_decoder_are_what_their_definition_says(positions):
    """Their parity files are not in the repository. Two layers of each, large weights, three texts in a row."""
    config = HOUSE.config.model_copy(update={"decoder_layers": 2, "decoder_positions": positions})
    network, generator = replace(HOUSE, config=config).build(), torch.Generator().manual_seed(0)
    for weight in network.parameters():
        weight.data.normal_(0.0, 0.3 if weight.ndim > 1 else 1.0, generator=generator)
    lengths, begins = (11, 12, 17), (4, 1, 15)
    text = torch.randint(1, VOCABULARY, (sum(lengths),), generator=generator)
    starts = torch.tensor([0, 11, 23]).repeat_interleave(torch.tensor(lengths))
    opens = starts + torch.tensor(begins).repeat_interleave(torch.tensor(lengths))
    blocks = torch.where(torch.arange(len(text)) < opens, starts, opens)
    batch = Batch(text[None], text[None], starts[None], blocks=blocks[None])
    with torch.no_grad():
        hidden = network(network.embed(batch.tokens), batch)[0][0]
        for start, length, begin in zip((0, 11, 23), lengths, begins, strict=True):
            context, generated = text[start : start + length].tensor_split([begin])
            expected = by_hand(network, context, generated, begin if positions == "offset" else 0)
            torch.testing.assert_close(hidden[start + begin : start + length], expected, rtol=0, atol=1e-9)


# ---- one task for three networks ------------------------------------------------------------------------------------


def test_three_networks_are_asked_for_the_same_tokens():
    """Identical rows, break points and labels: the batch knows no network, and the counts agree."""
    batch, objective = prefix_batch(), PrefixLM(PrefixLM.Config())
    three = [
        case.build()
        for case in cases()
        if case.name in ("decoder-house", "double_decoder-blocks", "encoder_decoder-house")
    ]
    assert len(three) == 3 and len({objective.count(network, batch)["nll"] for network in three}) == 1
    for network in three:
        asked = batch.targets != IGNORE
        assert torch.equal(network.score(batch) != 0, asked)
        count = objective.count(network, batch)
        loss, sums = objective.loss(network, batch, count)
        torch.testing.assert_close(loss, network.score(batch).sum() / asked.sum())
        torch.testing.assert_close(sums["nll"], network.score(batch).sum())


def test_double_decoder_reads_a_prefix_as_the_partition_with_one_boundary():
    case = next(case for case in cases() if case.name == "double_decoder-blocks")
    network, batch = case.build(), prefix_batch()
    for row, starts in enumerate(batch.starts):
        for start in starts.unique():
            place = (starts == start).nonzero()[:, 0]
            begins = batch.blocks[row, place].unique().tolist()
            assert len(begins) <= 2 and begins[0] == start
    latents = network.latents(network.embed(batch.tokens), batch.starts)
    hidden = network.generated(network.embed(batch.tokens), latents, batch.starts, batch.blocks)
    torch.testing.assert_close(network(network.embed(batch.tokens), batch)[0], hidden, rtol=0, atol=0)
    other = replace(batch, blocks=batch.starts)
    assert not torch.allclose(network.score(other), network.score(batch))


@pytest.mark.parametrize("name", ["double_decoder-authors", "encoder_decoder-theirs", "prefix_decoder-house"])
def test_a_break_point_of_the_row_cuts_each_document_or_the_row_where_documents_are_not_masked(name):
    case = next(case for case in cases() if case.name == name)
    rows = PrefixRows(packed([[document(12, 1), document(9, 2), document(19, 3)]]), scope="row")
    batch = replace(next(b for b in map(rows.batch, range(99)) if b.blocks[0, -1] in range(2, 10)), key=5)
    begin, documents = int(batch.blocks[0, -1]), torch.maximum(batch.blocks, batch.starts)
    assert len(set(documents[0, begin:].tolist())) == 3  # one that is cut, two that ask all they have

    def asked(network, blocks):
        return network(network.embed(batch.tokens), replace(batch, blocks=blocks))[0][:, begin:]

    torch.testing.assert_close(asked(case.build(), batch.blocks), asked(case.build(), documents), rtol=0, atol=1e-12)
    if name.startswith("double"):
        network = replace(case, config=case.config.model_copy(update={"document_mask": False})).build()
        single = torch.where(torch.arange(40) < begin, 0, begin)[None]
        torch.testing.assert_close(asked(network, batch.blocks), asked(network, single), rtol=0, atol=1e-12)
        assert not torch.allclose(asked(network, documents), asked(network, single))


def test_lengths_of_queries_and_keys_of_the_context_change_nothing_with_qk_norm():
    config = HOUSE.config.model_copy(update={"qk_norm": True, "norm_eps": 1e-12})
    network, batch = replace(HOUSE, config=config).build(), prefix_batch()
    before = network.score(batch)
    with torch.no_grad():
        for block in network.stack[network.config.encoder_layers :]:
            block.cross_q.weight *= 3
            block.cross_kv.weight[: len(block.cross_kv.weight) // 2] *= 3
    torch.testing.assert_close(network.score(batch), before)


def test_generation_starts_as_training_and_scores_do():
    """From the last token of the prompt, which is no context; every other start gives other probabilities."""
    text = document(12, 3)
    found = {}
    for start in ("last_token", "bos", 5):
        network = replace(HOUSE, config=HOUSE.config.model_copy(update={"start": start})).build()
        for n in (1, 2, 7):
            blocks = torch.where(torch.arange(12) < n - 1, 0, n - 1)[None]
            batch = Batch(
                torch.tensor([text]),
                torch.tensor([[*text[1:], IGNORE]]),
                torch.zeros(1, 12, dtype=torch.long),
                blocks=blocks,
            )
            session, nats = network.session(1), network.score(batch)[0].detach()
            logits = session.prefill([text[:n]])
            for i in range(n, 12):
                assert -logits.log_softmax(-1)[0, text[i]].item() == pytest.approx(nats[i - 1].item(), abs=1e-4)
                logits = session.step(torch.tensor([text[i]]))
            found[start, n] = nats[n - 1].item()
    assert len({round(value, 6) for (_, n), value in found.items() if n == 7}) == 3


def test_what_was_cut_out_is_written_from_its_own_start_and_position_whatever_follows_a_prompt():
    """And the encoder reads nothing of it, also where texts with gaps and prompts are in one row."""
    gaps = CorruptedRows(packed([[document(20, 1), document(12, 2)]]), Corruption(sentinels=5)).batch(0)
    prompts = prefix_batch()
    seen, N = [], gaps.tokens.shape[1]
    for start, positions in itertools.product(("last_token", "bos", 5), ("own", "offset")):
        settings = {"start": start, "decoder_positions": positions}
        network = replace(HOUSE, config=HOUSE.config.model_copy(update=settings)).build()
        found = [network(network.embed(batch.tokens), batch)[0] for batch in (gaps, prompts)]
        row = [torch.cat((getattr(gaps, n), getattr(prompts, n)[:1] + N * (n in "starts blocks")), dim=1)
               for n in ("tokens", "targets", "starts", "blocks")]  # fmt: skip
        both = Batch(*row[:3], blocks=row[3])
        together = network(network.embed(both.tokens), both)[0][0]
        torch.testing.assert_close(together, torch.cat((found[0][0], found[1][0])), rtol=0, atol=1e-12)
        seen.append(found)
    for gap, _ in seen[1:]:
        torch.testing.assert_close(gap, seen[0][0], rtol=0, atol=1e-12)
    assert not any(torch.allclose(a, b) for (_, a), (_, b) in itertools.combinations(seen, 2))


def test_what_is_read_of_the_context_is_projected_once():
    network = HOUSE.build()
    calls = []
    for block in network.stack[network.config.encoder_layers :]:
        block.cross_kv.register_forward_hook(lambda *_: calls.append(1))
    session = network.session(1)
    session.prefill([document(9, 1)])
    for token in (1, 2, 3):
        session.step(torch.tensor([token]))
    assert len(calls) == network.config.decoder_layers


def test_a_session_with_an_encoder_begins_with_a_prompt():
    session = HOUSE.build().session(2)
    with pytest.raises(ValueError, match=r"prefill\(\) comes before step\(\)"):
        session.step(torch.tensor([3, 4]))
    assert session.prefill([[1, 2], [3]]).shape[0] == session.step(torch.tensor([3, 4])).shape[0] == 2


# ---- sizes and costs ------------------------------------------------------------------------------------------------


def on_meta(name, vocabulary=32_766):
    recipe = load(name)
    with torch.device("meta"):
        return recipe.choice("network")(recipe.network.model_copy(update={"sentinels": 0}), vocabulary, 2048)


@pytest.mark.parametrize(("size", "C", "count"), WIDTHS)
def test_parameters_of_the_papers_sizes(size, C, count):
    network = on_meta(f"encoder_decoder/paper_{size}")
    L_c, L_d = network.config.encoder_layers, network.config.decoder_layers
    expected = (12 * L_c + 16 * L_d) * C**2 + 2 * C * L_c + 3 * C * L_d + 4 * C
    assert network.cost().total_parameters == 32_768 * C + expected and network.config.width == C
    assert expected == (count or expected)


@pytest.mark.parametrize("size", ["tiny", "1m", "3m"])
def test_our_sizes_have_the_parameters_of_the_decoders(size):
    ours, plain = on_meta(f"encoder_decoder/{size}"), decoder_on_meta(f"decoder/{size}")
    table = 32_768 * ours.config.width
    assert ours.cost().total_parameters - table == pytest.approx(plain.cost().total_parameters - table, rel=2e-3)


def decoder_on_meta(name):
    with torch.device("meta"):
        return Decoder(load(name).network, 32_766, 2048)


@pytest.mark.parametrize("C", [192, 256, 448, 576, 832])
def test_flops_of_the_papers_ledger(C):
    """Three times a forward without halved triangles, T_out 256 beside 2,048: linear parts are ours, pairs theirs."""
    T_in, T_out, L = 2048, 256, 12
    given = {"width": C, "heads": C // 64, "mlp": "gelu_tanh", "sentinels": 0}
    with torch.device("meta"):
        network = EncoderDecoder(EncoderDecoder.Config(encoder_layers=8, decoder_layers=4, **given), 32_766, 2048)
    training = network.cost().training(2048, parts=Parts(T_in, T_out))
    assert training["linear"] == L * (52 * T_in + 28 * T_out) * C**2
    paper = training["linear"] + L * (4 * T_out**2 + 4 * T_in * T_out + 8 * T_in**2) * C
    ratio = paper / (L * (72 * 2048 * C**2 + 12 * 2048**2 * C))
    assert 0.71 < ratio < 0.78 and (C != 256 or ratio == pytest.approx(0.7381, abs=1e-4))
    pairs = 8 * T_in**2 + 4 * (T_out * (T_out + 1) // 2 + T_in * T_out)
    assert training["attention"] == 14 * C * pairs
    assert training["head"] == 6 * 32_766 * C * T_out


@pytest.mark.parametrize("start", ["last_token", "bos", 5])
def test_only_a_prompt_costs_its_last_token_twice(start):
    """Pieces that were cut out start from an id of their own, whatever a text after a prompt starts from."""
    case = next(case for case in cases() if case.name == "encoder_decoder-house")
    cost = replace(case, config=case.config.model_copy(update={"start": start})).build().cost()
    cut, prompt = (cost.training(48, parts=Parts(36, 12, continued)) for continued in (False, True))
    cut["linear"] -= 6 * 12 * case.config.width * (2 + case.config.sentinels)  # their head has these rows, too
    assert cut == case.build().cost().training(48, parts=Parts(36, 12))
    assert (prompt == cut) == (start == "last_token")


@pytest.mark.parametrize("layers", [0, 2])
def test_the_rows_of_sentinels_cost_where_a_piece_is_asked_for(layers):
    case = next(case for case in cases() if case.name == "encoder_decoder-house")
    cost = replace(case, config=case.config.model_copy(update={"encoder_layers": layers})).build().cost()
    cut, prompt = (cost.training(48, parts=Parts(36, 12, continued)) for continued in (False, True))
    assert cut["linear"] - prompt["linear"] == 6 * 12 * case.config.width * (2 + case.config.sentinels)


def test_prefix_lm_pays_for_the_heads_that_are_asked():
    plain = decoder_on_meta("decoder/1m").cost()
    all_asked, half = plain.training(256), plain.training(256, parts=Parts(128, 128))
    assert (half["linear"], half["attention"], 2 * half["head"]) == tuple(all_asked.values())


def test_a_prompt_read_in_both_directions_is_read_so_and_the_rest_causally():
    case = next(case for case in cases() if case.name == "prefix_decoder-house")
    network, text = case.build(), torch.tensor([document(12, 4)])
    batch = Batch(text, text, torch.zeros_like(text), blocks=torch.where(torch.arange(12) < 4, 0, 4)[None])
    x = network.embed(text).detach().requires_grad_()
    hidden = network(x, batch)[0]
    for i in range(12):
        (grad,) = torch.autograd.grad(hidden[0, i].square().sum(), x, retain_graph=True)
        read = (grad.abs().amax(-1) > 0)[0].nonzero()[:, 0].tolist()
        assert read == list(range(max(i, 4) + 1))
    pairs = sum(max(i, 4) + 1 for i in range(12))
    assert network.cost().divided(Parts(4, 8))[1] == pairs and network.cost().prefill_pairs(5) == 25
    ((_, drawn, keys),) = case.network.drawing(case.config, [0] * 12)  # the first six are the prompt
    assert torch.equal(readable(drawn, keys)[0].sum(-1), torch.arange(12).clamp_min(5) + 1)
    other = next(case for case in cases() if case.name == "decoder-house").build(seed=3)
    network.start_from(other)
    plain = replace(batch, blocks=None)
    assert torch.equal(network.score(plain), other.score(plain))
    assert not torch.allclose(network.score(batch), other.score(batch))


def test_without_an_encoder_nothing_is_generated_from_and_nothing_is_held_for_it():
    config = HOUSE.config.model_copy(update={"encoder_layers": 0, "decoder_layers": 2, "start": "bos"})
    check_cache(replace(HOUSE, config=config))


def test_an_empty_context_and_an_empty_batch_have_gradients():
    network = HOUSE.build()
    tokens = torch.tensor([[3, 4, 5, EOS]])
    batch = Batch(
        tokens, torch.tensor([[4, 5, EOS, IGNORE]]), torch.zeros_like(tokens), blocks=torch.zeros_like(tokens)
    )
    network.score(batch).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert not network.stack[0].qkv.weight.grad.any() and network.stack[-1].qkv.weight.grad.any()

    network, task = HOUSE.build(), Task("", SpanCorruption(SpanCorruption.Config(sentinels=5)))
    (batch,) = task.batches([[[EOS]] * 3])  # nothing in it can be cut out
    assert batch.tokens.tolist() == [[EOS, VOCABULARY + 1]] and (batch.targets == IGNORE).all()
    assert backward(network, task.objective, [batch]) == 0
    assert not any(p.grad.any() for p in network.parameters())
