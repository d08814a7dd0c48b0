"""Evaluation of trained networks."""

from tandem.evaluation import likelihood
