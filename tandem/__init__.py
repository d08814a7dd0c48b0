"""Tandem: pretraining language models in ways that split one job in two.

Two streams, two decoders, two phases, two levels, two networks: five published methods and their baselines
on one backbone, one data order, one budget and one ruler. Start with `tandem show`.
"""

__version__ = "0.1.0"
