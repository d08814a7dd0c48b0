"""One file per architecture, its session included; importing this registers them all."""

from tandem.networks import decoder, sps

__all__ = ["decoder", "sps"]
