"""Tasks of the harness, over a small network and files made here."""

import gzip
import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager

from tandem.corpus import Segmentation, Store, Tokenizer
from tandem.corpus.store import StoreWriter
from tandem.evaluation.harness import Harness, run_tasks
from tandem.evaluation.likelihood import likelihood
from tandem.evaluation.task_files import TaskFile, Texts, read_tasks, shipped
from tandem.generation.generate import generate_text
from tandem.generation.sampling import Sampler
from tandem.networks.decoder import Decoder
from tandem.recipe import UserError, registered
from tandem.testing.cases import Case

CHOICES = [
    {"query": f"Question: the {w} is", "choices": ["big", "red and old", f"a {w}"], "gold": i % 3}
    for i, w in enumerate("abcdefgh")
]
SCHEMAS = [
    {"context_options": [f"{w} fell so {w}", f"{w} fell so they"], "continuation": "cried.", "gold": 0} for w in "abc"
]
FILES = {
    "lambada_openai_test": [{"context": f"He said {w}, she said", "continuation": w} for w in ("yes", "no", "never")],
    "mmlu_test": [{**CHOICES[0], "subject": "high_school_botany", "choices": ["w", "x", "y", "z"]}] * 2,
    "winogrande_val": SCHEMAS,
    "winograd_wsc273": SCHEMAS,
    **dict.fromkeys(
        (
            *("arc_challenge_test", "arc_easy_test", "boolq_val", "commonsense_qa_val", "copa_val", "hellaswag_val"),
            *("piqa_val", "siqa_val"),
        ),
        CHOICES,
    ),
}


def network_of(context=64, vocabulary=257, **settings):
    config, generator = Decoder.Config(width=32, heads=2, depth=2, **settings), torch.Generator().manual_seed(0)
    network = Decoder(config, vocabulary, context, generator)
    for parameter in network.parameters():
        parameter.data *= 3
    return network


def reads_sentences(name):
    given = {"memory": 2, "cap": 64, "thought_from": 1} if name == "gestalt" else {}
    cls = registered("network")[name]
    return Case("", cls, cls.Config(width=32, heads=2, depth=2, **given), 257).build().float()


