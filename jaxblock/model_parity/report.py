"""What `jaxblock parity` prints and writes: tables, texts, the verdict, one JSON file."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxblock.parity import Judgement, render_table

if TYPE_CHECKING:
    from jaxblock.model_parity.components import Row
    from jaxblock.model_parity.whole_model import Continuation, WholeModel

LEGEND = """\
rms, max  error against float64 (torch_ref with the same rounded weights)
ratio     jax's rms error over torch's
limit     of jax's rms error: what rounding explains at that place alone, or, where that is more,
          torch's error times a factor: 1.3 for the logits in float32, 1.1 for those in 16 bits,
          1.5 for the stages before them (and a little for chance), 2 for a component
equal     share of elements on which jax and torch agree to the bit
block     the residual stream after it, each token's row divided by its size (a power of two), as
          the next norm does"""

LEGEND_LOGITS = """\
logits    two dtypes: PyTorch rounds its logits to 16 bits, jaxblock returns float32; for 'equal'
          they are rounded too. Those of the component alone are judged by the float32 bound"""

# No line is cut where the output is a file or a narrow window.
LEAST_WIDTH = 120


def print_report(
    setting: Mapping[str, Any],
    wholes: Sequence["WholeModel"],
    rows: Sequence["Row"],
    console: Console,
) -> None:
    """The setting, a line for every stage and every call, the texts, summaries, the verdict.

    Args:
      setting: what the numbers depend on.
      wholes: the whole model, once for each dtype.
      rows: the components; empty if they were not compared.
      console: to print to.
    """
    console.width = max(console.width, LEAST_WIDTH)
    for name, value in setting.items():
        console.print(Text(f"{name:<12}{_in_words(value)}"), soft_wrap=True)
    for whole in wholes:
        console.print(f"\nThe whole model in {whole.dtype}", style="bold", highlight=False)
        _print_judgements(whole.stages, console)
        _print_findings(whole, console)
        components = [row.judgement for row in rows if row.dtype == whole.dtype]
        if components:
            title = f"Its components in {whole.dtype}, each given what PyTorch's was given"
            console.print(f"\n{title}", style="bold", highlight=False)
            _print_judgements(components, console)
    console.print(f"\n{LEGEND}", highlight=False, soft_wrap=True)
    if any(j.jax.dtype != j.torch.dtype for j in _judgements(wholes, rows)):
        console.print(LEGEND_LOGITS, highlight=False, soft_wrap=True)
    for whole in wholes:
        console.print(_texts(whole))
    console.print(_summary(_stage_groups(wholes), "whole model", "stages"))
    for whole in wholes:
        console.print(_in_one_line(whole), highlight=False, soft_wrap=True)
    if rows:
        console.print(_summary(_component_groups(rows), "component", "calls"))
    _print_verdict(wholes, rows, console)


def write_json(
    setting: Mapping[str, Any],
    wholes: Sequence["WholeModel"],
    rows: Sequence["Row"],
    file: Path,
) -> None:
    """The same with every number, in one step: no half-written file is ever seen."""
    document = {
        "verdict": "PASS" if _passed(wholes, rows) else "FAIL",
        **setting,
        "whole_model": [
            {
                "dtype": whole.dtype,
                "ok": whole.ok,
                "reasons": whole.reasons,
                "first_divergence": whole.first_divergence,
                "stages": [_numbers(stage) for stage in whole.stages],
                "num_tokens": whole.num_tokens,
                "other_choices": [asdict(choice) for choice in whole.choices],
                "continuation": asdict(whole.continuation),
            }
            for whole in wholes
        ],
        "components": [
            {
                "component": row.site.component,
                "place": row.site.place,
                "module": row.site.module,
                "dtype": row.dtype,
                **_numbers(row.judgement),
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


def _print_judgements(judgements: Sequence[Judgement], console: Console) -> None:
    table = Text(render_table(judgements))
    table.highlight_words(["FAIL"], "bold red")
    console.print(table, soft_wrap=True)


def _print_findings(whole: "WholeModel", console: Console) -> None:
    """What failed beside the numbers of the table, and where the two first part."""
    lines = []
    if whole.first_divergence is not None:
        names = [stage.name for stage in whole.stages]
        before = names.index(whole.first_divergence)
        still = f"{names[before - 1]} is the last that agrees" if before else "the first stage"
        lines.append(f"the two part at {whole.first_divergence} ({still})")
    lines += whole.other_reasons
    for line in lines:
        console.print(f"\n{line}", style="red", highlight=False, soft_wrap=True)


def _texts(whole: "WholeModel") -> Table:
    """What the prompt goes on with, side by side."""
    continuation = whole.continuation
    table = Table(
        title=f"\nThe prompt goes on in {whole.dtype}: {_agreement(continuation)}",
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE,
        expand=True,
    )
    table.add_column("PyTorch", ratio=1)
    table.add_column("jaxblock", ratio=1)
    table.add_row(Text(continuation.torch_text), Text(continuation.jax_text))
    return table


def _in_one_line(whole: "WholeModel") -> str:
    differ = len(whole.choices)
    choices = f"the likeliest token is the same after all {whole.num_tokens} tokens"
    if differ:
        near = f"{sum(c.tie for c in whole.choices)} of the {differ} others are near ties"
        same = whole.num_tokens - differ
        choices = f"the likeliest token is the same after {same} of {whole.num_tokens}; {near}"
    return f"{whole.dtype}: {choices}. Greedy: {_agreement(whole.continuation)}."


def _agreement(continuation: "Continuation") -> str:
    length, parted = len(continuation.jax), continuation.parted
    if parted is None:
        return f"{length} of {length} tokens equal"
    equal = sum(1 for _ in _common(continuation.jax, continuation.torch))
    kind = "a near tie" if parted.tie else "no near tie"
    return f"{equal} of {length} tokens equal, then {kind} ({parted.gap:.2g} nats)"


def _common(one: Iterable[int], other: Iterable[int]) -> Iterable[int]:
    for token, same in zip(one, other, strict=True):
        if token != same:
            return
        yield token


Group = tuple[str, str, list[Judgement]]


def _stage_groups(wholes: Sequence["WholeModel"]) -> list[Group]:
    """The stages of each dtype, with all blocks in one."""
    groups: dict[tuple[str, str], list[Judgement]] = {}
    for whole in wholes:
        for stage in whole.stages:
            name = "blocks (the worst)" if stage.name.startswith("block ") else stage.name
            groups.setdefault((name, whole.dtype), []).append(stage)
    return [(name, dtype, group) for (name, dtype), group in groups.items()]


def _component_groups(rows: Sequence["Row"]) -> list[Group]:
    groups: dict[tuple[str, str], list[Judgement]] = {}
    for row in rows:
        groups.setdefault((row.site.component, row.dtype), []).append(row.judgement)
    return [(name, dtype, group) for (name, dtype), group in groups.items()]


def _summary(groups: Sequence[Group], what: str, count: str) -> Table:
    """The worst of each group; in Markdown, so that it can be pasted."""
    table = Table(box=box.MARKDOWN)
    table.add_column(what, no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    headers = (count, "ok", "jax rms", "torch rms", "jax max", "torch max", "ratio", "equal")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for name, _, group in groups:
        jax, torch = group[0].jax.dtype, group[0].torch.dtype
        table.add_row(
            name,
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


def _print_verdict(wholes: Sequence["WholeModel"], rows: Sequence["Row"], console: Console) -> None:
    judgements = list(_judgements(wholes, rows))
    failed = sum(not j.ok for j in judgements)
    choices = [reason for whole in wholes for reason in whole.other_reasons]
    if failed or choices:
        counts = [f"{failed} of {len(judgements)} comparisons"] if failed else []
        console.print(
            f"FAIL: {'; '.join([*counts, *choices])}",
            style="bold red",
            highlight=False,
            soft_wrap=True,
        )
    else:
        console.print(f"PASS: {len(judgements)} comparisons", style="bold green", highlight=False)


def _judgements(wholes: Sequence["WholeModel"], rows: Sequence["Row"]) -> Iterable[Judgement]:
    for whole in wholes:
        yield from whole.stages
    for row in rows:
        yield row.judgement


def _passed(wholes: Sequence["WholeModel"], rows: Sequence["Row"]) -> bool:
    return all(whole.ok for whole in wholes) and all(row.judgement.ok for row in rows)


def _numbers(judgement: Judgement) -> dict[str, Any]:
    return {"ok": judgement.ok, "ratio": judgement.ratio, **asdict(judgement)}


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
