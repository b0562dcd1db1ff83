"""Argument checks: the only place in `ops` that words and raises shape and argument errors.

Every message reads ``{function}: {what must hold}; got {name}={value}[, ...]. {what to do}``.
Shapes are static under every JAX transformation, so these checks cost nothing in compiled code;
values (ids) are checked where they are known and reported through `checkify` where they are traced.
"""

import numbers
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import DTypeLike

from jaxblock.ops.sharding import along, laid_out

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


def fail(
    function: str, must: str, *, kind: type[Exception] = ValueError, hint: str = "", **got: Any
) -> NoReturn:
    """Raise `kind` in the wording of this library."""
    values = ", ".join(f"{name}={_describe(value)}" for name, value in got.items())
    message = f"{function}: {must}; got {values}"
    raise kind(f"{message}. {hint}" if hint else message)


def require(
    condition: bool,
    function: str,
    must: str,
    *,
    kind: type[Exception] = ValueError,
    hint: str = "",
    **got: Any,
) -> None:
    """Fail unless `condition` holds."""
    if not condition:
        fail(function, must, kind=kind, hint=hint, **got)


def floating(function: str, **values: Any) -> list[jax.Array]:
    """Return the named values as JAX arrays; each must be a non-empty array of a float dtype."""
    arrays = [_array(function, name, value) for name, value in values.items()]
    for name, array in zip(values, arrays, strict=True):
        got: dict[str, Any] = {name: array}
        must = f"{name} must have one of the dtypes {', '.join(FLOAT_DTYPES)}"
        require(array.dtype.name in FLOAT_DTYPES, function, must, kind=TypeError, **got)
    return arrays


def activations(function: str, x: Any, dtype: DTypeLike | None) -> jax.Array:
    """Return x, a float array of at least one axis, in `dtype`; None leaves it in its own."""
    (x,) = floating(function, x=x)
    require(x.ndim >= 1, function, "x must have at least one axis", x=x)
    if dtype is None:
        return x
    choice(function, "dtype", jnp.dtype(dtype).name, FLOAT_DTYPES)
    return x.astype(dtype)


def integers(function: str, name: str, value: Any) -> jax.Array:
    """Return `value` as a JAX array; it must be a non-empty array of an integer dtype."""
    array = _array(function, name, value)
    require(
        jnp.issubdtype(array.dtype, jnp.integer),
        function,
        f"{name} must have an integer dtype",
        kind=TypeError,
        hint="Cast explicitly if these really are ids.",
        **{name: array},
    )
    return array


def booleans(function: str, name: str, value: Any) -> jax.Array:
    """Return `value` as a JAX array; it must be a non-empty array of booleans."""
    array = _array(function, name, value)
    require(
        array.dtype == jnp.bool_,
        function,
        f"{name} must have the dtype bool",
        kind=TypeError,
        hint=f"Compare explicitly: {name} != 0.",
        **{name: array},
    )
    return array


def ids(
    function: str, name: str, value: Any, num_rows: int, *, ignore: int | None = None
) -> jax.Array:
    """Return `value` as ids that address `num_rows` rows; `ignore` is one that addresses none.

    Known ids outside [0, num_rows) raise `IndexError`, naming the first of them and its position.
    Traced ids cannot be looked at: they are reported by `checkify` if the caller functionalises the
    check, and cost nothing otherwise. They come back as -1 (-2 where -1 is the ignored one), and
    what the caller computes for them must be NaN.
    """
    # Looked at before JAX may narrow 64-bit ids to 32 bits, where a large one wraps into range.
    known = None if isinstance(value, jax.core.Tracer) else value
    array = integers(function, name, value)
    if array.dtype.itemsize < 8:
        # Narrow ids could not be compared with a larger V; uint32 ids from 2^31 on turn negative
        # and stay outside.
        array = array.astype(jnp.int32)
    allowed = f"{name} must lie in [0, {num_rows})"
    if ignore is not None:
        allowed += f" or be {ignore}, which is ignored"
    if known is None or isinstance(array, jax.core.Tracer):
        bad = (array < 0) | (array >= num_rows)
        if ignore is not None:
            bad &= array != ignore
        first = _first(array, bad)
        checkify.debug_check(
            ~jnp.any(bad),
            f"{function}: {allowed}; got {{first}}",
            first=first,
        )
        # JAX indexes with 32 bits, in which a large id would wrap into range.
        return jnp.where(bad, -2 if ignore == -1 else -1, array).astype(jnp.int32)
    known = np.asarray(known)
    outside = (known < 0) | (known >= num_rows)
    if ignore is not None:
        outside &= known != ignore
    if outside.any():
        position = tuple(int(i) for i in np.argwhere(outside)[0])
        fail(
            function,
            f"{allowed}, the rows of the table" if ignore is None else allowed,
            kind=IndexError,
            hint="Negative ids do not count from the end; resize the table if the id is meant.",
            **{name: int(known[position]), "position": position, "V": num_rows},
        )
    return array


