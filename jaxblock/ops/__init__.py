"""Pure functions over arrays: the single truth that modules, decoder and tests share."""

from jaxblock.ops.attention import attention
from jaxblock.ops.cross_entropy import cross_entropy, linear_cross_entropy, next_token_labels
from jaxblock.ops.embedding import embed, resize_embedding, unembed
from jaxblock.ops.feed_forward import geglu, intermediate_size, pack_gate_up, swiglu, unpack_gate_up
from jaxblock.ops.moe import moe_swiglu, route_top_k
from jaxblock.ops.normalization import rms_norm
from jaxblock.ops.rotary import apply_rotary, rotary_cos_sin, rotary_frequencies, rotary_magnitude
from jaxblock.ops.sampling import greedy, sample, top_k, top_p

__all__ = [
    "apply_rotary",
    "attention",
    "cross_entropy",
    "embed",
    "geglu",
    "greedy",
    "intermediate_size",
    "linear_cross_entropy",
    "moe_swiglu",
    "next_token_labels",
    "pack_gate_up",
    "resize_embedding",
    "rms_norm",
    "rotary_cos_sin",
    "rotary_frequencies",
    "rotary_magnitude",
    "route_top_k",
    "sample",
    "swiglu",
    "top_k",
    "top_p",
    "unembed",
    "unpack_gate_up",
]
