"""What the backward pass keeps of a layer and what it computes again: names and named policies."""

from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxblock.ops import cpu

# The values of a layer that a policy of `jax.checkpoint` can pick.
NORM_OUTPUT = "norm_output"
QKV = "qkv"
ATTENTION_OUTPUT = "attention_output"
ATTENTION_PROJECTION = "attention_projection"
GATE_UP = "gate_up"
BLOCK_OUTPUT = "block_output"
# The parameters as a layer uses them. No policy keeps these: looked up again they cost nothing, and
# kept they would be collected, layer by layer, to a second copy of all.
PARAMETER = "parameter"

Remat = Literal["none", "matmul_outputs", "block_inputs"]

_save_only = jax.checkpoint_policies.save_only_these_names
POLICIES: dict[Remat, Any] = {
    "none": jax.checkpoint_policies.save_anything_except_these_names(PARAMETER),
    "matmul_outputs": _save_only(QKV, ATTENTION_OUTPUT, ATTENTION_PROJECTION, GATE_UP),
    "block_inputs": jax.checkpoint_policies.nothing_saveable,
}


def named(x: jax.Array, name: str) -> jax.Array:
    """`checkpoint_name`, so that what is kept of x can go through a loop as it is."""
    return cpu.out_of_loops(checkpoint_name(cpu.in_loops(x), name), x.dtype)
