"""Parity between JAX and PyTorch, for anyone's layers: measure, judge, explain. Knows no component.

Importing it needs no PyTorch; `assert_parity` does (pip install "jaxblock[parity]").
"""

from jaxblock.parity.assertion import Report, assert_parity
from jaxblock.parity.compare import Comparison, compare
from jaxblock.parity.divergence import Divergence, first_divergence
from jaxblock.parity.explain import Explanation, explain
from jaxblock.parity.judge import Judgement, judge, render_table
from jaxblock.parity.tolerance import relative_error, unit_roundoff

__all__ = [
    "Comparison",
    "Divergence",
    "Explanation",
    "Judgement",
    "Report",
    "assert_parity",
    "compare",
    "explain",
    "first_divergence",
    "judge",
    "relative_error",
    "render_table",
    "unit_roundoff",
]
