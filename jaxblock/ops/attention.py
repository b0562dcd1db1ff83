"""Scaled dot-product attention with grouped heads, causal, windowed, masked and capped."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.backend import get_backend
from jaxtyping import Array, Bool, Float

from jaxblock.ops import checks
from jaxblock.ops.precision import arithmetic_dtype
from jaxblock.ops.sharding import laid_out, like


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    mask: Bool[Array, "#B #N #T #S"] | None = None,
) -> Float[Array, "B T N H"]:
    """y = softmax(cap(scale * q · k^T) where visible) · v,  cap(x) = softcap * tanh(x / softcap)

    Args:
      q: queries. They stand at the end of the keys: query t is at the position S - T + t.
      k: keys, in the dtype of q. Each head serves G = N / K heads of q: head n looks at n // G.
      v: values, in the dtype of q.
      scale: factor on the scores, usually 1 / sqrt(H). No default, because published models differ
        (Gemma 2: 1 / sqrt(query_pre_attn_scalar)).
      causal: whether a query sees no key behind its own position.
      window: how many positions a query sees, its own among them; needs causal. None means all.
      softcap: bound on the size of the scores (Gemma 2: 50.0), above 0; None means none.
      mask: true where a query may see a key; joins causal and window. [B N T S], where each axis
        may also be 1.

    Returns: the shape and dtype of q. A query that sees nothing gives zeros.

    Raises: ValueError or TypeError for shapes or dtypes that do not fit, N that is no multiple of
      K, an empty axis, more queries than keys with causal, a window without causal, a window below
      1, a cap of 0 or less, a mask that is not boolean or not of four axes.

    Precision: 16-bit operands of every product, forward and backward, are accumulated in float32.
      Scores, cap and softmax are float32 and never rounded; the weights are rounded to v.dtype.
      (float64 for float64.) The backward pass keeps q, k and v and computes the weights again.
      A key that is not visible has the weight 0 exactly, so finite numbers at its place leave the
      bits of the result. A NaN or an infinity does no harm where nobody sees it; one that some
      query of the sequence sees spoils the others too, since 0 * NaN is NaN.

    Differs from torch: with T < S torch.nn.functional.scaled_dot_product_attention(is_causal=True)
      puts the queries at the beginning of the keys. Its default scale is 1 / sqrt(H).

    Source: Vaswani et al., Attention Is All You Need, 2017, equation 1; grouped heads: Ainslie et
      al., GQA, 2023; the window: Jiang et al., Mistral 7B, 2023, section 2; the cap: Gemma 2, 2024,
      section 2.
    """
    function = "attention"
    q, k, v = checks.floating(function, q=q, k=k, v=v)
    checks.require(q.ndim == 4, function, "q must be [B T N H]", q=q)
    checks.require(
        k.ndim == 4 and (k.shape[0], k.shape[3]) == (q.shape[0], q.shape[3]),
        function,
        "k must be [B S K H] with the B and H of q",
        q=q,
        k=k,
    )
    checks.require(v.shape == k.shape, function, "v must have the shape of k", k=k, v=v)
    checks.require(
        q.dtype == k.dtype == v.dtype,
        function,
        "q, k and v must have one dtype",
        kind=TypeError,
        hint="Cast to the dtype of the activations.",
        q=q,
        k=k,
        v=v,
    )
    checks.require(q.shape[2] % k.shape[2] == 0, function, "N must be a multiple of K", q=q, k=k)
    scale = checks.number(function, "scale", scale)
    causal = checks.flag(function, "causal", causal)
    checks.require(
        not causal or q.shape[1] <= k.shape[1],
        function,
        "T must not exceed S with causal",
        hint="The queries stand at the end of the keys, so the first would see nothing.",
        q=q,
        k=k,
    )
    if window is not None:
        window = checks.size(function, "window", window)
        checks.require(
            causal,
            function,
            "window needs causal",
            hint="Another band can be given as the mask.",
            window=window,
            causal=causal,
        )
    if softcap is not None:
        softcap = checks.number(function, "softcap", softcap, minimum=0.0, strict=True)
    if mask is not None:
        mask = checks.booleans(function, "mask", mask)
        full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        checks.require(
            mask.ndim == 4
            and all(size in (1, most) for size, most in zip(mask.shape, full, strict=True)),
            function,
            "mask must be [B N T S], each axis whole or 1",
            hint="A mask of tokens [B S] is mask[:, None, None, :].",
            mask=mask,
            q=q,
            k=k,
        )
    return _attend(q, k, v, mask, scale=scale, causal=causal, window=window, softcap=softcap)


# Jitted, so that a call outside `jit` is one compiled program and gives the bits of one inside it.
@laid_out(lambda q, k, v, mask: like(q))
@partial(jax.jit, static_argnames=("scale", "causal", "window", "softcap"), inline=True)
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    # Checkpointed: the backward pass keeps q, k and v, not several arrays of [B N T S].
    @jax.checkpoint
    def plain(q, k, v):
        B, T, N, H = q.shape
        K = k.shape[2]
        k, v, visible = _visible(k, v, mask, T, N, causal=causal, window=window)
        scores = scale * _scores(q.reshape(B, T, K, N // K, H), k)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        return _mix(_softmax(scores, visible), v).astype(v.dtype).reshape(q.shape)

    def flash(q, k, v):
        local = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=causal,
            local_window_size=local,
            implementation="cudnn",
        )

    # cuDNN's kernel, where it computes the same function. It takes masks too, but as a large
    # negative bias, which leaves an empty row the mean of the values. The XLA path of
    # `jax.nn.dot_product_attention` is no substitute for the one above: it has no cap, gives empty
    # rows the mean, and fails in 16 bits under strict dtype promotion.
    H = q.shape[3]
    if (
        jnp.finfo(q.dtype).bits == 16
        and H % 8 == 0
        and H <= 128
        and 1 < q.shape[1] == k.shape[1]
        and softcap is None
        and mask is None
        and _has_cudnn()
    ):
        return lax.platform_dependent(q, k, v, cuda=flash, default=plain)
    return plain(q, k, v)


def _has_cudnn() -> bool:
    """Whether cuDNN's attention can be traced here (it raises elsewhere), and would run."""
    backend = get_backend()
    if "cuda" not in backend.platform_version:
        return False
    return float(backend.local_devices()[0].compute_capability) >= 8.0