@laid_out(lambda array, where: along())
def _first(array, where):
    return array.ravel()[jnp.argmax(where.ravel())]


def flag(function: str, name: str, value: Any) -> bool:
    """Return `value`, which must be True or False."""
    must = f"{name} must be True or False"
    require(isinstance(value, bool), function, must, kind=TypeError, **{name: value})
    return value


def size(function: str, name: str, value: Any) -> int:
    """Return `value` as a size: an integer of at least one."""
    require(
        isinstance(value, numbers.Integral) and not isinstance(value, bool),
        function,
        f"{name} must be an integer",
        kind=TypeError,
        **{name: value},
    )
    require(value >= 1, function, f"{name} must be at least 1", **{name: value})
    return int(value)


def num_valid(function: str, value: Any, vocab_size: int, **got: Any) -> int:
    """Return `value` as the number of rows that are no padding, of `vocab_size`; None means all."""
    if value is None:
        return vocab_size
    value = size(function, "num_valid", value)
    must = "num_valid must not exceed V, the rows of the table"
    require(value <= vocab_size, function, must, num_valid=value, **got)
    return value


def number(
    function: str, name: str, value: Any, *, minimum: float | None = None, strict: bool = False
) -> float:
    """Return `value` as a finite number, at least (`strict`: above) `minimum` if there is one."""
    require(
        isinstance(value, numbers.Real) and not isinstance(value, bool),
        function,
        f"{name} must be a number",
        kind=TypeError,
        **{name: value},
    )
    must = f"{name} must be finite"
    if minimum is not None:
        must += f" and {'above' if strict else 'at least'} {minimum}"
    enough = minimum is None or (value > minimum if strict else value >= minimum)
    require(bool(np.isfinite(value)) and enough, function, must, **{name: value})
    return float(value)


def choice(function: str, name: str, value: Any, options: tuple[str, ...]) -> None:
    """`value` must be one of `options`."""
    require(
        isinstance(value, str) and value in options,
        function,
        f"{name} must be one of {', '.join(map(repr, options))}",
        **{name: value},
    )


def _array(function: str, name: str, value: Any) -> jax.Array:
    # `__jax_array__` admits flax.nnx Variables; lists and framework tensors are refused because
    # converting them would hide a copy and, for lists, pick a dtype.
    require(
        isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(value, "__jax_array__"),
        function,
        f"{name} must be a JAX or NumPy array",
        kind=TypeError,
        hint=f"Convert it with jnp.asarray({name}).",
        **{name: type(value).__name__},
    )
    try:
        array = jnp.asarray(value)
    except TypeError:
        fail(function, f"{name} must hold numbers", kind=TypeError, **{name: str(value.dtype)})
    got: dict[str, Any] = {name: array}
    require(0 not in array.shape, function, f"{name} must have no empty axis", **got)
    return array


def _describe(value: Any) -> str:
    if hasattr(value, "dtype") and value.ndim:
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return str(value) if isinstance(value, numbers.Number | tuple) else repr(value)
