"""What a wrong result looks like: hypotheses about how it differs, each tried on the numbers.

A hypothesis is one function. It says what `actual` would be, made from `expected`, and is kept if
that undoes at least half of the squared error. A true one leaves nothing but rounding.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxblock.parity.arrays import to_numpy
from jaxblock.parity.compare import rms, to_float64
from jaxblock.parity.tolerance import unit_roundoff

# Elements looked at where comparing every place with every other would take too long.
SAMPLE = 2**18
LARGEST_MATCHED_AXIS = 1024


@dataclass(frozen=True)
class Explanation:
    """One way in which `actual` may come from `expected`.

    Attributes:
      text: the way, in words.
      before: root mean square of actual - expected, infinite if NaN or infinities differ.
      residual: what is left of it after doing to `expected` what the text says.
      systematic: whether rounding errors, however large, never look like this.
    """

    text: str
    before: float
    residual: float
    systematic: bool = False

    @property
    def fits(self) -> bool:
        """Whether it accounts for at least half of the squared error."""
        return self.residual <= math.sqrt(0.5) * self.before

    def __str__(self) -> str:
        if self.residual == self.before:
            return self.text
        return f"{self.text} (rms error {self.before:.2e}, that undone {self.residual:.2e})"


@dataclass(frozen=True)
class _Pair:
    """The two arrays, in float64 and finite, and what is common to all hypotheses."""

    actual: np.ndarray
    expected: np.ndarray
    dtype: np.dtype

    @cached_property
    def before(self) -> float:
        return rms(self.actual - self.expected)

    @property
    def roundoff(self) -> float:
        """Unit roundoff of `actual`; integers are exact."""
        return unit_roundoff(self.dtype) if jnp.issubdtype(self.dtype, jnp.floating) else 0.0

    @cached_property
    def rounding(self) -> float:
        """The error that rounding to the dtype of `actual` alone causes, at most."""
        return self.roundoff * rms(self.expected)

    def test(
        self, text: str, predicted: np.ndarray, *, free: int = 0, actual: np.ndarray | None = None
    ) -> Explanation | None:
        """The hypothesis that `actual` is `predicted`, fitted with `free` numbers, if it fits."""
        actual = self.actual if actual is None else actual
        # With as many numbers as elements everything fits, and with half as many something may.
        if predicted.size < 4 * free + 4:
            return None
        residual = rms(actual - predicted) * math.sqrt(predicted.size / (predicted.size - free))
        explanation = Explanation(text, self.before, residual)
        # Many numbers fit a little of anything, and nearly 0 is a better guess than the unrelated.
        fits = explanation.fits if free <= 1 else residual <= self.before / 2
        return explanation if fits and residual <= rms(actual) / 2 else None


Hypothesis = Callable[[_Pair], Explanation | None]


def explain(actual: Any, expected: Any) -> list[Explanation]:
    """Say how `actual` differs from `expected`: the likeliest explanation first, never none.

    Tried are: equal up to rounding, NaN or infinities in some places, a single value everywhere, a
    constant factor or offset, axes transposed, an axis reversed, shifted or in another order
    (halves swapped, interleaved, permuted), a mean subtracted, a factor or offset for each place of
    an axis, a difference of rank one, values rounded to fewer bits, an error in some places only.
    If none of them fits, the last entry says how large and how related the error is.

    Args:
      actual, expected: arrays of NumPy, JAX or PyTorch of one size. If their shapes differ, only
        transposing and reshaping are tried.

    Raises: ValueError if the sizes differ or are 0; TypeError if the arrays hold no real numbers.
    """
    actual, expected = to_numpy(actual), to_numpy(expected)
    if actual.size != expected.size or actual.size == 0:
        raise ValueError(
            "explain: both arrays must have one size, above 0; got "
            f"actual={list(actual.shape)}, expected={list(expected.shape)}"
        )
    dtype = actual.dtype
    actual, expected = to_float64("explain", actual), to_float64("explain", expected)
    with np.errstate(over="ignore", invalid="ignore"):
        return _explain(actual, expected, dtype)


def _explain(actual: np.ndarray, expected: np.ndarray, dtype: np.dtype) -> list[Explanation]:
    if actual.shape != expected.shape:
        return _explain_shape(actual, expected)
    finite = np.isfinite(actual) & np.isfinite(expected)
    mismatch = ~finite & ~((actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    pair = _Pair(np.where(finite, actual, 0.0), np.where(finite, expected, 0.0), dtype)
    if not mismatch.any():
        return _explain_finite(pair)
    text = _nonfinite_text(actual, expected, mismatch, dtype)
    explanations = [Explanation(text, math.inf, pair.before, systematic=True)]
    if not _is_rounding(pair):
        explanations += [
            replace(other, text=f"apart from that: {other.text}") for other in _explain_finite(pair)
        ]
    return explanations


def _explain_finite(pair: _Pair, *, within_place: bool = False) -> list[Explanation]:
    if pair.before == 0.0:
        return [Explanation("equal", 0.0, 0.0)]
    if _is_rounding(pair):
        text = f"equal up to rounding: the rms error is below half a unit of {pair.dtype.name}"
        return [Explanation(text, pair.before, pair.before)]
    hypotheses = [*SIMPLE, *DETAILED]
    if not within_place:
        hypotheses.append(_some_places)
    found = []
    for hypothesis in hypotheses:
        explanation = hypothesis(pair)
        if explanation is not None:
            explanation = replace(explanation, systematic=hypothesis in SYSTEMATIC)
            # One with many numbers of its own must leave half as much as a simple one to precede
            # it; none is better than rounding lets it be. The sort keeps equals in their order.
            penalty = 2.0 if hypothesis in DETAILED else 1.0
            found.append((max(explanation.residual, pair.rounding) * penalty, explanation))
    found.sort(key=lambda item: item[0])
    return [explanation for _, explanation in found] or [_no_relation(pair)]


def _is_rounding(pair: _Pair) -> bool:
    return pair.before <= pair.rounding


# --- hypotheses with one number or none ---


def _single_value(pair: _Pair) -> Explanation | None:
    for name, array, other in (
        ("actual", pair.actual, pair.expected),
        ("expected", pair.expected, pair.actual),
    ):
        value = array.flat[0]
        if array.size > 1 and np.all(array == value) and not np.all(other == other.flat[0]):
            # + 0.0 makes 0 of -0.
            return Explanation(f"{name} is {value + 0.0:.6g} everywhere", pair.before, 0.0)
    return None


def _factor(pair: _Pair) -> Explanation | None:
    squares = float(np.sum(np.square(pair.expected)))
    factor = float(np.sum(pair.actual * pair.expected)) / squares if squares else 0.0
    explanation = pair.test("", factor * pair.expected, free=1)
    if explanation is None or factor == 0.0:
        return None
    noise = explanation.residual + pair.roundoff * rms(pair.actual)
    uncertainty = 4 * noise / math.sqrt(squares)
    digits = max(3, min(7, math.ceil(math.log10(abs(factor) / max(uncertainty, 1e-300)))))
    known = _known_constant(abs(factor), uncertainty, pair.expected.shape)
    if known == "1" and factor < 0:
        text = "the sign is flipped"
    elif known and known != "1":
        sign = "-" if factor < 0 else ""
        text = f"a constant factor: {sign}{known} (fitted: {factor:.{digits}g})"
    else:
        text = f"a constant factor: {factor:.{digits}g}"
    return Explanation(text, explanation.before, explanation.residual)


def _offset(pair: _Pair) -> Explanation | None:
    offset = float(np.mean(pair.actual - pair.expected))
    return pair.test(f"a constant offset: {offset:.6g}", pair.expected + offset, free=1)


def _mean_subtracted(pair: _Pair) -> Explanation | None:
    found = []
    for axis in range(pair.expected.ndim):
        if pair.expected.shape[axis] == 1:
            continue
        for which, first, second in (
            ("subtracted", pair.expected, pair.actual),
            ("not subtracted", pair.actual, pair.expected),
        ):
            centred = first - first.mean(axis, keepdims=True)
            text = f"the mean over axis {axis} is {which}"
            found.append(pair.test(text, centred, actual=second))
            # LayerNorm of x is RMSNorm of x minus its mean: the rows have a mean square of 1 again.
            before = np.sqrt(np.mean(np.square(first), axis, keepdims=True))
            after = np.sqrt(np.mean(np.square(centred), axis, keepdims=True))
            scaled = centred * np.divide(before, after, out=np.zeros_like(after), where=after > 0)
            text += ", and the size restored: LayerNorm for RMSNorm or the other way round?"
            found.append(pair.test(text, scaled, actual=second))
    return _best(found)


def _transposed(pair: _Pair) -> Explanation | None:
    shape = pair.expected.shape
    found = []
    if len(shape) <= 5:
        for axes in permutations(range(len(shape))):
            moved = [axis for axis in axes if axes[axis] != axis and shape[axis] > 1]
            if moved and tuple(shape[axis] for axis in axes) == shape:
                text = f"axes transposed: actual = expected.transpose{axes}"
                found.append(pair.test(text, pair.expected.transpose(axes)))
    return _best(found)


def _another_order(pair: _Pair) -> Explanation | None:
    """One of the orders that conventions differ in, along one axis."""
    found = []
    for axis, n in enumerate(pair.expected.shape):
        actual, expected = _places(pair.actual, axis), _places(pair.expected, axis)
        direction = np.random.default_rng(0).standard_normal(actual.shape[1])
        # One number a place is enough to find the order; all numbers then decide.
        actual_number, expected_number = actual @ direction, expected @ direction
        orders = list(_known_orders(n))
        if orders:
            errors = [rms(actual_number - expected_number[order]) for _, order in orders]
            text, order = orders[int(np.argmin(errors))]
            predicted = np.take(pair.expected, order, axis)
            found.append(pair.test(f"axis {axis} ({n} places): {text}", predicted))
    return _best(found)


def _shifted(pair: _Pair) -> Explanation | None:
    found = []
    for axis, n in enumerate(pair.expected.shape):
        if n < 3:
            continue
        for index, low, high in (("i-1", 1, 0), ("i+1", 0, 1)):
            actual = np.take(pair.actual, range(low, n - high), axis)
            expected = np.take(pair.expected, range(high, n - low), axis)
            text = f"axis {axis} is shifted by one place: actual[i] = expected[{index}]"
            found.append(pair.test(text, expected, actual=actual))
    return _best(found)


def _fewer_bits(pair: _Pair) -> Explanation | None:
    for narrow in map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)):
        unit = unit_roundoff(narrow)
        # A few numbers may all be representable by chance, and an error that large is another's.
        if not 0 < pair.roundoff < unit or pair.before > 8 * unit * rms(pair.expected):
            continue
        for name, array, other in (
            ("actual", pair.actual, pair.expected),
            ("expected", pair.expected, pair.actual),
        ):
            if array.size >= 8 and _holds(narrow, array) and not _holds(narrow, other):
                residual = rms(array - _rounded(narrow, other))
                text = f"every value of {name} is a {narrow.name} number: rounded on the way"
                return Explanation(text, pair.before, min(residual, pair.before))
    return None


# --- hypotheses with a number for every place of an axis, or every place's source ---


def _permuted(pair: _Pair) -> Explanation | None:
    """Any order of the places of an axis, found by matching each with its nearest."""
    found = []
    for axis, n in enumerate(pair.expected.shape):
        actual, expected = _places(pair.actual, axis), _places(pair.expected, axis)
        if not (2 <= n <= LARGEST_MATCHED_AXIS and actual.shape[1] >= 4):
            continue
        squares = np.sum(np.square(expected), axis=1)
        sources = np.argmin(squares - 2 * actual @ expected.T, axis=1)
        if np.all(sources == np.arange(n)):
            continue
        moved = [
            f"actual[{i}] = expected[{source}]" for i, source in enumerate(sources) if i != source
        ]
        text = f"axis {axis} ({n} places) in another order: {', '.join(moved[:4])}"
        if len(moved) > 4:
            text += f" and {len(moved) - 4} more"
        found.append(pair.test(text, np.take(pair.expected, sources, axis)))
    return _best(found)


def _factor_by_place(pair: _Pair) -> Explanation | None:
    def fit(actual, expected):
        squares = np.sum(np.square(expected), axis=1, keepdims=True)
        products = np.sum(actual * expected, axis=1, keepdims=True)
        factors = np.divide(products, squares, out=np.zeros_like(squares), where=squares > 0)
        return factors * expected, factors

    return _by_place(pair, "factor", fit)


def _offset_by_place(pair: _Pair) -> Explanation | None:
    def fit(actual, expected):
        offsets = np.mean(actual - expected, axis=1, keepdims=True)
        return expected + offsets, offsets

    return _by_place(pair, "offset", fit)


def _rank_one(pair: _Pair) -> Explanation | None:
    """A mean subtracted before a scale: the difference is (one number a row) x (one a channel)."""
    if pair.expected.ndim < 2:
        return None
    difference = (pair.actual - pair.expected).reshape(-1, pair.expected.shape[-1])
    if min(difference.shape) < 2:
        return None
    # The power method, from the largest row.
    right = difference[np.argmax(np.sum(np.square(difference), axis=1))]
    for _ in range(20):
        right = difference.T @ (difference @ right)
        right = right / np.linalg.norm(right)
    product = np.outer(difference @ right, right)
    predicted = pair.expected + product.reshape(pair.expected.shape)
    text = (
        "the difference has rank one: one number for each row times one for each place of the "
        "last axis, as if a mean had been subtracted before the scale (LayerNorm for RMSNorm)"
    )
    return pair.test(text, predicted, free=sum(difference.shape) - 1)


# --- where, and the rest ---


def _some_places(pair: _Pair) -> Explanation | None:
    error = np.abs(pair.actual - pair.expected)
    wrong = error > 4 * pair.roundoff * np.maximum(np.abs(pair.expected), rms(pair.expected))
    if not wrong.any():
        return None
    region, text = _region(wrong)
    inside = np.zeros(wrong.shape, bool)
    if region is not None:
        inside[np.ix_(*region)] = True
    else:
        triangle, text = _triangle(wrong)
        if triangle is None:
            return None
        inside |= triangle
    explanation = Explanation(f"differs only in {text}", pair.before, rms(error[~inside]))
    if not explanation.fits:
        return None
    if region is not None:
        block = np.ix_(*region)
        there = _Pair(pair.actual[block], pair.expected[block], pair.dtype)
        inner = _explain_finite(there, within_place=True)[0]
        if inner.fits:
            text = f"{explanation.text}; there {inner.text}"
            return Explanation(text, explanation.before, explanation.residual)
    return explanation


def _no_relation(pair: _Pair) -> Explanation:
    actual, expected = pair.actual, pair.expected
    if actual.size == 1:
        text = f"one number, off by {actual.item() - expected.item():.6g}"
        if expected.item():
            text += f", {actual.item() / expected.item():.6g} times what it should be"
        return Explanation(text, pair.before, pair.before)
    norms = rms(actual) * rms(expected)
    correlation = float(np.mean(actual * expected)) / norms if norms else 0.0
    if correlation < 0.9:
        text = f"no simple relation; the correlation with the expected values is {correlation:.2f}"
        return Explanation(text, pair.before, pair.before)
    relative = pair.before / rms(expected)
    text = f"an error without simple structure, {relative:.1e} of the typical value"
    if pair.roundoff:
        text += f" or {relative / pair.roundoff:.0f} times the unit roundoff of {pair.dtype.name}"
    # Two operands of a product, each rounded: 0.6 u; deeper computations add up to a few times it.
    for narrow, bits in (("bfloat16", 8), ("float16 or TF32", 11), ("float32", 24)):
        lost = -math.log2(relative / 0.6)
        if pair.roundoff < 2.0 ** -(bits + 2) and abs(lost - bits) <= 1.25:
            text += f": the size that rounding to {narrow} on the way would cause"
    equal = float(np.mean(actual == expected))
    if equal > 0.05:
        text += f"; {equal:.0%} of the elements are exact"
    return Explanation(text, pair.before, pair.before)


# In the order of preference among equals.
SIMPLE: Sequence[Hypothesis] = (
    _single_value,
    _factor,
    _offset,
    _fewer_bits,
    _transposed,
    _another_order,
    _shifted,
    _mean_subtracted,
)
DETAILED: Sequence[Hypothesis] = (_permuted, _factor_by_place, _offset_by_place, _rank_one)
# A row's common factor, one bad row or too few bits can be rounding; these cannot.
SYSTEMATIC = {
    _factor,
    _offset,
    _transposed,
    _another_order,
    _shifted,
    _mean_subtracted,
    _permuted,
}


def _explain_shape(actual: np.ndarray, expected: np.ndarray) -> list[Explanation]:
    finite = [np.where(np.isfinite(array), array, 0.0) for array in (actual, expected)]
    rounding = 2.0**-6 * rms(finite[1])
    found = []
    if actual.ndim == expected.ndim <= 5:
        for axes in permutations(range(actual.ndim)):
            if expected.transpose(axes).shape == actual.shape:
                residual = rms(finite[0] - finite[1].transpose(axes))
                text = f"axes transposed: actual = expected.transpose{axes}"
                found.append(Explanation(text, math.inf, residual))
    residual = rms(finite[0].ravel() - finite[1].ravel())
    found.append(Explanation("the same numbers in another shape", math.inf, residual))
    found = sorted((e for e in found if e.residual <= rounding), key=lambda e: e.residual)
    text = f"another shape: {list(actual.shape)} for {list(expected.shape)}"
    return found or [Explanation(text, math.inf, math.inf)]


def _nonfinite_text(
    actual: np.ndarray, expected: np.ndarray, mismatch: np.ndarray, dtype: np.dtype
) -> str:
    kinds = []
    for name, there in (
        ("NaN", np.isnan(actual)),
        ("infinite", np.isinf(actual)),
        ("finite, where NaN or infinity is expected,", np.isfinite(actual)),
    ):
        if (there & mismatch).any():
            kinds.append(name)
    region, where = _region(mismatch)
    triangle, name = _triangle(mismatch)
    if region is None and triangle is not None and np.all(mismatch == triangle):
        where = name
    elif region is None:
        first = [int(i) for i in np.argwhere(mismatch)[0]]
        where = f"{int(mismatch.sum())} of {mismatch.size} elements, the first at {first}"
    text = f"actual is {' or '.join(kinds)} at {where}"
    if dtype == np.float16 and np.all(np.abs(expected[mismatch]) > np.finfo(np.float16).max):
        text += ": expected exceeds float16 there"
    return text


def _by_place(
    pair: _Pair,
    what: str,
    fit: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Explanation | None:
    """A number of its own for each place of an axis, or for each row of the last one."""
    arrays = (pair.actual, pair.expected)
    last = pair.expected.shape[-1:]
    groups = {
        f"place of axis {axis}": [_by_axis(x, axis) for x in arrays]
        for axis in range(pair.expected.ndim)
    }
    if pair.expected.ndim > 2:
        groups["row"] = [x.reshape(-1, *last) for x in arrays]
    found = []
    for name, (actual, expected) in groups.items():
        if len(actual) == 1:
            continue
        predicted, numbers = fit(actual, expected)
        text = f"another {what} for each {name}, {numbers.min():.6g} to {numbers.max():.6g}"
        found.append(pair.test(text, predicted, free=len(actual), actual=actual))
    return _best(found)


def _known_orders(n: int) -> Iterator[tuple[str, np.ndarray]]:
    """Orders that conventions differ in, for an axis of n places."""
    for size in range(2, n + 1):
        if n % size:
            continue
        for text, order in _orders_of_block(size):
            starts = np.arange(0, n, size)[:, None]
            prefix = f"in each block of {size}, " if size < n else ""
            yield prefix + text, (starts + order).ravel()
        if 2 < size < n and n // size > 2:
            order = np.arange(n).reshape(n // size, size).T.ravel()
            yield f"{n // size} x {size} are laid out as {size} x {n // size}", order


def _orders_of_block(n: int) -> Iterator[tuple[str, np.ndarray]]:
    half = np.arange(n // 2)
    if n == 2:
        yield "the two are swapped", np.array([1, 0])
    elif n % 2 == 0:
        yield "the halves are swapped", np.concatenate([half + n // 2, half])
        yield "the halves are interleaved", np.stack([half, half + n // 2], axis=1).ravel()
        yield "even places come first, then odd ones", np.concatenate([2 * half, 2 * half + 1])
    if n > 2:
        yield "the order is reversed", np.arange(n)[::-1]


def _known_constant(value: float, uncertainty: float, shape: tuple[int, ...]) -> str:
    """`value` as 1, k, 1/k, sqrt(k) or 1/sqrt(k), if it can be one of them."""
    uncertainty = max(uncertainty, 1e-9 * value)
    for base, slope, form in (
        (value, 1.0, "{}"),
        (1 / value, value**-2, "1/{}"),
        (value**2, 2 * value, "sqrt({})"),
        (value**-2, 2 * value**-3, "1/sqrt({})"),
    ):
        whole = round(base)
        # A window that wide would hold a whole number by chance.
        window = uncertainty * slope
        if whole >= 1 and abs(base - whole) <= window <= 0.05:
            if whole == 1:
                return "1"
            text = form.format(whole)
            for axis, n in enumerate(shape):
                if n == whole:
                    return f"{text}, {n} the length of axis {axis}"
                if n == whole**2:
                    return f"{text}, the root of {n}, the length of axis {axis}"
            return text
    return ""


def _region(wrong: np.ndarray) -> tuple[list[np.ndarray] | None, str]:
    """The places of each axis that hold all of `wrong`, and their names; None if that is most."""
    places, names = [], []
    for axis, n in enumerate(wrong.shape):
        other_axes = tuple(i for i in range(wrong.ndim) if i != axis)
        there = np.flatnonzero(wrong.any(axis=other_axes))
        if 2 * len(there) > n:
            there = np.arange(n)
        else:
            names.append(f"{_name_places(there, n)} of axis {axis} ({n} places)")
        places.append(there)
    return (places, " and ".join(names)) if names else (None, "")


def _name_places(places: np.ndarray, n: int) -> str:
    k = len(places)
    if k == 1:
        return f"place {places[0]}"
    if k and places[-1] - places[0] == k - 1:
        if places[0] == 0:
            return f"the first {k}"
        if places[-1] == n - 1:
            return f"the last {k}"
        return f"places {places[0]} to {places[-1]}"
    listed = ", ".join(str(place) for place in places[:8])
    return f"places {listed}" + (f" and {k - 8} more" if k > 8 else "")


def _triangle(wrong: np.ndarray) -> tuple[np.ndarray | None, str]:
    """Above or below the diagonal of the last two axes, which ends in their last element."""
    if wrong.ndim < 2 or min(wrong.shape[-2:]) < 3:
        return None, ""
    rows, columns = wrong.shape[-2:]
    above = np.arange(columns) > np.arange(rows)[:, None] + columns - rows
    for there, text in (
        (above, "elements above the diagonal of the last two axes (what a causal mask hides)"),
        (~above, "elements on and below the diagonal of the last two axes"),
    ):
        if not wrong[..., ~there].any():
            return np.broadcast_to(there, wrong.shape), text
    return None, ""


def _by_axis(x: np.ndarray, axis: int) -> np.ndarray:
    """x as [n, the rest], n the length of `axis`."""
    return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def _places(x: np.ndarray, axis: int) -> np.ndarray:
    """The same, of the rest a sample."""
    x = _by_axis(x, axis)
    return x[:, :: max(1, x.size // SAMPLE)]


def _holds(dtype: np.dtype, x: np.ndarray) -> bool:
    return bool(np.all(_rounded(dtype, x) == x))


def _rounded(dtype: np.dtype, x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(dtype).astype(np.float64)


def _best(found: Sequence[Explanation | None]) -> Explanation | None:
    fitting = [explanation for explanation in found if explanation is not None]
    return min(fitting, key=lambda explanation: explanation.residual, default=None)
