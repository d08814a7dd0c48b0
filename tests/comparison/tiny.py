"""A study of two shapes that trains in a second, as a user would write it."""

from pathlib import Path
from types import SimpleNamespace

from tandem.comparison.grid import load_grid
from tandem.comparison.pretrain import pretrain

STUDY = """\
title: Deep or wide
question: Which of two tiny shapes learns more in as many steps?
recipe: decoder/tiny
overrides:
  batch: {rows: 2, context: 32}
  sampling: {tokens: 3}
  checkpoint.every: 5
  log.every: 1
  evaluation.documents: 5
arms:
  deep: {network.depth: 3, network.width: 32}
  wide: {network.depth: 1}
baseline: deep
seeds: [1]
budget: 30 steps
"""


def write(folder: Path, small_corpus: list[str], text: str = STUDY, name: str = "tiny") -> Path:
    lines = "".join(f"  {override.replace('=', ': ', 1)}\n" for override in small_corpus)
    path = folder / f"{name}.yaml"
    path.write_text(text.replace("overrides:\n", f"overrides:\n{lines}", 1))
    return path


def read(folder: Path, small_corpus: list[str], *overrides: str, text: str = STUDY):
    return load_grid(str(write(folder, small_corpus, text)), overrides).cells[""]


class TrainedHere:
    """In the place of runner.Training: a run without a process of its own, and without the seconds that this takes."""

    def __init__(self, folder, job, claimed, processes, device=None):
        self.job, self.claimed, self.device = job, claimed, device
        self.process = SimpleNamespace(poll=lambda: 0)
        pretrain(folder.recipe(job), folder.runs / job.name)

    def close(self) -> None:
        self.claimed.close()
