"""One file per architecture, its session included; importing this registers them all."""

from tandem.networks import boundary_decoder, context_ready, decoder, double_decoder, gestalt, head_ffn, sps

__all__ = ["boundary_decoder", "context_ready", "decoder", "double_decoder", "gestalt", "head_ffn", "sps"]
