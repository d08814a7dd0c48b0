"""What a trained network is worth."""

from tandem.evaluation import father_son, likelihood, pointer_chasing

__all__ = ["father_son", "likelihood", "pointer_chasing"]
