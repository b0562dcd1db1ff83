"""Where numbers are rounded: the arithmetic dtype, the explicit rounding and the one matmul.

Policy of the whole library. Elementwise arithmetic and reductions run in float32 (float64 for
float64 inputs). Matrix products take their operands in the dtype of the activations, accumulate in
float32 (float64) and are rounded once. Parameters follow the activations, never the other way
round: a float32 parameter beside bfloat16 activations is rounded on its way into the product and
its gradient comes back in float32, unrounded.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jaxblock.ops import cpu


def arithmetic_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that values of `dtype` are computed in: float64 for float64, otherwise float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round x to `dtype` and return it in the dtype it came in.

    A plain pair of casts would do, but XLA may drop such a pair (`xla_allow_excess_precision`), and
    with it the rounding convention. `reduce_precision` is never dropped. It would flush subnormal
    numbers, so where `dtype` has its own (float16), they are rounded as the integers that they are
    multiples of; the casts then let what is too large overflow.
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if info.bits >= wide.bits:
        return x
    rounded = lax.reduce_precision(x, wide.nexp, info.nmant)
    if info.nexp < wide.nexp:
        step = float(info.smallest_subnormal)
        subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
        # Both differences are exact; so written, the gradient passes, where that of `round` is 0.
        subnormal = x + lax.stop_gradient(subnormal - x)
        rounded = jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)
    return rounded.astype(dtype).astype(x.dtype)


def matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    weight_axis: int = 0,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """y[*B *F] = sum over D of x[*B D] * weight[D *F]: the one matrix product of this library.

    Args:
      x: activations [*B D]; their dtype is the dtype of both operands.
      weight: [D *F] with `weight_axis=0`, or [*F D] with `weight_axis=-1`.
      bias: [*F], added before y is rounded.
      weight_axis: the axis of `weight` that is summed over.
      out_dtype: dtype of the result; None means x.dtype.

    Precision: 16-bit operands are accumulated in float32 and rounded once, in the product and in
    both gradient products, where autodiff alone would mix float32 and 16-bit operands and lose the
    fast kernels of every backend. float32 and float64 use JAX's own rules, so forward mode and
    higher derivatives work; float32 products obey `jax.default_matmul_precision`.
    """
    if bias is not None:
        wide = arithmetic_dtype(x.dtype)
        y = matmul(x, weight, weight_axis=weight_axis, out_dtype=wide)
        bias = bias.astype(x.dtype).astype(wide)
        y += bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y.astype(x.dtype if out_dtype is None else out_dtype)
    weight_axis %= weight.ndim
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if jnp.finfo(x.dtype).bits == 16:
        return _matmul_16bit(x, weight, weight_axis, out_dtype)
    weight = weight.astype(x.dtype)
    if x.dtype == jnp.float32 and weight_axis == 0:
        return _matmul_float32(x, weight).astype(out_dtype)
    return _contract(x, weight, (x.ndim - 1,), (weight_axis,)).astype(out_dtype)


def add_outer_sum(total: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """total[D F] + sum over T of x[T D] * y[T F], not rounded: the gradient of a weight."""

    def plain(total, x, y):
        return total + _contract(x, y, (0,), (0,))

    if jnp.finfo(x.dtype).bits == 16:
        return lax.platform_dependent(total, x, y, cpu=cpu.add_outer_sum, default=plain)
    return plain(total, x, y)


# Its own derivative, so that what the backward pass keeps is x and weight, as for a plain product.
@jax.custom_jvp
def _matmul_float32(x: jax.Array, weight: jax.Array) -> jax.Array:
    contract = partial(_contract, a_axes=(x.ndim - 1,), b_axes=(0,))
    on_cpu = cpu.contract_float32
    return lax.platform_dependent(x, weight, cpu=on_cpu, default=contract)


@partial(_matmul_float32.defjvp, symbolic_zeros=True)
def _matmul_float32_jvp(primals, tangents):
    (x, weight), (dx, dweight) = primals, tangents
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(_tangent_float32(dx, weight))
    if not isinstance(dweight, SymbolicZero):
        terms.append(_tangent_float32(x, dweight))
    y = _matmul_float32(x, weight)
    return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)


def _tangent_float32(x, weight):
    # Both forms are right everywhere, so this choice can be made while tracing. One by platform, as
    # above, would keep x and weight twice for the backward pass; the checkpoint keeps them as they
    # are, where a scan over layers would otherwise collect the weights as matrices: a second copy.
    if jax.default_backend() == "cpu":
        return jax.checkpoint(cpu.contract_matrices, prevent_cse=False)(x, weight)
    return _contract(x, weight, (x.ndim - 1,), (0,))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul_16bit(
    x: jax.Array, weight: jax.Array, weight_axis: int, out_dtype: jnp.dtype
) -> jax.Array:
    product = _contract_16bit(x, weight.astype(x.dtype), (x.ndim - 1,), (weight_axis,))
    return product.astype(out_dtype)


def _matmul_16bit_forward(x, weight, weight_axis, out_dtype):
    return _matmul_16bit(x, weight, weight_axis, out_dtype), (x, weight)


def _matmul_16bit_backward(weight_axis, out_dtype, saved, dy):
    x, weight = saved
    dy = dy.astype(x.dtype)
    tokens = tuple(range(x.ndim - 1))
    features = tuple(range(x.ndim - 1, dy.ndim))
    other_axes = tuple(axis for axis in range(weight.ndim) if axis != weight_axis)
    dx = _contract_16bit(dy, weight.astype(x.dtype), features, other_axes)
    first, last = (x, dy) if weight_axis == 0 else (dy, x)
    dweight = _contract_16bit(first, last, tokens, tokens)
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


_matmul_16bit.defvjp(_matmul_16bit_forward, _matmul_16bit_backward)


def _contract(a, b, a_axes, b_axes):
    return lax.dot_general(
        a,
        b,
        ((a_axes, b_axes), ((), ())),
        preferred_element_type=arithmetic_dtype(a.dtype),
    )


def _contract_16bit(a, b, a_axes, b_axes):
    contract = partial(_contract, a_axes=a_axes, b_axes=b_axes)
    on_cpu = partial(cpu.contract_16bit, a_axes=a_axes, b_axes=b_axes)
    # Elsewhere the axes stay apart: merging them would break a sharding of the inner one.
    return lax.platform_dependent(a, b, cpu=on_cpu, default=contract)
