"""What is asked of a network; importing this registers all objectives."""

from tandem.objectives import next_token, superposition

__all__ = ["next_token", "superposition"]
