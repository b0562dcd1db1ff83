"""RMSNorm with its rounding convention by name."""

from functools import partial
from typing import Literal

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxblock.ops import checks, cpu
from jaxblock.ops.precision import arithmetic_dtype, round_to
from jaxblock.ops.sharding import laid_out, like

INVERSE_RMS = "rms_norm_inverse"


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, "D"],
    *,
    eps: float,
    scale_offset: float = 0.0,
    cast: Literal["after_scale", "before_scale"] = "after_scale",
) -> Float[Array, "*B D"]:
    """y = x / sqrt(mean(x^2 over D) + eps) * (scale + scale_offset)

    Args:
      x: activations.
      scale: one factor a channel.
      eps: added to the mean of squares, so in the unit of x squared. At least 0; no default,
        because published models differ (1e-5, 1e-6) and a forgotten one must not be silent.
      scale_offset: 1.0 for checkpoints that store scale - 1 (Gemma), otherwise 0.0.
      cast: where a 16-bit result is rounded. "after_scale": everything in float32, rounded once
        (torch.nn.functional.rms_norm, Gemma, OLMo-2). "before_scale": the normalised value and the
        factor are each rounded to x.dtype, and so is their product (Llama, Mistral, Qwen).
        For float32 and float64 the two are the same.

    Returns: the shape and dtype of x, whatever the dtype of scale.

    Raises: ValueError or TypeError for a scale that is not [D] (length 1 would broadcast), an empty
      axis, integer inputs, a negative eps, an unknown cast.

    Precision: float32 inside (float64 for float64), so float16 rows of 60000 and rows of zeros are
      finite, forward and backward. A float32 row whose mean square exceeds 3.4e38 gives zeros, as
      it does in torch. The backward pass keeps x and one number a row.

    Differs from torch: eps has no default (torch: the machine epsilon of the dtype).

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, equation 4; the two
      conventions: huggingface/transformers models/llama/modeling_llama.py and
      models/gemma/modeling_gemma.py.
    """
    x, scale = checks.floating("rms_norm", x=x, scale=scale)
    checks.require(x.ndim >= 1, "rms_norm", "x must have at least one axis", x=x)
    checks.require(
        scale.shape == x.shape[-1:],
        "rms_norm",
        "scale must have the shape [D] of the last axis of x",
        x=x,
        scale=scale,
    )
    eps = checks.number("rms_norm", "eps", eps, minimum=0.0)
    scale_offset = checks.number("rms_norm", "scale_offset", scale_offset)
    checks.choice("rms_norm", "cast", cast, ("after_scale", "before_scale"))

    return _normalize(x, scale, eps=eps, scale_offset=scale_offset, cast=cast)


# Jitted, so that a call outside `jit` is one compiled program and gives the bits of one inside it.
@laid_out(lambda x, scale: like(x))
@partial(jax.jit, static_argnames=("eps", "scale_offset", "cast"), inline=True)
def _normalize(
    x: jax.Array, scale: jax.Array, *, eps: float, scale_offset: float, cast: str
) -> jax.Array:
    # The policy leaves the backward pass with x and the inverse; what it saves otherwise would be
    # three arrays of the size of x.
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(INVERSE_RMS))
    def normalize(x, scale):
        wide = x.astype(arithmetic_dtype(x.dtype))
        mean_square = cpu.sum_last(wide * wide, simple=True) / x.shape[-1]
        inverse = checkpoint_name(lax.rsqrt(mean_square + eps), INVERSE_RMS)
        normalized = wide * cpu.spread(inverse, x.shape)
        factor = scale.astype(wide.dtype) + scale_offset
        if cast == "before_scale":
            # The product of two 16-bit numbers is exact in float32, so this is the 16-bit product;
            # unlike one, it leaves the gradient of scale to be summed in float32.
            normalized, factor = round_to(normalized, x.dtype), round_to(factor, x.dtype)
        return (normalized * cpu.spread(factor, x.shape)).astype(x.dtype)

    return normalize(x, scale)
