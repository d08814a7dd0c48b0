"""What a trained network is worth."""

from tandem.evaluation import likelihood, pointer_chasing

__all__ = ["likelihood", "pointer_chasing"]
