"""Two networks layer by layer: where they first part."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxblock.parity.arrays import to_numpy
from jaxblock.parity.compare import Comparison, compare, rms, to_float64
from jaxblock.parity.explain import Explanation, explain
from jaxblock.parity.judge import Judgement, judge, render_table
from jaxblock.parity.tolerance import error_limits


@dataclass(frozen=True)
class Divergence:
    """The first place at which JAX leaves the bound.

    Attributes:
      name, position: the entry, and how many entries agree before it.
      previous: the name of the last entry that agrees; None if there is none.
      comparison: JAX against PyTorch there.
      limit_rms, limit_max: what its errors had to stay within.
      judgement: both sides against the reference, if there is one.
      explanations: what JAX's values look like there, the likeliest first.
    """

    name: str
    position: int
    previous: str | None
    comparison: Comparison
    limit_rms: float
    limit_max: float
    judgement: Judgement | None
    explanations: tuple[Explanation, ...]

    def __str__(self) -> str:
        where = f"{self.previous} still agrees" if self.previous else "the first entry"
        lines = [
            f"JAX and PyTorch part at {self.name} (entry {self.position}; {where})",
            f"  looks like: {self.explanations[0]}",
            f"  jax against torch: {self.comparison}",
            f"  limits: rms {self.limit_rms:.3e}, largest {self.limit_max:.3e}",
        ]
        if self.judgement is not None:
            lines += ["", render_table([self.judgement])]
        return "\n".join(lines)


def first_divergence(
    jax_values: Mapping[str, Any],
    torch_values: Mapping[str, Any],
    reference_values: Mapping[str, Any] | None = None,
    *,
    reduction_length: int | None = None,
    roundings: int = 2,
    factor: float = 2.0,
) -> Divergence | None:
    """Find the first of many recorded values at which JAX and PyTorch part.

    The bound grows with the position: the entry at i has all the sums and roundings of the entries
    before it behind it, so (i + 1) times `reduction_length` and `roundings`. It knows of no layer
    that amplifies errors; the reference does, since PyTorch's own error then shows it.

    Args:
      jax_values: arrays by name, in the order in which they were computed.
      torch_values: the same from PyTorch, in any order.
      reference_values: the same in float64; then `judge` decides. Without it the difference of the
        two sides is held against the bounds of both, added in quadrature.
      reduction_length: the longest sum behind one entry; None takes the longest axis of any.
      roundings: how often a value is rounded to its dtype on the way from one entry to the next.
      factor: how much worse than PyTorch JAX may be, with reference_values.

    Returns: the first divergence, or None.

    Raises: ValueError for names that not all mappings have, and for shapes that differ.
    """
    mappings = {"jax_values": jax_values, "torch_values": torch_values}
    if reference_values is not None:
        mappings["reference_values"] = reference_values
    _check_names(mappings)
    for name in jax_values:
        shapes = {source: list(to_numpy(values[name]).shape) for source, values in mappings.items()}
        if len({tuple(shape) for shape in shapes.values()}) > 1:
            got = ", ".join(f"{source}={shape}" for source, shape in shapes.items())
            raise ValueError(f"first_divergence: {name!r} must have one shape; got {got}")
    longest = max((max(np.shape(x), default=1) for x in jax_values.values()), default=1)

    previous = None
    for position, name in enumerate(jax_values):
        jax_value, torch_value = to_numpy(jax_values[name]), to_numpy(torch_values[name])
        behind: dict[str, Any] = dict(
            reduction_length=(position + 1) * (reduction_length or longest),
            roundings=(position + 1) * roundings,
        )
        comparison = compare(jax_value, torch_value)
        judgement, likened_to = None, torch_value
        if reference_values is None:
            limit_rms, limit_max = _limits(jax_value, torch_value, **behind)
            ok = comparison.rms_error <= limit_rms and comparison.max_abs_error <= limit_max
        else:
            likened_to = to_numpy(reference_values[name])
            judgement = judge(name, jax_value, torch_value, likened_to, factor=factor, **behind)
            limit_rms, limit_max, ok = judgement.limit_rms, judgement.limit_max, judgement.ok
        if not ok:
            return Divergence(
                name,
                position,
                previous,
                comparison,
                limit_rms,
                limit_max,
                judgement,
                tuple(explain(jax_value, likened_to)),
            )
        previous = name
    return None


def _limits(jax_value: np.ndarray, torch_value: np.ndarray, **behind: int) -> tuple[float, float]:
    expected = to_float64("first_divergence", torch_value)
    finite = np.where(np.isfinite(expected), expected, 0.0)
    limits = [
        error_limits(
            value.dtype,
            value.size,
            typical=rms(finite),
            largest=float(np.max(np.abs(finite))),
            **behind,
        )
        for value in (jax_value, torch_value)
    ]
    return math.hypot(*(rms_ for rms_, _ in limits)), math.hypot(*(max_ for _, max_ in limits))


def _check_names(mappings: Mapping[str, Mapping[str, Any]]) -> None:
    every = {name for values in mappings.values() for name in values}
    missing = {
        source: sorted(every - set(values))
        for source, values in mappings.items()
        if every - set(values)
    }
    if missing or not every:
        got = ", ".join(f"missing in {source}={names}" for source, names in missing.items())
        raise ValueError(
            f"first_divergence: all mappings must have the same names; got {got or 'none at all'}"
        )
