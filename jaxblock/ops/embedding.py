"""One [V, D] table: lookup, projection to logits, and its growth."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from jaxblock.ops import checks
from jaxblock.ops.precision import arithmetic_dtype, matmul
from jaxblock.ops.sharding import along, axes, laid_out


def embed(tokens: Integer[Array, "*B"], embedding: Float[Array, "V D"]) -> Float[Array, "*B D"]:
    """y[..., :] = embedding[tokens[...], :]

    Args:
      tokens: ids in [0, V), of any integer dtype.
      embedding: the table.

    Returns: rows of the table, in its dtype.

    Raises: IndexError for a known id outside [0, V): no clamping, no wrap-around of negative ids.
      A traced one gives a row of NaN, touches no row's gradient, and is reported by
      `checkify.checkify`. TypeError for float tokens, ValueError for empty ones.

    Precision: exact. The gradient of a 16-bit table is summed in float32 and rounded once, so a
      token that occurs thousands of times loses nothing.

    Differs from torch: torch.nn.functional.embedding always raises; under `jit` nothing can.
    """
    (embedding,) = checks.floating("embed", embedding=embedding)
    checks.require(embedding.ndim == 2, "embed", "embedding must be [V D]", embedding=embedding)
    tokens = checks.ids("embed", "tokens", tokens, embedding.shape[0])
    return _embed(tokens, embedding)


def unembed(
    x: Float[Array, "*B D"],
    embedding: Float[Array, "V D"],
    *,
    softcap: float | None = None,
    num_valid: int | None = None,
) -> Float[Array, "*B V"]:
    """logits = x · embedding^T,  then softcap * tanh(logits / softcap) if there is a cap

    Args:
      x: the last hidden states.
      embedding: the table of `embed` (tied), or one of its own (untied).
      softcap: bound on the size of the logits (Gemma 2: 30.0), above 0; None means none.
      num_valid: rows of the table at or above it are padding: their logits are -inf, after the cap.

    Returns: logits in nats, float32 (float64 for float64 inputs).

    Raises: ValueError or TypeError for shapes that do not fit, an empty axis, a cap of 0 or less,
      num_valid outside [1, V].

    Precision: 16-bit operands are accumulated in float32 and not rounded back.

    Differs from torch: a 16-bit torch.nn.functional.linear rounds the logits to 16 bits.

    Source: Press and Wolf, Using the Output Embedding to Improve Language Models, 2017; the cap:
      Gemma 2, 2024, section 2.
    """
    x, embedding = checks.floating("unembed", x=x, embedding=embedding)
    checks.require(
        x.ndim >= 1 and embedding.ndim == 2 and embedding.shape[1] == x.shape[-1],
        "unembed",
        "embedding must be [V D] with D the last axis of x",
        x=x,
        embedding=embedding,
    )
    if softcap is not None:
        softcap = checks.number("unembed", "softcap", softcap, minimum=0.0, strict=True)
    num_valid = checks.num_valid("unembed", num_valid, embedding.shape[0], embedding=embedding)
    return _project_to_logits(x, embedding, softcap=softcap, num_valid=num_valid)


def resize_embedding(
    embedding: Float[Array, "V D"],
    vocab_size: int,
    *,
    fill: Literal["mean", "normal", "zeros"] = "mean",
    allow_shrink: bool = False,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "W D"]:
    """new[:min(V, W)] = embedding[:min(V, W)],  new[V:] as `fill` says  (W = vocab_size)

    Args:
      embedding: the table. Use the returned one for lookup and projection alike, so tied stays
        tied.
      vocab_size: rows of the result, at least 1.
      fill: new rows are "mean": the mean of the old rows, which leaves the loss least disturbed;
        "normal": normal, with mean 0 and the root mean square of the old table as its deviation;
        "zeros".
      allow_shrink: must be True for rows to be cut off.
      key: a PRNG key; for "normal" only.

    Returns: [vocab_size D] in the dtype of `embedding`; old rows keep their bits.

    Raises: ValueError for a smaller vocab_size without allow_shrink, an unknown fill, a missing or
      superfluous key.

    Source: Hewitt, Initializing New Word Embeddings for Pretrained Language Models, 2021 (mean).
    """
    function = "resize_embedding"
    (embedding,) = checks.floating(function, embedding=embedding)
    checks.require(embedding.ndim == 2, function, "embedding must be [V D]", embedding=embedding)
    vocab_size = checks.size(function, "vocab_size", vocab_size)
    checks.choice(function, "fill", fill, ("mean", "normal", "zeros"))
    checks.require(
        (key is not None) == (fill == "normal"),
        function,
        'a key must be given for fill "normal", and only for it',
        fill=fill,
        key=key,
    )
    old_size, hidden_size = embedding.shape
    if vocab_size <= old_size:
        checks.require(
            vocab_size == old_size or allow_shrink,
            function,
            "vocab_size must not be below V, the rows of the table",
            hint="Pass allow_shrink=True to cut rows off.",
            vocab_size=vocab_size,
            V=old_size,
        )
        return embedding[:vocab_size]
    wide = embedding.astype(arithmetic_dtype(embedding.dtype))
    shape = (vocab_size - old_size, hidden_size)
    if fill == "mean":
        rows = jnp.broadcast_to(jnp.mean(wide, axis=0, keepdims=True), shape)
    elif key is not None:
        deviation = jnp.sqrt(jnp.mean(wide * wide))
        rows = deviation * jax.random.normal(key, shape, wide.dtype)
    else:
        rows = jnp.zeros(shape, wide.dtype)
    return jnp.concatenate([embedding, rows.astype(embedding.dtype)])


# Jitted, so that a call outside `jit` is one compiled program and gives the bits of one inside it.
@laid_out(lambda x, embedding: along(*axes(x, but=1), (embedding, 0)))
@partial(jax.jit, static_argnames=("softcap", "num_valid"), inline=True)
def _project_to_logits(
    x: jax.Array, embedding: jax.Array, *, softcap: float | None, num_valid: int
) -> jax.Array:
    # Checkpointed: the backward pass keeps the plain logits only, not one [*B V] array a step.
    @jax.checkpoint
    def cap_and_mask(logits):
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        if num_valid < logits.shape[-1]:
            valid = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < num_valid
            logits = jnp.where(valid, logits, -jnp.inf)
        return logits

    return cap_and_mask(matmul(x, embedding, weight_axis=-1, out_dtype=arithmetic_dtype(x.dtype)))


@laid_out(lambda tokens, embedding: along(*axes(tokens), (embedding, 1)))
def _embed(tokens: jax.Array, embedding: jax.Array) -> jax.Array:
    is_16bit = jnp.finfo(embedding.dtype).bits == 16
    return (_lookup_16bit if is_16bit else _lookup)(tokens, embedding)


@partial(jax.jit, inline=True)
def _lookup(tokens: jax.Array, embedding: jax.Array) -> jax.Array:
    return embedding.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@jax.custom_vjp
def _lookup_16bit(tokens: jax.Array, embedding: jax.Array) -> jax.Array:
    # XLA's CPU backend looks 16 bits up by way of float32. The barrier ties the table to the
    # tokens; without it a loop of decode steps begins by converting the whole table, SmolLM2's in
    # 24 ms and 113 MB.
    return _lookup(*lax.optimization_barrier((tokens, embedding)))


def _lookup_16bit_forward(tokens, embedding):
    return _lookup(tokens, embedding), (tokens, embedding)


def _lookup_16bit_backward(saved, dy):
    tokens, embedding = saved
    dy = dy.astype(jnp.float32).reshape(-1, embedding.shape[1])
    return None, _summed_by_token(tokens.ravel(), dy, len(embedding)).astype(embedding.dtype)


def _summed_by_token(tokens, dy, vocab_size):
    """total[v] = sum of dy[t] over the t with tokens[t] = v"""
    T, D = dy.shape
    tokens = jnp.where(tokens < 0, vocab_size, tokens)  # Past the end, where nothing is added.
    if T >= vocab_size:
        return jnp.zeros((vocab_size, D), dy.dtype).at[tokens].add(dy, mode="drop")
    # Summed where a token occurs first, and looked up from there, so that what is held is T rows
    # and not a table in float32: for 2,048 tokens on 49152 x 576 5 MB and 25 ms, not 113 MB and 55.
    first = jnp.full(vocab_size, T).at[tokens].min(jnp.arange(T), mode="drop")
    places = first.at[tokens].get(mode="fill", fill_value=T)
    sums = jnp.zeros((T, D), dy.dtype).at[places].add(dy, mode="drop")
    return sums.at[first].get(mode="fill", fill_value=0)


_lookup_16bit.defvjp(_lookup_16bit_forward, _lookup_16bit_backward)
