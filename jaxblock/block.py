"""One layer of the decoder: attention and feed-forward, each a branch beside the residual stream.

    x = x + post_norm(attention(pre_norm(x)))
    x = x + post_norm(feed_forward(pre_norm(x)))

Which norms there are is the family's: Llama has the first of each pair, OLMo-2 the second, Gemma 2
and 3 both. What a token sees, and whether a cache is behind it, is decided by the caller, who hands
in `attend`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int32, Integer

from jaxblock import ops
from jaxblock.config import DecoderConfig, LayerKind
from jaxblock.ops import checks
from jaxblock.ops.feed_forward import GATED_FEED_FORWARDS
from jaxblock.ops.precision import matmul
from jaxblock.ops.remat import ATTENTION_OUTPUT, ATTENTION_PROJECTION, NORM_OUTPUT, QKV, named
from jaxblock.sequence import token_order, within

Params = Mapping[str, Any]
Angles = tuple[jax.Array, jax.Array]
# From q [B T N H], k and v [B T K H] to [B T N H], and whatever state the caller keeps.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def rotary_angles(positions: jax.Array, kind: LayerKind, config: DecoderConfig) -> Angles:
    """cos, sin [B T rotary_dim/2] of the positions [B T], for layers of one kind."""
    rotary = kind.rotary
    frequencies = ops.rotary_frequencies(
        config.attention.head_dim,
        theta=rotary.theta,
        scaling=rotary.scaling,
        rotary_dim=rotary.rotary_dim,
    )
    return ops.rotary_cos_sin(
        positions, frequencies, magnitude=ops.rotary_magnitude(rotary.scaling)
    )


def decoder_block(
    params: Params,
    x: Float[Array, "B T D"],
    config: DecoderConfig,
    *,
    angles: Angles,
    attend: Attend,
) -> tuple[Float[Array, "B T D"], Any]:
    """x = x + attention branch;  x = x + feed-forward branch

    Args:
      params: of one layer: `layers` of the parameter tree without its leading axis.
      x: the residual stream.
      config: the decoder.
      angles: of `rotary_angles`, for this layer's kind.
      attend: attention itself.

    Returns: the residual stream after the layer, and the state that `attend` returned.

    Precision: each branch comes in x.dtype, and each sum is rounded to it, as in torch.
    """
    branch = _norm(params, "attention_norm", x, config)
    branch, state = attention_branch(
        params["attention"], branch, config, angles=angles, attend=attend
    )
    branch = named(branch, ATTENTION_PROJECTION)
    x = x + _norm(params, "attention_post_norm", branch, config)
    branch = _norm(params, "feed_forward_norm", x, config)
    branch = feed_forward_branch(params["feed_forward"], branch, config)
    return x + _norm(params, "feed_forward_post_norm", branch, config), state


def attention_branch(
    params: Params,
    x: Float[Array, "B T D"],
    config: DecoderConfig,
    *,
    angles: Angles,
    attend: Attend,
) -> tuple[Float[Array, "B T D"], Any]:
    """y = attend(rotate(norm(x · q + q_bias)), rotate(norm(x · k + k_bias)), x · v + v_bias) · o"""
    q, k, v = (
        named(matmul(x, params[name], bias=params.get(f"{name}_bias")), QKV) for name in "qkv"
    )
    if config.attention.qk_norm is not None:
        q = _qk_norm(q, params["q_norm"]["scale"], config)
        k = _qk_norm(k, params["k_norm"]["scale"], config)
    q, k = ops.apply_rotary(q, *angles), ops.apply_rotary(k, *angles)
    y, state = attend(q, k, v)
    o = params["o"].reshape(-1, params["o"].shape[-1])
    y = named(y.reshape(*y.shape[:-2], -1), ATTENTION_OUTPUT)
    return matmul(y, o, bias=params.get("o_bias")), state


def attend_to_rows(
    config: DecoderConfig,
    kind: LayerKind,
    order: Int32[Array, "B T"],
    mask: Bool[Array, "B T"] | None,
) -> Attend:
    """Attention of whole rows to themselves; `order` is `token_order` of the mask."""

    def attend(q, k, v):
        visible, window = None, kind.window
        if mask is not None:
            # The window counts real tokens: with padding in between, places would be others.
            visible = mask[:, None, None, :] & within(order, order, window, causal=False)
            window = None
        y = ops.attention(
            q,
            k,
            v,
            scale=config.attention.scale,
            window=window,
            softcap=config.attention.softcap,
            mask=visible,
        )
        return y, None

    return attend


def row_attention(
    params: Params,
    x: Float[Array, "B T D"],
    config: DecoderConfig,
    kind: LayerKind,
    *,
    positions: Integer[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """y = `attention_branch` of whole rows: the attention of one layer, by itself"""
    angles, attend = _whole_rows("Attention", x, config, kind, positions, mask)
    return attention_branch(params, x, config, angles=angles, attend=attend)[0]


def row_block(
    params: Params,
    x: Float[Array, "B T D"],
    config: DecoderConfig,
    kind: LayerKind,
    *,
    positions: Integer[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """y = `decoder_block` of whole rows: one layer, by itself"""
    angles, attend = _whole_rows("DecoderBlock", x, config, kind, positions, mask)
    return decoder_block(params, x, config, angles=angles, attend=attend)[0]


def _whole_rows(
    function: str,
    x: jax.Array,
    config: DecoderConfig,
    kind: LayerKind,
    positions: jax.Array | None,
    mask: jax.Array | None,
) -> tuple[Angles, Attend]:
    fits = x.ndim == 3 and x.shape[-1] == config.hidden_size
    must = f"x must be [B T D] with D = {config.hidden_size}"
    checks.require(fits, function, must, x=x)
    if positions is not None:
        positions = checks.integers(function, "positions", positions)
        must = "positions must have the shape [B T] of x"
        checks.require(positions.shape == x.shape[:2], function, must, positions=positions, x=x)
    if mask is not None:
        mask = checks.booleans(function, "mask", mask)
        must = "mask must have the shape [B T] of x"
        checks.require(mask.shape == x.shape[:2], function, must, mask=mask, x=x)
    order = token_order(x.shape[:2], mask)
    angles = rotary_angles(order if positions is None else positions, kind, config)
    return angles, attend_to_rows(config, kind, order, mask)


def feed_forward_branch(
    params: Params, x: Float[Array, "B T D"], config: DecoderConfig
) -> Float[Array, "B T D"]:
    """y = the gated feed-forward, or the mixture of experts where the decoder has experts"""
    if config.moe is not None:
        return ops.moe_swiglu(
            x,
            params["router"],
            params["gate_up"],
            params["down"],
            num_active=config.moe.num_experts_per_tok,
            renormalize=config.moe.norm_topk_prob,
        )
    return GATED_FEED_FORWARDS[config.feed_forward.activation](x, **params)


def norm(x: jax.Array, scale: jax.Array, config: DecoderConfig) -> jax.Array:
    """`rms_norm` by the conventions of the family."""
    return ops.rms_norm(
        x,
        scale,
        eps=config.norm.eps,
        scale_offset=config.norm.scale_offset,
        cast=config.norm.cast,
    )


def _norm(params: Params, name: str, x: jax.Array, config: DecoderConfig) -> jax.Array:
    # A family without this norm has no such parameter: the tree was checked against the config.
    return named(norm(x, params[name]["scale"], config), NORM_OUTPUT) if name in params else x


def _qk_norm(heads: jax.Array, scale: jax.Array, config: DecoderConfig) -> jax.Array:
    if config.attention.qk_norm == "head":
        return norm(heads, scale, config)
    flat = heads.reshape(*heads.shape[:-2], -1)
    return norm(flat, scale, config).reshape(heads.shape)
