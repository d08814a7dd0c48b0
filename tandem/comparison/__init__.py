"""Comparing runs: what they cost, what they reached, and whether the difference is significant."""
