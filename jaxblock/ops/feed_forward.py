"""The gated feed-forward: its size, its fused weights, SwiGLU and GEGLU."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jaxblock.ops import checks, cpu
from jaxblock.ops.precision import arithmetic_dtype, matmul
from jaxblock.ops.remat import GATE_UP, named
from jaxblock.ops.sharding import laid_out, like

_gelu_tanh = partial(jax.nn.gelu, approximate=True)
_gelu_exact = partial(jax.nn.gelu, approximate=False)


def intermediate_size(
    hidden_size: int, *, multiple_of: int, ffn_dim_multiplier: float | None = None
) -> int:
    """F = multiple_of * ceil(int(ffn_dim_multiplier * int(2/3 * 4 * hidden_size)) / multiple_of)

    Args:
      hidden_size: D, at least 1.
      multiple_of: F is rounded up to a multiple of it, at least 1. No default: Llama's sizes
        differ.
      ffn_dim_multiplier: enters between the two-thirds step and the rounding up, as in Meta's code;
        above 0. None means none.

    Returns: F. (4096, 256) gives 11008; (8192, 4096, 1.3) gives 28672.

    Raises: ValueError or TypeError for a size below 1 or no integer, or if no channel would be
      left.

    Source: meta-llama/llama, llama/model.py, class FeedForward; Shazeer, GLU Variants Improve
      Transformer, 2020, for the two thirds.
    """
    hidden_size = checks.size("intermediate_size", "hidden_size", hidden_size)
    multiple_of = checks.size("intermediate_size", "multiple_of", multiple_of)
    channels = 2 * (4 * hidden_size) // 3
    if ffn_dim_multiplier is not None:
        ffn_dim_multiplier = checks.number(
            "intermediate_size", "ffn_dim_multiplier", ffn_dim_multiplier, minimum=0.0, strict=True
        )
        channels = int(ffn_dim_multiplier * channels)
    checks.require(
        channels >= 1,
        "intermediate_size",
        "at least one channel must be left before rounding up",
        hidden_size=hidden_size,
        ffn_dim_multiplier=ffn_dim_multiplier,
    )
    return multiple_of * -(-channels // multiple_of)


def pack_gate_up(
    gate: Float[Array, "*L D F"], up: Float[Array, "*L D F"]
) -> Float[Array, "*L D 2 F"]:
    """gate_up[..., 0, :] = gate, gate_up[..., 1, :] = up

    Args:
      gate: the projection that the activation is applied to (w1 in Meta's files).
      up: the other projection (w3).

    Returns: both in one array whose axis of size 2 says which is which. Leading axes (layers,
      experts) pass through.

    Raises: ValueError or TypeError if shapes or dtypes differ.
    """
    gate, up = checks.floating("pack_gate_up", gate=gate, up=up)
    checks.require(
        gate.shape == up.shape and gate.ndim >= 2,
        "pack_gate_up",
        "gate and up must have the same shape [D F]",
        gate=gate,
        up=up,
    )
    checks.require(
        gate.dtype == up.dtype,
        "pack_gate_up",
        "gate and up must have the same dtype",
        kind=TypeError,
        hint="Cast one of them: packing does not promote.",
        gate=gate,
        up=up,
    )
    return jnp.stack([gate, up], axis=-2)


def unpack_gate_up(
    fused: Float[Array, "*L M"],
    *,
    layout: Literal["gate_up", "up_gate", "interleaved", "blocks"],
    block_size: int | None = None,
) -> tuple[Float[Array, "*L F"], Float[Array, "*L F"]]:
    """gate, up = the two halves of the last axis (M = 2F), taken apart as `layout` says

    Args:
      fused: gate and up projections in one axis. The last axis is the one taken apart; turn torch's
        [out, in] kernels first.
      layout: "gate_up": all gate channels, then all up channels (Phi-3, transformers).
        "up_gate": the other way round. "interleaved": gate and up channels alternate, gate first.
        "blocks": `block_size` gate channels, then as many up channels, and so on (shards of a
        tensor-parallel file one after the other). No default: the shapes do not tell.
      block_size: channels in a block, a divisor of F; for "blocks" only.

    Returns: gate and up, each of half the width and in the dtype of `fused`; `pack_gate_up` of the
      two is the [D 2 F] array that `swiglu` takes.

    Raises: ValueError for an odd axis, an unknown layout, a missing, superfluous or unfitting
      block.
    """
    function = "unpack_gate_up"
    (fused,) = checks.floating(function, fused=fused)
    checks.require(fused.ndim >= 1, function, "fused must have at least one axis", fused=fused)
    checks.choice(function, "layout", layout, ("gate_up", "up_gate", "interleaved", "blocks"))
    *leading, width = fused.shape
    checks.require(width % 2 == 0, function, "the last axis must be even (2F)", fused=fused)
    if layout == "blocks":
        checks.require(
            block_size is not None,
            function,
            'layout "blocks" needs block_size',
            block_size=block_size,
        )
        block_size = checks.size(function, "block_size", block_size)
        checks.require(
            width % (2 * block_size) == 0,
            function,
            "block_size must divide F, half of the last axis",
            block_size=block_size,
            fused=fused,
        )
        halves = fused.reshape(*leading, -1, 2, block_size)
        return halves[..., 0, :].reshape(*leading, -1), halves[..., 1, :].reshape(*leading, -1)
    checks.require(
        block_size is None,
        function,
        'block_size belongs to layout "blocks" only',
        layout=layout,
        block_size=block_size,
    )
    if layout == "interleaved":
        return fused[..., 0::2], fused[..., 1::2]
    first, second = fused[..., : width // 2], fused[..., width // 2 :]
    return (first, second) if layout == "gate_up" else (second, first)


def swiglu(
    x: Float[Array, "*B D"],
    gate_up: Float[Array, "D 2 F"],
    down: Float[Array, "F D"],
    *,
    gate_up_bias: Float[Array, "2 F"] | None = None,
    down_bias: Float[Array, "D"] | None = None,
) -> Float[Array, "*B D"]:
    """y = (silu(x · gate_up[:, 0]) * (x · gate_up[:, 1])) · down,  silu(z) = z / (1 + exp(-z))

    Args:
      x: activations.
      gate_up: index 0 of the axis of size 2 is the gate, index 1 the up projection; see
        `pack_gate_up` and `unpack_gate_up`.
      down: the projection back.
      gate_up_bias, down_bias: added to the two products (Llama's `mlp_bias`).

    Returns: the shape and dtype of x.

    Raises: ValueError or TypeError for shapes that do not fit (gate_up without its axis of size 2
      among them), an empty axis, integer inputs.

    Precision: products with 16-bit operands accumulate in float32 and are rounded once, after the
      bias if there is one; silu and
      the elementwise product run in float32 and are rounded once. Weights follow the dtype of x.
      The backward pass keeps x and the gate/up product only and computes the elementwise values
      again.

    Differs from torch: transformers' LlamaMLP rounds silu(gate) to 16 bits before the product.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, equation 6.
    """
    return _gated_feed_forward(
        "swiglu", x, gate_up, down, gate_up_bias, down_bias, activation=jax.nn.silu
    )


def geglu(
    x: Float[Array, "*B D"],
    gate_up: Float[Array, "D 2 F"],
    down: Float[Array, "F D"],
    *,
    approximate: bool = True,
    gate_up_bias: Float[Array, "2 F"] | None = None,
    down_bias: Float[Array, "D"] | None = None,
) -> Float[Array, "*B D"]:
    """y = (gelu(x · gate_up[:, 0]) * (x · gate_up[:, 1])) · down

    Args:
      x: activations.
      gate_up: index 0 of the axis of size 2 is the gate, index 1 the up projection.
      down: the projection back.
      approximate: True: the tanh form (Gemma; "gelu_pytorch_tanh"). False: the exact form with erf.
        They differ by up to 4.8e-4.
      gate_up_bias, down_bias: added to the two products.

    Returns, Raises, Precision: as `swiglu`.

    Differs from torch: torch.nn.functional.gelu is exact by default; here tanh is, as in
      jax.nn.gelu.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, equation 6; Hendrycks and Gimpel,
      Gaussian Error Linear Units, 2016.
    """
    approximate = checks.flag("geglu", "approximate", approximate)
    activation = _gelu_tanh if approximate else _gelu_exact
    return _gated_feed_forward(
        "geglu", x, gate_up, down, gate_up_bias, down_bias, activation=activation
    )


# By the names of the activations: the one table that modules and decoder pick from.
GATED_FEED_FORWARDS: Mapping[str, Callable[..., jax.Array]] = {
    "silu": swiglu,
    "gelu": partial(geglu, approximate=False),
    "gelu_tanh": partial(geglu, approximate=True),
}


def _gated_feed_forward(
    function: str,
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    *,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    x, gate_up, down = checks.floating(function, x=x, gate_up=gate_up, down=down)
    checks.require(x.ndim >= 1, function, "x must have at least one axis", x=x)
    checks.require(
        gate_up.ndim == 3 and gate_up.shape[:2] == (x.shape[-1], 2),
        function,
        "gate_up must have the shape [D 2 F] with D the last axis of x",
        hint="Build it with pack_gate_up(gate, up).",
        x=x,
        gate_up=gate_up,
    )
    checks.require(
        down.shape == (gate_up.shape[2], x.shape[-1]),
        function,
        "down must have the shape [F D] with F the last axis of gate_up and D that of x",
        hint="torch keeps kernels as [out, in]: turn them.",
        x=x,
        gate_up=gate_up,
        down=down,
    )
    gate_up_bias = _bias(function, "gate_up_bias", gate_up_bias, gate_up)
    down_bias = _bias(function, "down_bias", down_bias, down)

    return _compute_gated_feed_forward(
        x, gate_up, down, gate_up_bias, down_bias, activation=activation
    )


def _bias(function: str, name: str, bias: jax.Array | None, kernel: jax.Array) -> jax.Array | None:
    if bias is None:
        return None
    (bias,) = checks.floating(function, **{name: bias})
    must = f"{name} must have the shape of what its kernel makes of one token"
    got: dict[str, Any] = {name: bias, "kernel": kernel}
    checks.require(bias.shape == kernel.shape[1:], function, must, **got)
    return bias


# Jitted, so that a call outside `jit` is one compiled program and gives the bits of one inside it.
@laid_out(lambda x, *parameters: like(x))
@partial(jax.jit, static_argnames="activation", inline=True)
def _compute_gated_feed_forward(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    *,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    parameters = gate_up, down, gate_up_bias, down_bias
    # Its 16-bit products have no forward mode, and no part in what is gained.
    if jnp.finfo(x.dtype).bits == 16 or cpu.num_pieces(x, gate_up) == 1:
        return _at_once(x, *parameters, activation=activation)
    return _in_pieces(x, *parameters, activation)


def _at_once(x, gate_up, down, gate_up_bias, down_bias, *, activation):
    # Checkpointed with the product that follows, so that what the backward pass keeps of all this
    # is the gate/up product; the elementwise values cost less to compute again than to store.
    @jax.checkpoint
    def gate_and_project_down(gate_up_product, down, down_bias):
        wide = gate_up_product.astype(arithmetic_dtype(x.dtype))
        hidden = _gated(wide, activation)
        return matmul(hidden.astype(x.dtype), down, bias=down_bias)

    gate_up_product = named(matmul(x, gate_up, bias=gate_up_bias), GATE_UP)
    return gate_and_project_down(gate_up_product, down, down_bias)


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def _in_pieces(x, gate_up, down, gate_up_bias, down_bias, activation):
    """The same where nothing is kept for a backward pass."""
    at_once = partial(_at_once, activation=activation)
    return lax.platform_dependent(
        x,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        cpu=partial(cpu.in_pieces, at_once),
        default=at_once,
    )


@partial(_in_pieces.defjvp, symbolic_zeros=True)
def _in_pieces_jvp(activation, primals, tangents):
    leaves, structure = jax.tree.flatten(primals)
    slopes = jax.tree.leaves(tangents, is_leaf=lambda slope: isinstance(slope, SymbolicZero))
    moving = [place for place, one in enumerate(slopes) if not isinstance(one, SymbolicZero)]

    def of_moving(*moved):
        found = list(leaves)
        for place, leaf in zip(moving, moved, strict=True):
            found[place] = leaf
        return _at_once(*jax.tree.unflatten(structure, found), activation=activation)

    return jax.jvp(of_moving, [leaves[i] for i in moving], [slopes[i] for i in moving])


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _gated(gate_up: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """activation(gate) * up, with the two on the last axis but one."""
    return activation(gate_up[..., 0, :]) * gate_up[..., 1, :]


# JAX's own rule, but for its shape: the gradient of both halves is one array, whose elements are
# computed where they belong. Left to autodiff it is the sum of two padded arrays.
@_gated.defjvp
def _gated_jvp(activation, primals, tangents):
    (gate_up,), (d_gate_up,) = primals, tangents
    gate, up = gate_up[..., :1, :], gate_up[..., 1:, :]
    activated, slope = jax.jvp(activation, (gate,), (jnp.ones_like(gate),))
    half = lax.broadcasted_iota(jnp.int32, gate_up.shape, gate_up.ndim - 2)
    factors = jnp.where(half == 0, slope * up, activated)
    return _gated(gate_up, activation), jnp.sum(factors * d_gate_up, axis=-2)
