"""Wrong recipes, texts, stores, runs and prompts: one clear message, exit code 2, no traceback, nothing lost."""

import errno
import json
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typed import tandem

from tandem.analysis.state_window import StateWindow
from tandem.comparison import tasks
from tandem.comparison import trained as trained_module
from tandem.comparison.pretrain import result_page
from tandem.comparison.results import read_result
from tandem.comparison.trained import open_model, open_trained
from tandem.export import hugging_face
from tandem.recipe import UserError, load
from tandem.training import run as run_module
from tandem.training.device import Choice
from tandem.training.folder import RunFolder
from tandem.training.speed import Speed

SMALL = ["budget=6 steps", "batch.rows=2", "batch.context=32", "network.depth=1", "sampling.tokens=3"]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_corpus):
    folder = tmp_path_factory.mktemp("trained")
    done = tandem("train", "decoder/tiny", "--run", "mine", "--runs", folder, *SMALL, *small_corpus)
    assert done.exit_code == 0, done.output
    return folder / "mine"


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "mine"))


def refused(done, *words):
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["network.width=65"], ["width 65 is not a multiple of heads 2"]),
        (["network.key_heads=3"], ["key_heads 3 does not divide heads 2"]),
        (["network.head_width=9e18"], ["network.head_width = 9000000000000000000", "<= 1000000000"]),
        (["network.mlp_width=9e18", "network.heads=4e18"], ["network.mlp_width = 9", "network.heads = 4"]),
        (["network.mlp=swish"], ["network.mlp", "swiglu, gelu, gelu_tanh"]),
        (["budget=1 tokens"], ["one step alone takes"]),
        (["optimiser.betas=[0.9, 1.5]"], ["optimiser.betas.1 = 1.5", "< 1"]),
        (["batch.rows=3", "batch.micro_batches=2"], ["batch.micro_batches", "must divide batch.rows (3)"]),
        (["training.device=cuda:9"], ["training.device", "auto, cpu, cuda"]),
        (["corpus.texts=[nowhere.txt]"], ["nowhere.txt"]),
        (["corpus.texts=[table.xlsx]"], [".xlsx", ".jsonl"]),
        (["corpus.tokenizer=nowhere.json"], ["nowhere.json"]),
        (["corpus.vocabulary=12"], ["corpus.vocabulary", ">= 257"]),
        (["network.positions=learned", "sampling.tokens=40"], ["sampling.tokens = 40", "positions for 32"]),
    ],
)
def test_a_wrong_recipe(tmp_path, monkeypatch, small_corpus, overrides, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.xlsx").write_bytes(b"PK")
    given = [word for word in small_corpus if word.split("=")[0] not in {o.split("=")[0] for o in overrides}]
    if any(word.startswith("corpus.tokenizer") for word in overrides):
        given = [word for word in given if not word.startswith("corpus.vocabulary")]
    refused(tandem("train", "decoder/tiny", *SMALL, *given, *overrides), *words)
    assert not (tmp_path / "runs").exists()


def test_an_option_that_contradicts_another_is_told_at_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: decoder/tiny\ncorpus:\n  tokenizer: bytes\n  vocabulary: 300\n")
    words = "mine.yaml:4  corpus.vocabulary = 300: only a bpe trained here has a size", "corpus.vocabulary=null"
    refused(tandem("plan", "mine.yaml"), *words)
    words = "override  network.partition.shared = true: gives all rows the same splits", "take scope: row"
    refused(tandem("plan", "double_decoder/tiny", "network.partition.shared=true"), *words)


@pytest.mark.parametrize(("option", "extra"), [("log.wandb=mine", "wandb"), ("log.tensorboard=true", "tensorboard")])
def test_a_log_whose_package_is_not_installed(tmp_path, monkeypatch, small_corpus, option, extra):
    monkeypatch.setitem(sys.modules, extra, None)
    done = tandem("train", "decoder/tiny", "--runs", tmp_path / "runs", *SMALL, *small_corpus, option)
    refused(done, f"{extra} is not installed; pip install 'tandem-lm[{extra}]'")
    assert not (tmp_path / "runs").exists()


def test_no_held_out_document_for_one_half(tmp_path):
    (tmp_path / "one.txt").write_text("The only held-out text.")
    (tmp_path / "more.txt").write_text("Some text to train on. " * 50)
    given = [f"corpus.{key}={tmp_path / name}" for key, name in {"texts": "more.txt", "validation": "one.txt"}.items()]
    given += [f"corpus.folder={tmp_path}", "corpus.tokenizer=bytes", "evaluation.split=tuning"]
    done = tandem("train", "decoder/tiny", "--runs", tmp_path / "runs", *SMALL, *given)
    refused(done, "1 document, of which one half is for tuning (evaluation.split): none is left to score")
    assert not (tmp_path / "runs").exists()


def test_a_changed_byte_of_a_store(tmp_path, texts):
    given = [f"corpus.texts=[{texts}]", "corpus.tokenizer=bytes", f"corpus.folder={tmp_path}"]
    assert tandem("prepare", "decoder/tiny", "--verify", *given).exit_code == 0
    (store,) = tmp_path.glob("*/validation")
    (store / "tokens.bin").write_bytes(b"!" + (store / "tokens.bin").read_bytes()[1:])
    assert tandem("prepare", "decoder/tiny", *given).exit_code == 0
    refused(
        tandem("prepare", "decoder/tiny", "--verify", *given),
        f"{store} is not a usable",
        "contents have changed",
        "delete",
    )


def test_a_run_that_is_not_there(run):
    for command in ("evaluate", "generate"):
        refused(tandem(command, run.parent / "yours"), "no run here", "mine")
    refused(tandem("analyse", "pointer_chasing", run.parent / "yours"), "no run here", "mine")
    refused(tandem("analyse", "pointer_chasing", "decoder/tinny"), "no such recipe; did you mean decoder/tiny?")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "1", "--rows", "3"], "--limit, --rows: evaluate without --tasks takes --documents, --texts"),
        (
            ["--tasks", "ood", "--documents", "1", "--texts", "a=b"],
            "--documents, --texts: evaluate with --tasks takes --limit",
        ),
    ],
)
def test_options_of_another_way_to_evaluate(options, message):
    refused(tandem("evaluate", "nowhere", *options), message)


