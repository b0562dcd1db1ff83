"""rms_norm: against PyTorch, against float64, its memory, its derivatives and its extremes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FLOAT16S,
    FLOATS,
    assert_derivatives,
    assert_matches_float64,
    assert_same_bits,
    random_arrays,
)
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxblock import rms_norm
from jaxblock.parity import assert_parity

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("shape_checks")]

CASTS = ("after_scale", "before_scale")
# Shape of x, its size, eps, scale_offset, cast. No leading axis and several, a one, a prime, a
# remainder. The rows are not centred, and those of size 1e-3 weigh eps: a norm that subtracts the
# mean or takes another eps is seen. A row of one number keeps a share of eps too, since otherwise
# its gradient is a difference of two equal numbers. From 2^16 numbers on the CPU sums in parts.
LAYERS = {
    "no leading axis": ((7,), 1.0, 1e-6, 0.0, "after_scale"),
    "one channel": ((3, 1), 1.0, 0.5, 0.0, "before_scale"),
    "small rows": ((2, 3, 64), 1e-3, 1e-6, 0.0, "before_scale"),
    "many axes": ((5, 1, 2, 33), 1.0, 1e-5, 1.0, "after_scale"),
    "in parts": ((6, 50, 264), 1.0, 1e-5, 0.0, "after_scale"),
    "in parts, rounded before": ((311, 256), 1.0, 1e-6, 0.0, "before_scale"),
}


def make_inputs(shape, size, scale_offset, seed=0):
    x, scale = random_arrays(seed, shape, shape[-1:])
    return size * (x + 0.5), 1.0 + 0.3 * scale - scale_offset


def check_against_torch(jax_fn, torch_ref, dtype, layer):
    """What every parity test and every planted fault below calls."""
    shape, size, eps, scale_offset, cast = LAYERS[layer]
    options = dict(eps=eps, scale_offset=scale_offset, cast=cast)
    return assert_parity(
        partial(jax_fn, **options),
        partial(torch_ref.rms_norm, **options),
        make_inputs(shape, size, scale_offset),
        dtypes=[dtype],
        # before_scale rounds the normalised value and the factor on the way.
        roundings=2 if cast == "before_scale" else 0,
        # Both sides compute in float32, to a few of its units in the last place, and round the same
        # numbers to 16 bits. Float32 numbers that differ by 8 units of 2^-23 fall on two sides of a
        # rounding boundary with the chance 8 * 2^-23 / 2^-10 < 1/1000 in float16, less in bfloat16.
        # The other cast order agrees on far less (see the planted faults).
        share_equal=None if dtype == "float32" else 0.99,
    )


@pytest.mark.torch
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_parity(layer, dtype, torch_ref):
    check_against_torch(rms_norm, torch_ref, dtype, layer)


@pytest.mark.torch
@pytest.mark.parametrize("cast", CASTS)
def test_parity_with_a_float32_scale(cast, torch_ref):
    x, scale = make_inputs((4, 33), 1.0, 0.0)
    report = assert_parity(
        partial(rms_norm, eps=1e-6, cast=cast),
        partial(torch_ref.rms_norm, eps=1e-6, cast=cast),
        [jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.float32)],
        share_equal=0.99,
    )
    dtypes = {judgement.name: judgement.jax.dtype for judgement in report.judgements}
    assert dtypes["output, jit"] == dtypes["gradient of input 0"] == "bfloat16"
    # The gradient of the scale is summed in float32 and stays there.
    assert dtypes["gradient of input 1"] == "float32"


def centred(x, scale, **options):
    mean = jnp.mean(x.astype(jnp.float32), axis=-1, keepdims=True)
    return rms_norm((x.astype(jnp.float32) - mean).astype(x.dtype), scale, **options)


def other_cast(x, scale, *, cast, **options):
    return rms_norm(x, scale, cast=CASTS[cast == CASTS[0]], **options)


def larger(x, scale, **options):
    y = rms_norm(x, scale, **options)
    return (y.astype(jnp.float32) * 1.01).astype(y.dtype)


# Each with the layer that shows it and the dtypes in which it can be shown.
PLANTED_FAULTS = {
    "x1.01": (larger, ["small rows"], FLOATS),
    "eps 1e-5 for 1e-6": (
        lambda x, scale, *, eps, **options: rms_norm(x, scale, eps=10 * eps, **options),
        ["small rows"],
        FLOATS,
    ),
    "mean subtracted": (centred, ["no leading axis"], FLOATS),
    "offset dropped": (
        lambda x, scale, *, scale_offset, **options: rms_norm(x, scale, **options),
        ["many axes"],
        FLOATS,
    ),
    # In float32 both orders are the same function.
    "cast order": (other_cast, ["many axes", "small rows"], FLOAT16S),
}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("fault", "layer", "dtype"),
    [
        (name, layer, dtype)
        for name, (_, layers, dtypes) in PLANTED_FAULTS.items()
        for layer in layers
        for dtype in dtypes
    ],
)
def test_planted_fault_is_caught(fault, layer, dtype, torch_ref):
    with pytest.raises(AssertionError, match="FAIL .*output"):
        check_against_torch(PLANTED_FAULTS[fault][0], torch_ref, dtype, layer)


def float64_norm_and_gradients(x, scale, dy, eps, scale_offset):
    """rms_norm and its two gradients, by hand."""
    inverse = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
    factor = scale + scale_offset
    d_normalized = dy * factor
    along = np.mean(d_normalized * x, axis=-1, keepdims=True)
    dx = inverse * d_normalized - x * inverse**3 * along
    dscale = (dy * x * inverse).reshape(-1, x.shape[-1]).sum(axis=0)
    return x * inverse * factor, dx, dscale


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
@pytest.mark.parametrize("layer", ["small rows", "many axes", "in parts"])
def test_against_float64(layer, dtype):
    shape, size, eps, scale_offset, cast = LAYERS[layer]
    with jax.enable_x64(dtype == "float64"):
        x, scale = (jnp.asarray(a, dtype) for a in make_inputs(shape, size, scale_offset))
        dy = jnp.asarray(random_arrays(1, shape)[0], dtype)
        options = dict(eps=eps, scale_offset=scale_offset, cast=cast)

        @jax.jit
        def value_and_gradients(x, scale, dy):
            y, pull_back = jax.vjp(partial(rms_norm, **options), x, scale)
            return y, *pull_back(dy)

        results = value_and_gradients(x, scale, dy)
        wide = (np.asarray(a, np.float64) for a in (x, scale, dy))
        references = float64_norm_and_gradients(*wide, eps, scale_offset)
        assert [result.dtype for result in results] == 3 * [jnp.dtype(dtype)]
        roundings = 2 if cast == "before_scale" else 0
        tokens = x.size // shape[-1]
        inverse = 1 / np.sqrt(np.mean(np.square(np.asarray(x, np.float64))) + eps)
        # Terms that partly cancel decide the error of a gradient: dx is a difference of terms of
        # the size of dy * inverse, dscale a sum over the tokens of terms of the size of dy.
        scales = (None, float(inverse), max(1.0, tokens**0.5))
        for result, reference, extent in zip(results, references, scales, strict=True):
            assert_matches_float64(
                result,
                reference,
                reduction_length=max(tokens, *shape),
                roundings=roundings,
                scale=extent,
            )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cast", CASTS)
def test_backward_keeps_x_and_one_number_a_row(cast, dtype):
    kept = jax.eval_shape(
        lambda x, scale: jax.vjp(partial(rms_norm, eps=1e-6, cast=cast), x, scale)[1],
        jax.ShapeDtypeStruct((3, 5, 8), dtype),
        jax.ShapeDtypeStruct((8,), dtype),
    )
    described = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(kept))
    assert described == [((3, 5, 1), "float32"), ((3, 5, 8), dtype), ((8,), dtype)]


def test_a_norm_of_a_compiled_training_step_keeps_one_array():
    """What XLA allocates for forward and backward of a stack of norms, by its own account.

    A norm more costs its own x and one number a row; without checkpointing it is four arrays.
    """
    tokens, hidden = 64, 256

    def loss(x, scales):
        y, _ = lax.scan(lambda x, s: (x + rms_norm(x, s, eps=1e-6), None), x, scales)
        return jnp.sum(y)

    def allocated(layers):
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((tokens, hidden), (layers, hidden))
        ]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    a_norm = (allocated(16) - allocated(8)) / 8
    assert a_norm == 4 * (tokens * hidden + tokens)


def test_derivatives_of_all_orders_and_modes(x64):
    x, scale = make_inputs((2, 5), 1.0, 0.0)
    assert_derivatives(partial(rms_norm, eps=1e-2), jnp.asarray(x), jnp.asarray(scale))


@pytest.mark.parametrize("dtype", FLOATS)
def test_forward_mode_equals_reverse_mode(dtype):
    x, scale, x_dot, dy = (
        jnp.asarray(a, dtype) for a in random_arrays(2, (3, 7), 7, (3, 7), (3, 7))
    )
    function = partial(rms_norm, eps=1e-2)

    @jax.jit
    def both_modes(x, scale, x_dot, dy):
        _, y_dot = jax.jvp(lambda x: function(x, scale), (x,), (x_dot,))
        return y_dot, jax.vjp(lambda x: function(x, scale), x)[1](dy)[0]

    y_dot, dx = both_modes(x, scale, x_dot, dy)
    # <dy, J x_dot> = <J^T dy, x_dot>. Each of the 21 terms was rounded to dtype once on each side.
    left, right = (
        np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64))
        for a, b in ((dy, y_dot), (dx, x_dot))
    )
    terms = np.abs(np.asarray(dy, np.float64) * np.asarray(y_dot, np.float64)).sum()
    terms += np.abs(np.asarray(dx, np.float64) * np.asarray(x_dot, np.float64)).sum()
    # Half a unit in the last place a term, and the float32 steps before it.
    assert abs(left - right) <= terms * (float(jnp.finfo(dtype).eps) / 2 + 32 * 2.0**-24)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cast", CASTS)
def test_zero_rows(cast, dtype):
    """y = 0 and dx = dy * scale / sqrt(eps): finite, not 0 * inf."""
    x, scale = jnp.zeros((2, 4), dtype), jnp.array([1.0, 2.0, -0.5, 0.0], dtype)

    @jax.jit
    def value_and_gradients(x, scale):
        y, pull_back = jax.vjp(partial(rms_norm, eps=2.0**-20, cast=cast), x, scale)
        return y, *pull_back(jnp.ones_like(y))

    y, dx, dscale = value_and_gradients(x, scale)
    assert not y.any()
    np.testing.assert_array_equal(dx, jnp.broadcast_to(1024 * scale, (2, 4)))
    assert not dscale.any()


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("size", [300.0, 60000.0])
def test_large_float16_rows(size, cast):
    """Squares beyond float16: exact forward; the gradient of a constant row is 0 up to rounding."""
    x, scale = jnp.full((2, 8), size, jnp.float16), jnp.ones(8, jnp.float16)

    @jax.jit
    def value_and_gradients(x, scale):
        y, pull_back = jax.vjp(partial(rms_norm, eps=1e-6, cast=cast), x, scale)
        return y, *pull_back(jnp.ones_like(y))

    y, dx, dscale = value_and_gradients(x, scale)
    assert_same_bits(y, np.ones((2, 8), np.float16))
    # Two terms 1 / size, each with some units of 2^-24, cancel.
    assert np.abs(np.asarray(dx, np.float64)).max() <= 16 * 2.0**-24 / size + 2.0**-24
    assert_same_bits(dscale, np.full(8, 2, np.float16))


def test_a_mixed_row_of_extremes_in_float16():
    x = np.array([65504.0, -65504.0, 6e-8, 0.0, 1.0], np.float16)
    y = rms_norm(jnp.asarray(x), jnp.ones(5, jnp.float16), eps=1e-6)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2) + 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2.0**-11, atol=2.0**-24)


@pytest.mark.parametrize("dtype", FLOAT16S)
@pytest.mark.parametrize("cast", CASTS)
def test_the_rounding_convention_survives_jit(cast, dtype):
    """XLA may drop a cast down and up again; the step by step result in NumPy has both."""
    x, scale = (jnp.asarray(a, dtype) for a in make_inputs((64, 33), 1.0, 0.0))
    wide = np.asarray(x, np.float32)
    inverse = 1 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + np.float32(1e-6))
    normalized, factor = wide * inverse, np.asarray(scale, np.float32)
    if cast == "before_scale":
        normalized = normalized.astype(x.dtype).astype(np.float32)
    expected = (normalized * factor).astype(x.dtype)
    results = {
        name: np.asarray(jax.jit(partial(rms_norm, eps=1e-6, cast=name))(x, scale))
        for name in CASTS
    }
    # NumPy's float32 steps differ from XLA's by some units of 2^-24: see check_against_torch.
    assert np.mean(results[cast] == expected) >= 0.99
    assert np.mean(results["after_scale"] == results["before_scale"]) < 0.9


@pytest.mark.parametrize("cast", CASTS)
def test_scan_over_layers_carries_bfloat16(cast):
    scales = jnp.ones((12, 8), jnp.float32)
    x = jnp.asarray(random_arrays(3, (4, 8))[0], jnp.bfloat16)

    def layer(x, scale):
        return rms_norm(x, scale, eps=1e-6, cast=cast), None

    y, _ = jax.jit(lambda x: lax.scan(layer, x, scales))(x)
    assert y.dtype == jnp.bfloat16
    expected = x
    for scale in scales:
        expected = layer(expected, scale)[0]
    # The same numbers, twelve times rounded; rounding boundaries as in check_against_torch.
    assert np.mean(np.asarray(y) == np.asarray(expected)) >= 0.99


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
@pytest.mark.parametrize("scale_dtype", [*FLOATS, "float64"])
def test_result_and_gradients_have_the_dtypes_of_the_inputs(dtype, scale_dtype, x64):
    def value_and_gradients(x, scale):
        y, pull_back = jax.vjp(partial(rms_norm, eps=1e-6), x, scale)
        return y, *pull_back(y)

    x, scale = jax.ShapeDtypeStruct((2, 3), dtype), jax.ShapeDtypeStruct((3,), scale_dtype)
    y, dx, dscale = jax.eval_shape(value_and_gradients, x, scale)
    assert (y.dtype, dx.dtype, dscale.dtype) == (x.dtype, x.dtype, scale.dtype)


def test_vmap_over_norms_of_one_size():
    """Attention norms: a scale a head, over [*B N H]."""
    x, scale = (jnp.asarray(a, jnp.float32) for a in random_arrays(4, (2, 3, 5, 8), (5, 8)))
    function = partial(rms_norm, eps=1e-6)
    per_head = jax.vmap(function, in_axes=(-2, 0), out_axes=-2)(x, scale)
    for head in range(5):
        one = function(x[..., head, :], scale[head])
        assert_matches_float64(
            per_head[..., head, :], np.asarray(one, np.float64), reduction_length=8
        )


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(PartitionSpec("data"), "bfloat16"), (PartitionSpec("data", "model"), "float32")],
    ids=str,
)
def test_sharded_equals_unsharded(spec, dtype):
    """Rows over devices give the same bits; a sharded D sums in another order."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    x, scale, dy = (jnp.asarray(a, dtype) for a in random_arrays(5, (4, 8), 8, (4, 8)))

    def value_and_gradients(x, scale, dy):
        y, pull_back = jax.vjp(partial(rms_norm, eps=1e-6), x, scale)
        return y, *pull_back(dy)

    function = jax.jit(value_and_gradients)
    sharded = jax.device_put((x, dy), NamedSharding(mesh, spec))
    results = function(sharded[0], scale, sharded[1])
    expected = function(x, scale, dy)
    if spec == PartitionSpec("data"):
        assert_same_bits(results[0], expected[0])
    for result, reference in zip(results, expected, strict=True):
        assert_matches_float64(
            result, np.asarray(reference, np.float64), reduction_length=8, roundings=1, scale=2.0
        )


