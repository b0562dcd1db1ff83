"""A decoder as an Orbax folder: `params`, written by Orbax, and `config.json` beside it.

The parameter tree goes in as it is, so any JAX program can restore it with Orbax alone. Reading is
strict: the folder must hold the very tree that its configuration describes.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax

from jaxblock.config import DecoderConfig
from jaxblock.parameters import Params, check_params, unflatten

PARAMS = "params"


def save_orbax(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: Params,
    *,
    overwrite: bool = False,
) -> None:
    """folder = config.json with `config.to_hf()`, and the parameter tree in `params`

    Args:
      folder: to be made; what is there already stays as it is unless `overwrite`. It appears in one
        step, whole.
      config: of the decoder.
      params: the parameter tree, written bit for bit.
      overwrite: replace a folder that is there.

    Raises: FileExistsError for a folder that is there. ConfigError for a configuration that no
      config.json can hold: one with a padded vocabulary, for example. ValueError or TypeError for a
      tree that does not fit it.
    """
    import orbax.checkpoint as ocp

    check_params("save_orbax", params, config)
    entries = config.to_hf()
    target = Path(folder).absolute()
    if os.path.lexists(target) and not overwrite:
        raise FileExistsError(17, "the folder must not exist yet", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(unfinished / PARAMS, dict(params))
        (unfinished / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
        unfinished.chmod(0o755)
        _replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_orbax(folder: str | os.PathLike[str]) -> tuple[DecoderConfig, Params]:
    """config, params = what `save_orbax` wrote, bit for bit

    Args:
      folder: of `save_orbax`.

    Returns: the configuration and the parameter tree, every leaf in the dtype that it was saved in,
      on the default device.

    Raises: ConfigError for a config.json that is not understood. CheckpointError, with all findings,
      for a folder without parameters, missing or unexpected leaves, and other shapes: decided before
      any of them is read.
    """
    import orbax.checkpoint as ocp

    source = Path(folder).absolute()
    config = DecoderConfig.from_hf(source)
    with ocp.StandardCheckpointer() as checkpointer:
        found = orbax_leaves(source)
        _check_leaves(source, found, config)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
            for path, leaf in found.items()
        }
        try:
            params = checkpointer.restore(source / PARAMS, unflatten(wanted))
        except Exception as error:  # whatever Orbax raises on damaged files
            raise _error([f"Orbax must be able to read {source / PARAMS}; got {error}"]) from error
    return config, params


def is_orbax(folder: Path) -> bool:
    """Whether `save_orbax` wrote this folder."""
    return (folder / PARAMS / "_CHECKPOINT_METADATA").is_file()


def orbax_leaves(folder: Path) -> dict[Path, Any]:
    """Path -> shape and dtype of every array in the folder; none of them is read."""
