"""The folder of a run: found again, locked while used, and its record cut back to a checkpoint."""

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
from pathlib import Path

import pytest

import tandem
from tandem.comparison.pretrain import pretrain
from tandem.disk import locked
from tandem.recipe import UserError, load
from tandem.training import folder as folder_module
from tandem.training.folder import RunFolder, code_version

RECIPE = """\
seed: 1337
network:
  name: decoder
  depth: 2
sampling: {tokens: 40}
checkpoint: {every: 500, keep: 1}
"""


def write_metrics(folder: RunFolder, *lines: str) -> None:
    folder.metrics.write_text("".join(lines))


def line(step: int, kind: str = "step", value: float = 0.1) -> str:
    return json.dumps({"kind": kind, "step": step, "value": value}) + "\n"


def test_a_started_run_is_found_again(tmp_path):
    with RunFolder.start(tmp_path / "runs" / "mine", RECIPE):
        pass
    folder = RunFolder.open(tmp_path / "runs" / "mine")
    assert folder.recipe.read_text() == RECIPE
    (entry,) = json.loads(folder.environment.read_text())
    assert entry["tandem"] == tandem.__version__
    assert entry["cores"] >= 1
    assert entry["memory_bytes"] > 2**28
    assert all(entry[key] for key in ("cpu", "python", "torch", "numpy", "platform", "threads", "command"))


def test_every_process_of_a_run_leaves_its_environment(tmp_path):
    for _ in range(2):
        RunFolder.start(tmp_path / "mine", RECIPE).close()
    assert len(json.loads(RunFolder.open(tmp_path / "mine").environment.read_text())) == 2


def test_a_missing_run_is_answered_with_those_that_are_there(tmp_path):
    RunFolder.start(tmp_path / "mine", RECIPE).close()
    RunFolder.start(tmp_path / "yours", RECIPE).close()
    with pytest.raises(UserError, match=r"theirs: no run here; runs in .*: mine, yours"):
        RunFolder.open(tmp_path / "theirs")
    with pytest.raises(UserError, match=f"mime: no run here; did you mean {tmp_path}/mine"):
        RunFolder.open(tmp_path / "mime")
    with pytest.raises(UserError, match=f"nothing: inside the run {tmp_path}/mine, which is the folder to give"):
        RunFolder.open(tmp_path / "mine" / "models" / "nothing")
    with pytest.raises(UserError, match="holds runs, and is none: give one of mine, yours"):
        RunFolder.open(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(UserError, match="a model, no run: `tandem evaluate` and `tandem generate` take it"):
        RunFolder.open(tmp_path / "model")
    with pytest.raises(UserError, match="holds no run"):
        RunFolder.open(tmp_path / "other" / "nothing")


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="mine: cannot be the folder of a run"):
        RunFolder.start(tmp_path / "mine", RECIPE)


def test_another_recipe_is_refused_key_by_key(tmp_path):
    RunFolder.start(tmp_path / "mine", RECIPE).close()
    other = RECIPE.replace("depth: 2", "width: 64").replace("1337", "7").replace("every: 500", "every: 9")
    with pytest.raises(UserError) as error:
        RunFolder.start(tmp_path / "mine", other)
    assert str(error.value).splitlines()[1:] == [
        "  seed: 1337 there, 7 asked",
        "  network.width: absent there, 64 asked",
        "  network.depth: 2 there, absent asked",
        "A run that goes on may change only checkpoint, sampling, log, training.compile, training.parallel, "
        "training.recompute, evaluation.rows, batch.micro_batches, start.trunk",
        f"To train its weights otherwise, or longer, start another run from them: start.run={tmp_path}/mine",
    ]
    assert "another name" in str(error.value)
    assert RunFolder.open(tmp_path / "mine").recipe.read_text() == RECIPE
    RunFolder.start(tmp_path / "mine", RECIPE).close()  # the refusal holds no lock


def test_a_finished_run_may_stand_where_nothing_can_be_written(tmp_path, monkeypatch):
    RunFolder.start(tmp_path / "mine", RECIPE).close()
    (tmp_path / "mine" / "result.json").write_text("{}")
    monkeypatch.setattr(folder_module, "lock", lambda path: pytest.fail("it locks"))
    monkeypatch.setattr(folder_module, "replace_file", lambda *_: pytest.fail("it writes"))
    RunFolder.start(tmp_path / "mine", RECIPE).close()
    with pytest.raises(UserError, match="holds the run of another recipe"):
        RunFolder.start(tmp_path / "mine", RECIPE.replace("1337", "7"))


def test_what_a_process_leaves_and_where_it_stops_may_differ(tmp_path):
    RunFolder.start(tmp_path / "mine", RECIPE).close()
    later = RECIPE.replace("null", "10").replace("keep: 1", "keep: 3").replace("tokens: 40", "tokens: 20")
    later += "training: {recompute: true}\nevaluation: {rows: 4}\n"
    with RunFolder.start(tmp_path / "mine", later) as folder:
        assert folder.recipe.read_text() == later


