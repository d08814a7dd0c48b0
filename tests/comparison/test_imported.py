import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typed import tandem

from tandem.comparison import imported
from tandem.comparison.trained import open_model, open_trained
from tandem.corpus import Tokenizer
from tandem.export.weights import load_exported
from tandem.recipe import UserError

SMALL = ["budget=4 steps", "batch.rows=2", "batch.context=32", "sampling.tokens=3"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder as transformers would write it, of a decoder of one layer."""
    folder, V, C, F = tmp_path_factory.mktemp("llama"), 300, 16, 24
    Tokenizer.train(["the cat sees a small dog and sleeps " * 20], V).to_file(folder / "tokenizer.json")
    sizes = {"architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": C, "intermediate_size": F}
    depth = {"num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(sizes | depth))
    shapes = {f"self_attn.{part}_proj": (C, C) for part in "qkvo"}
    shapes |= {"mlp.gate_proj": (F, C), "mlp.up_proj": (F, C), "mlp.down_proj": (C, F)}
    shapes |= {"input_layernorm": (C,), "post_attention_layernorm": (C,)}
    names = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (V, C), "lm_head.weight": (V, C), "model.norm.weight": (C,)}
    torch.manual_seed(0)
    save_file({name: torch.randn(shape) / 4 for name, shape in names.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def run(llama, small_corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    asked = *SMALL, *small_corpus[::3], *small_corpus[2:3], "corpus.vocabulary=null"
    done = tandem("import", llama, "decoder/tiny", *asked, "--runs", runs)
    assert done.exit_code == 0, done.output
    return next(path for path in runs.iterdir() if path.is_dir())


def test_an_imported_decoder_is_a_run_that_is_judged_and_exported(llama, run, tmp_path):
    network, tokenizer = load_exported(llama)
    opened = open_trained(run)
    state = opened.network.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert opened.corpus.tokenizer.hash == tokenizer.hash
    assert "step 0 of 4" in tandem("evaluate", run, "--documents", 3).output
    done = tandem("export", run, tmp_path / "out")
    assert done.exit_code == 0 and "modeling_tandem.py" in done.output
    source = len([*(tmp_path / "out").glob("tandem_*.py")])
    assert source > 9 and f"tokenizer_config.json and {source} files of its source (step 0)" in done.output
    assert "tandem_nn" not in done.output
    again, _ = open_model(tmp_path / "out")
    assert again.config == network.config


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder as GPT-2's own is written, of one layer and 48 positions."""
    folder, V, C = tmp_path_factory.mktemp("gpt2"), 300, 16
    Tokenizer.train(["the cat sees a small dog and sleeps " * 20], V).to_file(folder / "tokenizer.json")
    sizes = {"architectures": ["GPT2LMHeadModel"], "vocab_size": V, "n_embd": C, "n_head": 2, "n_layer": 1}
    (folder / "config.json").write_text(json.dumps(sizes | {"n_positions": 48, "layer_norm_epsilon": 1e-5}))
    shapes = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)}
    shapes |= {"ln_1": (C,), "ln_2": (C,)}
    names = {f"h.0.{name}.weight": shape for name, shape in shapes.items()}
    names |= {f"h.0.{name}.bias": shape[-1:] for name, shape in shapes.items()}
    names |= {"wte.weight": (V, C), "wpe.weight": (48, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    torch.manual_seed(0)
    save_file({name: torch.randn(shape) / 4 for name, shape in names.items()}, folder / "model.safetensors")
    return folder


def test_the_context_of_an_imported_run_is_as_long_as_its_learned_positions(gpt2, small_corpus, tmp_path):
    small = [one for one in SMALL if "context" not in one]
    asked = "import", gpt2, "decoder/tiny", *small, *small_corpus[::3], *small_corpus[2:3], "--runs", tmp_path, "--run"
    done = tandem(*asked, "other", "batch.context=32")
    assert done.exit_code == 2 and f"batch.context = 32: {gpt2} has learned positions for 48; leave it" in done.stderr
    assert not (tmp_path / "other").exists()
    for name, more in ("mine", ()), ("same", ("batch.context=48",)):
        done = tandem(*asked, name, *more)
        assert done.exit_code == 0, done.output
    opened = open_trained(tmp_path / "mine")
    assert opened.network.context == opened.recipe.batch.context == 48
    assert "step 0 of 4" in tandem("evaluate", tmp_path / "mine", "--documents", 3).output
    done = tandem("generate", tmp_path / "mine", "the cat", "--tokens", 80)
    assert done.exit_code == 2 and "learned positions for 48" in done.stderr
    assert tandem("export", tmp_path / "mine", tmp_path / "out").exit_code == 0
    texts = [tandem("generate", path, "the cat", "--tokens", 9).stdout for path in (gpt2, tmp_path / "out")]
    assert texts[0] == texts[1] and "the cat" in texts[0]
    done = tandem("train", tmp_path / "mine" / "recipe.yaml", "--run", "mine", "--runs", tmp_path)
    assert done.exit_code == 0, done.output


def test_it_can_be_converted_gone_on_with_and_started_from(run):
    done = tandem("convert", run, "--run", "ready", "--runs", run.parent)
    assert done.exit_code == 0, done.output
    tuned = tandem("train", run / "recipe.yaml", f"start.run={run}", "--run", "tuned", "--runs", run.parent)
    assert tuned.exit_code == 0, tuned.output
    alone = tandem("train", run / "recipe.yaml", "--run", run.name, "--runs", run.parent)
    assert alone.exit_code == 0, alone.output
    assert "from its weights of step 0" in " ".join(alone.output.split())
    losses = [
        [
            json.loads(line)["terms"]
            for line in (path / "metrics.jsonl").read_text().splitlines()
            if '"step"' in line[:20]
        ]
        for path in (run, run.parent / "tuned")
    ]
    assert losses[0] and losses[0] == losses[1]  # from step 0 of one as from the weights of the other


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "tokenizer.json: no such file; the folder of a model has",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: damaged, or not JSON"),
        (lambda folder: (folder / "config.json").write_text('{"architectures": ["T5Model"]}'), "T5Model"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"nothing"), "model.safetensors: damaged"),
        (
            lambda folder: save_file(
                load_file(folder / "model.safetensors") | {"model.norm.weight": torch.full((16,), float("nan"))},
                folder / "model.safetensors",
            ),
            "model.norm.weight: not all of its numbers are finite",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_one_message(spoil, words, llama, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    spoil(folder)
    for arguments in (("generate", folder, "the"), ("import", folder, "decoder/tiny", "--runs", tmp_path / "runs")):
        done = tandem(*arguments)
        assert done.exit_code == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "override", ["corpus.tokenizer=bytes", "corpus.vocabulary=257", "start.run=runs/a", "network.depth=2", "corpus={}"]
)
def test_what_the_folder_decides_is_not_overridden(llama, tmp_path, override):
    done = tandem("import", llama, "decoder/tiny", override, "--runs", tmp_path / "runs")
    assert done.exit_code == 2 and f"{override}: network, tokenizer and weights are those of {llama}" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_is_not_written_over(llama, run):
    done = tandem("import", llama, "decoder/tiny", "--run", run.name, "--runs", run.parent)
    assert done.exit_code == 2 and "exists already" in done.stderr


@pytest.fixture
def asked(llama, small_corpus, tmp_path):
    corpus = *small_corpus[::3], *small_corpus[2:3]
    return "import", llama, "decoder/tiny", *SMALL, *corpus, "--run", "q", "--runs", tmp_path / "runs"


def test_an_import_that_fails_leaves_no_run_without_weights(asked, tmp_path, monkeypatch):
    def full(*_, **__):
        raise UserError("not saved; make room and start the same command again")

    with monkeypatch.context() as patch:
        patch.setattr(imported.checkpoint, "save", full)
        assert tandem(*asked).exit_code == 2 and [path.name for path in (tmp_path / "runs").iterdir()] == [".q.lock"]
    assert tandem(*asked).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".q.lock", "q"]


def test_a_run_that_another_command_has_made_meanwhile_stays(asked, tmp_path, monkeypatch):
    target, build = tmp_path / "runs" / "q", imported.built

    def late(*arguments):
        target.mkdir(parents=True)
        (target / "recipe.yaml").write_text("of another")
        return build(*arguments)

    monkeypatch.setattr(imported, "built", late)
    done = tandem(*asked)
    assert done.exit_code == 2 and "exists already" in done.stderr
    assert [path.read_text() for path in target.iterdir()] == ["of another"]
