"""Studies whose results are drawn, not trained."""

from types import SimpleNamespace

import numpy as np
import pytest

from tandem.comparison.results import Decoding, Point, Result
from tandem.recipe import Budget

ENVIRONMENT = {
    "command": ["/home/ada/bin/tandem", "compare"],
    "tandem": "0.3.0",
    "commit": "4c1f2ab",
    "dirty": False,
    "python": "3.12.3",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "platform": "Linux-6.1",
    "cpu": "AMD EPYC 9B45",
    "device": "cpu",
    "precision": "weights float32, compute float32",
    "cores": 2,
    "gpus": [],
    "plugins": [],
    "threads": 2,
}
ARMS = {"decoder": {"network.name": "decoder"}, "sps": {"network.name": "sps", "network.window": 64},
        "memory <2x>": {"network.name": "sps", "network.window": None}}  # fmt: skip
GAIN = {"decoder": 0.0, "sps": 0.05, "memory <2x>": 0.012}


@pytest.fixture
def make_study():
    def make(**changes):
        study = SimpleNamespace(
            title="Does a second stream pay?",
            question="At equal tokens, is text better predicted by a network whose predictions are forgotten?",
            arms=ARMS,
            starts={},
            baseline="decoder",
            seeds=[1, 2, 3],
            budget=Budget(2e6, "tokens"),
            rates=[],
            keys=SimpleNamespace(trial_share=1.0, margin=None),
            level=0.05,
            targets=[],
            texts=["/home/ada/texts/wiki.txt", "stories"],
        )
        return SimpleNamespace(**(vars(study) | changes))

    return make


@pytest.fixture
def run(tmp_path):
    """A drawn result of an arm and a seed."""

    def draw(arm: str, seed: int, lr: float = 2e-3, trial: bool = False, spread: float = 0.006, **changes) -> Result:
        documents = np.random.default_rng(0)
        tokens = np.ceil(180 * np.exp(0.8 * documents.standard_normal(240)))
        hard = documents.normal(3.4, 0.35, 240)
        own = np.random.default_rng([seed, list(GAIN).index(arm)])
        tried = 0.03 * np.log2(lr / 2e-3) ** 2
        level = -GAIN[arm] + own.normal(0, spread) + tried
        nats = tokens * (hard + level + own.normal(0, 0.25, 240) / np.sqrt(tokens) + 0.03 * own.normal(0, 1, 240))
        final = nats.sum() / tokens.sum()
        factor = {"decoder": 1.0, "sps": 1.9, "memory <2x>": 2.1}[arm]
        steps = [10, 20, 40, 80, 120, 160, 200, 240, 280, 320, 360, 400]
        bumps = own.normal(0, 0.008, len(steps)) * (np.arange(len(steps)) < len(steps) - 1)
        curve = [
            Point(s, s * 5000, s * 3.1e10 * factor, s * 0.21 * factor, final * (s / 400) ** -0.2 + bump)
            for s, bump in zip(steps, bumps, strict=True)
        ]
        fields = dict(
            arm=arm, seed=seed, lr=lr, trial=trial, folder=tmp_path / "runs" / f"{arm}-{seed}", steps=400,
            tokens=2_000_000, positions=1_250_000, flops=400 * 3.1e10 * factor,
            training_seconds=84.0 * factor, evaluation_seconds=3.0,
            parameters={"embedding": 524288, "attention": 300_000, "mlp": 700_000}, documents=np.arange(240), nats=nats,
            document_tokens=tokens, document_bytes=np.round(tokens * 4.3), end_nats=0 * tokens, curve=curve,
            decoding=Decoding(256, 0.031 * factor, 410 / factor, int(2**20 * factor)),
            samples=[("The river", f" was wide <{arm}>, and nobody crossed it & lived."), ("In 1912", " it snowed.")],
            note="", environment=[ENVIRONMENT],
        )  # fmt: skip
        return Result(**(fields | changes))

    return draw


@pytest.fixture
def page(tmp_path):
    from tandem.comparison.report import write_report
    from tandem.comparison.summary import Summary

    def write(study, results, diverged=frozenset()) -> str:
        return write_report(Summary.of(study, results, diverged), tmp_path).read_text("utf-8")

    return write