def test_a_run_whose_text_is_gone_names_what_can_still_generate(run, tmp_path):
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["corpus"]["texts"] = [str(run / "gone.txt")]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for command in (("generate", run, "The"), ("export", run, tmp_path / "out"), ("evaluate", run)):
        refused(tandem(*command), "no such text", f"{run / 'model'} can still generate text and be scored")
    done = tandem("generate", run / "model", "The", "--tokens", "2")
    assert done.exit_code == 0, done.output


def test_a_checkpoint_that_training_replaces_meanwhile_is_taken_anew(run, monkeypatch):
    (stands,) = (run / "checkpoints").iterdir()
    older = [run / "checkpoints" / "step-00000002"]
    latest = trained_module.checkpoint.latest
    monkeypatch.setattr(trained_module.checkpoint, "latest", lambda *args: older.pop() if older else latest(*args))
    assert open_trained(run).progress.step == int(stands.name.removeprefix("step-")) and not older
    (stands / "manifest.json").unlink()
    with pytest.raises(UserError, match="this checkpoint is damaged"):
        open_trained(run)


def cuda_says():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 EiB.\nGPU 0 has none.")


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (lambda: np.empty(1 << 60, np.uint8), "(Unable to allocate"),
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), "can't allocate memory"),
        (lambda: torch.empty(1 << 40, 1 << 40), "(Storage size calculation overflowed"),
        (cuda_says, "(CUDA out of memory. Tried to allocate 2 EiB.): take fewer rows"),
    ],
    ids=["numpy", "cpu", "beyond 64 bits", "cuda"],
)
def test_a_step_that_no_memory_holds(small_corpus, monkeypatch, allocate, said):
    monkeypatch.setattr(run_module, "measure", lambda scratch: allocate())
    refused(tandem("plan", "decoder/tiny", *small_corpus), "out of memory (", said, "recompute=true")


def test_any_other_error_of_pytorch_is_a_bug(small_corpus, monkeypatch):
    monkeypatch.setattr(run_module, "measure", lambda scratch: torch.zeros(2) @ torch.zeros(3))
    assert isinstance(tandem("plan", "decoder/tiny", *small_corpus).exception, RuntimeError)


def test_a_recipe_has_no_trained_weights_to_analyse():
    refused(
        tandem("analyse", "state_window", "mine.yaml"), "mine.yaml: a recipe; state_window analyses trained weights"
    )


