"""Father and son, on a network made by hand that copies what stands at a place, and on tiny ones."""

import warnings
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tandem.analysis.father_son import (
    NAMES,
    FatherSon,
    answers,
    drawn_pairs,
    error_over_names,
    question,
    read_names,
    read_sentences,
    single_tokens,
)
from tandem.corpus import IGNORE, Tokenizer, scoring_rows
from tandem.networks.boundary_decoder import BoundaryDecoder
from tandem.networks.context_ready import ContextReady
from tandem.networks.decoder import Decoder
from tandem.networks.double_decoder import DoubleDecoder
from tandem.networks.encoder_decoder import EncoderDecoder
from tandem.networks.prefix_decoder import PrefixDecoder
from tandem.recipe import UserError

TEXTS = [f"The son of {a} is {b}. The father of {b} is {a}. It was {a}" for a in NAMES[:30] for b in NAMES[:30]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 600)


def measured(network, tokenizer, **options):
    run: Any = SimpleNamespace(network=network, corpus=SimpleNamespace(tokenizer=tokenizer))
    return FatherSon(FatherSon.Config(**options)).measure(run)


class Made:
    """Reads rows of any length."""

    longest, divides, config = None, False, Decoder.Config()

    def scoring(self, store, context, rows):
        return scoring_rows(store, context, rows)


class Copies(Made):
    """Gives the token at a place of the text nearly all probability as the last token."""

    def __init__(self, tokenizer: Tokenizer, place: int):
        self.vocabulary, self.place, self.head = tokenizer.vocabulary, place, torch.zeros(1)

    def score(self, batch):
        copied = batch.tokens.gather(1, (batch.starts + self.place).clamp_max(batch.tokens.shape[1] - 1))
        return torch.where(batch.targets == copied, 0.1, 7.0) * (batch.targets != IGNORE)


def test_margins_of_a_network_that_copies_by_place(tokenizer):
    pair, ids = (NAMES[0], NAMES[1]), single_tokens(list(NAMES[:30]), tokenizer)
    places = [tokenizer.decode([token]) for token in tokenizer.encode(f"The son of {NAMES[0]} is {NAMES[1]}.")]
    father, son = places.index(f" {NAMES[0]}"), places.index(f" {NAMES[1]}")
    for query, sign in (("normal", 1), ("reversed", -1)):
        for between in (0, 1, 4):
            asked = [question(pair, query, between)]
            for place, expected in ((son, sign), (father, -sign)):
                target, distractor = answers(Copies(tokenizer, place), tokenizer, asked, ids, 4)[0]
                assert distractor - target == pytest.approx(expected * 6.9)


def test_what_is_told_of_a_network_that_copies_the_son(tokenizer):
    son = 1 + tokenizer.encode(f"The son of {NAMES[0]} is").size
    found = measured(Copies(tokenizer, son - 1), tokenizer, pairs=40)
    told = ("target", "distractor", "margin", "standard_error", "error")
    for row in found["conditions"]:
        if row["between"] is not None:
            expected = (0.1, 7.0, 6.9, 0, 0) if row["query"] == "normal" else (7.0, 0.1, -6.9, 0, 1)
            assert [row[key] for key in told] == pytest.approx(expected, abs=1e-6)


class Uneven(Copies):
    """Gives every token other nats after every other token at the place."""

    def score(self, batch):
        there = batch.tokens.gather(1, (batch.starts + self.place).clamp_max(batch.tokens.shape[1] - 1))
        return (there * batch.targets % 97 / 10.0) * (batch.targets != IGNORE)


def test_the_standard_error_is_over_names(tokenizer):
    father = tokenizer.encode("The son of").size
    network, ids = Uneven(tokenizer, father), single_tokens(list(NAMES), tokenizer)
    found = measured(network, tokenizer, pairs=40)
    pairs = drawn_pairs(sorted(ids), 40, 0)
    for row in found["conditions"]:
        asked = [question(pair, row["query"], row["between"]) for pair in pairs]
        of_names: dict = {}
        for pair, (target, distractor) in zip(pairs, answers(network, tokenizer, asked, ids, 64), strict=True):
            of_names.setdefault(frozenset(pair), []).append(distractor - target)
        means = {names: sum(both) / 2 for names, both in of_names.items()}
        without = [
            np.mean([mean for names, mean in means.items() if name not in names])
            for name in {name for names in means for name in names}
        ]
        error = sum((mean - np.mean(without)) ** 2 for mean in without) * (len(without) - 1) / len(without)
        assert len(means) == 20 and row["standard_error"] == pytest.approx(error**0.5) != 0
        assert row["error"] == np.mean([margin < 0 for both in of_names.values() for margin in both])


