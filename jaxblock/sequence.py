"""Which tokens of a row are real, in which order, and how far they see."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def token_order(shape: tuple[int, ...], mask: jax.Array | None) -> Int32[Array, "B T"]:
    """The index of each token [B T] among the real ones of its row, from 0."""
    if mask is None:
        return jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)


def within(
    queries: Int32[Array, "B T"],
    keys: Int32[Array, "B S"],
    window: int | None,
    *,
    causal: bool,
) -> Bool[Array, "B 1 T S"]:
    """Whether the key of an index lies in the query's window and, if `causal`, not after it."""
    distance = queries[:, None, :, None] - keys[:, None, None, :]
    visible = distance >= 0 if causal else jnp.ones(distance.shape, jnp.bool_)
    return visible if window is None else visible & (distance < window)
