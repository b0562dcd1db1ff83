"""A folder that the transformers library loads, from the tree of parameters."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxblock.checkpoint.atomic import replace_folder
from jaxblock.checkpoint.copying import copy
from jaxblock.checkpoint.findings import checkpoint_error
from jaxblock.checkpoint.folder import INDEX, SINGLE
from jaxblock.checkpoint.layout import (
    Placement,
    hugging_face,
    leaf_shapes,
    placements,
    uncovered,
)
from jaxblock.checkpoint.plan import DTYPES
from jaxblock.checkpoint.safetensors_file import write_safetensors
from jaxblock.config import ConfigError, DecoderConfig
from jaxblock.config.decoder_config import check_config
from jaxblock.parameters import flatten
from jaxblock.vocabulary import unpad_vocabulary

FUNCTION = "save_checkpoint"

# What goes with a tokenizer in a folder of transformers.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

# Decimal and binary units, as in huggingface_hub.
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

Progress = Callable[[int, int], None]


def save_checkpoint(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    max_shard_size: int | str = "5GB",
    tokenizer_from: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """the tensor of that name = params[leaf][layer], turned from [in, out] to [out, in]

    A tied table is written once. Rows of the tables from `config.num_valid` on are left out.

    Args:
      folder: written anew, in one step: a crash leaves the old one or the new one.
      config: of the model.
      params: nested dicts as `config.parameter_shapes()` says, with arrays of JAX or NumPy.
      max_shard_size: bytes, or a number with a unit ("5GB", "200MiB"). A larger model is cut into
        several files with an index; a larger tensor has a file of its own.
      tokenizer_from: a folder whose tokenizer files are copied; `folder` itself is allowed.
      progress: is called with the bytes written so far and all bytes to be written.

    Returns: nothing.

    Raises: CheckpointError, with all findings, for a tree that does not fit the configuration, a
      leaf that is no array, and dtypes that are not float32, float16 or bfloat16. FileExistsError
      if what `folder` leads to is no checkpoint. ValueError for a `max_shard_size` that is no size.

    Precision: exact: every array is written in its own dtype.

    Source: transformers 5.24.0, PreTrainedModel.save_pretrained; the units and the cut into shards,
      huggingface_hub, serialization/_base.py.
    """
    check_config("save_checkpoint", config)
    limit = _num_bytes(max_shard_size)
    config, leaves = _checked(config, params)
    entries = _config_entries(config, leaves)
    tensors = {
        placement.name: (leaves[placement.parts[0].leaf].dtype, placement)
        for placement in placements(config, hugging_face(config.model_type))
    }
    shards = _shards(tensors, limit)
    beside = [] if tokenizer_from is None else _tokenizer_files(Path(tokenizer_from))
    total = sum(_size(*tensors[name]) for name in tensors)
    done = 0

    def values(placement: Placement) -> np.ndarray:
        nonlocal done
        result = _stored(placement, leaves)
        done += result.nbytes
        if progress is not None:
            progress(done, total)
        return result

    with replace_folder(folder) as new:
        for file, names in shards.items():
            content = {
                name: (dtype, placement.shape, partial(values, placement))
                for name, (dtype, placement) in ((name, tensors[name]) for name in names)
            }
            write_safetensors(new / file, content, {"format": "pt"})
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            _write_json(new / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(new / "config.json", entries)
        for path in beside:
            shutil.copyfile(path, new / path.name)


def _checked(
    config: DecoderConfig, params: Mapping[str, Any]
) -> tuple[DecoderConfig, dict[str, Any]]:
    """The leaves that are written, by path, and the configuration that says so."""
    if not isinstance(params, Mapping):
        raise TypeError(f"{FUNCTION}: params must be nested dicts; got {type(params).__name__}")
    shapes = leaf_shapes(config)
    leaves = _leaves(params)
    findings = [f"params must have {leaf}; it is missing" for leaf in shapes if leaf not in leaves]
    for leaf, value in leaves.items():
        if not isinstance(value, jax.Array | np.ndarray):
            findings.append(f"{leaf} must be an array; got {type(value).__name__}")
        elif leaf not in shapes:
            findings.append(f"{leaf} must be a leaf of this configuration; got one too many")
        elif value.shape != shapes[leaf]:
            must = f"{leaf} must have the shape {list(shapes[leaf])}"
            findings.append(f"{must}; got {list(value.shape)}")
        elif value.dtype not in DTYPES:
            kinds = ", ".join(map(str, DTYPES))
            findings.append(f"{leaf} must be of one of the dtypes {kinds}; got {value.dtype}")
        elif isinstance(value, jax.core.Tracer):
            findings.append(f"{leaf} must be known; got one that is traced, inside jit")
    if not findings:
        config, params = unpad_vocabulary(config, dict(params))
        leaves = _leaves(params)
        placed = placements(config, hugging_face(config.model_type))
        for leaf in uncovered(config, placed):
            must = f"{leaf} must have a name in files"
            findings.append(f"{must}; got none in the family {config.model_type}")
        for placement in placed:
            dtypes = {part.leaf: str(leaves[part.leaf].dtype) for part in placement.parts}
            if len(set(dtypes.values())) > 1:
                must = f"the leaves in {placement.name} must have one dtype"
                findings.append(f"{must}; got {dtypes}")
    if findings:
        raise checkpoint_error(FUNCTION, findings)
    return config, leaves


def _leaves(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"/".join(map(str, path)): leaf for path, leaf in flatten(params)}


def _config_entries(config: DecoderConfig, leaves: Mapping[str, Any]) -> dict[str, Any]:
    try:
        entries = config.to_hf()
    except ConfigError as error:
        raise checkpoint_error(FUNCTION, error.findings) from error
    # transformers casts all parameters to this; float32 holds every other one exactly.
    kinds = {str(leaf.dtype) for leaf in leaves.values()}
    return {**entries, "dtype": kinds.pop() if len(kinds) == 1 else "float32"}


def _stored(placement: Placement, leaves: Mapping[str, Any]) -> np.ndarray:
    """One tensor as the file has it."""
    first = leaves[placement.parts[0].leaf]
    result = np.empty(placement.shape, first.dtype)
    for part in placement.parts:
        rows = result[part.rows]
        values = part.in_stored_order(_slice(leaves[part.leaf], part.index))
        copy(rows.reshape(values.shape), values)
    return result


def _slice(leaf: Any, index: tuple[int | slice, ...]) -> np.ndarray:
    # What is not in this memory comes piece by piece, and not whole.
    here = isinstance(leaf, np.ndarray) or (
        len(leaf.devices()) == 1 and next(iter(leaf.devices())).platform == "cpu"
    )
    return np.asarray(leaf)[index] if here else np.asarray(leaf[index])


def _shards(tensors: Mapping[str, tuple[np.dtype, Placement]], limit: int) -> dict[str, list[str]]:
    """The names in each file: filled in order, up to `limit` bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = _size(*tensor)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def _size(dtype: np.dtype, placement: Placement) -> int:
    return math.prod(placement.shape) * dtype.itemsize


def _num_bytes(size: int | str) -> int:
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)", size.strip().upper())
        if match and match[2] in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        must = 'max_shard_size must be a number of bytes, or one with a unit like "5GB"'
        raise ValueError(f"{FUNCTION}: {must}; got max_shard_size={size!r}")
    return size


def _write_json(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def _tokenizer_files(folder: Path) -> list[Path]:
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        must = "tokenizer_from must be a folder with tokenizer files"
        raise checkpoint_error(FUNCTION, [f"{must}; got {folder}"])
    return found
