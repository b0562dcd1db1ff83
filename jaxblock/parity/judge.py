"""Both frameworks against the float64 reference: whose error is how large, and is ours allowed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxblock.parity.arrays import to_numpy
from jaxblock.parity.compare import Comparison, compare, rms, to_float64
from jaxblock.parity.explain import explain
from jaxblock.parity.tolerance import error_limits, unit_roundoff

# PyTorch this many times beyond the derived bound: five bits lost, more than its roundings explain.
DOUBTFUL = 32


@dataclass(frozen=True)
class Judgement:
    """What `judge` found for one array.

    Attributes:
      name: what was compared.
      jax, torch: each side against the float64 reference.
      between: JAX against PyTorch directly.
      limit_rms, limit_max: what JAX's rms_error and max_abs_error had to stay within.
      reasons: why it failed, in words; empty if it did not.
      doubts: why PyTorch or the reference may not be fit to judge by; a doubt fails nothing.
      torch_there: PyTorch's value where JAX's error is largest.
      explanation: what JAX's result looks like, if it failed.
    """

    name: str
    jax: Comparison
    torch: Comparison
    between: Comparison
    limit_rms: float
    limit_max: float
    reasons: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    torch_there: float = float("nan")
    explanation: str = ""

    @property
    def ok(self) -> bool:
        """Whether JAX passed."""
        return not self.reasons

    @property
    def ratio(self) -> float:
        """JAX's rms error over PyTorch's; 1.0 where both are exact."""
        if self.torch.rms_error == 0.0:
            return 1.0 if self.jax.rms_error == 0.0 else float("inf")
        return self.jax.rms_error / self.torch.rms_error


def judge(
    name: str,
    jax_result: Any,
    torch_result: Any,
    reference: Any,
    *,
    reduction_length: int,
    roundings: int = 0,
    factor: float = 2.0,
    scale: float | None = None,
    share_equal: float | None = None,
    torch_errors: tuple[float, float] | None = None,
) -> Judgement:
    """Judge JAX's result against the float64 reference, with PyTorch's beside it.

    JAX passes if its error is within the bound of `jaxblock.parity.tolerance`, or at most `factor`
    times PyTorch's own error against the same reference: in the root mean square and in the largest
    error, each. NaN and infinities must stand where the reference, rounded to the dtype, has them.
    Integers and booleans must equal the reference or, at a near tie, PyTorch's.

    PyTorch's error excuses nothing if it is more than 32 times the bound and systematic (a factor,
    an offset, another order, ...; see `explain`): PyTorch then computes something else than the
    reference, and JAX must be within the bound of one of the two.

    Args:
      name: what is compared, for the table.
      jax_result: one array as JAX computed it. In a dtype of fewer bits than PyTorch's it fails.
      torch_result: the same as PyTorch computed it.
      reference: the same in float64, from the same rounded inputs.
      reduction_length: the longest sum behind an element.
      roundings: how often values were rounded to the dtype of the result before the last rounding.
      factor: how much worse than PyTorch JAX may be.
      scale: root mean square of the terms behind an element, if cancellation makes it larger than
        that of the reference; None takes the reference's own.
      share_equal: the least share of elements on which both frameworks must agree to the bit. 1.0
        for what is exact; slightly less tells rounding conventions apart, which no error bound can.
      torch_errors: the rms and the largest error that PyTorch is known to reach on such inputs, to
        be used where they exceed those of torch_result.
    """
    jax_result, torch_result = to_numpy(jax_result), to_numpy(torch_result)
    reference_dtype = to_numpy(reference).dtype
    reference = to_float64("judge", to_numpy(reference))
    between = compare(jax_result, torch_result)
    if not _is_float(jax_result.dtype):
        # Where scores nearly tie, an index in float64 may be another than both frameworks find.
        reference = np.where(jax_result == torch_result, torch_result, reference)
    jax = compare(jax_result, _representable(reference, jax_result.dtype))
    torch = compare(torch_result, _representable(reference, torch_result.dtype))

    def bound(dtype: np.dtype) -> tuple[float, float]:
        representable = _representable(reference, dtype)
        finite = np.where(np.isfinite(representable), representable, 0.0)
        return error_limits(
            dtype,
            reference.size,
            typical=rms(finite) if scale is None else scale,
            largest=float(np.max(np.abs(finite))),
            reduction_length=reduction_length,
            roundings=roundings,
        )

    bound_rms, bound_max = bound(jax_result.dtype)
    known_rms, known_max = torch_errors or (0.0, 0.0)
    excuse_rms = factor * max(torch.rms_error, known_rms)
    excuse_max = factor * max(torch.max_abs_error, known_max)
    doubts = _doubts_about_reference(jax, reference, reference_dtype)
    torch_bound_rms, torch_bound_max = bound(torch_result.dtype)
    if torch.rms_error > DOUBTFUL * torch_bound_rms or torch.nonfinite_mismatches:
        likeness = explain(torch_result, _representable(reference, torch_result.dtype))[0]
        doubts.append(
            f"PyTorch's own rms error, {torch.rms_error:.2e}, is far beyond what its roundings "
            f"explain, {torch_bound_rms:.2e}. PyTorch looks like: {likeness}"
        )
        if likeness.systematic and likeness.residual <= likeness.before / 4:
            excuse_rms = excuse_max = 0.0
            if _within(between, bound_rms, bound_max):
                excuse_rms = torch.rms_error + bound_rms
                excuse_max = torch.max_abs_error + bound_max
    limit_rms, limit_max = max(excuse_rms, bound_rms), max(excuse_max, bound_max)

    reasons = []
    if jax.nonfinite_mismatches:
        reasons.append(
            f"{jax.nonfinite_mismatches} of {jax.size} elements are NaN or infinite where the "
            f"reference is not, or the other way round; the first at {list(jax.index)}"
        )
    elif not _is_float(jax_result.dtype) and jax.share_equal < 1.0 and limit_max == 0.0:
        reasons.append(f"{1 - jax.share_equal:.2%} of the elements differ; {jax.dtype} is exact")
    else:
        if jax.rms_error > limit_rms:
            reasons.append(f"rms error {jax.rms_error:.3e} is above its limit {limit_rms:.3e}")
        if jax.max_abs_error > limit_max:
            reasons.append(f"largest error {jax.max_abs_error:.3e} is above {limit_max:.3e}")
    explanation = str(explain(jax_result, reference)[0]) if reasons else ""
    if share_equal is not None and between.share_equal < share_equal:
        reasons.append(
            f"only {between.share_equal:.2%} of the elements equal PyTorch's to the bit, "
            f"{share_equal:.2%} were asked for: another rounding convention?"
        )
        explanation = explanation or str(explain(jax_result, torch_result)[0])
    if _is_narrower(jax_result.dtype, torch_result.dtype):
        reasons.append(f"JAX returns {jax.dtype} where PyTorch returns {torch.dtype}")
    return Judgement(
        name,
        jax,
        torch,
        between,
        limit_rms,
        limit_max,
        tuple(reasons),
        doubts=tuple(doubts),
        torch_there=float(to_float64("judge", torch_result)[jax.index]),
        explanation=explanation,
    )


def render_table(judgements: Sequence[Judgement]) -> str:
    """The judgements as plain text: a line each, then, for those that failed, what to look at."""
    header = (
        "",
        "dtype",
        "jax rms",
        "jax max",
        "torch rms",
        "torch max",
        "ratio",
        "limit",
        "equal",
    )
    rows: list[tuple[str, ...]] = [header]
    for j in judgements:
        dtype = j.jax.dtype if j.jax.dtype == j.torch.dtype else f"{j.jax.dtype}/{j.torch.dtype}"
        errors = (j.jax.rms_error, j.jax.max_abs_error, j.torch.rms_error, j.torch.max_abs_error)
        rows.append(
            (
                f"{'ok  ' if j.ok else 'FAIL'} {j.name}",
                dtype,
                *(f"{error:.2e}" for error in errors),
                f"{j.ratio:.2f}" if j.ratio < 1e4 else f"{j.ratio:.0e}",
                f"{j.limit_rms:.2e}",
                f"{j.between.share_equal:.1%}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    failed = [j for j in judgements if not j.ok]
    for _, alike in groupby(failed, key=lambda j: (j.jax.index, j.explanation)):
        first, *others = alike
        title = "; ".join(j.name for j in (first, *others))
        lines += ["", f"{title}:", *_what_to_look_at(first)]
    names_by_doubt: dict[str, list[str]] = {}
    for j in judgements:
        for doubt in j.doubts:
            names_by_doubt.setdefault(doubt, []).append(j.name)
    for doubt, names in names_by_doubt.items():
        lines += ["", f"doubt, {'; '.join(names)}: {doubt}"]
    return "\n".join(lines)


def _what_to_look_at(j: Judgement) -> list[str]:
    lines = [
        "; ".join(j.reasons),
        f"looks like: {j.explanation}",
        f"worst at {list(j.jax.index)}: jax {j.jax.actual:.9g}, torch {j.torch_there:.9g}, "
        f"reference {j.jax.expected:.9g}",
    ]
    for side, comparison in (("jax", j.jax), ("torch", j.torch)):
        lines.append(
            f"{side}: at most {comparison.max_ulps:.3g} ulp of {comparison.dtype}, "
            f"{comparison.share_within_1_ulp:.1%} of {comparison.size} within 1 ulp"
        )
    return [f"  {line}" for line in lines]


def _doubts_about_reference(
    jax: Comparison, reference: np.ndarray, reference_dtype: np.dtype
) -> list[str]:
    """Whether the reference has been rounded to a dtype that is no finer than the result's."""
    dtype = np.dtype(jax.dtype)
    if not _is_float(dtype) or jax.share_equal == 1.0:
        return []
    advice = "what computes it rounds inside, and its own error is counted as JAX's"
    if _is_narrower(reference_dtype, np.dtype(np.float64)):
        if not _is_narrower(dtype, reference_dtype):
            return [f"the reference is {reference_dtype}: {advice}"]
    elif reference.size >= 64:
        # Fewer numbers may all be representable by chance.
        coarse = np.dtype(np.float32) if dtype == np.float64 else dtype
        with np.errstate(over="ignore"):
            if np.array_equal(reference.astype(coarse), reference, equal_nan=True):
                return [f"every value of the reference is a {coarse} number: {advice}"]
    return []


def _representable(reference: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The reference with what exceeds `dtype` as `dtype` has it: infinite, or NaN."""
    if not _is_float(dtype):
        return reference
    with np.errstate(over="ignore"):
        rounded = reference.astype(dtype).astype(np.float64)
    return np.where(np.isfinite(rounded), reference, rounded)


def _is_float(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _is_narrower(dtype: np.dtype, other: np.dtype) -> bool:
    return _is_float(dtype) and _is_float(other) and unit_roundoff(dtype) > unit_roundoff(other)


def _within(comparison: Comparison, limit_rms: float, limit_max: float) -> bool:
    return comparison.rms_error <= limit_rms and comparison.max_abs_error <= limit_max
