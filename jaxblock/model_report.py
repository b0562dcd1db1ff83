"""What `jaxblock parity` prints and writes: tables, the verdict, one JSON file."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxblock.parity import Judgement, render_table

if TYPE_CHECKING:
    from jaxblock.model_parity import Row

LEGEND = """\
rms, max  error against float64 (torch_ref on the same rounded inputs and weights)
ratio     jax's rms error over torch's
limit     of jax's rms error: what rounding explains, or twice torch's error where that is more
equal     share of elements on which jax and torch agree to the bit"""

LEGEND_LOGITS = """\
unembed   two dtypes: PyTorch rounds its logits to 16 bits, jaxblock returns float32. jaxblock's are
          judged by the float32 bound alone, and rounded like PyTorch's before 'equal' is counted"""

# No line is cut where the output is a file or a narrow window.
LEAST_WIDTH = 120


def print_report(setting: Mapping[str, Any], rows: Sequence["Row"], console: Console) -> None:
    """The setting, a line for every call, a line for every component, and the verdict."""
    console.width = max(console.width, LEAST_WIDTH)
    for name, value in setting.items():
        console.print(Text(f"{name:<12}{_in_words(value)}"), soft_wrap=True)
    for dtype in dict.fromkeys(row.dtype for row in rows):
        judgements = [row.judgement for row in rows if row.dtype == dtype]
        table = Text("\n" + render_table(judgements))
        table.highlight_words(["FAIL"], "bold red")
        console.print(table, soft_wrap=True)
    console.print(f"\n{LEGEND}", highlight=False, soft_wrap=True)
    if any(row.judgement.jax.dtype != row.judgement.torch.dtype for row in rows):
        console.print(LEGEND_LOGITS, highlight=False, soft_wrap=True)
    console.print(_summary(rows))
    failed = sum(not row.judgement.ok for row in rows)
    console.print(
        f"FAIL: {failed} of {len(rows)} comparisons"
        if failed
        else f"PASS: {len(rows)} comparisons",
        style="bold red" if failed else "bold green",
        highlight=False,
    )


def write_json(setting: Mapping[str, Any], rows: Sequence["Row"], file: Path) -> None:
    """The same with every number, in one step: no half-written file is ever seen."""
    document = {
        "verdict": "PASS" if all(row.judgement.ok for row in rows) else "FAIL",
        **setting,
        "rows": [
            {
                "component": row.site.component,
                "place": row.site.place,
                "module": row.site.module,
                "dtype": row.dtype,
                "ok": row.judgement.ok,
                "ratio": row.judgement.ratio,
                **asdict(row.judgement),
            }
            for row in rows
        ],
    }
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _summary(rows: Sequence["Row"]) -> Table:
    """The worst over all layers; in Markdown, so that it can be pasted."""
    table = Table(box=box.MARKDOWN)
    table.add_column("component")
    table.add_column("dtype", no_wrap=True)
    headers = ("calls", "ok", "jax rms", "torch rms", "jax max", "torch max", "ratio", "equal")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    groups: dict[tuple[str, str], list[Judgement]] = {}
    for row in rows:
        groups.setdefault((row.site.component, row.dtype), []).append(row.judgement)
    for (component, _), group in groups.items():
        jax, torch = group[0].jax.dtype, group[0].torch.dtype
        table.add_row(
            component,
            jax if jax == torch else f"{jax}/{torch}",
            str(len(group)),
            str(sum(j.ok for j in group)),
            f"{max(j.jax.rms_error for j in group):.2e}",
            f"{max(j.torch.rms_error for j in group):.2e}",
            f"{max(j.jax.max_abs_error for j in group):.2e}",
            f"{max(j.torch.max_abs_error for j in group):.2e}",
            f"{max(j.ratio for j in group):.2f}",
            f"{min(j.between.share_equal for j in group):.1%}",
        )
    return table


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(each)}" for name, each in value.items())
    if isinstance(value, list):
        return f"{len(value)}"
    return str(value)


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: null stands for them."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
