"""A probe that is registered runs on a trained network by its name, and what it finds is kept."""

import json

import pytest
import torch
from pydantic import Field
from typed import tandem

from tandem.evaluation.probe import Findings
from tandem.recipe import Settings, register, settings


@pytest.fixture
def counting(monkeypatch):
    """A probe for the time of a test."""
    monkeypatch.setattr(settings, "_registry", settings._registry | {"probe": {}})

    @register("probe", "counting")
    class Counting:
        class Config(Settings):
            words: int = Field(3, ge=1)

        def __init__(self, config):
            self.words = config.words

        def __call__(self, network, tokenizer, device):
            assert not network.training and not torch.is_grad_enabled()
            assert network.head.device.type == device.type and tokenizer.vocabulary == network.vocabulary
            rows = [{"word": number, "length": number**2} for number in range(self.words)]
            record = {"words": self.words, "every_word": [row["word"] for row in rows]}
            return Findings(record, {"Words": rows}, {"lengths": lambda path: path.write_bytes(b"png")})


def test_a_probe_runs_by_its_name_and_leaves_what_it_found(trained, counting):
    done = tandem("evaluate", trained, "--probe", "counting", "probe.words=7")
    assert done.exit_code == 0, done.output
    assert "Words" in done.stdout and " 36 " in done.stdout and "every_word" not in done.stdout
    kept = json.loads((trained / "probes" / "counting.json").read_text())
    assert kept == {"probe": "counting", "step": 4, "options": {"words": 7}, "words": 7, "every_word": [*range(7)]}
    assert (trained / "probes" / "counting-lengths.png").read_bytes() == b"png"


def test_probes_are_shown(counting):
    assert "  counting" in tandem("show").stdout.splitlines()
    assert "probe.words = 3" in tandem("show", "counting").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--probe", "countin"], "--probe countin: no such probe; did you mean counting? probes: counting"),
        (["--probe", "counting", "probe.words=0"], "probe.words = 0: must be a whole number >= 1"),
        (["--probe", "counting", "words=0"], "probe.words = 0: must be a whole number >= 1"),
        (["--probe", "counting", "probe.word=2"], "did you mean probe.words?"),
        (["words=0"], "words=0: options are those of a probe; name it with --probe"),
    ],
)
def test_what_is_wrong_is_told(trained, counting, arguments, message):
    done = tandem("evaluate", trained, *arguments)
    assert done.exit_code == 2 and message in done.stderr, done.stderr