def test_printed_commands_can_be_typed(run, tmp_path):
    moved = RunFolder(Path(shutil.move(run, run.parent / "two words" / "mine")))
    result = json.loads((moved.path / "result.json").read_text())
    assert f"tandem generate '{moved.path / 'model'}' 'Once" in result_page(moved, result)[-1][1]
    recipe = moved.recipe.read_text()
    moved.recipe.write_text(recipe.replace("positions: adjacent", "positions: learned"))
    prompt, tokens = result["samples"][0][0], load(str(moved.recipe)).sampling.tokens
    assert result_page(moved, result)[-1][1].endswith(f"{shlex.quote(prompt)} --tokens {tokens}")
    moved.recipe.write_text(recipe)
    model = moved.model.rename(tmp_path / "model")
    assert f"tandem generate '{moved.path}' 'Once" in result_page(moved, result)[-1][1]
    model.rename(moved.model)
    shutil.rmtree(moved.checkpoints)
    cure = f"tandem train '{moved.recipe}' --run mine --runs '{moved.path.parent}'"
    refused(tandem("evaluate", moved.path), "finished, but its checkpoints are gone", cure, "can still generate text")
    (moved.path / "result.json").unlink()
    refused(tandem("evaluate", moved.path), "no checkpoint yet", cure)


def test_what_was_deleted_of_a_run_is_said_to_be_gone(run):
    def told() -> dict[str, object]:
        return dict(result_page(RunFolder(run), result))

    result = json.loads((run / "result.json").read_text())
    shutil.rmtree(run / "model")
    assert told()["model"] == f"not there; `tandem export {run} {run / 'model'}` writes it, or says why it cannot"
    shutil.rmtree(run / "checkpoints")
    assert (told()["model"], told()["checkpoint"]) == ("gone", "gone") and "go on" not in told()
    result["note"] = "bags of 4 tokens"
    assert told()["model"].startswith("not written; the run ends in a phase")


def test_a_run_is_opened_where_its_device_is_not_and_without_its_optimiser(run, tmp_path):
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("device: auto", "device: cuda"))
    done = tandem("export", run, tmp_path / "model")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "model" / "config.json").read_text())["recipe"]["training"]["device"] == "cuda"
    assert not open_trained(run).optimiser.state_dict()["state"]


def test_every_checkpoint_that_is_kept_can_be_opened(small_corpus, tmp_path):
    kept = [*SMALL, *small_corpus, "checkpoint.every=2", "checkpoint.keep=9"]
    assert tandem("train", "decoder/tiny", "--run", "new", "--runs", tmp_path, *kept).exit_code == 0
    new = tmp_path / "new"
    for command in (["evaluate", new], ["export", new, tmp_path / "model"]):
        done = tandem(*command, "--step", 2)
        assert done.exit_code == 0 and "step 2" in done.stdout, done.output
    assert tandem("generate", new, "cat", "--tokens", 2, "--step", 2).exit_code == 0
    refused(tandem("analyse", "state_window", new, "--step", 3), "no checkpoint of step 3; there are those of 2, 4, 6")
    refused(tandem("analyse", "coordinate_check", "decoder/tiny", "--step", 2), "coordinate_check looks at no trained")
    refused(tandem("generate", new / "model", "--step", 2), "an exported model is of one step")


def test_an_exported_model_is_opened_on_the_device_that_a_run_takes(run, monkeypatch):
    monkeypatch.setattr(trained_module, "choose_device", lambda config: Choice(torch.device("meta"), "a test"))
    network, _ = open_model(run / "model")
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["", ".", "..", "mine/new", "/new", "new/"])
def test_a_name_that_is_not_that_of_one_folder(run, small_corpus, name):
    before = contents(run.parent)
    new = ("--run", name, "--runs", run.parent)
    for command in (("train", "decoder/tiny", *SMALL, *small_corpus), ("convert", run)):
        refused(tandem(*command, *new), ": must be the name of one folder")
    assert contents(run.parent) == before


def test_the_folder_of_another_recipe(run, small_corpus):
    before = contents(run)
    other = ["network.depth=2", *(word for word in SMALL if "depth" not in word)]
    done = tandem("train", "decoder/tiny", "--run", run.name, "--runs", run.parent, *other, *small_corpus)
    refused(done, "another recipe", "network.depth: 1 there, 2 asked")
    assert contents(run) == before


def test_a_recipe_that_no_longer_fits_the_weights(run):
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("width: 64", "width: 32"))
    words = "not the weights of this network as recipe.yaml describes it now; bring back the recipe.yaml, or"
    refused(tandem("evaluate", run), words, "norm.weight: float32 [64], in this run float32 [32]")


def test_a_damaged_checkpoint(run):
    (weights,) = run.glob("checkpoints/*/*.distcp")
    weights.write_bytes(weights.read_bytes()[:-5])
    before = contents(run)
    refused(tandem("evaluate", run), "__0_0.distcp", "damaged. Delete ")
    assert contents(run) == before


