"""The decoder block for JAX, with proof."""

from jaxblock.cache import Cache, init_cache
from jaxblock.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from jaxblock.config import ConfigError, DecoderConfig
from jaxblock.decoder import activations, decode_step, forward, prefill
from jaxblock.generate import generate
from jaxblock.ops import (
    apply_rotary,
    attention,
    cross_entropy,
    embed,
    geglu,
    greedy,
    intermediate_size,
    linear_cross_entropy,
    moe_swiglu,
    next_token_labels,
    pack_gate_up,
    resize_embedding,
    rms_norm,
    rotary_cos_sin,
    rotary_frequencies,
    rotary_magnitude,
    route_top_k,
    sample,
    swiglu,
    top_k,
    top_p,
    unembed,
    unpack_gate_up,
)
from jaxblock.parameters import init_params
from jaxblock.train import TrainState, init_train_state, next_token_loss, train_step
from jaxblock.vocabulary import pad_vocabulary, resize_vocabulary, unpad_vocabulary

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DecoderConfig",
    "TrainState",
    "activations",
    "apply_rotary",
    "attention",
    "cross_entropy",
    "decode_step",
    "embed",
    "forward",
    "geglu",
    "generate",
    "greedy",
    "init_cache",
    "init_params",
    "init_train_state",
    "intermediate_size",
    "linear_cross_entropy",
    "load_checkpoint",
    "moe_swiglu",
    "next_token_labels",
    "next_token_loss",
    "pack_gate_up",
    "pad_vocabulary",
    "prefill",
    "resize_embedding",
    "resize_vocabulary",
    "rms_norm",
    "rotary_cos_sin",
    "rotary_frequencies",
    "rotary_magnitude",
    "route_top_k",
    "sample",
    "save_checkpoint",
    "swiglu",
    "top_k",
    "top_p",
    "train_step",
    "unembed",
    "unpack_gate_up",
    "unpad_vocabulary",
]