def harness(network=None, rows=4):
    return Harness(network or network_of(), Tokenizer.of_bytes(), rows=rows)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder with a small file for each shipped task; what is read of them is not kept elsewhere."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("TANDEM_DATA", str(tmp_path))
    (tmp_path / "eval").mkdir()
    for name, items in FILES.items():
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (tmp_path / "eval" / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path


def harness_tasks():
    """Those of the package that are one task of the harness by a local file."""
    return [name for name in shipped() if name not in ("ood", "wikitext", "sps", "superposition")]


@pytest.fixture
def heard(monkeypatch):
    """What an adapter is asked, in place of a network's answer to it."""
    pairs = []

    def loglikelihood(self, requests):
        pairs.extend(request.args for request in requests)
        return [(-1.0, False)] * len(requests)

    monkeypatch.setattr(Harness, "loglikelihood", loglikelihood)
    return pairs


PLAIN, ANSWER = ("Question: the a is", " red and old"), ("Question: the a is\nAnswer:", " red and old")
SECOND = {
    **dict.fromkeys(("hellaswag", "copa", "siqa", "commonsense_qa"), PLAIN),
    **dict.fromkeys(("arc_easy", "arc_challenge", "piqa", "boolq"), ANSWER),
    **dict.fromkeys(("winogrande", "wsc273"), ("a fell so they", " cried.")),
    "lambada_openai": ("He said no, she said", " no"),
    "mmlu": (
        "The following are multiple choice questions (with answers) about high school botany.\n\n"
        "Question: the a is\nA. w\nB. x\nC. y\nD. z\nAnswer:",
        " B",
    ),
}


@pytest.mark.parametrize("name", harness_tasks())
def test_every_shipped_task_asks_what_its_data_mean(data, heard, name):
    (file,) = read_tasks(name)
    (result,) = run_tasks(harness(), [file])
    assert result.name == name and result.version == 1.0
    assert {"acc"} <= result.metrics.keys() <= {"acc", "acc_norm", "perplexity"}
    assert len(result.items) == result.count == len(FILES[file.data[0].name.removesuffix(".jsonl.gz")])
    assert heard[1] == SECOND[name]


def test_numbers_are_the_same_at_any_batch_size_to_the_last_item(data):
    files = read_tasks("hellaswag,lambada_openai,winogrande")
    one, *others = [run_tasks(harness(rows=rows), files) for rows in (1, 7, 32)]
    for other in others:
        for expected, found in zip(one, other, strict=True):
            assert found.metrics["acc"] == expected.metrics["acc"] and found.count == expected.count
            for item, like in zip(found.items, expected.items, strict=True):
                assert item["acc"] == like["acc"] and item["item"] == like["item"]
                np.testing.assert_allclose(item["answers"], like["answers"], atol=1e-4)


def test_metrics_and_errors_are_those_of_the_items(data):
    (result,) = run_tasks(harness(), read_tasks("hellaswag"), limit=5)
    gold = [item["gold"] for item in CHOICES[:5]]
    best = [np.argmax([nats for nats, _ in item["answers"]]) for item in result.items]
    right = [float(choice == asked) for choice, asked in zip(best, gold, strict=True)]
    assert len(set(right)) == 2
    assert [item["acc"] for item in result.items] == right and result.count == 5
    assert result.metrics["acc"].value == np.mean(right)
    assert result.metrics["acc"].error == pytest.approx(np.std(right, ddof=1) / 5**0.5)
    letters = [
        [nats / len(c) for (nats, _), c in zip(item["answers"], CHOICES[i]["choices"], strict=True)]
        for i, item in enumerate(result.items)
    ]
    assert [item["acc_norm"] for item in result.items] == [
        float(np.argmax(row) == asked) for row, asked in zip(letters, gold, strict=True)
    ]


def test_a_last_word_counts_where_it_is_the_likeliest_and_perplexity_is_that_of_the_words(data):
    (result,) = run_tasks(harness(), read_tasks("lambada_openai"))
    assert [item["acc"] for item in result.items] == [item["answers"][0][1] for item in result.items]
    nats = [item["answers"][0][0] for item in result.items]
    assert result.metrics["perplexity"].value == pytest.approx(np.exp(-np.mean(nats)))
    assert result.metrics["perplexity"].error > 0


# ---- the adapter ----------------------------------------------------------------------------------------------------


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


def test_a_pair_is_cut_where_its_context_ends():
    tokenizer = Tokenizer.train(["the cat sat on the mat " * 50], 280)
    adapter = Harness(network_of(vocabulary=tokenizer.vocabulary), tokenizer, rows=2)
    for context, continuation in [("the cat", " sat"), ("the cat ", "sat"), ("the cat", " sat on the mat")]:
        prompt, asked = adapter._pair(context, continuation)
        assert prompt == tokenizer.encode("the cat").tolist()
        assert tokenizer.decode(prompt + asked) == context + continuation and asked
    whole = tokenizer.encode("the cat").tolist()
    assert adapter._pair("", "the cat") == (whole[:1], whole[1:])
    assert adapter.loglikelihood(requests(("", "t"))) == [(0.0, True)]  # no method is asked for a first token
    with pytest.raises(UserError, match=r"nothing is left to ask after 'the ca'.*target_delimiter"):
        adapter.loglikelihood(requests(("the ca", "t")))


ROLLED = ["a short one", "", " \n", "é", "The cat sat on the mat. " * 9, "x", "naïve " * 12]


def store_of(texts, folder, segmentation=None):
    writer = StoreWriter(folder, Tokenizer.of_bytes())
    writer.append(*writer.tokenizer.encode_batch(texts))
    writer.close([])
    return Store(folder, segmentation)


@pytest.mark.parametrize("name", ["decoder", "boundary_decoder", "gestalt"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rolling_likelihood_is_the_score_of_the_same_documents(tmp_path, rows, name):
    network = network_of(context=24) if name == "decoder" else reads_sentences(name)
    found = harness(network, rows=rows).loglikelihood_rolling(requests(*((text,) for text in ROLLED)))
    expected = likelihood(network, store_of(ROLLED, tmp_path / "store"), context=network.context, rows=2)
    assert found[1] == 0.0 > found[2] and len(found) == len(ROLLED)
    nats = expected.nats_by_document + expected.end_nats_by_document
    np.testing.assert_allclose([-found[i] for i in expected.order], nats, rtol=1e-5)


@pytest.mark.parametrize("splitter", ["rules", "given"])
def test_whole_texts_are_cut_into_the_sentences_that_a_network_can_read(splitter):
    cls = registered("network")["gestalt"]
    network = (
        Case("", cls, cls.Config(width=32, heads=2, depth=1, thought_from=1, cap=9, memory=2), 257).build().float()
    )
    network.segmentation = Segmentation(cap=9, splitter=splitter)
    assert harness(network).loglikelihood_rolling(requests(("a sentence of many more tokens",)))[0] < 0


class SuffixesOnly(Decoder):
    def score(self, batch, x=None):
        raise UserError("network encoder_decoder: has no likelihood of whole texts, only of suffixes")


def suffixes_only():
    return SuffixesOnly(Decoder.Config(width=32, heads=2, depth=1), 257, 64, torch.Generator().manual_seed(0))


def test_a_network_without_a_score_of_whole_texts_says_why_and_does_the_rest():
    network = suffixes_only()
    with pytest.raises(UserError, match="only of suffixes"):
        harness(network).loglikelihood_rolling(requests(("some text",)))
    ((nats, _),) = harness(network).loglikelihood(requests(("some", " text")))
    assert nats < 0
    assert harness(network).generate_until(requests(("some", {"max_gen_toks": 2})))


PROMPTS = ["Once", "The cat sat on", "", "He said yes", "naïve"]


def test_texts_are_those_of_greedy_generation_up_to_a_stop_string():
    network = network_of()
    greedy = generate_text(
        network, Tokenizer.of_bytes(), PROMPTS, sampler=Sampler(Sampler.Config(temperature=0.0)), max_tokens=30
    )
    options = {"max_gen_toks": 30, "until": ["\n\nnever"]}
    for rows in (1, 2, 7):
        assert harness(network, rows).generate_until(requests(*((p, options) for p in PROMPTS))) == greedy
    text = max(greedy, key=len)
    assert len(text) > 6
    stopped = harness(network).generate_until(
        requests(*((p, {**options, "until": [text[3:5], text[4:7]]}) for p in PROMPTS))
    )
    assert stopped == [t[: min((t.index(s) for s in (text[3:5], text[4:7]) if s in t), default=len(t))] for t in greedy]


@pytest.mark.parametrize("name", ["boundary_decoder", "gestalt"])
def test_networks_that_read_sentences_are_told_of_those_of_the_prompt(name):
    """And of those that they write, as in generation."""
    network = reads_sentences(name)
    text, tokenizer = "The cat sat. The do", Tokenizer.of_bytes()
    prompt, asked = network.prompt(tokenizer, text), tokenizer.encode("gs").tolist()
    assert network.end in prompt if name == "gestalt" else prompt[0] == 258
    session, nats = network.session(1), 0.0
    logits = session.prefill([prompt])
    for token in asked:
        nats += logits.log_softmax(-1)[0, token].item()
        logits = session.step(torch.tensor([token]))
    ((found, _),) = harness(network).loglikelihood(requests((text, "gs")))
    assert found == pytest.approx(nats, abs=1e-4)
    greedy = generate_text(network, tokenizer, [text], sampler=Sampler(Sampler.Config(temperature=0.0)), max_tokens=9)
    assert harness(network).generate_until(requests((text, {"max_gen_toks": 9, "until": ["\n\nnever"]}))) == greedy


def scored_by_the_ruler(network, text, folder):
    """-(nats of tokens 2 to last, those of sentence ends), the document end left out."""
    (scoring,) = network.scoring(store_of([text], folder, network.segmentation), 200, 1)
    with torch.no_grad():
        nll = network.score(scoring.batch)
    asked = (scoring.document == 0) & (scoring.index != 0) & (scoring.index != len(text))
    return -nll[asked].sum().item()


@pytest.mark.parametrize("segmentation", [Segmentation(), Segmentation(splitter="every", every=7)], ids=str)
@pytest.mark.parametrize("name", ["boundary_decoder", "gestalt"])
def test_sentences_of_a_continuation_end_as_in_training(name, segmentation, tmp_path):
    """Where it begins with one, too; their ends are paid for, as in the ruler."""
    network, text = reads_sentences(name), "The cat sat down. The dog ran off. It rained on them."
    network.segmentation, network.context = segmentation, 200
    expected = scored_by_the_ruler(network, text, tmp_path / "store")
    ((rest, _),) = harness(network).loglikelihood(requests((text[0], text[1:])))
    assert rest == pytest.approx(expected, abs=1e-3)
    for context in (text[:17], text[:18], text[:40]):  # a whole sentence, the same with its space, a part of one
        (before, _), (after, _) = harness(network).loglikelihood(
            requests((text[0], context[1:].rstrip()), (context, text[len(context) :]))
        )
        assert before + after == pytest.approx(expected, abs=1e-3)


def test_a_sentence_that_is_full_closes_for_free():
    """As in generation, where its end is not drawn."""
    network, tokenizer, text = reads_sentences("gestalt"), Tokenizer.of_bytes(), "The cat sat on. The dog ran."
    network.config, network.context = network.config.model_copy(update={"cap": 16}), 200
    ids, session, nats = tokenizer.encode(text).tolist(), network.session(1), 0.0
    logits = session.prefill([ids[:1]])
    for token in ids[1:]:
        nats += logits.log_softmax(-1)[0, token].item()
        logits = session.step(torch.tensor([token]))
    assert session.known[0] == 1
    ((found, _),) = harness(network).loglikelihood(requests((text[0], text[1:])))
    assert found == pytest.approx(nats, abs=1e-3)


@pytest.mark.parametrize("name", ["decoder", "boundary_decoder", "gestalt"])
def test_without_a_context_the_first_token_is_one(name):
    network = network_of() if name == "decoder" else reads_sentences(name)
    (empty, _), (one, _) = harness(network).loglikelihood(requests(("", "one dog"), ("o", "ne dog")))
    assert empty == pytest.approx(one, abs=1e-4)


def test_requests_of_different_lengths_keep_their_places():
    network, asked = network_of(), [(p, {"max_gen_toks": n}) for p, n in zip(PROMPTS, (3, 9, 3, 1, 9), strict=True)]
    together = harness(network).generate_until(requests(*asked))
    assert together == [harness(network).generate_until(requests(one))[0] for one in asked]


def test_a_task_that_a_network_can_not_do_is_named(data, tmp_path):
    written = MINE.replace("multiple_choice", "loglikelihood_rolling").replace("doc_to_choice: choices\n", "")
    written = written.replace("doc_to_target: gold", "doc_to_target: query").replace("acc, agg", "bits_per_byte, agg")
    (tmp_path / "mine.yaml").write_text(written.replace("aggregation: mean", "aggregation: bits_per_byte"))
    (file,) = read_tasks(str(tmp_path / "mine.yaml"))
    (result,) = run_tasks(harness(), [file])
    texts = [item["query"] for item in CHOICES]
    nats = -sum(harness().loglikelihood_rolling(requests(*((text,) for text in texts))))
    size = sum(len(text.encode()) for text in texts)
    assert result.metrics["bits_per_byte"].value == pytest.approx(nats / np.log(2) / size)
    with pytest.raises(UserError, match=r"mine.yaml: network encoder_decoder: .* only of suffixes"):
        run_tasks(harness(suffixes_only()), [file])


def test_generation_that_can_not_be_done_is_refused():
    with pytest.raises(UserError, match="do_sample: false"):
        harness().generate_until(requests(("a", {"do_sample": True, "temperature": 0.7})))
    with pytest.raises(UserError, match=r"asks for 64 tokens, .* trained with 64 in all; set"):
        harness().generate_until(requests(("a", {"max_gen_toks": 64})))


@pytest.mark.parametrize("positions", ["adjacent", "learned"])
def test_a_prompt_makes_room_for_what_follows_it(positions):
    """As in lm-eval's own reader of models."""
    asked, text = {"max_gen_toks": 60}, "the cat sat on the mat"
    whole, newest = harness(network_of(positions=positions)).generate_until(requests((text, asked), (text[-4:], asked)))
    assert whole == newest


# ---- files ----------------------------------------------------------------------------------------------------------


def test_sets_and_texts_are_read_by_name(data):
    names = [file.name for file in read_tasks("sps,ood,piqa")]
    assert names == ["arc_easy", "hellaswag", "piqa", "hf:sciq", "lambada_openai", "ood"]
    (texts,) = read_tasks("ood")
    assert isinstance(texts, Texts) and texts.texts["brown"] == f"{data}/ood/brown.jsonl.gz"
    assert [file.name for file in read_tasks("superposition")][5] == "hf:openbookqa"


MINE = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: "${TANDEM_DATA}/eval/hellaswag_val.jsonl.gz"}}
output_type: multiple_choice
test_split: test
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
FILTERED = """
generation_kwargs: {until: ["."], max_gen_toks: 4}
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "(.)"}, {function: take_first}]}
  - {name: all, filter: [{function: take_first}]}
"""


def test_a_file_of_ones_own_is_a_task(data, heard, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    (result,) = run_tasks(harness(), read_tasks(str(tmp_path / "mine.yaml")), limit=2)
    assert (result.name, result.count) == ("mine", 2)


def test_items_hold_probabilities_and_one_of_repeated_answers(data, heard, tmp_path):
    written = MINE.replace("acc, aggregation: mean", "brier_score, aggregation: brier_score") + "repeats: 2\n"
    (tmp_path / "mine.yaml").write_text(written)
    (result,) = run_tasks(harness(), read_tasks(str(tmp_path / "mine.yaml")), limit=2)
    for item in result.items:
        p = np.exp([nats for nats, _ in item["answers"]])
        assert item["brier_score"] == [item["item"] % 3, pytest.approx(p / p.sum())]


def test_an_item_that_several_filters_read_is_one_with_their_metrics(data, heard, tmp_path):
    written = MINE.replace("multiple_choice", "generate_until").replace("doc_to_choice: choices\n", "")
    written = written.replace("doc_to_target: gold", 'doc_to_target: "{{choices[gold]}}"')
    (tmp_path / "mine.yaml").write_text(written.replace("metric: acc", "metric: exact_match") + FILTERED)
    (result,) = run_tasks(harness(), read_tasks(str(tmp_path / "mine.yaml")), limit=2)
    assert [item["item"] for item in result.items] == [0, 1]
    assert result.metrics.keys() == {"exact_match (first)", "exact_match (all)"}
    assert all(item.keys() == {"item", "answers", *result.metrics} for item in result.items)


def test_a_group_without_a_mean_of_its_own_is_its_tasks(data, heard, tmp_path, monkeypatch):
    """Such as hf:openllm or hf:pythia."""
    own = MINE.replace("${TANDEM_DATA}", str(data))
    (tmp_path / "mine.yaml").write_text(own)
    (tmp_path / "yours.yaml").write_text(own.replace("task: mine", "task: yours"))
    (tmp_path / "both.yaml").write_text("group: both\ntask: [mine, yours]\n")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("tandem.evaluation.harness.TaskManager", lambda include_defaults: manager)
    found = run_tasks(harness(), [TaskFile("hf:both", "hf:both")], limit=2)
    assert [(result.name, result.count) for result in found] == [("mine", 2), ("yours", 2)]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("task: mine\n  output_type: [", r"mine.yaml:2: cannot be read"),
        ("task: mine\ndoc_to_text: !function a.b\n", r"mine.yaml:2: cannot be read"),
        ("task: mine\nmetadata: {a: 1}\nmetadata: {}\n", r"mine.yaml:3: cannot be read: metadata is written twice"),
        ("task: mine\ninclude: base.yaml\n", r"mine.yaml: include = base.yaml: a task file holds all of its task"),
        ("- hellaswag\n", r"mine.yaml: no task file; it needs `task: NAME`"),
        ("task: [a]\n", r"no task file"),
        ("texts: {poems: 3}\n", r"no task file"),
        ("texts: {poems: [2020]}\n", r"no task file"),
        ("task: mine\nmetadata: {day: 2020-13-45}\n", r"mine.yaml: cannot be read: month must be"),
        ("task: mine\nmetadata: " + "[" * 3000, r"mine.yaml: cannot be read: maximum recursion depth"),
        ("texts: {}\n", r"no task file"),
        ("tasks: []\n", r"no task file"),
        ("tasks: [piqa]\ntask: piqa\n", r"no task file"),
        (MINE.replace("TANDEM_DATA", "NOWHERE_SET"), r"the environment has no NOWHERE_SET; set it"),
        (MINE.replace("hellaswag_val", "absent"), r"data_files names .*absent.jsonl.gz, and there is no such file"),
        (
            MINE.replace("doc_to_text: query", "doc_to_text: '{{question}}'"),
            r"mine.yaml: the harness cannot run it.*question",
        ),
        (MINE.replace("multiple_choice", "multiple"), r"mine.yaml: the harness cannot run it.*multiple"),
        ("task: mine\ndataset_kwargs: [a]\n", r"mine.yaml: the harness cannot run it"),
        (MINE.replace("test_split", "tset_split"), r"mine.yaml: the harness cannot run it.*tset_split"),
        (MINE.replace("hellaswag_val.jsonl.gz", "broken.jsonl"), r"mine.yaml: the harness cannot run it"),
        (
            MINE.replace("hellaswag_val.jsonl.gz", "no_choices.jsonl"),
            r"mine.yaml: the harness cannot ask or score its items: Ty",
        ),
        (MINE.replace("hellaswag_val.jsonl.gz", "no_target.jsonl"), r"mine.yaml: item 1: its right answer is None, no"),
        (
            MINE.replace("to_target: gold", "to_target: right"),
            r"item 0: its right answer is 'right', none of its",
        ),
        (
            MINE.replace("hellaswag_val.jsonl.gz", "empty.jsonl"),
            r"mine.yaml: its data has no items|error .* generating the dataset",
        ),
        ("tasks: [mine.yaml, piqa]\n", r"contains itself"),
        ("tasks: [piqqa]\n", r"piqqa: no such task; did you mean piqa\? there are arc_challenge, "),
    ],
)
def test_a_file_that_can_not_be_read_is_told_in_one_message(data, tmp_path, monkeypatch, written, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(written)
    (tmp_path / "eval" / "broken.jsonl").write_text('{"query": \n')
    (tmp_path / "eval" / "empty.jsonl").touch()
    for lacking, key in (("no_choices", "choices"), ("no_target", "gold")):
        items = [CHOICES[0], CHOICES[1] | {key: None}]
        (tmp_path / "eval" / f"{lacking}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    with pytest.raises(UserError, match=message) as told:
        run_tasks(harness(), [file for file in read_tasks("mine.yaml") if isinstance(file, TaskFile)])
    assert "\n" not in str(told.value)


def test_an_error_of_the_adapter_is_not_the_harness_s(data, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(MINE)
    monkeypatch.setattr("tandem.evaluation.harness.answers", lambda *_, **__: {}["nobody's"])
    with pytest.raises(KeyError, match="nobody's"):
        run_tasks(harness(), read_tasks(str(tmp_path / "mine.yaml")))


def test_the_tokenizer_of_another_network_is_refused():
    network = Decoder(Decoder.Config(width=32, heads=2, depth=1), 61, 64)
    with pytest.raises(UserError, match="the tokenizer has 257 ids, the network 61"):
        harness(network)
