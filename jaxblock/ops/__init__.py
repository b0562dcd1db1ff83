"""Pure functions over arrays: the single truth that modules, decoder and tests share."""

from jaxblock.ops.embedding import embed, resize_embedding, unembed
from jaxblock.ops.feed_forward import (
    geglu,
    intermediate_size,
    pack_gate_up,
    swiglu,
    unpack_gate_up,
)
from jaxblock.ops.normalization import rms_norm

__all__ = [
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
