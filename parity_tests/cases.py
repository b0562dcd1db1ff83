"""The cases of data/cases.json: one call each, with the arrays as NumPy arrays.

An array is written {"value": nested list, "dtype": name}, its numbers exact in that dtype; "nan"
stands for NaN. Everything else is passed as it is.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the dtype name "bfloat16")
import numpy as np


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      function: its name; `jitted` says whether the case is about the call under `jax.jit`.
      arguments, keywords: of the call.
      expected: the results, more than one if the function returns a tuple; None if it must fail.
      error: class name of the exception, or part of its message.
      tolerance: largest |got - expected| / |expected|, element by element; 0 means equal bits.
      needs_x64: whether 64-bit types must be on.
    """

    id: str
    function: str
    jitted: bool
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    expected: tuple[Any, ...] | None
    error: str | None
    tolerance: float
    needs_x64: bool

    @property
    def has_arrays(self) -> bool:
        return any(isinstance(argument, np.ndarray) for argument in self.arguments)


def load_cases() -> list[Case]:
    text = (Path(__file__).parent / "data" / "cases.json").read_text()
    return [_case(entry) for entry in json.loads(text)]


def _case(entry) -> Case:
    name, expect = entry["function"], entry["expect"]
    jitted = name.startswith("jit(")
    expected = None
    if "error" not in expect:
        expected = tuple(_value(output) for output in expect.get("outputs", [expect]))
    return Case(
        id=entry["id"],
        function=name.removeprefix("jit(").removesuffix(")"),
        jitted=jitted,
        arguments=tuple(_value(argument) for argument in entry["args"]),
        keywords=entry["kwargs"],
        expected=expected,
        error=expect.get("error"),
        tolerance=entry["tolerance"],
        needs_x64=entry["dtype"] == "float64",
    )


def _value(entry):
    if not (isinstance(entry, dict) and set(entry) == {"value", "dtype"}):
        return entry
    if entry["dtype"] == "int":
        return entry["value"]
    exact = np.asarray(_with_nan(entry["value"]), np.float64)
    return exact.astype(entry["dtype"])


def _with_nan(value):
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return float("nan") if value == "nan" else value
