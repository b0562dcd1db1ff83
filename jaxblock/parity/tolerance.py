"""How large a rounding error may be, from the dtype and the length of the sums.

Let u be the unit roundoff of a dtype (half the distance from 1 to the next number above). A result
is made of

- one rounding to its own dtype and `roundings` more of that size on values on the way: each a
  relative error of at most u_out;
- sums of `reduction_length` terms in the accumulation dtype (float32, or float64 for float64): the
  roundings of the partial sums are independent with mean zero, so they add up to sqrt(n) u_acc and
  not to n u_acc (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019);
- elementary functions (exp, tanh, rsqrt), good to 4 units in the last place, 8 u_acc.

Independent errors add in quadrature:

    relative = sqrt((1 + roundings) u_out^2 + (reduction_length + 8^2) u_acc^2)

`relative` bounds the root mean square of the error over a result, relative to `typical`, the root
mean square of the result (or of the terms that it is the sum of, if they cancel). It takes every
rounding at its worst (u), where the mean one is about u / sqrt(3). That slack covers samples of 52
and more errors. The root mean square of fewer can be larger by chance: with the probability 1 - p
it is below 1 + sqrt(2 ln(1/p) / size) of their deviation (a Gaussian vector's length is within
sqrt(2 ln(1/p)) of its mean: Boucheron, Lugosi and Massart, Concentration Inequalities, 2013,
theorem 5.6). The largest of `size` errors is below sqrt(2 ln(2 size / p)). p is the chance of a
false alarm.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

FALSE_ALARM = 1e-6
ELEMENTARY_FUNCTION = 8


def unit_roundoff(dtype: DTypeLike) -> float:
    """u = 2^-p for p significant bits: 2^-24 for float32, 2^-11 float16, 2^-8 bfloat16."""
    return 2.0 ** -(jnp.finfo(dtype).nmant + 1)


def relative_error(dtype: DTypeLike, *, reduction_length: int, roundings: int) -> float:
    """The bound on rms(error) / rms(result) derived above, for a result of `dtype`."""
    accumulation = jnp.float64 if np.dtype(dtype) == np.float64 else jnp.float32
    result = (1 + roundings) * unit_roundoff(dtype) ** 2
    sums = (reduction_length + ELEMENTARY_FUNCTION**2) * unit_roundoff(accumulation) ** 2
    return math.sqrt(result + sums)


def rms_tail(size: int) -> float:
    """How far the rms of `size` errors may exceed `relative`: 3.6 for one, 1 for 52 and more."""
    return max(1.0, (1 + math.sqrt(2 * math.log(1 / FALSE_ALARM) / size)) / math.sqrt(3))


def max_tail(size: int) -> float:
    """How far the largest of `size` errors may exceed `relative`."""
    return math.sqrt(2 * math.log(2 * size / FALSE_ALARM))


def smallest_step(dtype: DTypeLike) -> float:
    """The absolute error that underflow alone can cause.

    float16 has gradual underflow; XLA and PyTorch may flush the subnormals of the wider types.
    """
    info = jnp.finfo(dtype)
    return float(info.smallest_subnormal if np.dtype(dtype) == np.float16 else info.tiny)


def error_limits(
    dtype: DTypeLike,
    size: int,
    *,
    typical: float,
    largest: float,
    reduction_length: int,
    roundings: int,
) -> tuple[float, float]:
    """The limits of the root mean square and of the largest error of a result of `dtype`.

    Args:
      dtype, size: of the result. Integers and booleans are exact: both limits are 0.
      typical, largest: the root mean square and the largest of its values, or of their terms.
      reduction_length, roundings: as in `relative_error`.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0, 0.0
    relative = relative_error(dtype, reduction_length=reduction_length, roundings=roundings)
    underflow = smallest_step(dtype)
    return (
        rms_tail(size) * relative * typical + underflow,
        max_tail(size) * relative * max(largest, typical) + underflow,
    )
