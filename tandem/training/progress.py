"""Where a run stands, and which of its steps were spikes.

A spike is a step whose loss or gradient norm, before clipping, lies more than `deviations` standard deviations above
the running mean. Mean and variance look back about a hundred steps; the first hundred are weighted equally.

    loss      3.41 3.40 3.43 3.39 9.80 3.44         9.80 is a spike
    enters    3.41 3.40 3.43 3.39 3.52 3.44         and enters the estimate as the threshold, no more

So one spike does not hide the next, and a level that lasts becomes the usual one: within a few steps the deviation has
grown to cover it. No step is a spike among the first hundred, nor within `deviations` times one per cent of the mean:
where a loss is nearly constant, its deviation means nothing.

Everything here is plain numbers, saved in the checkpoint and computed from sums over all processes: a resumed run
judges like one that was never interrupted, and all processes of a run judge alike.
"""

import math
from dataclasses import dataclass, field

WINDOW = 100
"""Steps that the estimate looks back, and steps before the first judgement."""


@dataclass
class Progress:
    """What a checkpoint needs besides weights and optimiser.

    step: finished steps.  seconds: of training.  spikes, skipped: steps that were spikes, and those of them skipped.
    usual: for loss and norm, [steps seen, running mean, running variance].  steps: of the whole run; 0: not recorded.
    """

    step: int = 0
    seconds: float = 0.0
    spikes: int = 0
    skipped: int = 0
    usual: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0

    def is_spike(self, values: dict[str, float], deviations: float, skip: bool) -> bool:
        """Judges one step by its finite `values`, which enter the estimate; counts a spike, with `skip` as skipped."""
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
