"""Two arrays, number by number."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxblock.parity.arrays import to_numpy


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
      size, dtype: of `actual`; its dtype is the one that units in the last place refer to.
      max_abs_error: the largest |actual - expected|; infinite where one of the two is not finite
        and the other is not the same.
      rms_error: root mean square of the errors.
      index: where the largest error is.
      actual, expected: the two values there.
      max_ulps: the largest error in units in the last place of `expected` in `dtype`.
      share_within_1_ulp: share of the elements whose error is at most one such unit.
      share_equal: share of the elements that are equal; NaN equals NaN, 0 equals -0.
      nonfinite_mismatches: elements where one side is NaN or infinite and the other is not the
        same.
    """

    size: int
    dtype: str
    max_abs_error: float
    rms_error: float
    index: tuple[int, ...]
    actual: float
    expected: float
    max_ulps: float
    share_within_1_ulp: float
    share_equal: float
    nonfinite_mismatches: int

    def __str__(self) -> str:
        text = (
            f"largest error {self.max_abs_error:.3e} ({self.max_ulps:.3g} ulp of {self.dtype}) at "
            f"{list(self.index)}: {self.actual!r} for {self.expected!r}; rms {self.rms_error:.3e}; "
            f"{self.share_within_1_ulp:.2%} within 1 ulp, {self.share_equal:.2%} equal "
            f"of {self.size}"
        )
        if self.nonfinite_mismatches:
            text += f"; {self.nonfinite_mismatches} NaN or infinite on one side only"
        return text


def compare(actual: Any, expected: Any) -> Comparison:
    """Compare two arrays of one shape from NumPy, JAX or PyTorch, without judging.

    NaN agrees with NaN and an infinity with the same infinity; neither agrees with anything else.

    Raises: ValueError if the shapes differ (nothing is broadcast) or the arrays are empty;
      TypeError if they hold no real numbers.
    """
    actual, expected = to_numpy(actual), to_numpy(expected)
    if actual.shape != expected.shape:
        raise ValueError(
            f"compare: both arrays must have one shape; got actual={list(actual.shape)}, "
            f"expected={list(expected.shape)}"
        )
    if actual.size == 0:
        raise ValueError(f"compare: nothing to compare; got shape={list(actual.shape)}")
    dtype = actual.dtype
    are_integers = {actual.dtype.kind, expected.dtype.kind} <= {"i", "u"}
    equal_integers = (actual == expected) if are_integers else None
    actual, expected = to_float64("compare", actual), to_float64("compare", expected)
    equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if equal_integers is not None:
        equal = equal_integers
    finite = np.isfinite(actual) & np.isfinite(expected)
    mismatch = ~finite & ~equal
    error = np.zeros(actual.shape)
    # The difference of two float64 numbers can exceed float64, and so can a count of ulps.
    with np.errstate(over="ignore"):
        np.subtract(actual, expected, out=error, where=finite)
        error = np.where(mismatch, np.inf, np.abs(error))
        if equal_integers is not None:
            # float64 does not tell all 64-bit integers apart.
            error = np.where(equal, 0.0, np.maximum(error, 1.0))
        ulps = error / _ulp(expected, dtype)
    index = np.unravel_index(int(np.argmax(error)), error.shape)
    return Comparison(
        size=error.size,
        dtype=dtype.name,
        max_abs_error=float(error[index]),
        rms_error=rms(error),
        index=tuple(int(i) for i in index),
        actual=float(actual[index]),
        expected=float(expected[index]),
        max_ulps=float(ulps.max()),
        share_within_1_ulp=float(np.mean(ulps <= 1.0)),
        share_equal=float(np.mean(equal)),
        nonfinite_mismatches=int(mismatch.sum()),
    )


def to_float64(function: str, array: np.ndarray) -> np.ndarray:
    """Real numbers of any dtype, booleans too, as float64, which holds all narrower ones."""
    if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(np.float64)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{function}: the arrays must hold real numbers; got dtype={array.dtype}. "
            "Of complex numbers, pass the real and the imaginary parts."
        )
    return array.astype(np.float64)


def rms(x: np.ndarray) -> float:
    """Root mean square; infinite if an element is."""
    with np.errstate(over="ignore", under="ignore"):
        squares = float(np.vdot(x, x))
    if 1e-200 < squares < np.inf:
        return float(np.sqrt(squares / x.size))
    largest = float(np.max(np.abs(x)))
    if largest == 0.0 or not np.isfinite(largest):
        return largest
    # Scaled, so that squares neither overflow nor underflow.
    return largest * float(np.sqrt(np.mean(np.square(x / largest))))


def _ulp(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The distance between neighbours of `dtype` at `value`."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.ones(value.shape)
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(np.where(np.isfinite(value), value, 0.0))
    # The numbers next to 0 are as far apart as all numbers below the smallest normal one.
    exponent = np.where(value == 0.0, info.minexp, np.maximum(exponent - 1, info.minexp))
    return np.ldexp(1.0, exponent - info.nmant)
