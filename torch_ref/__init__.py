"""The operations of `jaxblock.ops` in plain PyTorch: the specification, and the float64 judge.

Same file stems, names, parameter order and shape strings as `jaxblock.ops`, written for reading,
not for speed. Given float64 tensors everything is float64; given 16-bit tensors the results are
rounded where `jaxblock.ops` says.
"""

from torch_ref.embedding import embed, resize_embedding, unembed
from torch_ref.feed_forward import (
    geglu,
    intermediate_size,
    pack_gate_up,
    swiglu,
    unpack_gate_up,
)
from torch_ref.normalization import rms_norm

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