def me(pid: int | None = None) -> str:
    return f"process {pid or os.getpid()} on {platform.node()}"


def test_two_processes_cannot_train_one_run(tmp_path):
    with RunFolder.start(tmp_path / "mine", RECIPE) as folder:
        with pytest.raises(UserError, match=f"{me()} is training this run; wait for it, or give"):
            RunFolder.start(folder.path, RECIPE)
        assert RunFolder.open(folder.path).records() == []  # reading is free
    RunFolder.start(tmp_path / "mine", RECIPE).close()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"mine/.lock: cannot be locked \(Function not implemented\).*Lustre: -o flock"):
        RunFolder.start(tmp_path / "mine", RECIPE)
    with pytest.raises(UserError, match=r"study.lock: cannot be locked"), locked(tmp_path / "study.lock"):
        pytest.fail("it goes on")


def test_a_killed_process_holds_no_lock(tmp_path):
    ready, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            folder = RunFolder.start(tmp_path / "mine", RECIPE)
            os.write(started, b"x")
            signal.pause()
            folder.close()
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"x"
    with pytest.raises(UserError, match=f"{me(pid)} is training"):
        RunFolder.start(tmp_path / "mine", RECIPE)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    alive = f"{me()} is training"
    with RunFolder.start(tmp_path / "mine", RECIPE), pytest.raises(UserError, match=alive):
        RunFolder.start(tmp_path / "mine", RECIPE)


def test_the_record_is_read_by_kind_without_the_line_being_written(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.records() == []
    write_metrics(folder, line(1), line(1, "sample"), line(2), '{"kind": "step", "st')
    assert [(r["kind"], r["step"]) for r in folder.records()] == [("step", 1), ("sample", 1), ("step", 2)]
    assert [r["step"] for r in folder.records("step")] == [1, 2]


def test_a_damaged_line_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    for damaged in ("{\n", "[1]\n", '{"step": 2}\n', '{"kind": "step"}\n'):
        write_metrics(folder, line(1), damaged, line(2))
        with pytest.raises(UserError, match=r"metrics.jsonl:2: not a record; delete this line"):
            folder.records()


@pytest.mark.parametrize("cut", ["", '{"kind": "step", "step": 3', line(5).strip()])
def test_the_record_is_cut_back_to_a_checkpoint_byte_for_byte(tmp_path, cut):
    folder = RunFolder(tmp_path)
    kept = [line(1, value=1 / 3), '{"step":2,  "kind":"step", "text": "\\u00e4 \u2028"}\n', line(3, "sample")]
    write_metrics(folder, *kept, line(4), line(5, "sample"), cut)
    folder.truncate_metrics(3)
    assert folder.metrics.read_text() == "".join(kept)
    folder.truncate_metrics(None)
    assert folder.metrics.read_bytes() == b""


def test_a_failed_cut_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    write_metrics(folder, line(1), line(2))
    monkeypatch.setattr(os, "fsync", lambda _: os.stat(tmp_path / "nothing"))
    with pytest.raises(OSError):
        folder.truncate_metrics(1)
    assert len(folder.records()) == 2


def test_the_record_is_on_the_disk_before_a_checkpoint_that_stands_on_it(tmp_path, small_corpus, monkeypatch):
    shape = ["network.depth=1", "network.width=16", "batch.rows=2", "batch.context=32", "sampling.tokens=2"]
    recipe = load("decoder/tiny", [*shape, *small_corpus, "budget=2 steps", "checkpoint.every=1", "log.every=1"])
    fsync, seen = os.fsync, []

    def watched(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append((path.name, path.read_bytes().count(b'"kind": "step"') if path.is_file() else 0))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    pretrain(recipe, tmp_path / "run")
    for step in (1, 2):
        assert ("metrics.jsonl", step) in seen[: seen.index((f".step-{step:08d}", 0))]


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *identity, "-C", str(tmp_path), *arguments], text=True).strip()

    package = tmp_path / "tandem"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(tandem, "__file__", str(package / "__init__.py"))
    assert code_version() == (None, None)
    git("init", "-q")
    assert code_version() == (None, None)  # in a tree that does not hold the code
    git("add", ".")
    git("commit", "-qm", "Start")
    assert code_version() == (git("rev-parse", "HEAD"), False)
    Path(package / "new.py").write_text("")
    assert code_version() == (git("rev-parse", "HEAD"), True)


def test_only_a_recipe_that_was_read_can_be_trained(tmp_path):
    with pytest.raises(UserError, match=r"recipe is str: pass what tandem\.load\(\.\.\.\) returns"):
        pretrain("decoder/tiny", tmp_path / "run")
    assert not (tmp_path / "run").exists()
