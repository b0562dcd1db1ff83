"""The arithmetic dtype, the explicit rounding and the one matmul."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FLOAT16S,
    FLOATS,
    assert_matches_float64,
    assert_same_bits,
    equations,
    random_arrays,
)
from hypothesis import given
from hypothesis import strategies as st
from jax import export

import jaxblock
from jaxblock.ops import cpu
from jaxblock.ops.precision import add_outer_sum, arithmetic_dtype, matmul, round_to

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("shape_checks")]

# x [*B D], weight [D *F] or [*F D]: no leading axis and several; a one, a prime and a remainder of
# every vector width.
MATMULS = [
    ((7,), (7, 5), 0),
    ((1, 1), (1, 1), 0),
    ((2, 3, 13), (13, 2, 11), 0),
    ((5, 33), (17, 33), -1),
    ((2, 1, 3, 8), (1, 8), -1),
]


def numbers_around_every(dtype):
    """float32 numbers: all of `dtype`, the halves between neighbours, the next to those, NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = np.arange(2**16, dtype=np.uint16).view(np.dtype(dtype)).astype(np.float32)
    values = values[np.isfinite(values)]
    finite = np.unique(values).astype(np.float64)
    halves = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    largest = np.float32(jnp.finfo(dtype).max)
    # From half a unit in the last place above the largest number on, rounding gives infinity.
    overflow = np.float32(largest * (1 + 2.0 ** -(jnp.finfo(dtype).nmant + 2)))
    halves = np.concatenate([halves, [overflow, -overflow]]).astype(np.float32)
    up, down = (np.nextafter(halves, np.float32(end)) for end in (np.inf, -np.inf))
    return np.concatenate([values, halves, up, down, np.float32([3e38, 1e-44, np.inf, np.nan])])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", FLOAT16S)
def test_round_to_is_one_rounding_to_nearest_even(dtype, compiled):
    values = numbers_around_every(dtype)
    function = jax.jit(round_to, static_argnums=1) if compiled else round_to
    with np.errstate(over="ignore"):
        expected = values.astype(np.dtype(dtype)).astype(np.float32)
    rounded = np.asarray(function(jnp.asarray(values), dtype))
    assert rounded.dtype == np.float32
    np.testing.assert_array_equal(rounded, expected)


def test_round_to_from_float64(x64):
    (values,) = random_arrays(0, 1000)
    half = 1 + 2.0**-11  # between two float16 numbers; the next float64 above rounds up
    values = np.concatenate([values, [half, np.nextafter(half, 2), 65504.0, 1e300, 6e-8]])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float64)
    assert_same_bits(jax.jit(round_to, static_argnums=1)(values, "float16"), expected)


def test_round_to_a_dtype_as_wide_changes_nothing():
    x = jnp.array([1.1, jnp.pi], jnp.float32)
    assert round_to(x, jnp.float32) is x
    assert round_to(x.astype(jnp.bfloat16), jnp.float32).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", FLOAT16S)
def test_round_to_passes_the_gradient(dtype):
    x = jnp.array([1.1, -3.3, 1e-3, 0.0], jnp.float32)
    assert_same_bits(jax.vmap(jax.grad(lambda x: round_to(x, dtype)))(x), jnp.ones_like(x))


def test_arithmetic_dtype():
    for dtype in FLOATS:
        assert arithmetic_dtype(jnp.dtype(dtype)) == jnp.float32
    assert arithmetic_dtype(jnp.dtype("float64")) == jnp.float64


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [*((dtype, dtype) for dtype in FLOATS), ("bfloat16", "float32")],
)
@pytest.mark.parametrize(("x_shape", "weight_shape", "axis"), MATMULS)
def test_matmul_against_float64(x_shape, weight_shape, axis, dtype, weight_dtype):
    x, weight = random_arrays(1, x_shape, weight_shape)
    x, weight = jnp.asarray(x, dtype), jnp.asarray(weight, weight_dtype)
    features = [n for place, n in enumerate(weight_shape) if place != axis % len(weight_shape)]
    (dy,) = random_arrays(2, (*x_shape[:-1], *features))
    dy = jnp.asarray(dy, dtype)

    @jax.jit
    def value_and_gradients(x, weight, dy):
        y, pull_back = jax.vjp(partial(matmul, weight_axis=axis), x, weight)
        return y, *pull_back(dy)

    y, dx, dweight = value_and_gradients(x, weight, dy)
    assert (y.dtype, dx.dtype, dweight.dtype) == (x.dtype, x.dtype, weight.dtype)

    wide_x, wide_dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    # The weight is rounded on its way into the product.
    wide_weight = np.asarray(weight.astype(dtype), np.float64)
    depth = x_shape[-1]
    rows = wide_x.reshape(-1, depth)
    matrix = np.moveaxis(wide_weight, axis, 0).reshape(depth, -1)
    dy_rows = wide_dy.reshape(rows.shape[0], -1)
    # A sum of n products of standard normal numbers has the deviation sqrt(n).
    assert_matches_float64(
        y, (rows @ matrix).reshape(y.shape), reduction_length=depth, scale=depth**0.5
    )
    features, tokens = matrix.shape[1], rows.shape[0]
    assert_matches_float64(
        dx,
        (dy_rows @ matrix.T).reshape(dx.shape),
        reduction_length=features,
        scale=features**0.5,
    )
    gradient = (rows.T @ dy_rows).reshape(depth, *dy.shape[len(x_shape) - 1 :])
    # For a float32 weight the bound is the one of float32: its gradient is never rounded to 16.
    assert_matches_float64(
        dweight,
        np.moveaxis(gradient, 0, axis),
        reduction_length=tokens,
        scale=tokens**0.5,
    )


