"""Exported models in a process that has transformers and nothing of Tandem; the process is started once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.corpus import Batch
from tandem.export.weights import export, load_exported
from tandem.generation.generate import generate
from tandem.generation.sampling import Sampler, row_generators
from tandem.networks.network import Network
from tandem.testing.cases import cases, first_cases

pytest.importorskip("transformers")

TEXTS = ["the cat sat on the mat naïve", "東京", "on the cat <|endoftext|> x"]
IMPORTED = ["llama", "llama_tied", "qwen3", "qwen3_tied", "mistral", "mistral_tied", "gpt2", "gpt2_tied"]
LEARNED = [case for case in cases() if case.name == "decoder-gpt2"]  # with learned positions
TINY = first_cases() + LEARNED  # exported code is by class
CASES = [case.name for case in TINY] + IMPORTED
FLOAT = 1e-4


def drawn(case, vocabulary):
    """As the contract draws networks: far from zero, where a tiny one notices what it reads."""
    network = case.network(case.config, vocabulary, 40, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return network


@pytest.fixture(scope="module")
def networks(foreign, tokenizer):
    imported = {name: load_exported(path)[0] for name, (path, _) in foreign.items()}
    return {case.name: drawn(case, tokenizer.vocabulary) for case in TINY} | imported


def logits(model, ids):
    """(T, V) of a network here, or of a model of transformers."""
    with torch.no_grad():
        if not isinstance(model, Network):
            return model(ids).logits[0]
        return (model.read(Batch(ids, ids, torch.zeros_like(ids))) @ model.head.T)[0]


@pytest.fixture(scope="module")
def folder(networks, foreign, tokenizer, tmp_path_factory):
    """What was imported is asked for the logits of the model that transformers made."""
    root, V = tmp_path_factory.mktemp("exported"), tokenizer.vocabulary
    rows = [torch.tensor([tokenizer.encode(text).tolist()]) for text in TEXTS]
    for name, network in networks.items():
        export(network, tokenizer, {}, root / name)
        source = foreign[name][1] if name in foreign else network
        is_blind = getattr(source, "suffixes_only", "")
        wanted = [] if is_blind else [logits(source, ids)[:, :V].tolist() for ids in rows]
        (root / name / "expected.json").write_text(json.dumps({"texts": TEXTS, "logits": wanted}))
    return root


@pytest.fixture(scope="module")
def seen(folder):
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "HF_MODULES_CACHE": str(folder / "modules")}
    command = [sys.executable, "-I", str(Path(__file__).with_name("outside.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **own})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_network_however_rows_are_padded_and_pieces_cut(name, seen):
    found = seen[name]
    if name.startswith("encoder_decoder"):
        assert "logits" not in found  # it has none of a whole text
        return
    for what in ("logits", "left", "right", "pieces"):
        assert found[what] < FLOAT, what


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_texts_go_on_by_cache_as_by_a_pass_over_all_and_in_a_batch_as_alone(name, seen):
    found = seen[name]
    for way in ("greedy", "sampled", "beams"):
        assert found[f"{way} by cache"] == found.get(f"{way} by pass", found[f"{way} by cache"]), way
    divides = name.split("-")[0] in ("double_decoder", "encoder_decoder", "prefix_decoder")
    assert ("greedy by pass" in found) != divides  # where prompts end, these read in another way
    for way in ("greedy", "beams"):
        assert found[f"{way} alone"] == found[f"{way} by cache"], way
    assert found["beams by cache"][::2] != found["greedy by cache"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_what_follows_are_those_of_tandem(name, networks, tokenizer, seen):
    network, found = networks[name], seen[name]
    assert found["ids"] == [tokenizer.encode(text).tolist() for text in TEXTS]
    assert found["text"] == TEXTS
    draw = Sampler(Sampler.Config(temperature=0.0))
    tokens = [[] for _ in TEXTS]
    for row, token in generate(network, found["ids"], row_generators(0, 3), sampler=draw, max_tokens=6):
        tokens[row].append(token)
    for row, wanted in zip(found["greedy by cache"], tokens, strict=True):
        known = [*wanted, tokenizer.eos].index(tokenizer.eos)  # which `generate` was told not to draw
        assert row[:known] == wanted[:known] and known > 1


@pytest.mark.slow
def test_the_loss_is_nats_per_token_of_the_ruler(networks, seen):
    network, found = networks["sps-separated"], seen["sps-separated"]
    for ids, loss in zip(found["ids"], found["loss"], strict=True):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            nll = network.score(Batch(tokens[:, :-1], tokens[:, 1:], torch.zeros(1, len(ids) - 1, dtype=torch.long)))
        assert loss == pytest.approx(nll.mean().item(), abs=FLOAT)


@pytest.mark.slow
def test_what_a_model_can_not_read_it_refuses(seen):
    assert "one text" in seen["refusals"]["holes"]
    assert "one text" in seen["refusals"]["empty"]
    assert "learned positions for 40" in seen["refusals"]["long"]
    assert seen["config"] == {"type": "tandem", "context": 40}


@pytest.mark.slow
def test_what_transformers_saves_again_is_read_again(folder, networks, tokenizer, seen):
    network, theirs = load_exported(folder / "again")
    given = networks[min(CASES)]
    state = network.state_dict()
    assert network.config == given.config
    assert all(torch.equal(value, state[name]) for name, value in given.state_dict().items())
    assert theirs.encode(TEXTS[0]).tolist() == tokenizer.encode(TEXTS[0]).tolist()