def test_a_text_that_has_changed(tmp_path):
    (tmp_path / "one.txt").write_text("Some text to train on. " * 50)
    (tmp_path / "held.txt").write_text("The only held-out text.")
    given = [f"corpus.texts={tmp_path / 'one.txt'}", f"corpus.validation={tmp_path / 'held.txt'}"]
    given += [f"corpus.folder={tmp_path}", "corpus.vocabulary=300"]
    assert tandem("train", "decoder/tiny", "--run", "mine", "--runs", tmp_path, *SMALL, *given).exit_code == 0
    before = contents(tmp_path / "mine")
    (tmp_path / "one.txt").touch()  # prepared anew, and the same
    assert tandem("evaluate", tmp_path / "mine").exit_code == 0
    (tmp_path / "one.txt").write_text("Words that nobody has read before. " * 50)
    refused(tandem("evaluate", tmp_path / "mine"), "mine: was trained on other tokens", "have changed")
    assert contents(tmp_path / "mine") == before


def test_a_damaged_record(run, small_corpus):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0][:9] + "\n", *lines[1:]]))
    done = tandem("train", "decoder/tiny", "--run", run.name, "--runs", run.parent, *SMALL, *small_corpus)
    refused(done, "metrics.jsonl:1")


@pytest.mark.parametrize(
    ("name", "content", "cure"),
    [
        ("result.json", "{", "delete it and train the run again"),
        ("plan.json", "{}", "delete it: the run is planned again"),
        ("environment.json", "", "delete it and delete result.json beside it"),
        ("recipe.yaml", "", "bring it back from a copy"),
    ],
)
def test_a_damaged_part_of_a_run(run, small_corpus, name, content, cure):
    if name != "result.json":
        (run / "result.json").unlink()
    (run / name).write_text(content)
    again = ("train", "decoder/tiny", "--run", run.name, "--runs", run.parent, *SMALL, *small_corpus)
    refused(tandem(*again), f"{run / name}: damaged; {cure}")
    if name != "recipe.yaml":
        (run / name).unlink()
        assert tandem(*again).exit_code == 0


@pytest.mark.parametrize(
    ("name", "cure"),
    [("result.json", "train the run again: it goes"), ("environment.json", "delete result.json beside")],
)
def test_what_is_missing_need_not_be_deleted(run, name, cure):
    (run / name).unlink()
    with pytest.raises(UserError, match=f"{name}: missing; {cure}"):
        read_result(run, "mine", 1, 1e-3, trial=False)


def test_a_run_that_goes_on_tells_how_this_process_executes_it(run, small_corpus, monkeypatch):
    (run / "result.json").unlink()
    again = ("train", "decoder/tiny", "--run", run.name, "--runs", run.parent, *SMALL, *small_corpus)
    told = {}
    for name, flags in ("bfloat16", {"avx512_bf16"}), ("float32", set()):
        monkeypatch.setattr("tandem.training.device.cpu_flags", lambda flags=flags: flags)
        told[name] = tandem(*again, "training.compile=false", "batch.micro_batches=2").stdout
        assert "going on at step" in told[name] and "compile     no (asked for)\n" in told[name]
        assert f"precision   weights float32, compute {name} (the device" in told[name]
        (run / "result.json").unlink()
    entries = json.loads((run / "environment.json").read_text())[-2:]
    assert [entry["precision"].split()[-1] for entry in entries] == list(told)
    assert all(entry["device"] == "cpu" for entry in entries)


@pytest.mark.parametrize("lost", ["plan.json", "plan.json metrics.jsonl"])
def test_a_run_of_some_seconds_keeps_its_length_when_it_is_planned_again(lost, tmp_path, small_corpus, monkeypatch):
    given = ["budget=60 seconds", *SMALL[1:], "log.every=1", "training.compile=false", *small_corpus]
    again = ("train", "decoder/tiny", "--run", "mine", "--runs", tmp_path, *given)
    for seconds in (10.0, 5.0):  # a step, on a machine that is busy, then on one that is not
        monkeypatch.setattr(run_module, "measure", lambda run, s=seconds: Speed(s, 0.0, 1, run.flops(1)))
        assert tandem(*again).exit_code == 0
        assert json.loads((tmp_path / "mine" / "result.json").read_text())["step"] == 6
        for name in ("result.json", *lost.split()):
            (tmp_path / "mine" / name).unlink()


def test_a_result_that_lacks_a_number_or_an_environment_of_no_entries(run):
    told = json.loads((run / "result.json").read_text())
    for name, content in (("result.json", {**told, "tokens": None}), ("environment.json", [1])):
        whole = (run / name).read_text()
        (run / name).write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"{name}: damaged; delete it"):
            read_result(run, "mine", 1, 1e-3, trial=False)
        (run / name).write_text(whole)


