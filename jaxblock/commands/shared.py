"""What the commands share: the dtypes, the streams, and errors as text."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import typer


class Dtype(StrEnum):
    """What weights and activations are rounded to."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def say(line: str) -> None:
    """Progress: on stderr, so that stdout holds the result alone."""
    typer.echo(line, err=True)


def stop(line: str) -> NoReturn:
    """An error in words, and exit status 2."""
    typer.echo(f"error: {line}", err=True)
    raise typer.Exit(2)


@contextmanager
def findings_as_text() -> Iterator[None]:
    """What is wrong with a file or a folder ends the command as text, with all findings."""
    from jaxblock.checkpoint import CheckpointError
    from jaxblock.config import ConfigError

    try:
        yield
    except (ConfigError, CheckpointError) as error:
        stop(str(error))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        stop(f"{error.strerror or error}{where}")


def check_json_option(command: str, file: Path | None) -> None:
    """Refuse a --json that cannot be written, before any work is done."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        stop(f"{command}: --json must name a file in a folder that exists; got json={file}")


def write_text(file: Path, text: str) -> None:
    """Write in one step: no half-written file is ever seen."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def count(value: Any) -> str:
    """134515008 -> 134,515,008"""
    return f"{value:,}"