def _visible(k, v, mask, T, N, *, causal, window):
    """k and v without what nobody sees, and what is visible, [B K T G S] or None for everything."""
    S, K = k.shape[1:3]
    if window is not None and S - T >= window:
        # Keys that have left the window of the first query: a decode step skips the old ones.
        start = S - T - window + 1
        k, v, S = k[:, start:], v[:, start:], S - start
        if mask is not None and mask.shape[3] > 1:
            mask = mask[..., start:]
    visible = None
    if causal and T > 1:
        position = lax.broadcasted_iota(jnp.int32, (1, 1, T, 1, S), 2) + (S - T)
        age = position - lax.broadcasted_iota(jnp.int32, (1, 1, T, 1, S), 4)
        visible = age >= 0
        if window is not None and window < S:
            visible &= age < window
    if mask is not None:
        B, heads = mask.shape[:2]
        mask = mask.reshape(B, *((1, 1) if heads == 1 else (K, N // K)), *mask.shape[2:])
        mask = mask.transpose(0, 1, 3, 2, 4)
        visible = mask if visible is None else mask & visible
        # What nobody sees may hold NaN, and 0 * NaN is NaN.
        seen = visible.any(axis=(2, 3)).transpose(0, 2, 1)[..., None]
        k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    return k, v, visible


def _softmax(scores, visible):
    """Weights over the last axis: 0 where not visible, in rows with nothing visible too."""
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    # Not `jax.nn.softmax(where=visible)`: it masks three times, and with it the whole backward pass
    # takes twice as long on CPU.
    largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    exponential = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0, largest))
    total = jnp.sum(exponential, axis=-1, keepdims=True)
    return exponential / jnp.where(total == 0, 1, total)


# The two products, with q as [B T K G H], k and v as [B S K H], weights as [B K T G S]. 16-bit
# operands are accumulated in float32 in both gradient products too, where autodiff alone would mix
# float32 and 16-bit operands.
def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """scores[B K T G S] = sum over H of q * k, in the arithmetic dtype."""
    return (_scores_16bit if jnp.finfo(q.dtype).bits == 16 else _over_channels)(q, k)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """y[B T K G H] = sum over S of weights, rounded to v.dtype, * v, in the arithmetic dtype."""
    return (_mix_16bit if jnp.finfo(v.dtype).bits == 16 else _over_keys)(weights, v)


@jax.custom_vjp
def _scores_16bit(q: jax.Array, k: jax.Array) -> jax.Array:
    return _over_channels(q, k)


def _scores_16bit_forward(q, k):
    return _over_channels(q, k), (q, k)


def _scores_16bit_backward(saved, d_scores):
    q, k = saved
    d_scores = d_scores.astype(q.dtype)
    return _over_keys(d_scores, k).astype(q.dtype), _over_queries(d_scores, q).astype(k.dtype)


_scores_16bit.defvjp(_scores_16bit_forward, _scores_16bit_backward)


@jax.custom_vjp
def _mix_16bit(weights: jax.Array, v: jax.Array) -> jax.Array:
    return _over_keys(weights.astype(v.dtype), v)


def _mix_16bit_forward(weights, v):
    return _mix_16bit(weights, v), (weights, v)


def _mix_16bit_backward(saved, dy):
    weights, v = saved
    dy = dy.astype(v.dtype)
    # The gradient of the weights stays float32, as they were before they were rounded.
    return _over_channels(dy, v), _over_queries(weights.astype(v.dtype), dy).astype(v.dtype)


_mix_16bit.defvjp(_mix_16bit_forward, _mix_16bit_backward)


# Each is one `dot_general` as it stands, on every platform. XLA's CPU backend has fast bfloat16
# products for just these: on two cores, with B=4, T=S=256, N=9, K=3, H=64, they take 1.2, 1.1 and
# 1.6 ms. With T and G made one axis they take 2.4, 3.2 and 4.4 ms, as einsums up to 3.2 ms, in
# float32 about 2.7 ms, and the last with the weights on the left, as autodiff has it, 7 ms.
def _over_channels(q, k):
    return _contract(q, k, ((4,), (3,)), ((0, 2), (0, 2)))


def _over_keys(weights, v):
    return _contract(weights, v, ((4,), (1,)), ((0, 1), (0, 2))).transpose(0, 2, 1, 3, 4)


def _over_queries(weights, q):
    return _contract(q, weights, ((1, 3), (2, 3)), ((0, 2), (0, 1))).transpose(0, 3, 1, 2)


def _contract(a, b, summed, shared):
    wide = arithmetic_dtype(a.dtype)
    return lax.dot_general(a, b, (summed, shared), preferred_element_type=wide)