def test_a_finished_run_stays_what_it_was_when_other_prompts_are_asked_for(run, small_corpus):
    before = contents(run)
    again = ("train", "decoder/tiny", "--run", run.name, "--runs", run.parent, *SMALL, *small_corpus)
    assert "stay as they are" not in tandem(*again).stdout
    done = tandem(*again, "sampling.prompts=[Other]")
    assert done.exit_code == 0 and "prompts; those of this finished run stay as they are" in done.stdout
    assert contents(run) == before


def test_a_run_whose_recipe_is_gone(run, small_corpus):
    (run / "recipe.yaml").unlink()
    before, other = contents(run), ["seed=99", "network.mlp=gelu"]
    done = tandem("train", "decoder/tiny", "--run", run.name, "--runs", run.parent, *SMALL, *small_corpus, *other)
    refused(done, "plan.json, metrics.jsonl, checkpoints, result.json of a run stand here", "recipe.yaml: missing")
    assert contents(run) == before


def test_a_run_without_its_record_or_its_documents_is_scored_again(run, small_corpus):
    again = ("train", "decoder/tiny", "--run", run.name, "--runs", run.parent, *SMALL, *small_corpus)
    documents, record = (run / "documents.npz").read_bytes(), (run / "metrics.jsonl").read_bytes()
    for damage in ((run / "documents.npz").unlink, lambda: (run / "documents.npz").write_bytes(b"PK")):
        damage()
        with pytest.raises(UserError, match=r"documents.npz: missing or damaged; delete documents.npz and result.json"):
            read_result(run, "mine", 1, 1e-3, trial=False)
    for name in ("documents.npz", "result.json"):
        (run / name).unlink()
    assert tandem(*again).exit_code == 0
    assert (run / "documents.npz").read_bytes() == documents and (run / "metrics.jsonl").read_bytes() == record
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics.jsonl: missing, or holds no likelihood"):
        read_result(run, "mine", 1, 1e-3, trial=False)
    assert "the record holds no step" in tandem(*again).stdout
    (run / "result.json").unlink()
    assert tandem(*again).exit_code == 0 and len(RunFolder(run).records("likelihood")) == 1


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(run, texts, tmp_path, monkeypatch):
    (run / "tasks").write_text("")
    (run / "analysis").write_text("")
    (tmp_path / "mine.yaml").write_text(f"texts: {{mine: {texts}/000.txt}}")
    monkeypatch.setattr(tasks, "scored", lambda *_, **__: pytest.fail("it is measured"))
    monkeypatch.setattr(StateWindow, "measure", lambda *_: pytest.fail("it is measured"))
    refused(tandem("evaluate", run, "--tasks", tmp_path / "mine.yaml"), "tasks: cannot be the folder of tasks (File")
    refused(tandem("analyse", "state_window", run), "analysis: cannot be the folder of analyses (File")


def test_an_export_for_which_there_is_no_room_leaves_no_part_of_a_model(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(folder)  # one's own, and empty
    with monkeypatch.context() as patch:
        patch.setattr(hugging_face, "write", full)
        refused(tandem("export", run, "."), "No space left on device; make room on the disk and start the same command")
    assert [path.name for path in folder.iterdir()] == [".partial"]
    assert tandem("export", run, ".").exit_code == 0 and tandem("generate", ".", "the", "--tokens", 2).exit_code == 0
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # all are files that others may read


def test_exporting_over_something(run, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious.txt").write_text("mine")
    refused(tandem("export", run, tmp_path / "there"), "not empty")
    assert (tmp_path / "there" / "precious.txt").read_text() == "mine"
    refused(tandem("export", run, tmp_path / "there" / "precious.txt"), "precious.txt: a file; export to a new folder")
    below = tmp_path / "there" / "precious.txt" / "new" / "model"
    refused(tandem("export", run, below), "precious.txt: a file; export to a new folder")


@pytest.mark.parametrize(
    "arguments", [["--tokens", "0"], ["--temperature", "-1"], ["--top-p", "0"], ["--top-k", "0"], ["\udcff"]]
)
def test_bad_prompts(run, arguments):
    refused(tandem("generate", run, *arguments))


def test_a_prompt_longer_than_learned_positions(tmp_path, small_corpus):
    learned = ["network.positions=learned", *SMALL, *small_corpus]
    assert tandem("train", "decoder/tiny", "--run", "short", "--runs", tmp_path, *learned).exit_code == 0
    refused(tandem("generate", tmp_path / "short", "cat " * 40), "positions for 32")