class Frequent(Made):
    """Gives every token a probability of its own, whatever stands before it."""

    def __init__(self, tokenizer: Tokenizer):
        self.vocabulary, self.head = tokenizer.vocabulary, torch.zeros(1)
        self.nats = torch.rand(tokenizer.vocabulary, generator=torch.Generator().manual_seed(0)) * 9

    def score(self, batch):
        return self.nats[batch.targets.clamp_min(0)] * (batch.targets != IGNORE)


def test_how_frequent_names_are_is_neither_margin_nor_its_error(tokenizer):
    found = measured(Frequent(tokenizer), tokenizer, pairs=40)
    for row in found["conditions"]:
        assert (row["margin"], row["standard_error"]) == pytest.approx((0, 0), abs=1e-6) and row["error"] == 0.5


def test_context_and_query_are_one_text_and_no_space_follows(tokenizer):
    asked = question(("Adam", "Alan"), "reversed", 1)
    assert (asked.target, asked.distractor) == ("Adam", "Alan")
    (sentences,) = read_sentences(tokenizer, [asked.sentences])
    text = "The son of Adam is Alan. It rained all morning. The father of Alan is"
    assert [token for sentence in sentences for token in sentence] == tokenizer.encode(text).tolist()
    assert [tokenizer.decode(s) for s in sentences] == [
        "The son of Adam is Alan.",
        " It rained all morning.",
        " The father of Alan is",
    ]
    alone = question(("Adam", "Alan"), "normal", None)
    assert alone.sentences == ["The son of Adam is"] and alone.target == "Alan"


def test_every_pair_is_asked_in_both_orders():
    pairs = drawn_pairs(list("abcdefgh"), 20, seed=1)
    assert len(pairs) == len(set(pairs)) == 20 and {(b, a) for a, b in pairs} == set(pairs)
    assert all(a != b for a, b in pairs) and pairs != drawn_pairs(list("abcdefgh"), 20, seed=2)
    assert len(drawn_pairs(list("abcdefgh"), 1000, seed=1)) == 56
    assert len({father for father, _ in pairs}) > 4  # not the first names of the list


def test_names_are_single_tokens_behind_a_space(tokenizer, tmp_path):
    kept = single_tokens(list(NAMES), tokenizer)
    assert set(NAMES[:30]) <= set(kept) and len(kept) < len(NAMES)
    assert all(tokenizer.decode([token]) == f" {name}" for name, token in kept.items())
    with pytest.raises(UserError, match=r"0 of 2 names are one token of this tokenizer, and it takes 12"):
        single_tokens(["Xyzzyq", "Qwortle"], tokenizer)
    assert list(single_tokens(NAMES[:12], tokenizer)) == NAMES[:12]
    with pytest.raises(UserError, match=r"11 of 11 names"):
        single_tokens(NAMES[:11], tokenizer)
    path = tmp_path / "names.txt"
    path.write_text("\ufeffAnn\nBob\n\nMary Ann\nBob\n", "utf-8")  # some editors begin a file with a mark
    assert read_names(str(path)) == ["Ann", "Bob"]
    with pytest.raises(UserError, match=r"analysis.names = .*absent.txt: cannot be read"):
        read_names(str(tmp_path / "absent.txt"))


@pytest.mark.parametrize("network", ["decoder", "boundary_decoder", "gestalt", "unseeded"])
def test_networks_of_every_view_are_asked(tokenizer, network):
    from tandem.networks.gestalt import Gestalt

    cls = {"decoder": Decoder, "boundary_decoder": BoundaryDecoder}.get(network, Gestalt)
    config = next(iter(cls.tiny().values()))
    if cls is Gestalt:
        config = config.model_copy(update={"cap": 64, "seed": network == "gestalt"})
    made = cls(config, tokenizer.vocabulary, 64, torch.Generator().manual_seed(0))
    for parameter in made.parameters():
        parameter.data *= 4
    found = measured(made, tokenizer, pairs=12, rows=5)
    asked = [(row["between"], row["seeds"]) for row in found["conditions"]]
    seeds = [True, False] if network == "gestalt" else [False]
    assert asked == 2 * [(None, seeds[0]), *((between, seed) for seed in seeds for between in (0, 1, 4))]
    assert found["pairs"] == 12
    assert found["single_token_share"] == found["names_kept"] / len(NAMES) < 1
    margins = [row["margin"] for row in found["conditions"]]
    assert len(set(margins)) == len(margins)  # every condition is another question
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a legend without a curve
        FatherSon(None).draw(found, axes := Figure().subplots())
    shown = [row["margin"] for row in found["conditions"] if row["seeds"] == seeds[0]]
    curves, alone = axes.lines[:-1], [None, 0, 1, 4]
    assert [line.get_label()[-6:] for line in curves] == [f"{margin:+.3f}" for margin in shown]
    assert [line.get_linestyle() for line in curves] == 4 * ["-"] + 4 * ["--"]
    for line, margin, between in zip(curves, shown, 2 * alone, strict=True):
        assert f"{between} sentences" in line.get_label() or (between is None and "alone" in line.get_label())
        assert len(line.get_xdata()) == 6 + 1 and np.mean(line.get_xdata()[1:]) == pytest.approx(margin)


