"""Everything about loading that headers tell: what is in the files, and where each tensor goes.

No tensor is read, but for the ones that decide something: a head that may be the table, rotary
tables, and the norms that each of Meta's shards has.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxblock.checkpoint.buffers import drop_buffers
from jaxblock.checkpoint.families_hint import hint
from jaxblock.checkpoint.findings import CheckpointError, checkpoint_error
from jaxblock.checkpoint.folder import open_hugging_face
from jaxblock.checkpoint.gguf import gguf_source
from jaxblock.checkpoint.layout import (
    Part,
    Placement,
    hugging_face,
    leaf_shapes,
    placements,
    uncovered,
)
from jaxblock.checkpoint.meta import meta_source
from jaxblock.checkpoint.source import Source
from jaxblock.checkpoint.stored import StoredTensor
from jaxblock.checkpoint.tie import decide
from jaxblock.config import ConfigError, DecoderConfig

FUNCTION = "load_checkpoint"

# What parameters are stored in.
DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checkpoint in which everything fits.

    Attributes:
      source: what was opened.
      config: of the decoder, the tie decided.
      tie: whether there is one, and by what that was decided.
      parts: of each leaf, by its path: the stored tensors, and what part of them goes where.
    """

    source: Source
    config: DecoderConfig
    tie: str
    parts: Mapping[str, list[tuple[StoredTensor, Part]]]

    def dtype(self, leaf: str) -> np.dtype:
        """Of a leaf, if its tensors keep theirs: the one that holds them all exactly."""
        kinds = {tensor.dtype for tensor, _ in self.parts[leaf]}
        # bfloat16 and float16 hold nothing of each other.
        return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(
            math.prod(tensor.shape) * tensor.dtype.itemsize
            for tensor in self.source.tensors.values()
        )


def plan(source: Source, *, tie: bool | None = None) -> Plan:
    """Decide the tie, drop what is computed, and find the place of every tensor.

    Raises: CheckpointError, with all findings.
    """
    findings: list[str] = []
    drop_buffers(source, findings)
    tied, why = decide(source, tie, findings)
    config = dataclasses.replace(source.config, tie_word_embeddings=tied)
    _check_count(source, config, findings)
    placed = placements(config, source.naming)
    _check(source, config, placed, findings)
    if findings:
        raise checkpoint_error(FUNCTION, findings)
    parts: dict[str, list[tuple[StoredTensor, Part]]] = {leaf: [] for leaf in leaf_shapes(config)}
    for placement in placed:
        for part in placement.parts:
            parts[part.leaf].append((source.tensors[placement.name], part))
    return Plan(source, config, why, parts)


def open_source(path: Path, *, rope_scaling_factor: float | None = None) -> Source:
    """Open whatever kind of checkpoint `path` is.

    Raises: CheckpointError, with all findings in configuration and files.
    """
    if not path.exists():
        raise checkpoint_error(
            FUNCTION, [f"a checkpoint must be a folder or a file; got no {path}"]
        )
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
    notes = ["rotary pairs: halves of a head, in the files as in the tree"]
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


def _check_count(source: Source, config: DecoderConfig, findings: list[str]) -> None:
    """Before names are listed: a hostile configuration may claim more than fits into memory."""
    each = any("{E}" in rule.name for rule in source.naming.rules)
    experts = config.moe.num_experts if config.moe and each else 1
    if config.num_hidden_layers * experts > len(source.tensors):
        claim = f"{config.num_hidden_layers} layers" + f" of {experts} experts" * each
        findings.append(f"{claim} must have a tensor each; got {len(source.tensors)} tensors")
        raise checkpoint_error(FUNCTION, findings)


def _check(
    source: Source, config: DecoderConfig, placed: list[Placement], findings: list[str]
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
        if tensor.dtype not in DTYPES:
            kinds = ", ".join(map(str, DTYPES))
            got = f"got {tensor.dtype} in {tensor.file}"
            findings.append(f"{name} must be of one of the dtypes {kinds}; {got}")


def _rows(placement: Placement) -> str:
    """Which rows are what, where one tensor is several."""
    if len(placement.parts) == 1:
        return ""
    rows = [
        f"rows {part.rows.start} to {part.rows.stop - 1} {part.leaf.split('/')[-1]}"
        for part in placement.parts
    ]
    return f" ({', '.join(rows)})"
