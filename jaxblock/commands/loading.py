"""Any checkpoint to configuration and parameters, with progress on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from jaxblock.commands.shared import say, stop


def load(
    path: Path,
    *,
    dtype: str | None = None,
    tie: bool | None = None,
    rope_scaling_factor: float | None = None,
) -> tuple[Any, Any]:
    """config, params = those of an Orbax folder or of anything that `load_checkpoint` reads

    Meta's pickled shards are read, too. What was read is said on stderr.

    Raises: ConfigError, CheckpointError, OSError.
    """
    from jaxblock import checkpoint
    from jaxblock.orbax_folder import is_orbax

    if not path.exists():
        stop(f"a checkpoint must be a folder or a file; got {path}, which is not there")
    if is_orbax(path):
        given = {"--tie": tie, "--rope-scaling-factor": rope_scaling_factor}
        if options := [name for name, value in given.items() if value is not None]:
            stop(f"an Orbax folder says all of it itself; got {' and '.join(options)} for {path}")
        return _load_orbax(path, dtype)
    read = checkpoint.load_checkpoint
    if not (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        if any(path.glob("consolidated.*.pth")):
            read = _with_torch(checkpoint.load_pickled_meta)
    with progress_bar(f"Reading {path.name}") as step:
        loaded = read(
            path, dtype=dtype, tie=tie, rope_scaling_factor=rope_scaling_factor, progress=step
        )
    say(str(loaded.report))
    return loaded.config, loaded.params


def _load_orbax(path: Path, dtype: str | None) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp

    from jaxblock.orbax_folder import load_orbax

    say(f"Reading {path.name}")
    config, params = load_orbax(path)
    say(f"{config.model_type}, an Orbax folder: {len(jax.tree.leaves(params))} leaves")
    if dtype is not None:
        rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        finite = [
            jnp.all(jnp.isfinite(ours) | ~jnp.isfinite(theirs))
            for ours, theirs in zip(jax.tree.leaves(rounded), jax.tree.leaves(params), strict=True)
        ]
        if not all(finite):
            stop(f"every parameter must fit into {dtype}; got larger values in {path}")
        params = rounded
    return config, params


def _with_torch(read: Callable[..., Any]) -> Callable[..., Any]:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        stop("Meta's .pth files are read through PyTorch, which is not installed")
    return read


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for a callback with bytes done and all bytes; one line where there is no terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        say(what)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