def test_what_a_network_of_sentences_is_asked_is_an_open_sentence(tokenizer):
    from tandem.networks.gestalt import Gestalt

    config = Gestalt.tiny()["alternate"].model_copy(update={"cap": 64})
    network = Gestalt(config, tokenizer.vocabulary, 64, torch.Generator().manual_seed(0))
    network.double()
    for parameter in network.parameters():
        parameter.data *= 4
    asked, ids = question(("Adam", "Alan"), "reversed", 1), single_tokens(list(NAMES[:30]), tokenizer)
    (sentences,) = read_sentences(tokenizer, [asked.sentences])
    prompt = [token for sentence in sentences[:-1] for token in (*sentence, network.end)] + sentences[-1]
    logits = network.session(1).prefill([prompt])[0].log_softmax(-1)
    expected = [-logits[ids[name]].item() for name in (asked.target, asked.distractor)]
    assert answers(network, tokenizer, [asked], ids, 4)[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("cls", [Decoder, ContextReady, DoubleDecoder, EncoderDecoder, PrefixDecoder])
def test_what_any_other_network_is_asked_is_what_generation_would_say(tokenizer, cls):
    ids = single_tokens(list(NAMES[:30]), tokenizer)
    asked = [question(("Adam", "Alan"), query, between) for query in ("normal", "reversed") for between in (None, 0)]
    for config in cls.tiny().values():
        network = cls(config, tokenizer.vocabulary, 64, torch.Generator().manual_seed(0))
        for parameter in network.parameters():
            parameter.data *= 2
        found = answers(network, tokenizer, asked, ids, 2)
        for one, nats in zip(asked, found, strict=True):
            logits = network.session(1).prefill([network.prompt(tokenizer, " ".join(one.sentences))])[0].log_softmax(-1)
            expected = [-logits[ids[name]].item() for name in (one.target, one.distractor)]
            assert nats.tolist() == pytest.approx(expected, abs=1e-3)


def test_texts_and_sentences_that_a_network_can_not_read_are_refused(tokenizer):
    from tandem.networks.gestalt import Gestalt

    asked, ids = [question(("Adam", "Alan"), "normal", 1)], single_tokens(list(NAMES[:30]), tokenizer)
    (sentences,) = read_sentences(tokenizer, [asked[0].sentences])
    read, longest = sum(map(len, sentences)), max(map(len, sentences))  # the last one and its answer are shorter
    for context, cap in ((read, longest), (read - 1, longest - 1)):
        decoder = Decoder(Decoder.tiny()["gpt2"], tokenizer.vocabulary, context, torch.Generator().manual_seed(0))
        config = Gestalt.tiny()["alternate"].model_copy(update={"cap": cap})
        gestalt = Gestalt(config, tokenizer.vocabulary, 64, torch.Generator().manual_seed(0))
        if cap == longest:
            assert all(answers(network, tokenizer, asked, ids, 4).all() for network in (decoder, gestalt))
            continue
        with pytest.raises(UserError, match=rf"analysis.between: a text has {read} tokens .* positions for {context};"):
            answers(decoder, tokenizer, asked, ids, 4)
        with pytest.raises(UserError, match=rf"network.cap = {cap}: a sentence of this analysis has {longest} tokens"):
            answers(gestalt, tokenizer, asked, ids, 4)


@pytest.mark.parametrize(("names", "pairs"), [(97, 500), (20, 190), (12, 66)])
def test_the_standard_error_holds_what_names_share(names, pairs):
    """Margins that are sums of two names' own: 95 % intervals around the mean, over 200 draws."""
    every, held = [(str(a), str(b)) for a, b in combinations(range(names), 2)], 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        chosen, own = [every[i] for i in draw.permutation(len(every))[:pairs]], draw.normal(size=names)
        margins = np.array([own[int(a)] + own[int(b)] for a, b in chosen])
        held += abs(margins.mean()) < 1.96 * error_over_names(margins, chosen)
    assert 0.89 <= held / 200 <= 0.99
    assert error_over_names(np.ones(2), [("0", "1"), ("0", "2")]) is None
