"""What several test files use: parameters, the derived bound, and a look into jaxprs."""

import jax.extend
import jax.numpy as jnp
import numpy as np

from jaxblock.parameters import flatten, unflatten
from jaxblock.parity import compare
from jaxblock.parity.tolerance import error_limits

FLOAT16S = ("bfloat16", "float16")
FLOATS = ("float32", *FLOAT16S)


def random_arrays(seed, *shapes):
    """Standard normal float64 arrays."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape) for shape in shapes]


def random_params(config, dtype="float32"):
    """A parameter tree, made sooner than by `init_params`, which takes seconds to compile."""
    random = np.random.default_rng(0)

    def draw(path, shape):
        leaf = random.standard_normal(shape, np.float32)
        leaf = 1 + leaf / 8 if path[-1] == "scale" else leaf / shape[-1] ** 0.5
        return jnp.asarray(leaf, dtype)

    shapes = dict(flatten(config.parameter_shapes()))
    return unflatten({path: draw(path, shape) for path, shape in shapes.items()})


def assert_matches_float64(result, reference, *, reduction_length, roundings=0, scale=None):
    """`result` is within the derived bound of its dtype of a float64 `reference`.

    It is the bound of `assert_parity`, derived in jaxblock/parity/tolerance.py, without PyTorch.
    `scale` is the root mean square of the terms behind an element where they cancel.
    """
    comparison = compare(result, reference)
    finite = np.where(np.isfinite(reference), reference, 0.0)
    limit_rms, limit_max = error_limits(
        comparison.dtype,
        comparison.size,
        typical=float(np.sqrt(np.mean(finite**2))) if scale is None else scale,
        largest=float(np.max(np.abs(finite))),
        reduction_length=reduction_length,
        roundings=roundings,
    )
    assert comparison.nonfinite_mismatches == 0, comparison
    assert comparison.rms_error <= limit_rms, f"{comparison}; allowed rms {limit_rms:.3e}"
    assert comparison.max_abs_error <= limit_max, f"{comparison}; allowed {limit_max:.3e}"


def assert_same_bits(actual, expected):
    """Same dtype, shape and bits; any NaN equals any NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    unsigned = f"u{actual.dtype.itemsize}"
    actual_bits = np.ascontiguousarray(actual).view(unsigned)
    expected_bits = np.ascontiguousarray(expected).view(unsigned)
    both_nan = (actual != actual) & (expected != expected)
    different = (actual_bits != expected_bits) & ~both_nan
    assert not different.any(), f"{actual[different][:8]} for {expected[different][:8]}"


def assert_derivatives(function, *args):
    """First and second derivatives of a float64 function, in every mode, against differences.

    Along random directions v and w: forward mode, reverse mode, forward over reverse and reverse
    over forward. Central differences of step h err by h^2 times a third derivative and by
    rounding, 2^-53 / h: together below 1e-8 of numbers of size one for h = 1e-5.
    """
    h = 1e-5
    random = np.random.default_rng(0)
    v = [random.standard_normal(arg.shape) for arg in args]
    w = random.standard_normal(jax.eval_shape(function, *args).shape)

    def along(direction, *args):
        return [arg + h * direction * step for arg, step in zip(args, v, strict=True)]

    def scalar(*args):
        return (function(*args) * w).sum()

    gradient = jax.grad(scalar, argnums=range(len(args)))

    @jax.jit
    def derivatives(*args):
        v_args = tuple(jax.numpy.asarray(step) for step in v)
        slope = jax.jvp(scalar, args, v_args)[1]
        by_reverse = sum((g * step).sum() for g, step in zip(gradient(*args), v, strict=True))
        differences = (scalar(*along(1, *args)) - scalar(*along(-1, *args))) / (2 * h)
        curvature = jax.jvp(gradient, args, v_args)[1]
        other = jax.grad(lambda *args: jax.jvp(scalar, args, v_args)[1], range(len(args)))(*args)
        up, down = gradient(*along(1, *args)), gradient(*along(-1, *args))
        gradient_differences = [(a - b) / (2 * h) for a, b in zip(up, down, strict=True)]
        return (slope, by_reverse, differences), (curvature, other, gradient_differences)

    (slope, by_reverse, differences), (curvature, other, gradient_differences) = derivatives(*args)
    np.testing.assert_allclose(slope, by_reverse, rtol=1e-12)
    np.testing.assert_allclose(slope, differences, rtol=1e-7)
    for one, two, reference in zip(curvature, other, gradient_differences, strict=True):
        extent = np.abs(reference).max()
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12 * extent)
        np.testing.assert_allclose(one, reference, rtol=0, atol=1e-7 * extent)


def equations(jaxpr):
    """Every equation of a jaxpr and of those within it: branches, calls, checkpoints, loops."""
    if isinstance(jaxpr, jax.extend.core.ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                if isinstance(inner, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                    yield from equations(inner)
