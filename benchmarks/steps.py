"""Training steps, to measure time and memory: a network, batches by step number, and steps taken as in a run.

steps = Steps(network, lambda step: one_document(4096, 16, 256, step))
steps(0)                            the loss of a step
growth(lambda: (steps(0), steps(1)))         bytes
"""

import resource
from collections.abc import Callable
from pathlib import Path

import torch

from tandem.corpus import Batch
from tandem.networks.network import Network
from tandem.objectives.next_token import NextToken
from tandem.training.device import Choice, autocast
from tandem.training.health import peak_memory
from tandem.training.loop import take_step
from tandem.training.optimiser import AdamW
from tandem.training.parallel import ALONE, StepLoss
from tandem.training.progress import Progress

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LR = 1e-3


class Steps:
    """The parts of a run that `take_step` needs."""

    ranks, steps = ALONE, 0

    def __init__(
        self,
        network: Network,
        batch: Callable[[int], Batch],
        objective=None,
        *,
        dtype=torch.bfloat16,
        compiled=True,
    ):
        self.network, self.batch, self.dtype = network.to(DEVICE), batch, dtype
        if compiled:
            network.compile()
        self.objective = objective or NextToken(NextToken.Config())
        self.model = StepLoss(network, self.objective)
        self.optimiser, self.progress = AdamW(AdamW.Config(lr=LR), network), Progress()
        self.device = Choice(DEVICE, "")

    def batches(self, step: int) -> list[Batch]:
        return [self.batch(step)]

    def schedule(self, step: int) -> float:
        return min(1.0, (step + 1) / 20)

    def place(self, step: int) -> str:
        return "random rows"

    def autocast(self):
        return autocast(DEVICE, self.dtype)

    def __call__(self, step: int) -> float:
        return next(iter(take_step(self, step).means().values()))


def growth(run: Callable[[], object]) -> int:
    """Peak growth in bytes of this process, or of the device's memory, while `run` runs."""
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
    else:
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    run()
    return peak_memory(DEVICE) - before
