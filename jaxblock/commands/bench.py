"""`jaxblock bench`: jaxblock beside its peers, in turns."""

import importlib.util
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxblock.commands.shared import check_json_option, say, stop, write_text


def bench(
    pattern: Annotated[
        str | None,
        typer.Option(
            "--rows",
            metavar="PATTERN",
            help="A regular expression: only rows whose name and dtype contain it, such as "
            "'swiglu.*bfloat16'. Without it: all.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="An eighth of the tokens, two layers, three repetitions: minutes, and rough.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write every number to a JSON file, too."),
    ] = None,
    chart_file: Annotated[
        Path | None,
        typer.Option("--chart", metavar="FILE.png", help="Draw the ratios, too (matplotlib)."),
    ] = None,
) -> None:
    """Measure jaxblock and its peers side by side.

    Each row is computed by jaxblock, by PyTorch (eager, torch.compile, the modules of
    transformers), and by flax.nnx, optax and tokamax where they have it. JAX and PyTorch run in two
    processes with as many threads each, which take turns, one repetition at a time. The results are
    compared before anything is timed. The least time possible is measured beside them, by the best
    matrix product of the shape and dtype or by the speed of copying.

    Let nothing else run meanwhile: two programs on the same cores disturb PyTorch more than JAX.

    Exit status: 0 however long anything took, 1 if jaxblock failed in a row or differs from a peer,
    2 if nothing could be measured.
    """
    check_json_option("bench", json_file)
    if chart_file is not None:
        if chart_file.is_dir() or not chart_file.absolute().parent.is_dir():
            stop(f"bench: --chart must name a file in a folder that exists; got {chart_file}")
        if importlib.util.find_spec("matplotlib") is None:
            stop(
                "bench: matplotlib must be installed for --chart. Install it: "
                'pip install "jaxblock[bench]"'
            )
    from jaxblock.bench import measure, report, rows

    available = rows.cpu_rows(quick=quick)
    try:
        chosen = rows.choose(available, pattern)
    except re.error as error:
        stop(f"bench: --rows must be a regular expression; got {pattern}: {error}")
    if not chosen:
        names = "\n".join(f"  {row.name} {row.dtype}" for row in available)
        stop(f"bench: --rows must match one of these; got {pattern}\n{names}")

    results = []
    repeats = measure.QUICK_REPEATS if quick else measure.REPEATS
    for result in measure.measure(chosen, repeats=repeats, fresh=not quick, say=say):
        say(report.line(result))
        results.append(result)
        # As it comes: what was measured is not lost when a later row is cut short.
        if json_file is not None:
            write_text(json_file, report.to_json(results))
    report.print_table(results, Console())
    if chart_file is not None:
        report.chart(results, chart_file)
    bad = any(result.ours is None or result.wrong for result in results)
    raise typer.Exit(1 if bad else 0)
