"""`jaxblock convert`: any checkpoint to a Hugging Face folder or an Orbax folder."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jaxblock.commands.shared import Dtype, findings_as_text, say, stop


class Format(StrEnum):
    """What is written."""

    hf = "hf"
    orbax = "orbax"


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A folder (Hugging Face, Meta with safetensors or .pth, Orbax) or a GGUF file of "
            "the llama family.",
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to write; new or empty.")
    ],
    to: Annotated[
        Format,
        typer.Option(
            metavar="FORMAT",
            help="hf: what PyTorch's transformers loads. orbax: the parameter tree, by Orbax.",
        ),
    ] = Format.hf,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16 or float16: what parameters are rounded to. Without it: they "
            "keep their bits.",
        ),
    ] = None,
    tie: Annotated[
        bool | None,
        typer.Option(
            "--tie/--no-tie",
            help="Whether lookup and logits share one table, in place of what SOURCE says. --tie "
            "drops a head that differs.",
        ),
    ] = None,
    rope_scaling_factor: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="For Meta's params.json with use_scaled_rope: 8 for Llama 3.1, 32 for Llama 3.2.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of one safetensors file, 5GB or 200MiB for example.  [default: 5GB]",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace a checkpoint that is in TARGET, all of it."),
    ] = False,
) -> None:
    """Write a checkpoint in another format.

    SOURCE is read strictly: every tensor must have its place, and every parameter its tensor.
    TARGET appears in one step, whole. The tokenizer's files in SOURCE are copied along.

    Exit status: 0, or 2 if SOURCE is not understood completely or TARGET cannot be written.
    """
    _check_target(source, target, overwrite)
    if max_shard_size is not None:
        if to is Format.orbax:
            stop("convert: --max-shard-size goes with --to hf; got --to orbax")
        if not re.fullmatch(r"[1-9]\d*(\.\d+)?\s*[kmgt]i?b", max_shard_size, re.IGNORECASE):
            must = "convert: --max-shard-size must be a number from 1 and a unit, like 5GB"
            stop(f"{must}; got max_shard_size={max_shard_size!r}")
    import jax

    from jaxblock.commands.loading import load, progress_bar

    with findings_as_text(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        config, params = load(
            source,
            dtype=dtype and str(dtype),
            tie=tie,
            rope_scaling_factor=rope_scaling_factor,
        )
        tokenizer = _tokenizer_folder(source)
        if to is Format.orbax:
            from jaxblock.orbax_folder import save_orbax

            say(f"Writing {target}")
            save_orbax(target, config, params, tokenizer_from=tokenizer, overwrite=overwrite)
        else:
            from jaxblock.checkpoint import save_checkpoint
            from jaxblock.orbax_folder import aside

            with aside(target), progress_bar(f"Writing {target}") as step:
                save_checkpoint(
                    target,
                    config,
                    params,
                    max_shard_size=max_shard_size or "5GB",
                    tokenizer_from=tokenizer,
                    progress=step,
                )
    files = [path for path in target.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    say(f"Wrote {target}: {len(files)} files, {size / 1e6:,.1f} MB")


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if source.exists() and source.resolve().is_relative_to(target.resolve()):
        stop(f"convert: SOURCE must not be in TARGET; got {source} and {target}")
    there = target.is_file() or (target.is_dir() and any(target.iterdir()))
    if there and not overwrite:
        must = "convert: TARGET must be new or empty unless there is --overwrite"
        stop(f"{must}; got {target}, which has something in it")
    if there and not (target / "config.json").is_file():
        stop(f"convert: --overwrite must replace a checkpoint; got {target} without a config.json")


def _tokenizer_folder(source: Path) -> Path | None:
    """Where the tokenizer's files are, if there are any."""
    from jaxblock.checkpoint.save import TOKENIZER_FILES

    if source.is_dir() and any((source / name).is_file() for name in TOKENIZER_FILES):
        return source
    where = "a GGUF file's own is not converted" if source.is_file() else f"none in {source}"
    say(f"Note: no tokenizer files are copied: {where}")
    return None