def test_matmul_in_float64(x64):
    x, weight = random_arrays(3, (3, 13), (13, 2, 5))
    y = matmul(jnp.asarray(x), jnp.asarray(weight, jnp.float32))
    assert y.dtype == jnp.float64
    expected = np.einsum("bd,dcf->bcf", x, weight.astype(np.float32).astype(np.float64))
    assert_matches_float64(y, expected, reduction_length=13, scale=13**0.5)


def test_matmul_keeps_the_sum_when_asked_to():
    # 256 + 0.5 + 0.5 + 0.5 is 257.5: no bfloat16 number, and 256 if summed in bfloat16.
    x = jnp.array([256, 0.5, 0.5, 0.5], jnp.bfloat16)
    ones = jnp.ones((4, 1), jnp.bfloat16)
    assert matmul(x, ones, out_dtype=jnp.float32) == 257.5
    assert matmul(x, ones).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", FLOAT16S)
def test_matmul_under_vmap_equals_a_loop(dtype):
    x, weight, dy = (
        jnp.asarray(array, dtype)
        for array in random_arrays(4, (3, 2, 7), (3, 7, 2, 5), (3, 2, 2, 5))
    )

    def value_and_gradients(x, weight, dy):
        y, pull_back = jax.vjp(matmul, x, weight)
        return y, *pull_back(dy)

    batched = jax.jit(jax.vmap(value_and_gradients))(x, weight, dy)
    one = jax.jit(value_and_gradients)
    for index in range(3):
        for result, expected in zip(batched, one(x[index], weight[index], dy[index]), strict=True):
            # Products of standard normal numbers; both sides rounded to 16 bits once.
            assert_matches_float64(
                result[index], np.asarray(expected, np.float64), reduction_length=10, roundings=1
            )


def run_forward_and_backward(function, *args):
    y, pull_back = jax.vjp(function, *args)
    return y, pull_back(y)


def products():
    """Functions on [*B D], [D *F] ... and how many matrix products forward and backward take."""
    x, gate_up, down, table = (3, 5, 8), (8, 2, 6), (6, 8), (11, 8)
    return {
        "matmul": (matmul, (x, gate_up), 3),
        "matmul of the last axis": (partial(matmul, weight_axis=-1), (x, table), 3),
        # Two products forward, two gradients of each: nothing is multiplied again.
        "swiglu": (jaxblock.swiglu, (x, gate_up, down), 6),
        "geglu": (jaxblock.geglu, (x, gate_up, down), 6),
        "unembed": (jaxblock.unembed, (x, table), 3),
        "unembed with a cap": (
            partial(jaxblock.unembed, softcap=3.0, num_valid=9),
            (x, table),
            3,
        ),
    }


@pytest.mark.parametrize("weight_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", FLOAT16S)
@pytest.mark.parametrize("name", products())
def test_every_product_has_16_bit_operands_and_a_float32_sum(name, dtype, weight_dtype):
    function, (x, *weights), count = products()[name]
    arguments = [jax.ShapeDtypeStruct(x, dtype)]
    arguments += [jax.ShapeDtypeStruct(shape, weight_dtype or dtype) for shape in weights]
    jaxpr = jax.make_jaxpr(partial(run_forward_and_backward, function))(*arguments)
    found = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert len(found) >= count
    for equation in found:
        assert [str(operand.aval.dtype) for operand in equation.invars] == [dtype, dtype]
        assert equation.params["preferred_element_type"] == jnp.float32
        assert equation.outvars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("name", products())
