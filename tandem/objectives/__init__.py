"""What is asked of a network; importing this registers all objectives."""

from tandem.objectives import next_token, prefix_lm, span_corruption, superposition

__all__ = ["next_token", "prefix_lm", "span_corruption", "superposition"]
