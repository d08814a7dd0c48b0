"""Where a run stands, and which of its steps were spikes.

A spike is a step whose loss or gradient norm, before clipping, lies more than `deviations` standard deviations above
the running mean. Mean and variance weigh the last hundred steps or so; of the first hundred, all alike.

    loss      3.41 3.40 3.43 3.39 9.80 3.44         9.80 is a spike
    enters    3.41 3.40 3.43 3.39 3.52 3.44         and enters the estimate as the threshold, no more

So one spike does not hide the next, and a level that lasts becomes the usual one: within a few steps the deviation has
grown to it. Nothing is a spike in the first hundred steps, nor what lies within one per cent of the mean times
`deviations`, for where a loss is nearly constant its deviation means nothing.

Everything here is plain numbers that stand in the checkpoint, made from sums over all processes: a run that goes on
judges as one that was never interrupted, and every process of a run judges alike.
"""

import math
from dataclasses import dataclass, field

WINDOW = 100
"""Steps that the estimate looks back, and steps before the first judgement."""


@dataclass
class Progress:
    """What a checkpoint needs beside weights and optimiser.

    step: finished.  seconds: of training.  spikes, skipped: how many steps were spikes, and of these were no updates.
    usual: of loss and norm, [steps seen, running mean, running variance].
    """

    step: int = 0
    seconds: float = 0.0
    spikes: int = 0
    skipped: int = 0
    usual: dict[str, list[float]] = field(default_factory=dict)

    def is_spike(self, values: dict[str, float], deviations: float, skip: bool) -> bool:
        """Judges one step by its finite `values`, which enter the estimate, and counts it; `skip`: as one skipped."""
        found = [self._judge(name, value, deviations) for name, value in values.items()]
        self.spikes += any(found)
        self.skipped += any(found) and skip
        return any(found)

    def _judge(self, name: str, value: float, deviations: float) -> bool:
        seen, mean, variance = self.usual.get(name, (0, 0.0, 0.0))
        limit = mean + deviations * max(math.sqrt(variance), 0.01 * abs(mean))
        high = seen >= WINDOW and value > limit
        share = 1 / min(seen + 1, WINDOW)
        gap = (limit if high else value) - mean
        self.usual[name] = [seen + 1, mean + share * gap, (1 - share) * (variance + share * gap * gap)]
        return high
