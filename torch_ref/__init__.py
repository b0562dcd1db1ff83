"""The operations of `jaxblock.ops` in plain PyTorch: the specification, and the float64 judge.

Same file stems, names, parameter order and shape strings as `jaxblock.ops`, written for reading,
not for speed. Given float64 tensors everything is float64; given 16-bit tensors the results are
rounded where `jaxblock.ops` says.
"""

from torch_ref.attention import attention
from torch_ref.cross_entropy import cross_entropy, linear_cross_entropy, next_token_labels
from torch_ref.embedding import embed, resize_embedding, unembed
from torch_ref.feed_forward import geglu, intermediate_size, pack_gate_up, swiglu, unpack_gate_up
from torch_ref.moe import moe_swiglu, route_top_k
from torch_ref.normalization import rms_norm
from torch_ref.rotary import apply_rotary, rotary_cos_sin, rotary_frequencies, rotary_magnitude
from torch_ref.sampling import greedy, sample, top_k, top_p

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
