"""Training: one loop, and around it what it is handed."""

from tandem.training import checkpoint, device, muon, observers, optimiser, run, schedule

__all__ = ["checkpoint", "device", "muon", "observers", "optimiser", "run", "schedule"]
