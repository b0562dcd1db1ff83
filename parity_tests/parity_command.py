"""`jaxblock parity` in this process, for the two files that test it."""

from typer.testing import CliRunner

from jaxblock import cli

# What the command sets for its own process would stay set in this one.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def run_parity(*arguments, env=None):
    return CliRunner().invoke(cli.app, ["parity", *arguments], env={**ENVIRONMENT, **(env or {})})
