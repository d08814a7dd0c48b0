"""One file per architecture, its session included; importing this registers them all."""

from tandem.networks import (
    boundary_decoder,
    context_ready,
    decoder,
    double_decoder,
    encoder_decoder,
    gestalt,
    head_ffn,
    prefix_decoder,
    sps,
)

__all__ = [
    "boundary_decoder",
    "context_ready",
    "decoder",
    "double_decoder",
    "encoder_decoder",
    "gestalt",
    "head_ffn",
    "prefix_decoder",
    "sps",
]
