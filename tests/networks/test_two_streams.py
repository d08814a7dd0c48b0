"""What is State-Prediction Separation's own; what it shares with all networks is in test_contract.py."""

import math
from itertools import pairwise

import pytest
import torch

from tandem.corpus import Batch
from tandem.generation.generate import generate
from tandem.generation.sampling import Sampler, row_generators
from tandem.networks import sps
from tandem.networks.decoder import Decoder
from tandem.networks.sps import SPS, stream_spans
from tandem.nn.spans import readable
from tandem.recipe import load
from tandem.testing.cases import CONTEXT, VOCABULARY, Case, document, pack, texts
from tandem.testing.costs import flops_run

TINY = SPS.tiny()
TWO_STREAMS = [name for name, config in TINY.items() if len(config.streams) > 1]


def tiny(window=3, persistent="inputs", read="predictions", depth=2, **settings):
    given = {"window": window, "persistent": persistent, "read": read, "depth": depth, **settings}
    return Case("", SPS, SPS.Config(width=32, heads=4, **given)).build()


def hidden_of(network, batch):
    return network(network.embed(batch.tokens), batch)[0]


def both_streams(network, batch):
    """Hidden states of inputs and predictions, (2, B, T, C)."""
    network.whole, seen = True, []
    hook = network.blocks[-1].register_forward_hook(lambda block, args, x: seen.append(x))
    hidden_of(network, batch)
    hook.remove()
    return torch.stack(network.norm(seen[0]).chunk(2))


# ---- the family -----------------------------------------------------------------------------------------------------


def test_without_a_window_the_inputs_are_the_plain_decoder():
    network, batch = tiny(window=0), pack(texts())
    config, plain, _ = SPS.degenerate(network.config)
    expected = Decoder(plain, VOCABULARY, CONTEXT).double()
    expected.load_state_dict({name: x for name, x in network.state_dict().items() if name != "predict.weight"})
    torch.testing.assert_close(both_streams(network, batch)[0], hidden_of(expected, batch), rtol=1e-9, atol=1e-9)
    assert SPS(config, VOCABULARY, CONTEXT).state_dict().keys() == expected.state_dict().keys()


def test_delayed_state_and_reverse_sps_differ_only_in_what_is_read():
    delayed, reverse, batch = (
        tiny(persistent="predictions"),
        tiny(persistent="predictions", read="inputs"),
        pack(texts()),
    )
    assert torch.equal(both_streams(delayed, batch), both_streams(reverse, batch))
    inputs, predictions = both_streams(delayed, batch)
    torch.testing.assert_close(hidden_of(reverse, batch), inputs)
    torch.testing.assert_close(hidden_of(delayed, batch), predictions)


@pytest.mark.parametrize("window", [0, 3])
def test_a_window_is_not_noticed_before_it_ends(window):
    batch = pack(texts())
    short, endless = hidden_of(tiny(window), batch), hidden_of(tiny(None), batch)
    same = ((short - endless).abs().amax(-1) < 1e-9).int()
    index = torch.arange(same.shape[1]) - batch.starts
    assert torch.equal(same, (index <= window).int())


def test_with_a_window_as_long_as_the_row_it_does_not_matter_which_stream_persists():
    batch = pack([[document(20, 1), document(20, 2)]])
    one, other = (hidden_of(tiny(39, persistent), batch) for persistent in ("inputs", "predictions"))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [0, 1, 4])
def test_a_prediction_is_read_for_as_long_as_the_window(window, monkeypatch):
    """With one block, its key and value reach the logits at its own position and the `window` after it."""
    network, batch, at = tiny(window, depth=1), pack([[document(9, 1), document(20, 2)]]), 12
    expected, read = hidden_of(network, batch), sps.StreamReader.__call__

    def disturbed(self, layer, q, k, v):
        noise = torch.zeros_like(k)
        noise[1, :, at] = 3.0  # the row of predictions
        return read(self, layer, q, k + noise, v + noise)

    monkeypatch.setattr(sps.StreamReader, "__call__", disturbed)
    changed = (hidden_of(network, batch) != expected).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == list(range(at, at + window + 1))


