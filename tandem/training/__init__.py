"""Training: one loop, and the parts that it is given."""

from tandem.training import checkpoint, device, muon, observers, optimiser, run, schedule, start
