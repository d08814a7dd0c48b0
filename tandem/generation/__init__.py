"""Texts from trained networks: how tokens are chosen, and how they become text."""

from tandem.generation import generate, sampling
