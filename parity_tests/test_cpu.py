"""Sums in the form that XLA's CPU backend needs: equal to the plain ones, derivatives included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, equations, random_arrays

from jaxblock.ops import cpu

# Eight parts, five, and a prime, which stays whole; rows likewise.
SHAPES = [(256, 512), (4, 65, 300), (97, 701)]
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the plain form elsewhere")


def primitives(function, *arguments):
    return [e.primitive.name for e in equations(jax.make_jaxpr(function)(*arguments))]


def close(result, reference, length):
    """float32 sums of so many terms of about 1."""
    reference = np.asarray(reference, np.float64)
    np.testing.assert_allclose(result, reference, rtol=0, atol=2**-22 * length)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("simple", [False, True])
def test_sum_last(shape, simple):
    x, dx = (jnp.asarray(a, jnp.float32) for a in random_arrays(0, shape, shape))
    dy = jnp.asarray(random_arrays(1, (*shape[:-1], 1))[0], jnp.float32)
    total = lambda x: cpu.sum_last(x, simple)  # noqa: E731
    close(total(x), np.sum(np.asarray(x, np.float64), axis=-1, keepdims=True), shape[-1])
    y, tangent = jax.jvp(total, (x,), (dx,))
    close(y, np.sum(np.asarray(x, np.float64), axis=-1, keepdims=True), shape[-1])
    close(tangent, np.sum(np.asarray(dx, np.float64), axis=-1, keepdims=True), shape[-1])
    (gradient,) = jax.vjp(total, x)[1](dy)
    np.testing.assert_array_equal(gradient, np.broadcast_to(dy, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_max_last(shape):
    x = jnp.asarray(random_arrays(0, shape)[0], jnp.float32)
    expected = np.max(x, axis=-1, keepdims=True)
    np.testing.assert_array_equal(jax.jit(cpu.max_last)(x), expected)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(cpu.max_last(x)))(x), 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by", ["channel", "row"])
def test_spread(shape, by):
    small = shape[-1:] if by == "channel" else (*shape[:-1], 1)
    axes = tuple(range(len(shape) - 1)) if by == "channel" else -1
    x, dx, dy = (jnp.asarray(a, jnp.float32) for a in random_arrays(0, small, small, shape))
    spread = lambda x: cpu.spread(x, shape)  # noqa: E731
    y, tangent = jax.jvp(spread, (x,), (dx,))
    np.testing.assert_array_equal(y, np.broadcast_to(x, shape))
    np.testing.assert_array_equal(tangent, np.broadcast_to(dx, shape))
    (gradient,) = jax.vjp(spread, x)[1](dy)
    reference = np.sum(np.asarray(dy, np.float64), axis=axes).reshape(small)
    close(gradient, reference, dy.size // x.size)


@on_cpu
def test_large_sums_are_slices_and_products_and_small_ones_are_not():
    large, small = jnp.ones((256, 512)), jnp.ones((16, 512))
    gradient = lambda x: jax.vjp(lambda s: cpu.spread(s, x.shape), x[0])[1](x)  # noqa: E731
    for function in (cpu.sum_last, gradient):
        assert "dot_general" in primitives(function, large)
        assert "dot_general" not in primitives(function, small)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_in_memory_changes_nothing(dtype):
    x = jnp.asarray(np.arange(-3, 21).reshape(4, 6), dtype)
    for function in (cpu.in_memory, jax.jit(cpu.in_memory), jax.vmap(cpu.in_memory)):
        np.testing.assert_array_equal(function(x), x)
    assert cpu.in_memory(x[:0]).shape == (0, 6)
    for number in (jnp.nan, -jnp.inf, 0):
        if dtype != "int32":
            spoilt = x.at[0, 0].set(number)
            assert_same_bits(cpu.in_memory(spoilt), spoilt)
