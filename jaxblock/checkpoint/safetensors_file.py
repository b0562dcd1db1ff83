"""safetensors files, read without trust and written one tensor at a time.

A file is the size of a header (8 bytes, little-endian), the header (a JSON object that says dtype,
shape and place of every tensor) and the values. The header is parsed here and not by the
safetensors library, because whatever is wrong with a file must come as a finding among others, and
nothing may be allocated that only the header claims.

Source: huggingface/safetensors, README.md ("Format") and safetensors/src/tensor.rs.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxblock.checkpoint.findings import NotJson, is_text, parse_json, show
from jaxblock.checkpoint.stored import MAX_RANK, StoredTensor, open_file

# The library's own limit: a header says little about each of a few thousand tensors.
MAX_HEADER = 100_000_000

METADATA = "__metadata__"

# In the library's order, by which tensors are sorted in a file: the widest last.
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(NAMES)}

# The largest number of bytes that NumPy can count.
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class _Entry:
    dtype: np.dtype | None
    shape: tuple[int, ...]
    begin: int
    end: int


def open_safetensors(path: str | os.PathLike[str], findings: list[str]) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file.

    Args:
      path: the file.
      findings: gets a sentence for each thing that is wrong with it.

    Returns: the tensors that nothing is wrong with, by name. With no new finding they are all
      tensors of the file, and together fill it to the last byte.
    """
    path = Path(path)
    try:
        stream, origin = open_file(path)
        with stream:
            size = origin.size
            claimed = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= claimed <= min(size - 8, MAX_HEADER):
                limit = f"2 to {MAX_HEADER} bytes and fit into the file"
                findings.append(
                    f"the header of a safetensors file must take {limit}; got {claimed} bytes in "
                    f"{path} of {size} bytes. The file is cut off, or is none"
                )
                return {}
            text = stream.read(claimed)
    except OSError as error:
        findings.append(
            f"a safetensors file must be a readable file; got {path} ({error.strerror})"
        )
        return {}
    try:
        header = parse_json(text)
    except NotJson as error:
        findings.append(f"the header of {path} must be JSON in UTF-8; got {error}")
        return {}
    if not isinstance(header, dict) or not text.startswith(b"{"):
        findings.append(f"the header of {path} must be a JSON object; got {show(header)}")
        return {}
    _check_metadata(header.pop(METADATA, {}), path, findings)
    entries = _entries(header, path, findings)
    if len(entries) == len(header):
        _check_places(entries, size - 8 - claimed, path, findings)
    start = 8 + claimed
    return {
        name: StoredTensor(
            name,
            entry.dtype,
            entry.shape,
            path,
            partial(origin.view, start + entry.begin, entry.dtype, entry.shape),
        )
        for name, entry in entries.items()
        # In a file that is shorter than it says, only what lies inside can be read.
        if entry.dtype is not None and start + entry.end <= size
    }


def _check_metadata(metadata: Any, path: Path, findings: list[str]) -> None:
    fits = isinstance(metadata, dict) and all(
        isinstance(text, str) and is_text(key + text) for key, text in metadata.items()
    )
    if not fits:
        must = f"{METADATA} of {path} must map names to strings"
        findings.append(f"{must}; got {show(metadata)}")


def _entries(header: dict[str, Any], path: Path, findings: list[str]) -> dict[str, _Entry]:
    """What the header says of each tensor, where that makes sense in itself."""
    entries = {}
    unreadable: dict[str, list[str]] = {}
    for name, value in header.items():
        try:
            entries[name] = _entry(name, value)
        except ValueError as must:
            findings.append(f"{must}; got {show(value)} for {show(name)} in {path}")
            continue
        if entries[name].dtype is None:
            unreadable.setdefault(value["dtype"], []).append(name)
    # One finding a dtype: a quantised checkpoint has hundreds of such tensors.
    for dtype, names in unreadable.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        findings.append(
            f"the dtype of a tensor must be one of {', '.join(DTYPES)}; got dtype={show(dtype)} "
            f"for {show(names[0])}{more} in {path}. Convert it to BF16, F16 or F32 first"
        )
    return entries


