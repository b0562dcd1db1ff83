"""`jaxblock inspect`: what a model is, what it takes up and what it computes."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxblock.commands.shared import Dtype, check_json_option, findings_as_text, stop, write_text

if TYPE_CHECKING:
    from jaxblock.commands.contents import Contents
    from jaxblock.config import DecoderConfig

# No line is cut where the output is a file or a narrow window.
LEAST_WIDTH = 100


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A folder (Hugging Face, Meta, Orbax), a GGUF file, or a config.json or "
            "params.json alone.",
        ),
    ],
    length: Annotated[
        int,
        typer.Option(metavar="T", min=1, help="Tokens of a row: prompt, or cache when decoding."),
    ] = 2048,
    batch: Annotated[int, typer.Option(metavar="B", min=1, help="Rows.")] = 1,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="DTYPE",
            help="Of weights, activations and cache, for the costs. Without it: what most "
            "parameters of the files have.",
        ),
    ] = None,
    tie: Annotated[
        bool | None,
        typer.Option(
            "--tie/--no-tie",
            help="Whether lookup and logits share one table, in place of what the files say. "
            "Meta's params.json alone does not say.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(metavar="V", min=1, help="For a params.json that has -1.")
    ] = None,
    rope_scaling_factor: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="For a params.json with use_scaled_rope: 8 for Llama 3.1, 32 for Llama 3.2.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all of it to a JSON file, too."),
    ] = None,
) -> None:
    """Show configuration, parameters, memory and costs of a model.

    Of the files only headers are read (and two tables, where they must be compared). Costs count
    matrix products, a multiplication with its addition as two FLOPs, and the least possible memory
    traffic; prefill reads T tokens a row and makes logits of the last, decode reads token number T.

    Exit status: 0, or 2 if the files are not understood completely.
    """
    check_json_option("inspect", json_file)
    from jaxblock.commands.contents import contents

    with findings_as_text():
        found = contents(
            path, tie=tie, vocab_size=vocab_size, rope_scaling_factor=rope_scaling_factor
        )
    document = inspection(path, found, batch=batch, length=length, dtype=dtype and str(dtype))
    print_inspection(document, Console())
    if json_file is not None:
        try:
            write_text(json_file, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            stop(f"inspect: --json must be writable; got {error}")


def inspection(
    path: Path, found: "Contents", *, batch: int, length: int, dtype: str | None
) -> dict[str, Any]:
    """Everything that is shown, as JSON values."""
    from jaxblock import costs
    from jaxblock.commands.contents import itemsize
    from jaxblock.commands.describe import describe

    config = found.config
    number = dtype or found.dtype or "float32"
    b = itemsize(number)
    size = config.num_parameters()
    stored = [leaf.bytes for leaf in found.leaves.values() if leaf.bytes is not None]
    setting = {"batch": batch, "length": length, "itemsize": b}
    cache = costs.cache_bytes(config, **setting)
    # Of one more token, before and after every window is full.
    longest = max(kind.window or 1 for kind in config.layer_kinds)
    at = {n: costs.cache_bytes(config, batch=1, length=n, itemsize=b) for n in (1, longest)}
    after = costs.cache_bytes(config, batch=1, length=longest + 1, itemsize=b)
    steps = {
        "prefill": (costs.prefill_costs(config, **setting), batch * length),
        "decode": (costs.decode_costs(config, **setting), batch),
    }
    return {
        "path": str(path),
        "format": found.format,
        "files": {file.name: file.stat().st_size for file in found.files},
        "description": describe(config),
        "config": config.to_hf(),
        "tie": found.tie,
        "tokenizer": _tokenizer(path, config),
        "notes": [*_special_tokens_without_row(config), *found.notes],
        "parameters": {
            leaf: {**about._asdict(), "elements": about.size, "bytes": about.bytes}
            for leaf, about in found.leaves.items()
        },
        "num_parameters": size,
        "num_bytes": sum(stored) if stored else None,
        "setting": {
            **setting,
            "dtype": number,
            "dtype_from": "option" if dtype else "files" if found.dtype else "nothing said",
        },
        "memory": {
            "parameters": size * b,
            "cache_per_token": at[1],
            "cache_per_token_beyond_windows": after - at[longest],
            "cache": cache,
            "total": size * b + cache,
        },
        "costs": {
            name: {
                "tokens": tokens,
                "parts": [{**part._asdict(), "intensity": part.intensity} for part in parts],
                "flops": sum(part.flops for part in parts),
                "bytes": sum(part.bytes for part in parts),
            }
            for name, (parts, tokens) in steps.items()
        },
        "feed_forward": {
            name: _feed_forward(config, tokens, b) for name, (_, tokens) in steps.items()
        },
    }


def _feed_forward(config: "DecoderConfig", tokens: int, b: int) -> dict[str, Any]:
    """One layer's, with its formula."""
    from jaxblock.costs import feed_forward_cost

    cost = feed_forward_cost(config, tokens=tokens, itemsize=b)
    D, F = config.hidden_size, config.feed_forward.intermediate_size
    formula = f"6 T D F = 6 x {tokens:,} x {D:,} x {F:,}"
    if config.moe is not None:
        A, F = config.moe.num_experts_per_tok, config.moe.moe_intermediate_size
        formula = f"6 T A D F = 6 x {tokens:,} x {A} x {D:,} x {F:,}"
    return {
        "formula": formula,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "intensity": cost.intensity,
    }


