import json
import resource

import pytest
import tokenizers
import torch
from safetensors import safe_open
from tokenizers import processors

from tandem import __version__
from tandem.comparison import pretrain as pretraining
from tandem.comparison.pretrain import pretrain
from tandem.comparison.trained import open_model, open_trained
from tandem.corpus import Tokenizer
from tandem.export.weights import export, load_exported, save_network
from tandem.generation.generate import generate_text
from tandem.generation.sampling import Sampler
from tandem.networks.decoder import Decoder
from tandem.recipe import UserError, load
from tandem.recipe.settings import _registry

RECIPE = {"seed": 3, "network": {"name": "decoder"}, "corpus": {"texts": "${DATA}/wiki.txt"}}
SETTINGS = [{}, {"positions": "learned", "norm": "layer", "bias": True}, {"tied": False, "qk_norm": True, "window": 9}]


class Outside(Decoder):
    """A network whose module is none of Tandem's."""


def network_of(tokenizer, **settings):
    config = Decoder.Config(width=32, heads=4, depth=2, **settings)
    return Decoder(config, tokenizer.vocabulary, 40, torch.Generator().manual_seed(0))


def test_weights_for_which_there_is_no_room_are_named_and_leave_nothing_half_written(tokenizer, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"model.safetensors: cannot be written .*writes it again"):
            export(network_of(tokenizer), tokenizer, RECIPE, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_exported_comes_back_bit_for_bit_and_goes_on_alike(settings, tokenizer, tmp_path):
    network = network_of(tokenizer, **settings)
    export(network, tokenizer, RECIPE, tmp_path / "new" / "model")
    drawn = torch.get_rng_state()
    loaded, its_tokenizer = load_exported(tmp_path / "new" / "model")
    assert torch.equal(torch.get_rng_state(), drawn)  # weights that are loaded are not drawn first
    assert loaded.config == network.config
    assert (loaded.vocabulary, loaded.context) == (network.vocabulary, network.context)
    state = loaded.state_dict()
    assert state.keys() == network.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert its_tokenizer.hash == tokenizer.hash
    texts = [
        generate_text(net, its, ["the cat", "東"], sampler=Sampler(Sampler.Config()), max_tokens=12)
        for net, its in ((network, tokenizer), (loaded, its_tokenizer))
    ]
    assert texts[0] == texts[1]


def test_the_files_are_what_other_tools_read(tokenizer, tmp_path):
    network = network_of(tokenizer)
    export(network, tokenizer, RECIPE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["network"] == {"name": "decoder", **network.config.model_dump()}
    assert (config["vocabulary"], config["context"], config["tandem"]) == (tokenizer.vocabulary, 40, __version__)
    assert config["recipe"] == RECIPE
    with safe_open(tmp_path / "model.safetensors", framework="pt") as weights:
        assert set(weights.keys()) == {name for name, _ in network.named_parameters()}  # no second, tied head
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert inner.encode("the cat", add_special_tokens=False).ids == tokenizer.encode("the cat").tolist()


@pytest.mark.parametrize("trims", [False, True])
def test_no_token_is_put_around_a_text_by_the_tokenizer_of_an_export(trims, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.to_file(tmp_path / "llama.json")
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "llama.json"))
    begins = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos)])
    inner.post_processor = processors.Sequence([processors.ByteLevel(), begins]) if trims else begins
    inner.save(str(tmp_path / "llama.json"))
    given = Tokenizer.from_file(tmp_path / "llama.json")
    export(network_of(given), given, RECIPE, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    again = load_exported(tmp_path / "model")[1]
    for text in "the cat naïve", "東京":
        ids = given.encode(text).tolist()
        assert theirs(text).input_ids == again.encode(text).tolist() == ids
    written = json.loads((tmp_path / "model" / "tokenizer.json").read_text("utf-8"))
    assert (written["post_processor"] or {}).get("type") == ("ByteLevel" if trims else None)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_is_absent_or_cut_short_is_named(name, tokenizer, tmp_path):
    export(network_of(tokenizer), tokenizer, RECIPE, tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=name):
        load_exported(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=f"{name}: no such file; the folder of a model has"):
        load_exported(tmp_path)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("network", {"name": "unheard_of"}, "config.json: tells of no network.*unheard_of"),
        ("network", {"widht": 32}, "config.json: tells of no network.*widht"),
        ("network", {"depth": 3}, "model.safetensors: damaged, or not of the network in config.json"),
        (None, {"context": "x"}, "config.json: context = x: must be a whole number"),
        (None, {"vocabulary": -100}, "config.json: vocabulary = -100: must be a whole number"),
        (None, {"vocabulary": 10**14}, "config.json: tells of no network"),
        (None, {"vocabulary": 600}, "model.safetensors: .*size mismatch for table.weight"),
    ],
)
def test_weights_of_another_network_are_refused(section, change, message, tokenizer, tmp_path):
    export(network_of(tokenizer), tokenizer, RECIPE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config[section] if section else config).update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"(?s){message}"):
        load_exported(tmp_path)


def test_what_can_not_be_exported_is_refused_before_anything_is_written(tokenizer, tmp_path, monkeypatch):
    class Unknown(Decoder):
        __module__ = Decoder.__module__

    outside = Outside(Decoder.Config(width=32, heads=4, depth=1), tokenizer.vocabulary, 40)
    unknown, few = Unknown(outside.config, tokenizer.vocabulary, 40), Decoder(outside.config, 61, 40)
    monkeypatch.setitem(_registry["network"], "outside", Outside)
    said = [(outside, "is no module of tandem"), (few, f"the tokenizer has {tokenizer.vocabulary} ids, the network 61")]
    for network, why in said:
        with pytest.raises(UserError, match=why):
            export(network, tokenizer, RECIPE, tmp_path / "model")
    with pytest.raises(UserError, match="Unknown is not registered"):
        save_network(unknown, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_network_that_can_not_be_exported_is_trained_and_evaluated_all_the_same(small_corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(_registry["network"], "outside", Outside)
    small = ["budget=2 steps", "batch.rows=2", "batch.context=32", "sampling.tokens=2", "evaluation.final_documents=2"]
    shape = ["network.name=outside", "network.width=16", "network.heads=2", "network.depth=1"]
    result = pretrain(load("decoder/tiny", [*shape, *small, *small_corpus]), str(tmp_path / "run"))
    assert result["step"] == 2 and (tmp_path / "run/result.json").exists() and not (tmp_path / "run/model").exists()


def test_folders_may_be_given_as_text(tokenizer, tmp_path):
    folder = str(tmp_path / "model")
    export(network_of(tokenizer), tokenizer, RECIPE, folder)
    assert load_exported(folder)[1].hash == open_model(folder)[1].hash == tokenizer.hash
    with pytest.raises(UserError, match="no run here"):
        open_trained(str(tmp_path / "run"))


def test_the_source_that_is_exported_is_read_before_training(small_corpus, tmp_path, monkeypatch):
    """Whoever edits it while a run trains changes the next run, not what this one exports."""
    order = []
    for name in ("refusal", "train"):
        asked = getattr(pretraining, name)
        monkeypatch.setattr(pretraining, name, lambda *given, a=asked, n=name: (order.append(n), a(*given))[1])
    shape = ["budget=1 steps", "batch.rows=2", "batch.context=32", "network.depth=1", "network.width=16"]
    pretrain(load("decoder/tiny", [*shape, *small_corpus]), tmp_path / "mine")
    assert order == ["refusal", "train"] and (tmp_path / "mine/model/modeling_tandem.py").exists()
