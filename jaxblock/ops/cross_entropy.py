"""Cross-entropy as a total and a count: of logits, of a projection in chunks, and its labels."""

import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Integer

from jaxblock.ops import checks, cpu
from jaxblock.ops.precision import add_outer_sum, arithmetic_dtype, matmul
from jaxblock.ops.sharding import along, laid_out, like

ROW_STATISTIC = "cross_entropy_row_statistic"


def cross_entropy(
    logits: Float[Array, "*B V"],
    labels: Integer[Array, "*B"],
    *,
    ignore_index: int = -100,
    num_valid: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Float[Array, "*B"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """total = sum of w * (logsumexp(z) - (1-s) z[label] - s mean(z) + z_loss logsumexp(z)^2)

    Here z are the num_valid logits of a row, s is label_smoothing, and w is 1 or the row's weight.
    A mean is total / count, over as many micro-batches as there are: add up both numbers (and the
    gradients of the totals) first and divide once.

    Args:
      logits: in nats.
      labels: ids in [0, num_valid), or ignore_index, at the place of the logits that predict them;
        nothing is shifted here, see `next_token_labels`.
      ignore_index: the label of rows that are not counted, whatever their logits are.
      num_valid: columns at or above it are padding and never counted; None means all V are valid.
      label_smoothing: the share of the target that is spread over the valid columns, in [0, 1].
      z_loss: weight of the squared logsumexp, at least 0.
      weights: one factor a row; None means 1. A row of weight 0 is as if ignored.

    Returns: the total in nats and the count, the number (sum of the weights) of the rows that are
      not ignored; float32 scalars, float64 for float64 logits.

    Raises: IndexError for a known label outside [0, num_valid) that is not ignore_index. A traced
      one gives a NaN total and a NaN gradient of its row, and is reported by `checkify.checkify`.
      ValueError or TypeError for shapes that do not fit, an empty axis, num_valid outside [1, V].

    Precision: float32 inside (float64 for float64), relative to the largest logit of a row, so very
      negative and very large ones lose nothing. Padding, and an ignored row of NaN, get a gradient
      of exactly 0. The backward pass keeps the logits and two numbers a row.

    Differs from torch: torch.nn.functional.cross_entropy divides by the count, rounds 16-bit losses
      to 16 bits, and its `weight` is one factor a class.

    Source: label smoothing: Szegedy et al., Rethinking the Inception Architecture, 2015, section 7;
      z_loss: Chowdhery et al., PaLM, 2022, section 5.
    """
    function = "cross_entropy"
    ignore_index = _checked_ignore_index(function, ignore_index)
    (logits,) = checks.floating(function, logits=logits)
    checks.require(logits.ndim >= 1, function, "logits must have at least one axis", logits=logits)
    num_valid = checks.num_valid(function, num_valid, logits.shape[-1], logits=logits)
    labels, weights = _checked_rows(
        function, labels, weights, ignore_index, num_valid, logits=logits
    )
    label_smoothing, z_loss = _checked_terms(function, label_smoothing, z_loss)
    return _dense(
        logits,
        labels,
        weights,
        ignore_index=ignore_index,
        num_valid=num_valid,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def linear_cross_entropy(
    x: Float[Array, "*B D"],
    embedding: Float[Array, "V D"],
    labels: Integer[Array, "*B"],
    *,
    chunk_size: int,
    ignore_index: int = -100,
    num_valid: int | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Float[Array, "*B"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """total, count = cross_entropy(unembed(x, embedding, softcap=softcap), labels), in chunks

    The logits of chunk_size tokens are all that is held at once, forward and backward: memory
    O(chunk_size V + V D) where the dense loss takes O(tokens V).

    Args:
      x: the last hidden states.
      embedding: the table of `embed` (tied), or one of its own (untied).
      labels: as in `cross_entropy`.
      chunk_size: tokens, at least 1. At most so many are projected at once; they are taken from all
        over the batch, so a batch that is sharded stays so.
      ignore_index: the label of rows that are not counted, whatever their x is.
      num_valid: rows of the table at or above it are padding, never counted; None: all are valid.
      softcap: bound on the size of the logits, above 0; None means none.
      label_smoothing, z_loss, weights: as in `cross_entropy`.

    Returns: the total in nats and the count, as `cross_entropy`.

    Raises: as `cross_entropy` and `unembed`; ValueError or TypeError for a chunk_size below 1.

    Precision: as `unembed` and `cross_entropy`. All three products take operands of x.dtype and
      accumulate in float32; the gradient of the table is summed over the chunks in float32 and
      rounded once. Where a gradient is asked for, the forward pass computes it along with the
      loss, so nothing is projected twice. It is exact with respect to x, embedding and weights
      (0 for a weight of 0). Reverse mode only: `jax.jvp` is refused.

    Differs from torch: it has no such function.

    Source: Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, 2024, section 3.2
      (gradients in the forward pass, by chunks of tokens).
    """
    function = "linear_cross_entropy"
    ignore_index = _checked_ignore_index(function, ignore_index)
    x, embedding = checks.floating(function, x=x, embedding=embedding)
    checks.require(
        x.ndim >= 1 and embedding.ndim == 2 and embedding.shape[1] == x.shape[-1],
        function,
        "embedding must be [V D] with D the last axis of x",
        x=x,
        embedding=embedding,
    )
    chunk_size = checks.size(function, "chunk_size", chunk_size)
    num_valid = checks.num_valid(function, num_valid, embedding.shape[0], embedding=embedding)
    labels, weights = _checked_rows(function, labels, weights, ignore_index, num_valid, x=x)
    if softcap is not None:
        softcap = checks.number(function, "softcap", softcap, minimum=0.0, strict=True)
    label_smoothing, z_loss = _checked_terms(function, label_smoothing, z_loss)
    return _chunked(
        x,
        embedding,
        labels,
        weights,
        chunk_size=chunk_size,
        ignore_index=ignore_index,
        num_valid=num_valid,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def next_token_labels(
    tokens: Integer[Array, "*B T"],
    *,
    mask: Bool[Array, "*B T"] | None = None,
    ignore_index: int = -100,
) -> Integer[Array, "*B T"]:
    """labels[..., t] = tokens[..., t + 1],  ignore_index at the last and around masked places

    The one shift of the whole path: logits at t predict the token at t + 1, and the loss compares
    logits and labels of the same place.

    Args:
      tokens: ids in reading order.
      mask: true where a token is real; None means everywhere. A place is ignored if its own token
        or the next one is not real.
      ignore_index: the label of a place without a next token.

    Returns: int32 labels for `cross_entropy`.

    Raises: ValueError or TypeError for float tokens, a mask that is not boolean or of another
      shape, an empty axis.

    Differs from torch: transformers shifts inside the loss; labels made here must not go there.
    """
    function = "next_token_labels"
    tokens = checks.integers(function, "tokens", tokens).astype(jnp.int32)
    checks.require(tokens.ndim >= 1, function, "tokens must have at least one axis", tokens=tokens)
    ignore_index = _checked_ignore_index(function, ignore_index)
    if mask is not None:
        mask = checks.booleans(function, "mask", mask)
        must = "mask must have the shape of tokens"
        checks.require(mask.shape == tokens.shape, function, must, tokens=tokens, mask=mask)
        tokens = jnp.where(mask, tokens, ignore_index)
    labels = _following(tokens, ignore_index=ignore_index)
    return labels if mask is None else jnp.where(mask, labels, ignore_index)


@laid_out(like)
def _following(tokens: jax.Array, *, ignore_index: int) -> jax.Array:
    nothing = jnp.full_like(tokens[..., :1], ignore_index)
    return jnp.concatenate([tokens[..., 1:], nothing], axis=-1)


def _checked_ignore_index(function: str, ignore_index: Any) -> int:
    is_integer = not isinstance(ignore_index, bool) and isinstance(ignore_index, numbers.Integral)
    checks.require(
        is_integer and -(2**31) <= int(ignore_index) < 2**31,
        function,
        "ignore_index must be an integer of 32 bits",
        ignore_index=ignore_index,
    )
    return int(ignore_index)


def _checked_rows(
    function: str,
    labels: jax.Array,
    weights: jax.Array | None,
    ignore_index: int,
    num_valid: int,
    **rows: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Labels and weights, which must fit the one array in `rows`."""
    ((name, array),) = rows.items()
    labels = checks.ids(function, "labels", labels, num_valid, ignore=ignore_index)
    must = f"labels must have the shape of {name} without its last axis"
    checks.require(labels.shape == array.shape[:-1], function, must, labels=labels, **rows)
    if weights is not None:
        (weights,) = checks.floating(function, weights=weights)
        must = "weights must have the shape of labels"
        checks.require(weights.shape == labels.shape, function, must, weights=weights, **rows)
    return labels.astype(jnp.int32), weights


def _checked_terms(function: str, label_smoothing: float, z_loss: float) -> tuple[float, float]:
    label_smoothing = checks.number(function, "label_smoothing", label_smoothing, minimum=0.0)
    must = "label_smoothing must be at most 1"
    checks.require(label_smoothing <= 1.0, function, must, label_smoothing=label_smoothing)
    return label_smoothing, checks.number(function, "z_loss", z_loss, minimum=0.0)


STATIC = ("ignore_index", "num_valid", "label_smoothing", "z_loss")


# Jitted, so that a call outside `jit` is one compiled program and gives the bits of one inside it.
@laid_out(lambda *arrays: (along(),) * 2)
@partial(jax.jit, static_argnames=STATIC, inline=True)
def _dense(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    *,
    ignore_index: int,
    num_valid: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    dtype = arithmetic_dtype(logits.dtype)
    factors, count = _factors_and_count(labels, weights, ignore_index, num_valid, dtype)
    losses = _row_losses(
        logits,
        labels,
        factors,
        num_valid=num_valid,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return jnp.sum(losses), count


@laid_out(lambda *arrays: (along(),) * 2)
@partial(jax.jit, static_argnames=("chunk_size", "softcap", *STATIC), inline=True)
def _chunked(
    x: jax.Array,
    embedding: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    *,
    chunk_size: int,
    ignore_index: int,
    num_valid: int,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    dtype = arithmetic_dtype(x.dtype)
    factors, count = _factors_and_count(labels, weights, ignore_index, num_valid, dtype)
    # What an uncounted row holds must not reach the table's gradient, not even as 0 * NaN.
    x = jnp.where(jnp.expand_dims(factors != 0, -1), x, 0)

    num_chunks = -(-labels.size // chunk_size)
    length = -(-labels.size // num_chunks)

    def chunks(rows: jax.Array) -> jax.Array:
        # Rows of factor 0 fill up the last places. Chunk c takes the rows c, c + num_chunks, ...:
        # a batch sharded over its leading axis then has a part in every chunk.
        padding = num_chunks * length - labels.size
        rows = jnp.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
        return rows.reshape(length, num_chunks, *rows.shape[1:]).swapaxes(0, 1)

    row_losses = partial(
        _row_losses,
        num_valid=num_valid,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
    )
    total = _total_over_chunks(
        chunks(x.reshape(-1, x.shape[-1])),
        embedding,
        chunks(labels.reshape(-1)),
        chunks(factors.reshape(-1)),
        row_losses,
    )
    return total, count


def _factors_and_count(
    labels: jax.Array,
    weights: jax.Array | None,
    ignore_index: int,
    num_valid: int,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """What each row's loss is multiplied by: its weight, 0 if ignored, NaN if the label is bad."""
    weights = jnp.ones(labels.shape, dtype) if weights is None else weights.astype(dtype)
    ignored = labels == ignore_index
    counted = jnp.where(ignored, 0, weights)
    bad = ~ignored & ((labels < 0) | (labels >= num_valid))
    return jnp.where(bad, jnp.nan, counted), jnp.sum(counted)


def _row_losses(
    logits: jax.Array,
    labels: jax.Array,
    factors: jax.Array,
    *,
    num_valid: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None = None,
) -> jax.Array:
    """factor * loss of each row; exactly 0, as is its gradient, where the factor is 0."""

    def sum_last(x):
        return jnp.squeeze(cpu.sum_last(x), -1)

    # The policy leaves the backward pass with the logits, the maximum and the sum of each row; what
    # it saves otherwise would be several arrays of the size of the logits.
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(ROW_STATISTIC))
    def row_losses(logits, factors):
        z = logits.astype(arithmetic_dtype(logits.dtype))
        if softcap is not None:
            z = softcap * jnp.tanh(z / softcap)
        counted = factors != 0
        columns = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
        valid = columns < num_valid
        z = jnp.where(jnp.expand_dims(counted, -1), z, 0)
        if num_valid < z.shape[-1]:
            z = jnp.where(valid, z, -jnp.inf)

        # Relative to the largest logit; the loss is the same for any such number, so it counts as
        # a constant in derivatives.
        largest = checkpoint_name(jnp.squeeze(cpu.max_last(z), -1), ROW_STATISTIC)
        z = z - jnp.expand_dims(largest, -1)
        log_sum = jnp.log(checkpoint_name(sum_last(jnp.exp(z)), ROW_STATISTIC))

        # A comparison and not a lookup: it fuses into the passes over the logits, forward and
        # backward, and works on a shard of the columns.
        is_label = columns == jnp.expand_dims(labels, -1)
        losses = log_sum - (1 - label_smoothing) * sum_last(jnp.where(is_label, z, 0))
        if label_smoothing > 0:
            mean = sum_last(jnp.where(valid, z, 0)) / num_valid
            losses = losses - label_smoothing * mean
        if z_loss > 0:
            losses = losses + z_loss * jnp.square(log_sum + largest)
        return factors * jnp.where(counted, losses, 0)

    return row_losses(logits, factors)


def _total_over_chunks(
    x: jax.Array,
    embedding: jax.Array,
    labels: jax.Array,
    factors: jax.Array,
    row_losses: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The sum of row_losses of x[chunk C D] projected on embedding[V D], chunk by chunk."""
    x_dtype, table_dtype = x.dtype, embedding.dtype
    wide = arithmetic_dtype(x_dtype)

    @jax.custom_vjp
    def total(x, embedding, labels, factors):
        table = embedding.astype(x_dtype)

        def losses_of_chunk(carry, chunk):
            x, labels, factors = map(cpu.in_memory, chunk)
            logits = matmul(x, table, weight_axis=-1, out_dtype=wide)
            return carry, row_losses(logits, labels, factors)

        _, losses = lax.scan(losses_of_chunk, None, (x, labels, factors))
        return jnp.sum(losses)

    # The gradients for a cotangent of 1: whatever it will be, they are proportional to it.
    def forward(x, embedding, labels, factors):
        table = embedding.astype(x_dtype)

        def gradients_of_chunk(dtable, chunk):
            x, labels, factors = map(cpu.in_memory, chunk)
            logits = matmul(x, table, weight_axis=-1, out_dtype=wide)
            losses, pull_back = jax.vjp(
                lambda logits, factors: row_losses(logits, labels, factors), logits, factors
            )
            dlogits, dfactors = pull_back(jnp.ones_like(losses))
            dlogits = dlogits.astype(x_dtype)
            dx = matmul(dlogits, table, out_dtype=wide)
            dtable = add_outer_sum(dtable, dlogits, x)
            return dtable, (losses, dx, dfactors)

        dtable = jnp.zeros(embedding.shape, wide)
        dtable, (losses, dx, dfactors) = lax.scan(gradients_of_chunk, dtable, (x, labels, factors))
        return jnp.sum(losses), (dx, dtable, dfactors)

    def backward(saved, dtotal):
        dx, dtable, dfactors = saved
        dx, dtable = (dtotal * dx).astype(x_dtype), (dtotal * dtable).astype(table_dtype)
        return dx, dtable, None, dtotal * dfactors

    total.defvjp(forward, backward)
    return total(x, embedding, labels, factors)
