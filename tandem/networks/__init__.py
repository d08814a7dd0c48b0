"""One file per architecture, its session included; importing this registers them all."""

from tandem.networks import decoder

__all__ = ["decoder"]
