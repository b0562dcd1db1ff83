"""What was measured, as a table, as JSON, and as a chart."""

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxblock.bench.contenders import LIMIT, OURS
from jaxblock.bench.measure import Measured, Result

# Of the table where no terminal has a width of its own.
WIDTH = 160


def seconds(value: float | None) -> str:
    """0.00123 -> 1.23 ms"""
    if value is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * size:  # What is rounded to a whole one.
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def line(result: Result) -> str:
    """One row in words, as it comes."""
    if result.ours is None:
        return f"  failed: {result.skipped.get(OURS) or '; '.join(result.skipped.values())}"
    low, high = result.ours.quartiles
    text = f"  jaxblock {seconds(result.ours.median)} ({seconds(low)} to {seconds(high)})"
    for name, peer in result.peers.items():
        ratio = peer.median / result.ours.median
        text += f", {name} {seconds(peer.median)} (x{ratio:.2f})"
    if result.wrong:
        text += f". WRONG: not what {', '.join(result.wrong)} computes"
    left_out = [f"{name}: {reason}" for name, reason in result.skipped.items()]
    return "\n".join([text, *(f"  without {reason}" for reason in left_out)])


def print_table(results: list[Result], console: Console) -> None:
    """All rows: medians, the spread of ours, the ratio, and the share of the limit reached."""
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH, highlight=False)
    table = Table(title="ratio = fastest peer / jaxblock: above 1 jaxblock is faster")
    for heading in ("row", "dtype"):
        table.add_column(heading)
    for heading in ("jaxblock", "quartiles", "fastest peer", "", "ratio", "limit", "of limit"):
        table.add_column(heading, justify="right")
    for result in results:
        ours, peer, limit = result.ours, result.fastest_peer, result.limit_s
        if ours is None:
            table.add_row(result.row.name, result.row.dtype, "failed")
            continue
        low, high = ours.quartiles
        table.add_row(
            result.row.name,
            result.row.dtype,
            seconds(ours.median),
            f"{seconds(low)} - {seconds(high)}",
            peer or "none",
            seconds(result.peers[peer].median) if peer else "",
            "WRONG" if result.wrong else "" if result.ratio is None else f"{result.ratio:.2f}",
            seconds(limit),
            "" if limit is None else f"{limit / ours.median:.2f}",
        )
    console.print(table)
    ratios = [result.ratio for result in results if result.ratio is not None]
    if ratios:
        ahead = sum(ratio >= 1 for ratio in ratios)
        console.print(
            f"{ahead} of {len(ratios)} rows at 1.0 or above; "
            f"median {statistics.median(ratios):.2f}, least {min(ratios):.2f}"
        )
    setting = results[-1].setting if results else {}
    console.print(", ".join(f"{name} {value}" for name, value in setting.items()))


def as_json(result: Result) -> dict[str, Any]:
    """One row: seconds are medians."""
    row, ours, peer = result.row, result.ours, result.fastest_peer
    new = row.sizes.get("new")
    tokens = row.sizes["B"] * new if new else None

    def measured(one: Measured) -> dict[str, Any]:
        found: dict[str, Any] = {
            "median_s": one.median,
            "quartiles_s": list(one.quartiles),
            "repeats": len(one.seconds),
            "first_s": one.first_s,
        }
        if tokens:
            found["tokens_per_s"] = tokens / one.median
        if one.peak is not None:
            found["peak_bytes"], found["bytes_before"] = one.peak
        if one.difference is not None:
            found["difference"] = one.difference
        return found

    return {
        "row": row.name,
        "dtype": row.dtype,
        "ours_s": None if ours is None else ours.median,
        "peers": {name: one.median for name, one in result.peers.items()},
        "ratio": result.ratio,
        "limit_s": result.limit_s,
        "fastest_peer": peer,
        "wrong": result.wrong,
        "skipped": result.skipped,
        "measured": {
            name: measured(one)
            for name, one in result.measured.items()
            if not name.startswith(LIMIT)
        },
        "limits": {
            name.removeprefix(LIMIT): one.median
            for name, one in result.measured.items()
            if name.startswith(LIMIT)
        },
        "sizes": dict(row.sizes),
        "setting": result.setting,
    }


def to_json(results: list[Result]) -> str:
    """A list of rows."""
    # Infinity, a result of another shape, is no JSON.
    rows = [as_json(result) for result in results]
    for row in rows:
        for one in row["measured"].values():
            if one.get("difference") == float("inf"):
                one["difference"] = "other outputs"
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows of a JSON file as a table for a README."""
    lines = [
        "| row | dtype | jaxblock | fastest peer | | ratio | of limit |",
        "|---|---|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        ours, peer, limit = row["ours_s"], row["fastest_peer"], row["limit_s"]
        share = "" if limit is None else f"{limit / ours:.2f}"
        took, ratio = seconds(row["peers"][peer]), f"{row['ratio']:.2f}"
        name, dtype = row["row"], row["dtype"]
        lines.append(
            f"| {name} | {dtype} | {seconds(ours)} | {peer} | {took} | {ratio} | {share} |"
        )
    return "\n".join(lines) + "\n"


def chart(results: list[Result], file: Path) -> None:
    """Horizontal bars of the ratios, on a scale where twice as fast and half as fast match."""
    # Not pyplot, which looks for a screen.
    from matplotlib.figure import Figure

    shown = [result for result in results if result.ratio is not None][::-1]
    figure = Figure(figsize=(9, 1.2 + 0.24 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    ratios = [result.ratio or 0.0 for result in shown]
    labels = [f"{result.row.name}, {result.row.dtype}" for result in shown]
    places = list(range(len(shown)))
    # From 1.0 to either side.
    axes.barh(
        places,
        [ratio - 1.0 for ratio in ratios],
        left=1.0,
        color=["#2a7f62" if ratio >= 1 else "#b5483a" for ratio in ratios],
    )
    axes.set_xscale("log", base=2)
    axes.set_yticks(places, labels, fontsize=8)
    least, most = min([0.5, *ratios]), max([2.0, *ratios])
    ticks = [2.0**power for power in range(-8, 9) if least / 2 < 2.0**power < most * 2]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    # Room for what is written beside the longest bar.
    axes.set_xlim(least * 0.8, most * 3.0)
    axes.margins(y=0.01)
    axes.axvline(1.0, color="black", linewidth=1)
    for place, (result, ratio) in enumerate(zip(shown, ratios, strict=True)):
        text = f" {ratio:.2f} {result.fastest_peer} "
        axes.text(max(ratio, 1.0), place, text, va="center", fontsize=7)
    axes.set_xlabel("fastest peer's time / jaxblock's time: right of 1.0 jaxblock is faster")
    figure.savefig(file, dpi=150)
