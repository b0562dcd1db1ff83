"""The command line: the list of its commands, which are in `jaxblock.commands`."""

from typing import Annotated

import typer

from jaxblock import __version__
from jaxblock.commands.bench import bench
from jaxblock.commands.convert import convert
from jaxblock.commands.generate import generate
from jaxblock.commands.inspect import inspect
from jaxblock.commands.parity import parity

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jaxblock {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """The decoder block for JAX, with proof."""


for command in (inspect, generate, convert, parity, bench):
    app.command()(command)


if __name__ == "__main__":
    main()
