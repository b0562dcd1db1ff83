"""The next token from logits: the largest, or drawn from all, the top k, or the top p."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Key, PRNGKeyArray

from jaxblock.ops import checks
from jaxblock.ops.precision import arithmetic_dtype
from jaxblock.ops.sharding import along, axes, laid_out

Keys = PRNGKeyArray | Key[Array, "*B"]


def greedy(logits: Float[Array, "*B V"], *, num_valid: int | None = None) -> Int32[Array, "*B"]:
    """token = the lowest id whose logit is the largest

    Args:
      logits: of any float dtype.
      num_valid: columns at or above it are padding and never chosen; None means all V are valid.

    Returns: int32 tokens. -1, which no table has, for a row with a NaN among its valid logits or
      with none above -inf: `embed` refuses it, or gives NaN for it where it is traced.

    Raises: ValueError or TypeError for integer logits, an empty axis, num_valid outside [1, V].

    Differs from torch: torch.argmax gives an id for a row of NaN.
    """
    logits, num_valid = _checked("greedy", logits, num_valid)
    return _greedy(logits, num_valid=num_valid)


def sample(
    logits: Float[Array, "*B V"],
    key: Keys,
    *,
    temperature: float = 1.0,
    num_valid: int | None = None,
) -> Int32[Array, "*B"]:
    """token = i with the probability softmax(logits / temperature)[i]

    Args:
      logits: in nats.
      key: an array of keys [*B], one a row, or one key, of which row i (in the order of memory)
        takes `jax.random.fold_in(key, i)`. A row's token depends on its own key and logits and not
        on the rows around it.
      temperature: above 0, small enough is `greedy`.
      num_valid: columns at or above it are padding and never chosen; None means all V are valid.

    Returns: int32 tokens; never one whose logit is -inf. -1 for a row with a NaN, as `greedy`.

    Raises: ValueError or TypeError for integer logits, an empty axis, num_valid outside [1, V], a
      temperature of 0 or less, keys of another shape, a seed in place of a key.

    Precision: float32 inside (float64 for float64), by the Gumbel-max method.

    Differs from torch: torch.multinomial draws the rows of a batch from one stream.

    Source: Maddison, Tarlow and Minka, A* Sampling, 2014, section 2.
    """
    logits, num_valid = _checked("sample", logits, num_valid)
    temperature = _checked_temperature("sample", temperature)
    keys = _row_keys("sample", key, logits)
    return _draw(logits, keys, temperature, 1.0, k=None, num_valid=num_valid)


def top_k(
    logits: Float[Array, "*B V"],
    key: Keys,
    *,
    k: int,
    temperature: float = 1.0,
    num_valid: int | None = None,
) -> Int32[Array, "*B"]:
    """token = i among the k largest logits, with the probability softmax(those / temperature)[i]

    Args:
      logits, key: as in `sample`.
      k: how many are kept, in [1, V]; of equal ones those with the lowest ids.
      temperature, num_valid: as in `sample`.

    Returns, Raises, Precision: as `sample`, and ValueError for k outside [1, V].

    Differs from torch: TopKLogitsWarper of transformers keeps all that equal the k-th, so more than
      k, and takes V for a larger k.

    Source: Fan, Lewis and Dauphin, Hierarchical Neural Story Generation, 2018, section 5.3.
    """
    logits, num_valid = _checked("top_k", logits, num_valid)
    k = checks.size("top_k", "k", k)
    checks.require(k <= logits.shape[-1], "top_k", "k must not exceed V", k=k, logits=logits)
    temperature = _checked_temperature("top_k", temperature)
    keys = _row_keys("top_k", key, logits)
    return _draw(logits, keys, temperature, 1.0, k=k, num_valid=num_valid)


def top_p(
    logits: Float[Array, "*B V"],
    key: Keys,
    *,
    p: float,
    temperature: float = 1.0,
    num_valid: int | None = None,
) -> Int32[Array, "*B"]:
    """token = i of the fewest that reach p, with the probability softmax(those / temperature)[i]

    Args:
      logits, key: as in `sample`.
      p: the probability, after the temperature, that the kept tokens reach together, in (0, 1].
        They are taken from the largest down, of equal ones the lowest id first; the one that
        reaches p is kept, so there is always one.
      temperature, num_valid: as in `sample`.

    Returns, Raises, Precision: as `sample`, and ValueError for p outside (0, 1].

    Differs from torch: TopPLogitsWarper of transformers takes equal logits in no certain order.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, 2020, section 3.1.
    """
    logits, num_valid = _checked("top_p", logits, num_valid)
    p = checks.number("top_p", "p", p)
    checks.require(0 < p <= 1, "top_p", "p must be above 0 and at most 1", p=p)
    temperature = _checked_temperature("top_p", temperature)
    keys = _row_keys("top_p", key, logits)
    return _draw(logits, keys, temperature, p, k=logits.shape[-1], num_valid=num_valid)


def _checked(function: str, logits: jax.Array, num_valid: int | None) -> tuple[jax.Array, int]:
    (logits,) = checks.floating(function, logits=logits)
    checks.require(logits.ndim >= 1, function, "logits must have at least one axis", logits=logits)
    return logits, checks.num_valid(function, num_valid, logits.shape[-1], logits=logits)


def _checked_temperature(function: str, temperature: float) -> float:
    temperature = checks.number(function, "temperature", temperature)
    must, hint = "temperature must be above 0", "For the limit 0 use greedy."
    checks.require(temperature > 0, function, must, hint=hint, temperature=temperature)
    return temperature


def _row_keys(function: str, key: jax.Array, logits: jax.Array) -> jax.Array:
    """One key a row, [*B]."""
    checks.require(
        isinstance(key, jax.Array)
        and (jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.dtype == jnp.uint32),
        function,
        "key must be a key of jax.random or an array of them",
        kind=TypeError,
        hint="Make one with jax.random.key(seed).",
        key=key,
    )
    if key.dtype == jnp.uint32:
        key = jax.random.wrap_key_data(key)
    rows = logits.shape[:-1]
    checks.require(
        key.shape in ((), rows),
        function,
        "key must be one key or have the shape of logits without its last axis",
        key=key.shape,
        logits=logits,
    )
    if key.shape == rows:
        return key
    indices = jnp.arange(math.prod(rows), dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, indices).reshape(rows)


# Jitted, so that a call outside `jit` is one compiled program and gives the bits of one inside it.
@laid_out(lambda logits: along(*axes(logits, but=1)))
@partial(jax.jit, static_argnames="num_valid", inline=True)
def _greedy(logits: jax.Array, *, num_valid: int) -> jax.Array:
    logits, defined = _valid_logits(logits, num_valid)
    return jnp.where(defined, _first_largest(logits), -1)


@laid_out(lambda logits, *others: along(*axes(logits, but=1)))
@partial(jax.jit, static_argnames=("k", "num_valid"), inline=True)
def _draw(
    logits: jax.Array,
    keys: jax.Array,
    temperature: float | jax.Array,
    p: float | jax.Array,
    *,
    k: int | None,
    num_valid: int,
) -> jax.Array:
    """Draw from the k largest (None: all, unsorted), of them from the fewest that reach p."""
    logits, defined = _valid_logits(logits, num_valid)
    logits = logits.astype(arithmetic_dtype(logits.dtype))
    if k is not None:
        # From the largest down; of equal ones the lowest index comes first.
        logits, tokens = lax.top_k(logits, k)
    # Relative to the largest, which is then 0 at the lowest temperature too, or if it is infinite.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where(logits == largest, 0, (logits - largest) / temperature)
    if k is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        larger_ones = jnp.cumsum(probabilities, axis=-1) - probabilities
        # At p = 1 rounding must not cut off the last ones.
        logits = jnp.where((larger_ones < p) | (p >= 1), logits, -jnp.inf)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype))
    chosen = _first_largest(logits + noise(keys.reshape(-1)).reshape(logits.shape))
    if k is not None:
        chosen = jnp.take_along_axis(tokens, chosen[..., None], axis=-1)[..., 0]
    return jnp.where(defined, chosen, -1)


def _valid_logits(logits: jax.Array, num_valid: int) -> tuple[jax.Array, jax.Array]:
    """The logits with padding at -inf, and of which rows there is a token to choose."""
    valid = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < num_valid
    logits = jnp.where(valid, logits, -jnp.inf)
    # NaN is the maximum of a row that has one, and above nothing.
    return logits, jnp.max(logits, axis=-1) > -jnp.inf


def _first_largest(logits: jax.Array) -> jax.Array:
    return lax.argmax(logits, logits.ndim - 1, jnp.int32)
