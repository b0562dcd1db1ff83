"""A decoder as an Orbax folder: `params`, written by Orbax, and `config.json` beside it.

The parameter tree goes in as it is, so any JAX program can restore it with Orbax alone. Reading is
strict: the folder must hold the very tree that its configuration describes.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxblock.checkpoint.atomic import replace_folder
from jaxblock.checkpoint.findings import checkpoint_error
from jaxblock.checkpoint.save import TOKENIZER_FILES
from jaxblock.config import DecoderConfig
from jaxblock.ops.checks import FLOAT_DTYPES
from jaxblock.parameters import Params, check_params, flatten, unflatten

PARAMS = "params"
FUNCTION = "load_orbax"

Leaves = Mapping[tuple[str, ...], jax.ShapeDtypeStruct]


def save_orbax(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: Params,
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> None:
    """folder = config.json with `config.to_hf()`, and the parameter tree in `params`

    Args:
      folder: to be made; what is there already stays as it is unless `overwrite`. It appears in one
        step, whole.
      config: of the decoder.
      params: the parameter tree, written bit for bit.
      tokenizer_from: a folder whose tokenizer files are copied, as in `save_checkpoint`.
      overwrite: replace a folder that is there.

    Raises: FileExistsError for a folder that is there. ConfigError for a configuration that no
      config.json can hold: one with a padded vocabulary, for example. ValueError or TypeError for a
      tree that does not fit it.
    """
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]

    check_params("save_orbax", params, config)
    entries = config.to_hf()
    target = Path(folder).absolute()
    if not overwrite and target.exists() and (target.is_file() or any(target.iterdir())):
        raise FileExistsError(17, "save_orbax: folder must be new or empty", str(target))
    with aside(target), replace_folder(target) as new:
        (new / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(new.absolute() / PARAMS, dict(params))
        if tokenizer_from is not None:
            files = [Path(tokenizer_from) / name for name in TOKENIZER_FILES]
            for file in filter(Path.is_file, files):
                shutil.copyfile(file, new / file.name)


def load_orbax(folder: str | os.PathLike[str]) -> tuple[DecoderConfig, Params]:
    """config, params = what `save_orbax` wrote, bit for bit

    Args:
      folder: of `save_orbax`.

    Returns: the configuration and the parameter tree, every leaf in the dtype that it was saved in,
      on the default device.

    Raises: ConfigError for a config.json that is not understood. CheckpointError, with all
      findings, for a folder without parameters, and for leaves that are missing, unexpected, of
      another shape or no floats: before any of them is read. Orbax keeps no checksum of the values:
      a bit that flips in one goes unnoticed.
    """
    import orbax.checkpoint as ocp

    config, leaves = open_orbax(folder)
    (device,) = jnp.zeros(()).devices()
    wanted = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(device)
        )
        for path, leaf in leaves.items()
    }
    source = Path(folder).absolute() / PARAMS
    with _reading(source), ocp.StandardCheckpointer() as checkpointer:
        return config, checkpointer.restore(source, unflatten(wanted))


def open_orbax(folder: str | os.PathLike[str]) -> tuple[DecoderConfig, Leaves]:
    """config, leaves = what is in the folder, by its metadata: no array is read

    Args:
      folder: of `save_orbax`.

    Returns: the configuration, and shape and dtype of every leaf by its path.

    Raises: as `load_orbax`.
    """
    import orbax.checkpoint as ocp

    config = DecoderConfig.from_hf(folder)
    source = Path(folder).absolute() / PARAMS
    with _reading(source), ocp.StandardCheckpointer() as checkpointer:
        about = checkpointer.metadata(source).item_metadata
        if about is None:
            raise ValueError("metadata or arrays are missing or damaged")
        found = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for path, array in flatten(about.tree)
        }
    _check(source, found, config)
    return config, found


def is_orbax(folder: Path) -> bool:
    """Whether this looks like a folder of `save_orbax`."""
    return (folder / PARAMS / "_CHECKPOINT_METADATA").is_file()


def _check(source: Path, found: Leaves, config: DecoderConfig) -> None:
    expected = dict(flatten(config.parameter_shapes()))
    findings = [f"{'/'.join(path)} is missing" for path in expected if path not in found]
    for path, leaf in found.items():
        name = "/".join(path)
        if path not in expected:
            findings.append(f"{name} is unexpected: this configuration has no such leaf")
        elif tuple(leaf.shape) != expected[path]:
            must = f"{name} must have the shape {list(expected[path])}"
            findings.append(f"{must}; got {list(leaf.shape)} in {source}")
        if jnp.dtype(leaf.dtype).name not in FLOAT_DTYPES:
            must = f"{name} must be of one of the dtypes {', '.join(FLOAT_DTYPES)}"
            findings.append(f"{must}; got {leaf.dtype} in {source}")
    if findings:
        raise checkpoint_error(FUNCTION, findings)


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Whatever Orbax raises on files that are damaged, or none of its own, becomes one finding.

    It also logs a warning, and when one array fails it leaves the others to finish on an event loop
    that is closed, each of which prints a traceback. Those alone are kept from being printed.
    """
    logger = logging.getLogger("absl")
    level, hook = logger.level, sys.unraisablehook

    def quiet(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = quiet
    try:
        yield
    except Exception as error:
        # The hook stays: nothing tells when the last of them is done.
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        must = f"{source} must be a folder that Orbax can read"
        raise checkpoint_error(FUNCTION, [f"{must}; got {got}"]) from error
    else:
        sys.unraisablehook = hook
    finally:
        logger.setLevel(level)


@contextmanager
def aside(target: Path) -> Iterator[None]:
    """Put an Orbax folder aside, and back if something fails; delete it in the end.

    `replace_folder` deletes folders of files alone. If the process is killed in between, the old
    folder is still there, whole, as `.<name>.replaced-<process>`.
    """
    if not is_orbax(target):
        yield
        return
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    target.rename(old)
    try:
        yield
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)