def _entry(name: str, value: Any) -> _Entry:
    if not is_text(name):
        raise ValueError("the name of a tensor must be Unicode text")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor must have dtype, shape and data_offsets, and nothing else")
    if not isinstance(value["dtype"], str):
        raise ValueError("the dtype of a tensor must be a name")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise ValueError(f"a shape must be a list of at most {MAX_RANK} sizes of at least 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError("data_offsets must be two places, the end not before the beginning")
    dtype = DTYPES.get(value["dtype"])
    if dtype is not None:
        # Counted as if no axis were empty, since NumPy cannot hold such an array either.
        if math.prod(max(size, 1) for size in shape) * dtype.itemsize > _MAX_BYTES:
            raise ValueError("a tensor must have a size that can be counted")
        expected = math.prod(shape) * dtype.itemsize
        if offsets[1] - offsets[0] != expected:
            raise ValueError(
                f"data_offsets must lie {expected} bytes apart, as dtype and shape say"
            )
    return _Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(values: Any) -> bool:
    # Not isinstance: true is an integer in Python.
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MAX_BYTES for value in values
    )


def _check_places(
    entries: Mapping[str, _Entry], available: int, path: Path, findings: list[str]
) -> None:
    """The tensors lie side by side and fill the file: no overlap, no hole, no rest."""
    place, before = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != place:
            what = "overlap" if entry.begin < place else "leave a hole"
            findings.append(
                f"tensors must lie side by side; got {show(name)} at {entry.begin} after {before}, "
                f"which ends at {place}: they {what} in {path}"
            )
        place, before = max(place, entry.end), show(name)
    if place != available:
        findings.append(
            f"the tensors must fill their file; got {place} bytes of tensors in {path} with room "
            f"for {available}. " + ("The file is cut off" if place > available else "Rest unknown")
        )


Source = Callable[[], np.ndarray] | Iterable[np.ndarray]


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[Any, tuple[int, ...], Source]],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file, holding one tensor (or one piece of it) at a time.

    The order in the file is the library's: wide dtypes first, so that every tensor is aligned, then
    by name. The file is the same for equal arguments, whatever their order.

    Args:
      path: the file; written over if it exists. Durable and atomic writing is `atomic`'s task.
      tensors: for each name the dtype, the shape, and a function that gives the array, or pieces
        that make it up, one after the other along its first axis.
      metadata: strings that go along; transformers asks for {"format": "pt"}.

    Raises: ValueError for an array or pieces that are not of the dtype and the shape given before,
      or a dtype that safetensors has no name for.
    """
    for name, (dtype, _, _) in tensors.items():
        if np.dtype(dtype) not in NAMES or name == METADATA or not is_text(name):
            raise ValueError(
                f"write_safetensors: every tensor must have a name of its own, and a dtype of "
                f"{', '.join(map(str, NAMES))}; got {show(name)} of dtype {np.dtype(dtype)}"
            )
    order = sorted(tensors, key=lambda name: (-_RANKS[np.dtype(tensors[name][0])], name))
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    place = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        end = place + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": NAMES[np.dtype(dtype)],
            "shape": [int(size) for size in shape],
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"write_safetensors: the header must take at most {MAX_HEADER} bytes; got {len(text)}"
        )
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            _write_tensor(stream, name, *tensors[name])


def _write_tensor(
    stream: BinaryIO, name: str, dtype: Any, shape: tuple[int, ...], source: Source
) -> None:
    shape = tuple(shape)
    announced = f"{np.dtype(dtype)}{list(shape)}"
    left = math.prod(shape) * np.dtype(dtype).itemsize
    for piece in (source(),) if callable(source) else source:
        fits = piece.shape == shape if callable(source) else piece.shape[1:] == shape[1:]
        if piece.dtype != dtype or not fits:
            got = f"an array {piece.dtype}{list(piece.shape)}"
            raise ValueError(f"write_safetensors: {show(name)} must be {announced}; got {got}")
        # As bytes, because Python's buffers know no bfloat16.
        stream.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        left -= piece.nbytes
        del piece  # Before the next one is made.
    if left:
        must = f"the pieces of {show(name)} must make up {announced}"
        got = f"{abs(left)} bytes {'less' if left > 0 else 'more'}"
        raise ValueError(f"write_safetensors: {must}; got {got}")