def _tokenizer(path: Path, config: "DecoderConfig") -> dict[str, Any]:
    """The largest id of the tokenizer beside the model, and which ids have no row."""
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if not file.is_file():
        return {"file": None}
    from tokenizers import Tokenizer

    try:
        tokens = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises no narrower one
        return {"file": str(file), "error": str(error)}
    without_row = sorted((id, name) for name, id in tokens.items() if id >= config.vocab_size)
    return {
        "file": str(file),
        "tokens": len(tokens),
        "largest_id": max(tokens.values(), default=-1),
        "rows": config.vocab_size,
        "without_row": {name: id for id, name in without_row},
    }


def _special_tokens_without_row(config: "DecoderConfig") -> list[str]:
    special = asdict(config.special_tokens)
    special |= {f"eos_token_ids[{i}]": id for i, id in enumerate(special.pop("eos_token_ids"))}
    return [
        f"GAP: {name} is {id}, and the table has {config.vocab_size:,} rows"
        for name, id in special.items()
        if id is not None and id >= config.vocab_size
    ]


# Printing -----------------------------------------------------------------------------------------


def print_inspection(document: Mapping[str, Any], console: Console) -> None:
    """Configuration, findings, parameters, memory and costs, one after the other."""
    console.width = max(console.width, LEAST_WIDTH)
    lines = {"path": document["path"], "format": document["format"]}
    if files := document["files"]:
        names = ", ".join(files) if len(files) <= 3 else f"{len(files)} files"
        lines["files"] = f"{names}, {_scaled(sum(files.values()), 'B')}"
    lines |= document["description"] | {"tie": document["tie"]}
    lines |= {"tokenizer": _tokenizer_in_words(document["tokenizer"])}
    lines |= {"note" + " " * i: note for i, note in enumerate(document["notes"])}
    _print_lines(lines, console)
    _print_parameters(document, console)
    _print_memory(document, console)
    _print_costs(document, console)


def _print_lines(lines: Mapping[str, str], console: Console) -> None:
    column = max(map(len, lines)) + 2
    for name, text in lines.items():
        wrapped = textwrap.wrap(text, max(20, console.width - column), break_on_hyphens=False)
        for index, line in enumerate(wrapped or [""]):
            head = "" if index else name.rstrip()
            style = "bold red" if text.startswith("GAP") else None
            console.print(
                f"{head:<{column}}{line}",
                highlight=False,
                markup=False,
                soft_wrap=True,
                style=style,
            )


