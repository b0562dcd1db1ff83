"""Checkpoint = the tree of parameters, from files: strictly, and tensor by tensor."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxblock.checkpoint import copying
from jaxblock.checkpoint import tie as tie_rules
from jaxblock.checkpoint.buffers import drop_buffers
from jaxblock.checkpoint.families_hint import hint
from jaxblock.checkpoint.findings import CheckpointError, checkpoint_error
from jaxblock.checkpoint.folder import open_hugging_face
from jaxblock.checkpoint.layout import (
    Part,
    Placement,
    hugging_face,
    leaf_shapes,
    nest,
    placements,
    uncovered,
)
from jaxblock.checkpoint.report import LoadReport
from jaxblock.checkpoint.source import Source
from jaxblock.checkpoint.stored import StoredTensor
from jaxblock.config import ConfigError, DecoderConfig

FUNCTION = "load_checkpoint"

Progress = Callable[[int, int], None]

# The dtypes of parameters. float64 is for reference computations: no file has it.
_STORED = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))


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
    path = Path(path)
    try:
        source = _open(path, rope_scaling_factor)
    except ConfigError as error:
        raise checkpoint_error(FUNCTION, error.findings) from error
    return read(source, dtype=wanted, tie=tie, progress=progress)


def _wanted(dtype: Any) -> np.dtype | None:
    if dtype is None:
        return None
    wanted = np.dtype(dtype)
    allowed = (*_STORED, np.dtype(np.float64)) if jax.config.jax_enable_x64 else _STORED
    if wanted not in allowed:
        names = ", ".join(map(str, allowed))
        raise ValueError(f"{FUNCTION}: dtype must be one of {names}; got dtype={wanted}")
    return wanted


def _open(path: Path, rope_scaling_factor: float | None) -> Source:
    from jaxblock.checkpoint.gguf import gguf_source
    from jaxblock.checkpoint.meta import meta_source

    is_meta = not (path / "config.json").is_file() and (path / "params.json").is_file()
    if rope_scaling_factor is not None and not is_meta:
        must = "rope_scaling_factor must come with a folder of Meta's (params.json)"
        raise checkpoint_error(FUNCTION, [f"{must}; got {path}, which says it itself"])
    if path.is_file():
        return gguf_source(path)
    if is_meta:
        return meta_source(path, rope_scaling_factor)
    return _hugging_face_source(path)


def _hugging_face_source(folder: Path) -> Source:
    findings: list[str] = []
    notes: list[str] = []
    config, tensors = None, {}
    try:
        config = DecoderConfig.from_hf(folder)
    except ConfigError as error:
        findings += [f"config.json: {finding}" for finding in error.findings]
    try:
        tensors = open_hugging_face(folder, notes=notes)
    except CheckpointError as error:
        findings += error.findings
    if config is None or findings:
        raise checkpoint_error(FUNCTION, findings)
    return Source(
        format=f"{config.model_type}, a folder of transformers",
        config=config,
        tie=config.tie_word_embeddings,
        naming=hugging_face(config.model_type, tensors),
        tensors=tensors,
        notes=notes,
    )


def read(
    source: Source, *, dtype: np.dtype | None, tie: bool | None, progress: Progress | None
) -> Checkpoint:
    """Check everything there is to check, then fill the tree."""
    findings: list[str] = []
    drop_buffers(source, findings)
    tied, why = tie_rules.decide(source, tie, findings)
    config = dataclasses.replace(source.config, tie_word_embeddings=tied)
    placed = placements(config, source.naming)
    _check(source, config, placed, findings)
    if findings:
        raise checkpoint_error(FUNCTION, findings)
    tensors = source.tensors
    params, mixed = _fill(config, placed, tensors, dtype, progress)
    leaves = Counter(str(leaf.dtype) for leaf in params.values())
    report = LoadReport(
        format=source.format,
        files=tuple(sorted({tensor.file for tensor in tensors.values()})),
        num_tensors=len(placed),
        num_leaves=len(params),
        num_bytes=sum(_num_bytes(tensor) for tensor in tensors.values()),
        tie=why,
        dtypes=dict(leaves),
        dropped=tuple(source.dropped),
        notes=(*source.notes, *mixed),
    )
    return Checkpoint(config, nest(params), report)


def _check(
    source: Source, config: DecoderConfig, placed: Sequence[Placement], findings: list[str]
) -> None:
    """Names, shapes and dtypes: that the tensors and the leaves are a bijection."""
    tensors = source.tensors
    expected = {placement.name: placement for placement in placed}
    for leaf in uncovered(config, placed):
        findings.append(f"every leaf must have its tensors; got none for {leaf} in this family")
    missing = [name for name in expected if name not in tensors and name != source.naming.head]
    unexpected = [name for name in tensors if name not in expected]
    if missing or unexpected:
        if other := hint(config.model_type, tensors):
            findings.append(other)
    findings += [f"{name} is missing" for name in missing]
    findings += [
        f"{name} is unexpected: {config.model_type} with this configuration has no such tensor; "
        f"got it in {tensors[name].file}"
        for name in unexpected
    ]
    for name, placement in expected.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tensor.shape != placement.shape:
            got = f"{name} must have the shape {list(placement.shape)}{_rows(placement)}"
            findings.append(f"{got}; got {list(tensor.shape)} in {tensor.file}")
        if tensor.dtype not in _STORED:
            kinds = ", ".join(map(str, _STORED))
            got = f"got {tensor.dtype} in {tensor.file}"
            findings.append(f"{name} must be of one of the dtypes {kinds}; {got}")


def _rows(placement: Placement) -> str:
    """Which rows are what, where one tensor is several."""
    if len(placement.parts) == 1:
        return ""
    rows = [
        f"rows {part.rows.start} to {part.rows.stop - 1} {part.leaf.rsplit('/')[-1]}"
        for part in placement.parts
    ]
    return f" ({', '.join(rows)})"


def _fill(
    config: DecoderConfig,
    placed: Iterable[Placement],
    tensors: dict[str, StoredTensor],
    dtype: np.dtype | None,
    progress: Progress | None,
) -> tuple[dict[str, jax.Array], list[str]]:
    """Leaf after leaf, so that beside the result there is never more than one leaf in memory."""
    sources: dict[str, list[tuple[StoredTensor, Part]]] = {leaf: [] for leaf in leaf_shapes(config)}
    for placement in placed:
        for part in placement.parts:
            sources[part.leaf].append((tensors[placement.name], part))
    done, total = 0, sum(map(_num_bytes, tensors.values()))
    params, notes = {}, []
    overflows: list[str] = []
    with ThreadPoolExecutor(copying.THREADS) as pool:
        for leaf, shape in leaf_shapes(config).items():
            kinds = {tensor.dtype for tensor, _ in sources[leaf]}
            own = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
            if kinds and dtype is None:
                notes.append(f"{leaf} is float32, because its tensors are of several dtypes")
            buffer = copying.empty(shape, dtype or own)

            def place(source: tuple[StoredTensor, Part], buffer: np.ndarray = buffer) -> int:
                tensor, part = source
                values = tensor.read()[part.rows]
                try:
                    copying.copy(part.view(buffer), values)
                except FloatingPointError:
                    overflows.append(f"{tensor.name} must fit into float16; got larger values")
                return values.nbytes

            for num_bytes in pool.map(place, sources[leaf]):
                done += num_bytes
                if progress is not None:
                    progress(done, total)
            if overflows:
                raise checkpoint_error(FUNCTION, overflows)
            # Nothing writes to the buffer from here on: on CPU it is the array.
            params[leaf] = jax.device_put(buffer, may_alias=True).block_until_ready()
            del buffer, place
    return params, notes


def _num_bytes(tensor: StoredTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize
