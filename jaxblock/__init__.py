"""The decoder block for JAX, with proof."""

from jaxblock.config import ConfigError, DecoderConfig
from jaxblock.ops import (
    embed,
    geglu,
    intermediate_size,
    pack_gate_up,
    resize_embedding,
    rms_norm,
    swiglu,
    unembed,
    unpack_gate_up,
)

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DecoderConfig",
    "embed",
    "geglu",
    "intermediate_size",
    "pack_gate_up",
    "resize_embedding",
    "rms_norm",
    "swiglu",
    "unembed",
    "unpack_gate_up",
]
