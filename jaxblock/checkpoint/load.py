"""Checkpoint = configuration and parameters, from files: strictly, and tensor by tensor."""

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxblock.checkpoint.atomic import current
from jaxblock.checkpoint.fill import Progress, fill
from jaxblock.checkpoint.meta import meta_source, open_pickled
from jaxblock.checkpoint.plan import DTYPES, FUNCTION, open_source, plan
from jaxblock.checkpoint.report import LoadReport
from jaxblock.checkpoint.source import Source
from jaxblock.config import DecoderConfig
from jaxblock.parameters import unflatten


class Checkpoint(NamedTuple):
    """A decoder with its parameters.

    Attributes:
      config: what it computes.
      params: the parameter tree, `config.parameter_shapes()` with arrays for leaves.
      report: what was read.
    """

    config: DecoderConfig
    params: dict[str, Any]
    report: LoadReport


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    tie: bool | None = None,
    rope_scaling_factor: float | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """params[leaf][layer] = the tensor of that name, turned from [out, in] to [in, out]

    Every tensor lands in exactly one place and every part of a leaf has exactly one source;
    anything else is a finding, and all findings come in one error.

    Args:
      path: a folder of the transformers library (`config.json`, safetensors), one of Meta's
        (`params.json`, `consolidated*.safetensors`), or a GGUF file of the llama family.
      dtype: of all parameters; None keeps that of the files, leaf by leaf.
      tie: whether lookup and logits share one table, in place of what the files say. With True a
        head in the files is dropped, even one that differs.
      rope_scaling_factor: see `DecoderConfig.from_meta`; for Meta's folders alone.
      progress: is called with the bytes read so far and all bytes to be read.

    Returns: configuration, parameters and report. Where a leaf is made of tensors of several
      dtypes it is float32, which holds them all exactly; the report says so.

    Raises: CheckpointError, with all findings. ValueError for a `dtype` that parameters cannot
      have here.

    Precision: exact, or rounded once to `dtype`.

    Differs from torch: transformers fills what a file lacks with initial values, and leaves out
      what it has too much, with a warning.
    """
    wanted = _wanted(dtype)
    source = open_source(current(path), rope_scaling_factor=rope_scaling_factor)
    return _load(source, wanted, tie, progress)


def load_pickled_meta(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = None,
    tie: bool | None = None,
    rope_scaling_factor: float | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """`load_checkpoint` of a folder of Meta's whose shards are `consolidated.*.pth`, through torch.

    Only `jaxblock convert` calls it. torch unpickles tensors and nothing else (`weights_only`).
    """
    wanted = _wanted(dtype)
    folder = Path(folder)
    source = meta_source(folder, rope_scaling_factor, open_pickled(folder))
    return _load(source, wanted, tie, progress)


def _wanted(dtype: Any) -> np.dtype | None:
    if dtype is None:
        return None
    wanted = np.dtype(dtype)
    widest = jax.dtypes.canonicalize_dtype(np.float64)
    allowed = tuple(dict.fromkeys([*DTYPES, widest]))
    if wanted not in allowed:
        names = ", ".join(map(str, allowed))
        raise ValueError(f"{FUNCTION}: dtype must be one of {names}; got dtype={wanted}")
    return wanted


def _load(
    source: Source, dtype: np.dtype | None, tie: bool | None, progress: Progress | None
) -> Checkpoint:
    planned = plan(source, tie=tie)
    leaves = fill(planned, dtype, progress)
    tensors = source.tensors.values()
    mixed = [
        f"{leaf} is float32, which holds exactly the several dtypes of its tensors"
        for leaf, parts in planned.parts.items()
        if dtype is None and len({tensor.dtype for tensor, _ in parts}) > 1
    ]
    report = LoadReport(
        format=source.format,
        files=tuple(sorted({tensor.file for tensor in tensors})),
        num_tensors=len(tensors),
        num_leaves=len(leaves),
        num_bytes=planned.num_bytes,
        tie=planned.tie,
        dtypes=dict(Counter(str(leaf.dtype) for leaf in leaves.values())),
        dropped=tuple(source.dropped),
        notes=(*source.notes, *mixed),
    )
    params = unflatten({tuple(path.split("/")): leaf for path, leaf in leaves.items()})
    return Checkpoint(planned.config, params, report)