def _tokenizer_in_words(found: Mapping[str, Any]) -> str:
    if found["file"] is None:
        return "no tokenizer.json"
    if "error" in found:
        return f"GAP: {found['file']} cannot be read: {found['error']}"
    tokens = f"{found['tokens']:,} tokens, largest id {found['largest_id']:,}"
    without = list(found["without_row"].items())
    if not without:
        return f"{tokens}: every id has one of the {found['rows']:,} rows"
    names = ", ".join(f"{name} {id}" for name, id in without[:4])
    more = f" and {len(without) - 4:,} more" * (len(without) > 4)
    return (
        f"GAP: {tokens}, and the table has {found['rows']:,} rows. {len(without):,} tokens have "
        f"none: {names}{more}. Resize the vocabulary (resize_vocabulary) before they are used"
    )


def _markdown(headers: Sequence[str], *, left: int = 1) -> Table:
    """A table that can be pasted; all columns but the first `left` hold numbers."""
    table = Table(box=box.MARKDOWN)
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < left else "right", no_wrap=True)
    return table


def _print_parameters(document: Mapping[str, Any], console: Console) -> None:
    table = _markdown(["parameter", "shape", "dtype", "elements", "bytes"], left=3)
    for leaf, about in document["parameters"].items():
        shape = ", ".join(map(str, about["shape"]))
        size = "-" if about["bytes"] is None else f"{about['bytes']:,}"
        table.add_row(leaf, f"[{shape}]", about["dtype"] or "-", f"{about['elements']:,}", size)
    total = document["num_bytes"]
    size = "-" if total is None else f"{total:,}"
    table.add_row("all", "", "", f"{document['num_parameters']:,}", size)
    _print_table(table, console)


def _print_memory(document: Mapping[str, Any], console: Console) -> None:
    setting, memory = document["setting"], document["memory"]
    sizes = {name: _scaled(value, "B") for name, value in memory.items()}
    said = {"nothing said": ", for nothing says which"}.get(setting["dtype_from"], "")
    per_token = sizes["cache_per_token"]
    if memory["cache_per_token_beyond_windows"] < memory["cache_per_token"]:
        per_token += f", {sizes['cache_per_token_beyond_windows']} once the windows are full"
    where = f"{setting['batch']:,} x {setting['length']:,} tokens"
    lines = {
        "memory": f"in {setting['dtype']}{said}",
        "  parameters": sizes["parameters"],
        "  cache per token": per_token,
        f"  cache, {where}": sizes["cache"],
        "  together": sizes["total"],
    }
    console.print()
    _print_lines(lines, console)


def _print_costs(document: Mapping[str, Any], console: Console) -> None:
    B, T = document["setting"]["batch"], document["setting"]["length"]
    words = {
        "prefill": f"prefill of {B:,} x {T:,} tokens, logits of the last",
        "decode": f"decode of {B:,} x 1 token, number {T:,} of its row",
    }
    for name, step in document["costs"].items():
        table = _markdown([words[name], "FLOPs/token", "share", "bytes", "FLOPs/byte"])
        for part in [*step["parts"], {**step, "part": "all"}]:
            table.add_row(
                part["part"],
                _scaled(part["flops"] / step["tokens"]),
                f"{part['flops'] / step['flops']:.1%}",
                _scaled(part["bytes"], "B"),
                f"{part['flops'] / part['bytes']:.1f}",
            )
        _print_table(table, console)
        one = document["feed_forward"][name]
        line = (
            f"each feed-forward: {one['formula']} = {_scaled(one['flops'], 'FLOPs')}, "
            f"{_scaled(one['bytes'], 'B')}, {one['intensity']:.1f} FLOPs/byte"
        )
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_table(table: Table, console: Console) -> None:
    """Without the blanks that rich puts around it and at the ends of its lines."""
    with console.capture() as captured:
        console.print(table, highlight=False, markup=False)
    rows = [line.rstrip() for line in captured.get().splitlines()]
    text = "\n".join(row for row in rows if row)
    console.print(f"\n{text}", highlight=False, markup=False, soft_wrap=True)


def _scaled(value: float, unit: str = "") -> str:
    """1234567 -> 1.23 M, in powers of ten."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            break
        value /= 1000
    digits = f"{value:.0f}" if prefix == "" else f"{value:.3g}"
    return f"{digits} {prefix}{unit}".rstrip()