def test_the_products_that_are_lowered(name, platform):
    """What XLA is given on each platform: as many products as there must be, in the right types."""
    function, shapes, count = products()[name]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    exported = export.export(
        jax.jit(partial(run_forward_and_backward, function)), platforms=[platform]
    )(*arguments)
    text = exported.mlir_module()
    types = re.findall(
        r"stablehlo\.dot_general .*: \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>", text
    )
    assert len(types) == count == text.count("stablehlo.dot_general")
    assert "stablehlo.dot " not in text
    for left, right, result in types:
        assert (left.split("x")[-1], right.split("x")[-1]) == ("bf16", "bf16")
        assert result.split("x")[-1] == "f32"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wider_products_stay_in_their_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        for function, shapes, _ in products().values():
            arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
            jaxpr = jax.make_jaxpr(partial(run_forward_and_backward, function))(*arguments)
            for equation in equations(jaxpr):
                if equation.primitive.name == "dot_general":
                    avals = [v.aval for v in (*equation.invars, *equation.outvars)]
                    assert {str(aval.dtype) for aval in avals} == {dtype}


@pytest.mark.usefixtures("branches")
@pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="seen from 0.10.2 on; 0.10.0 has no such kernels"
)
@pytest.mark.parametrize("name", products())
def test_compiled_products_have_16_bit_operands_on_cpu(name):
    """What XLA's CPU backend does not take as it is, it converts to float32 and takes twice as long
    for; a weight's gradient among them."""
    function, shapes, count = products()[name]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    compiled = jax.jit(partial(run_forward_and_backward, function)).lower(*arguments).compile()
    computations = [
        lines for lines in compiled.as_text().split("\n\n") if re.search(r" dot\(", lines)
    ]
    assert len(computations) == count
    for lines in computations:
        signature = lines.strip().splitlines()[0]
        operands, result = re.match(r"%\S+ \((.*)\) -> (\w+)\[", signature).groups()
        assert set(re.findall(r": (\w+)\[", operands)) == {"bf16"} and result == "f32", signature


@pytest.mark.parametrize("rows", [3, 2048, 2051, 4096])
def test_a_large_total_is_added_to_in_blocks(rows):
    """Small integers, so that every sum is exact."""
    random = np.random.default_rng(0)
    total, x, y = (random.integers(-8, 9, shape) for shape in ((rows, 5), (7, rows), (7, 5)))
    result = jax.jit(add_outer_sum)(
        jnp.asarray(total, jnp.float32), jnp.asarray(x, jnp.bfloat16), jnp.asarray(y, jnp.bfloat16)
    )
    np.testing.assert_array_equal(result, total + x.T @ y)


@pytest.mark.usefixtures("branches")
@pytest.mark.parametrize("value", [0.0, -1.5, np.nan, np.inf, 3e38, 1e-40])
def test_the_transpose_that_is_not_folded_is_one(value):
    """Whatever stands in its first place, which it looks at."""
    x = jnp.asarray(np.arange(12.0).reshape(3, 4), jnp.bfloat16).at[0, 0].set(value)
    assert_same_bits(jax.jit(cpu._turned)(x), x.T)


@pytest.mark.usefixtures("branches")
def test_a_disguise_keeps_bits_and_gradients():
    bits = jnp.arange(2**16, dtype=jnp.uint32).astype(jnp.uint16)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    hidden = jax.jit(cpu.disguise)(x)
    assert hidden.dtype == jnp.float16
    back = jax.lax.bitcast_convert_type(jax.jit(cpu.undisguise)(hidden), jnp.uint16)
    np.testing.assert_array_equal(back, bits)
    y, pull_back = jax.vjp(lambda x: 3 * cpu.undisguise(cpu.disguise(x)), x[:100])
    assert_same_bits(pull_back(jnp.ones_like(y))[0], jnp.full(100, 3, jnp.bfloat16))


compiled_matmul = jax.jit(matmul)


@given(
    depth=st.sampled_from([1, 7, 33]),
    exponent=st.integers(-6, 6),
    dtype=st.sampled_from(FLOATS),
)
def test_matmul_is_exactly_homogeneous(depth, exponent, dtype):
    """A power of two in front of an operand is in front of the result, to the bit."""
    x, weight = (jnp.asarray(a, dtype) for a in random_arrays(5, (3, depth), (depth, 5)))
    factor = jnp.asarray(2.0**exponent, dtype)
    plain, scaled = compiled_matmul(x, weight), compiled_matmul(x * factor, weight)
    # In float16 results may become subnormal, where a power of two is not exact.
    safe = np.abs(np.asarray(plain, np.float64)) > 2.0**-7
    assert_same_bits(np.asarray(scaled)[safe], np.asarray(plain * factor)[safe])
