"""One file per architecture, its session included; importing this registers them all."""

from tandem.networks import context_ready, decoder, double_decoder, encoder_decoder, head_ffn, prefix_decoder, sps

__all__ = ["context_ready", "decoder", "double_decoder", "encoder_decoder", "head_ffn", "prefix_decoder", "sps"]
