"""Weights & Biases: one run for one folder, nothing twice, and never the end of a run."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_observers import STEP, make_log

from tandem.training.folder import RunFolder


class StandIn:
    """Keeps what it is told, and fails where it is asked to."""

    class Error(Exception):
        pass

    def __init__(self, fails_at=()):
        self.started, self.rows, self.fails_at = [], [], fails_at

    def Settings(self, **options):
        return options

    def init(self, **options):
        self.started.append(options)
        if "init" in self.fails_at:
            raise self.Error("no network")
        return SimpleNamespace(log=self.log, finish=lambda: None, define_metric=lambda *_, **__: None)

    def log(self, row):
        if row["step"] in self.fails_at:
            raise self.Error("no network")
        self.rows.append(row)


@pytest.fixture
def stand_in(monkeypatch):
    def put(**options):
        module = StandIn(**options)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return put


def log_steps(path, steps):
    if path.exists():  # as a run that goes on at its checkpoint
        RunFolder(path).truncate_metrics(steps[0] - 1)
    with make_log(path, wandb="towers") as log:
        for step in steps:
            log.after_step(replace(STEP, step=step))
            log.write({"kind": "sample", "step": step, "text": "a text is no number"})


def test_a_run_that_goes_on_is_the_same_and_sends_no_step_twice(tmp_path, stand_in):
    module = stand_in()
    log_steps(tmp_path / "mine", [1, 2, 3])
    log_steps(tmp_path / "mine", [3, 4])  # its checkpoint stood at 2
    log_steps(tmp_path / "yours", [1])
    ids = [started["id"] for started in module.started]
    assert ids[0] == ids[1] != ids[2]
    assert all(started["config"] == {"seed": 1} for started in module.started)
    assert all(started["resume"] == "allow" and started["project"] == "towers" for started in module.started)
    sent = [row["step"] for row in module.rows if "step/norm" in row]
    assert sent == [1, 2, 3, 4, 1]
    assert module.rows[0]["step/terms/nll"] == STEP.terms["nll"] and module.rows[0]["step/norm"] == STEP.norm


def test_what_was_recorded_before_is_sent_first_and_once(tmp_path, stand_in):
    with make_log(tmp_path / "branch") as log:  # as a trunk's record is taken over
        for step in (1, 2):
            log.after_step(replace(STEP, step=step))
    module = stand_in()
    log_steps(tmp_path / "branch", [3, 4])
    log_steps(tmp_path / "branch", [5])
    assert [row["step"] for row in module.rows if "step/norm" in row] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("fails_at", ["init", 2])
def test_a_failing_network_is_told_once_and_ends_nothing(tmp_path, stand_in, capsys, fails_at):
    module = stand_in(fails_at=[fails_at])
    log_steps(tmp_path / "mine", [1, 2, 3, 4])
    assert capsys.readouterr().err.count("no network") == 1
    assert {row["step"] for row in module.rows} == (set() if fails_at == "init" else {1})
    assert [r["step"] for r in RunFolder.open(tmp_path / "mine").records("step")] == [1, 2, 3, 4]


def test_a_record_that_did_not_go_out_goes_out_when_the_run_goes_on(tmp_path, stand_in):
    stand_in(fails_at=[2])
    log_steps(tmp_path / "mine", [1, 2])
    module = stand_in()
    log_steps(tmp_path / "mine", [2, 3])  # its checkpoint stood at 1
    assert [row["step"] for row in module.rows if "step/norm" in row] == [2, 3]


def test_a_bug_is_not_taken_for_a_network(tmp_path, stand_in, monkeypatch):
    module = stand_in()
    monkeypatch.setattr(module, "log", lambda row: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log_steps(tmp_path / "mine", [1])


def test_offline_it_leaves_its_files_in_the_folder(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps(tmp_path / "mine", [1, 2])
    (left,) = (tmp_path / "mine" / "wandb").glob("offline-run-*/*.wandb")
    until = time.monotonic() + 20  # a process of W&B's own writes it, and may do so after it said that it has finished
    while b"step/terms/nll" not in left.read_bytes() and time.monotonic() < until:
        time.sleep(0.05)
    assert b"step/terms/nll" in left.read_bytes()
    assert json.loads((tmp_path / "mine" / "wandb.json").read_text()) == {"step": 2, "sample": 2}
    out, err = capfd.readouterr()
    assert "wandb" not in out and "Weights" not in err
