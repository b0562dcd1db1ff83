"""Sums in the form that XLA's CPU backend needs: equal to the plain ones, derivatives included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, equations, random_arrays

from jaxblock.ops import cpu, embed

# Eight parts, five, and a prime, which stays whole; rows likewise.
SHAPES = [(256, 512), (4, 65, 300), (97, 701)]
pytestmark = pytest.mark.optimized
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the plain form elsewhere")


def test_this_file_is_compiled_as_users_compile():
    assert not jax.config.read("jax_disable_most_optimizations")


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


# Eight parts, four, one (a prime), and too small for parts.
@pytest.mark.parametrize("depth, width", [(512, 384), (268, 400), (701, 300), (16, 24)])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_product_of_one_row(depth, width, axis, dtype):
    a, b = (x.astype(dtype) for x in random_arrays(0, (1, depth), (depth, width)))
    b = b if axis == 0 else b.T
    product = jax.jit(lambda a, b: cpu.contract_16bit(a, b, (1,), (axis,)))
    y = product(a, b)
    assert y.dtype == jnp.float32 and y.shape == (1, width)
    wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    close(y, wide_a @ (wide_b if axis == 0 else wide_b.T), depth)


@on_cpu
def test_products_of_one_row_under_vmap_are_one_product():
    a, b = (jnp.asarray(x, jnp.bfloat16) for x in random_arrays(0, (64, 1, 512), (512, 384)))
    one = lambda a, b: cpu.contract_16bit(a, b, (1,), (0,))  # noqa: E731
    close(
        jax.vmap(one, (0, None))(a, b)[:, 0], np.asarray(a[:, 0], "f8") @ np.asarray(b, "f8"), 512
    )
    several = jnp.stack([b, 2 * b])
    close(jax.vmap(one)(a[:2], several)[1], np.asarray(a[1], "f8") @ np.asarray(2 * b, "f8"), 1024)
    memory = jax.jit(jax.vmap(one, (0, None))).lower(a, b).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * b.size


def test_derivatives_of_a_product_of_one_row():
    a, b, da = (jnp.asarray(x) for x in random_arrays(0, (1, 512), (512, 384), (1, 512)))
    small = [x.astype(jnp.bfloat16) for x in (a, b, da)]
    a, b, da = (np.asarray(x, np.float64) for x in small)
    product = lambda a, b: cpu.contract_16bit(a, b, (1,), (0,))  # noqa: E731
    close(jax.jvp(lambda a: product(a, small[1]), small[:1], small[2:])[1], da @ b, 512)
    gradient = jax.grad(lambda a: jnp.sum(product(a, small[1])))(small[0])
    np.testing.assert_allclose(np.asarray(gradient, "f8"), b.sum(1)[None], rtol=0, atol=0.5)


@on_cpu
def test_steps_of_one_row_convert_no_weights():
    """A loop over tokens and one over layers, as in decoding: neither the stack nor the table."""
    L, D, V = 6, 512, 4096
    shapes = dict(x=(1, D), stack=(L, D, D), table=(V, D))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes.values()]

    def token(x, stack, table):
        def layer(i, x):
            weight = cpu.look_up(stack, i)
            return cpu.contract_16bit(x, weight, (1,), (0,)).astype(x.dtype)

        x = jax.lax.fori_loop(0, L, layer, x)
        logits = cpu.contract_16bit(x, table, (1,), (1,))
        return embed(jnp.argmax(logits)[None], table)

    def tokens(x, stack, table):
        return jax.lax.fori_loop(0, 3, lambda _, x: token(x, stack, table), x)

    memory = jax.jit(tokens).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * L * D * D


@pytest.mark.usefixtures("branches")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_look_up_is_an_index(dtype):
    stack = jnp.asarray(np.arange(-30, 30).reshape(5, 3, 4), dtype)
    look_up = jax.jit(cpu.look_up)
    for index in range(5):
        assert_same_bits(look_up(stack, jnp.int32(index)), stack[index])


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
