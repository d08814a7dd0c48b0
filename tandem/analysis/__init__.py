"""What a trained network does inside; importing this registers every analysis."""

from tandem.analysis import contraction

__all__ = ["contraction"]
