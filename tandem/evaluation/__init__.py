"""What a trained network is worth."""

from tandem.evaluation import likelihood

__all__ = ["likelihood"]