@pytest.mark.parametrize("name", TWO_STREAMS)
def test_leaving_out_what_the_last_block_need_not_compute_changes_nothing(name):
    """Values and gradients, keys grouped or not, with and without biases."""
    trimmed, whole = (Case("", SPS, TINY[name]).build() for _ in range(2))
    whole.whole = True
    batch = pack(texts())
    for network in (trimmed, whole):
        hidden = hidden_of(network, batch)
        network.nll(hidden, batch.targets)[0].backward()
        network.seen = hidden.detach()
    torch.testing.assert_close(trimmed.seen, whole.seen, rtol=1e-9, atol=1e-9)
    for one, other in zip(trimmed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_inputs_learn_from_being_read_by_predictions_alone():
    network, batch = tiny(0, depth=1), pack(texts())
    x = network.embed(batch.tokens).detach().requires_grad_()
    network.score(batch, x).sum().backward()
    assert x.grad[batch.targets >= 0].abs().amax(-1).min() > 0


def test_a_restricted_state_reads_no_further_and_leaves_the_network_as_it_was():
    network, batch = tiny(2, depth=1), pack([[document(30, 1)]])
    x = network.embed(batch.tokens).detach().requires_grad_()
    for reader, first in ((network.restricted(5), 15), (network, 0)):
        (grad,) = torch.autograd.grad(reader.score(batch, x)[0, 20], x)
        assert grad[0].abs().amax(-1).nonzero().flatten().tolist() == list(range(first, 21))
    (text,) = (tokens.tolist() for tokens in batch.tokens)
    with torch.no_grad():
        scored = -network.restricted(5).score(batch)[0, 19]
        session = network.restricted(5).session(1)
        session.prefill([text[:19]])
        stepped = session.step(torch.tensor([text[19]])).log_softmax(-1)[0, batch.targets[0, 19]]
    torch.testing.assert_close(stepped.double(), scored, rtol=0, atol=1e-5)  # logits of a session are float32


@pytest.mark.parametrize(
    ("recipe", "persistent", "window", "read"),
    [
        ("1m", "inputs", 64, "predictions"),
        ("two_x_memory", "inputs", None, "predictions"),
        ("delayed_state", "predictions", 64, "predictions"),
        ("reverse_sps", "predictions", 64, "inputs"),
        ("side_read", "inputs", 0, "predictions"),
        ("standard", "inputs", 0, "inputs"),
        *((scale, "inputs", 64, "predictions") for scale in ("xs", "s", "m", "l", "xl")),
    ],
)
def test_recipes_are_the_variants_that_their_names_say(recipe, persistent, window, read):
    network = load(f"sps/{recipe}").network
    assert (network.persistent, network.window, network.read) == (persistent, window, read)


# ---- layout, initialisation, vocabulary -----------------------------------------------------------------------------


def test_all_variants_have_one_layout_and_standard_lacks_the_vector_of_predictions():
    layouts = [{name: x.shape for name, x in tiny(*given).state_dict().items()}
               for given in ((3,), (None,), (3, "predictions"), (3, "predictions", "inputs"))]  # fmt: skip
    assert all(layout == layouts[0] for layout in layouts)
    standard = {name: x.shape for name, x in tiny(0, read="inputs").state_dict().items()}
    assert layouts[0] == standard | {"predict.weight": torch.Size([1, 32])}
    assert SPS(TINY["separated"], VOCABULARY, CONTEXT).cost().parameters["embedding"] == 64 * 32 + 32


@pytest.mark.parametrize(("scheme", "down"), [("scaled_attention", 1.0), ("scaled", 1 / math.sqrt(4))])
def test_parameters_start_as_in_the_paper(scheme, down):
    """At the width of S; the authors' code scales the output of attention with depth, and that of the MLP does not."""
    config = SPS.Config(width=768, heads=12, depth=2, mlp_width=2304, init=scheme)
    network = SPS(config, 2000, 8, torch.Generator().manual_seed(0))
    block = network.blocks[0]
    weights = {block.qkv: 1, block.output: 1 / math.sqrt(4), block.mlp.up: 1, block.mlp.down: down, network.table: 1}
    for module, scale in weights.items():
        assert module.weight.std().item() == pytest.approx(0.02 * scale, rel=0.03)
    assert network.predict.weight.std().item() == pytest.approx(0.02, rel=4 / math.sqrt(2 * 768))
    text = torch.randint(0, 2000, (4, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        nll = network.score(Batch(text[:, :-1], text[:, 1:], torch.zeros(4, 32, dtype=torch.long))).mean().item()
    assert math.log(2000) < nll < math.log(2000) + 0.4


def test_predictions_may_start_from_a_row_of_the_table_but_it_is_never_generated():
    network = tiny(predict_in_vocabulary=True)
    assert network.predict is None and network.head.shape == (64, 32)
    assert torch.equal(network.first_predictions(torch.ones(1, 1, 32))[0, 0], network.table.weight[VOCABULARY])
    network.table.weight.data[VOCABULARY:] *= 1e3  # by far the likeliest
    sampler = Sampler(Sampler.Config(temperature=1.0))
    drawn = [token for _, token in generate(network, [[1, 2, 3]], row_generators(0, 1), sampler=sampler, max_tokens=20)]
    assert len(drawn) == 20 and max(drawn) < VOCABULARY


@pytest.mark.parametrize("from_token", [False, True])
def test_a_prediction_starts_from_the_learned_vector_alone_or_beside_its_token(from_token):
    """Blocks that add nothing show what it starts from."""
    network = tiny(start_from_token=from_token)
    with torch.no_grad():
        for block in network.blocks:
            block.output.weight.zero_()
            block.mlp.down.weight.zero_()
    batch = pack([[document(9, 1)]])
    x = network.embed(batch.tokens)
    expected = network.predict.weight[0] + (x if from_token else torch.zeros_like(x))
    torch.testing.assert_close(network.states(x, network.reader(x, batch)), expected, rtol=0, atol=0)


def test_a_picture_shows_the_spans_of_equation_5():
    shown = {title: readable(span, keys)[0].int().tolist() for title, span, keys in
             SPS.drawing(SPS.Config(window=1), [0, 0, 0, 3])}  # fmt: skip
    causal = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    assert shown == {
        "inputs that inputs read": causal,
        "inputs that predictions read": causal,
        "predictions that inputs read": [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]],
        "predictions that predictions read": [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]],
    }
    assert len(SPS.drawing(TINY["standard"], [0, 0])) == 1


# ---- cost -----------------------------------------------------------------------------------------------------------


def pairs_of(config, starts):
    spans = stream_spans(config, starts)
    return [[int((span.hi - span.lo).sum()) for span in groups] for groups in spans]


@pytest.mark.parametrize("persistent", ["inputs", "predictions"])
@pytest.mark.parametrize("window", [0, 3, 8, 16, None])
def test_pairs_are_those_that_the_spans_allow(window, persistent):
    T, config = 17, SPS.Config(window=window, persistent=persistent, depth=2, width=32, heads=4)
    whole, documents = torch.zeros(1, T, dtype=torch.long), torch.tensor([[0] * 5 + [5] * 12])
    x, p = (sum(groups) for groups in zip(*pairs_of(config, whole), strict=True))
    w = T if window is None else window
    assert x + p == (2 * T**2 + T if window is None else T**2 + 2 * T + 2 * w * T - w * (w + 1))
    read = {"predictions": p, "inputs": x}
    parts = [sum(sum(groups) for groups in pairs_of(config, torch.zeros(1, n, dtype=torch.long))) for n in (5, 12)]
    assert sum(sum(groups) for groups in pairs_of(config, documents)) == sum(parts)
    for stream, last in read.items():
        with torch.device("meta"):
            cost = SPS(config.model_copy(update={"read": stream}), VOCABULARY, T).cost()
        total = (
            2 * x if (window, persistent, stream) == (0, "inputs", "inputs") else x + p + last
        )  # the first: Standard
        assert cost.pair * cost.pairs(T) == 32 * total


PAIRS = {0: 16_785_408, 16: 16_916_208, 64: 17_305_536, 256: 18_816_768, None: 33_558_528, "standard": 8_390_656}


@pytest.mark.parametrize(("window", "pairs"), PAIRS.items())
def test_pairs_of_a_row_of_the_paper(window, pairs):
    config = SPS.Config(window=0, read="inputs") if window == "standard" else SPS.Config(window=window)
    assert sum(map(sum, pairs_of(config, torch.zeros(1, 4096, dtype=torch.long)))) == pairs


SCALES = {  # depth, parameters of the plain decoder, warm-up in millions, training FLOPs of a row, all blocks whole
    "xs": (8, 53_027_328, 50, 2_965_369_257_984),
    "s": (12, 130_665_216, 50, None),
    "m": (24, 378_717_184, 100, None),
    "l": (36, 831_253_760, 100, None),
    "xl": (48, 1_678_081_600, 100, 99_102_316_953_600),
}


@pytest.mark.parametrize("scale", SCALES)
def test_costs_of_the_models_of_the_paper(scale):
    depth, parameters, warmup, flops = SCALES[scale]
    recipe = load(f"sps/{scale}")
    assert recipe.network.init == "scaled_attention" and recipe.network.norm_eps == 1e-6
    assert (recipe.network.head_width, recipe.network.key_heads) == (64, recipe.network.heads)
    adamw = {"name": "adamw", "lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}
    assert recipe.values["optimiser"] | adamw == recipe.values["optimiser"]
    assert recipe.values["schedule"]["name"] == "wsd_by_tokens"
    assert recipe.schedule.warmup == warmup * 10**6 and (recipe.batch.rows, recipe.batch.context) == (96, 4096)
    config, C = recipe.network.model_copy(update={"predict_in_vocabulary": True}), recipe.network.width
    with torch.device("meta"):
        assert SPS(recipe.network, 50_257, 4096).cost().total_parameters == parameters + C
    with torch.device("meta"):
        network = SPS(config, 50_257, 4096)
    cost, T = network.cost(), 4096
    assert cost.total_parameters == parameters
    assert cost.head == 50_304 * C  # the authors' softmax has all rows of the table
    if flops is not None:
        inputs = 8_650_720  # pairs of the stream that the last block leaves out
        assert sum(cost.training(T).values()) == flops - 66 * C**2 * T - 14 * C * inputs
        decode = {512: 196_263_936, 1600: 7_220_121_600}[C]  # at index 1024, with all blocks whole
        assert cost.decode(1024) == decode - 22 * C**2 - 4 * C * (1025 + 64)
    assert 2 * cost.cache(1) == 2 * (2 * 2 * depth * C)  # bfloat16: a state and a prediction
    assert 2 * cost.cache(4096) == 4 * depth * C * (4096 + 64)


def test_training_costs_less_than_the_authors_pay():
    """At scale S with rows of 4,096; their kernels do 2.40 times the work of Standard."""
    T, shape = 4096, {"depth": 12, "width": 768, "heads": 12, "mlp_width": 2304}
    with torch.device("meta"):
        costs = [cls(cls.Config(**shape), 50_257, T).cost() for cls in (SPS, Decoder)]
    lengths = torch.empty(200).log_normal_(6.48, 0.96, generator=torch.Generator().manual_seed(0))  # median 650
    ends = (lengths * 1000 / lengths.mean()).cumsum(0).long()
    rows = range(0, int(ends[-1]) // T * T, T)
    cuts = [[row, *ends[(ends > row) & (ends < row + T)].tolist(), row + T] for row in rows]
    documents = [[b - a for a, b in pairwise(cut)] for cut in cuts]
    for cut, ratio in (([None], 1.736), (documents, 1.703)):  # 1.79 without leaving anything out of the last block
        ours, standard = (sum(sum(cost.training(T, row).values()) for row in cut) for cost in costs)
        assert ours / standard == pytest.approx(ratio, abs=2e-3)


def test_flops_run_are_those_of_the_pairs_that_the_tiles_visit():
    network, T = tiny(5).float(), 200
    batch = pack([[document(T, 1)]])
    reader = sps.StreamReader(network, batch.starts, network.embed(batch.tokens))
    visited = reader.read.both.tiled_pairs + reader.read.one.tiled_pairs  # two blocks: one of both streams
    _, attention = flops_run(lambda: network.nll(hidden_of(network, batch), batch.targets)[0].backward())
    assert attention == 12 * 32 * visited > 12 * 32 * network.cost().pairs(T) > 0


@pytest.mark.parametrize("window", [0, 4, None])
def test_a_session_holds_the_persistent_stream_and_a_window_of_the_other(window):
    network = tiny(window).float()
    session = network.session(1)
    for n in range(1, 12):
        session.step(torch.tensor([n]))
        kept = [(len(cache), len(ring)) for cache, ring in zip(session.caches, session.rings, strict=True)]
        assert kept == [(n, n if window is None else min(n, window))] * 2
        assert session.bytes == 4 * network.cost().cache(n)


def test_two_thousand_tokens_cost_memory_for_the_persistent_stream_only():
    network, text = tiny(3, depth=1).float(), document(2000, 1)
    session, reserved = network.session(1), set()
    for n, token in enumerate(text, 1):
        logits = session.step(torch.tensor([token]))
        if n > 3:
            reserved.add(session.rings[0].kv.shape[3])
            assert session.bytes == 4 * 2 * 32 * (n + 3)
    assert reserved == {64} and session.caches[0].kv.shape[3] <= 4000
    tokens = torch.tensor([text])
    with torch.no_grad():
        full = hidden_of(network, Batch(tokens, tokens, torch.zeros_like(tokens)))
    torch.testing.assert_close(logits, full[:, -1] @ network.head.T, rtol=0, atol=1e-4)


def test_a_prompt_whose_inputs_read_no_prediction_has_one_at_its_end_only():
    network, prompts = tiny(0), [document(9, 1), document(5, 2)]
    seen, session = [], network.session(2)
    network.blocks[0].register_forward_hook(lambda block, args, x: seen.append(tuple(x.shape[:2])))
    logits = session.prefill(prompts)
    assert seen == [(2, 8), (4, 1)]
    for row, prompt in enumerate(prompts):
        stepwise = network.session(1)
        for token in prompt:
            expected = stepwise.step(torch.tensor([token]))
        torch.testing.assert_close(logits[row], expected[0])
    plain = Decoder(Decoder.Config(width=32, heads=4, depth=2), VOCABULARY, CONTEXT).cost()
    assert network.cost().prefill(8) == plain.prefill(8)
