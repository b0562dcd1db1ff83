"""Meta's folders: the shards of a llama put together.

Each shard has every name. A kernel is cut along its outputs or along its inputs, as the layer is
parallel; norms are whole in each. Llama 3 cuts the table by rows, Llama 1 and 2 by columns, which
its width shows, since a row has D numbers. Source: meta-llama/llama and meta-llama/llama-models,
model.py: ColumnParallelLinear, RowParallelLinear, ParallelEmbedding, VocabParallelEmbedding.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxblock.checkpoint.findings import CheckpointError, checkpoint_error
from jaxblock.checkpoint.folder import open_meta
from jaxblock.checkpoint.layout import META
from jaxblock.checkpoint.source import Source
from jaxblock.checkpoint.stored import StoredTensor
from jaxblock.config import ConfigError, DecoderConfig

# The axis along which a tensor is cut, by the last words of its name.
_OUTPUTS = ("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight", "output.weight")
_INPUTS = ("wo.weight", "w2.weight")

Shards = Sequence[Mapping[str, StoredTensor]]


def meta_source(
    folder: Path, rope_scaling_factor: float | None, shards: Shards | None = None
) -> Source:
    """The whole tensors of a folder; `shards`, if they were opened already."""
    findings: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    try:
        shards = open_meta(folder) if shards is None else shards
        tensors = merge(shards, findings)
    except CheckpointError as error:
        findings += error.findings
    # The file may leave the number of tokens to the tokenizer; the table has a row for each.
    table = tensors.get(META.table)
    rows = table.shape[0] if table is not None and len(table.shape) == 2 else None
    config = None
    try:
        config = DecoderConfig.from_meta(
            folder,
            tie_word_embeddings=False,
            vocab_size=rows,
            rope_scaling_factor=rope_scaling_factor,
        )
    except ConfigError as error:
        said = [f"params.json: {finding}" for finding in error.findings]
        # Without a table, that its rows were not given is no finding of its own.
        findings += [text for text in said if rows or "vocab_size" not in text]
    if table is None and not findings:
        findings.append(f"{META.table} is missing")
    if config is None or shards is None or findings:
        raise checkpoint_error("load_checkpoint", findings)
    return Source(
        format=f"llama, a folder of Meta's with {len(shards)} shard{'s' * (len(shards) > 1)}",
        config=config,
        tie=None,
        naming=META,
        tensors=tensors,
        notes=["rotary pairs: neighbouring channels in the files, halves of a head in the tree"],
    )


def merge(shards: Shards, findings: list[str]) -> dict[str, StoredTensor]:
    """Every tensor of the shards, put together when it is read."""
    merged = {}
    for name in dict.fromkeys(name for shard in shards for name in shard):
        pieces = [shard[name] for shard in shards if name in shard]
        if len(pieces) < len(shards):
            must = f"{name} must be in every one of the {len(shards)} shards"
            findings.append(f"{must}; got it in {', '.join(piece.file.name for piece in pieces)}")
            continue
        if len(shards) == 1:
            merged[name] = pieces[0]
            continue
        if len({(piece.dtype, piece.shape) for piece in pieces}) > 1:
            got = ", ".join(f"{piece.dtype}{list(piece.shape)}" for piece in pieces)
            findings.append(f"{name} must be cut into equal pieces; got {got}")
            continue
        axis = _axis(name, shards[0])
        if axis is not None and axis < len(pieces[0].shape):
            merged[name] = _joined(pieces, axis)
        elif all(_same(pieces[0], piece) for piece in pieces[1:]):
            merged[name] = pieces[0]
        else:
            findings.append(f"{name} must be the same in every shard; got different values")
    return merged


def _axis(name: str, shard: Mapping[str, StoredTensor]) -> int | None:
    """Along which a tensor is cut; None if it is whole in each shard."""
    if name == META.table:
        norm = shard.get(META.final_norm)
        whole_rows = norm is not None and shard[name].shape[-1:] == norm.shape
        return 0 if whole_rows else 1
    if name.endswith(_OUTPUTS):
        return 0
    return 1 if name.endswith(_INPUTS) else None


def _joined(pieces: Sequence[StoredTensor], axis: int) -> StoredTensor:
    first = pieces[0]
    shape = list(first.shape)
    shape[axis] *= len(pieces)
    return dataclasses.replace(
        first,
        shape=tuple(shape),
        read=lambda: np.concatenate([piece.read() for piece in pieces], axis),
    )


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    return a.read().tobytes() == b.read().tobytes()


def open_pickled(folder: str | os.PathLike[str]) -> list[dict[str, StoredTensor]]:
    """The tensors of `consolidated.*.pth`, through torch: weights alone, nothing else is run.

    Raises: CheckpointError for a file that torch refuses, or that holds anything but tensors.
    """
    import torch

    folder = Path(folder)
    findings: list[str] = []
    shards = []
    paths = sorted(folder.glob("consolidated.*.pth"))
    if not paths:
        findings.append(f"{folder} must hold consolidated.00.pth and so on; got none")
    for path in paths:
        try:
            loaded: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # Whatever a pickle that is none, or a hostile one, leads to.
            got = f"{type(error).__name__}: {error}"
            findings.append(f"{path} must be a file of tensors; got {got}")
            continue
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str)
            and isinstance(value, torch.Tensor)
            and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
            for name, value in loaded.items()
        ):
            must = "a dict of tensors of float32, float16 or bfloat16"
            findings.append(f"{path} must hold {must}, and nothing else")
            continue
        shards.append({name: _pickled(name, value, path) for name, value in loaded.items()})
    if findings:
        raise checkpoint_error("load_pickled_meta", findings)
    return shards


def _pickled(name: str, tensor: Any, path: Path) -> StoredTensor:
    import torch

    def read() -> np.ndarray:
        values = tensor.contiguous()
        if values.dtype == torch.bfloat16:
            return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return values.numpy()

    # The two libraries have the same names for the dtypes; ml_dtypes gives NumPy bfloat16.
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    return StoredTensor(name, dtype, tuple(tensor.shape), path, read)