SIZES = st.sampled_from([1, 7, 33])
compiled_rms_norm = jax.jit(rms_norm, static_argnames=("eps", "cast"))


@given(
    width=SIZES, exponent=st.integers(-20, 20), cast=st.sampled_from(CASTS), seed=st.integers(0, 9)
)
def test_power_of_two_in_front_of_x_cancels(width, exponent, cast, seed):
    """rms_norm(2^k x, eps 4^k) = rms_norm(x, eps), to the bit."""
    x, scale = (a.astype(np.float32) for a in random_arrays(seed, (3, width), width))
    plain = compiled_rms_norm(x, scale, eps=2.0**-10, cast=cast)
    scaled = compiled_rms_norm(
        x * np.float32(2.0**exponent), scale, eps=2.0 ** (-10 + 2 * exponent), cast=cast
    )
    assert_same_bits(scaled, plain)


@given(
    width=st.sampled_from([1, 33]),
    exponent=st.integers(-6, 6),
    cast=st.sampled_from(CASTS),
    dtype=st.sampled_from(FLOATS),
)
def test_homogeneous_in_scale_and_odd_in_x(width, exponent, cast, dtype):
    x, scale = (a.astype(dtype) for a in random_arrays(6, (3, width), width))
    factor = np.asarray(2.0**exponent, dtype)
    function = partial(compiled_rms_norm, eps=1e-6, cast=cast)
    plain = np.asarray(function(x, scale))
    assert_same_bits(function(-x, scale), -plain)
    # float16 results may become subnormal, where a power of two is not exact.
    safe = np.abs(np.asarray(plain, np.float64)) > 2.0**-7
    scaled = np.asarray(function(x, scale * factor))
    assert_same_bits(scaled[safe], (plain * factor)[safe])


@given(
    row=st.lists(st.floats(-60000, 60000, width=16), min_size=7, max_size=7),
    dtype=st.sampled_from(FLOATS),
    cast=st.sampled_from(CASTS),
)
def test_no_row_leaves_the_unit_sphere(row, dtype, cast):
    """|y| <= sqrt(D) whatever the row: finite, and eps can only make it smaller."""
    x = jnp.asarray(np.asarray(row), dtype)
    y = np.asarray(compiled_rms_norm(x, jnp.ones_like(x), eps=1e-6, cast=cast), np.float64)
    slack = 1 + 2 * float(jnp.finfo(dtype).eps)
    assert np.all(np.abs(y) <= len(row) ** 0.5 * slack)
    # Order is kept: the factor is one positive number.
    wide = np.asarray(x, np.float64)
    assert np.all(np.diff(y[np.argsort(wide, kind="stable")]) >= 0)
