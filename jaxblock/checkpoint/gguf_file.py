"""GGUF files, read without trust: metadata, and tensors that are dequantised when they are read.

Counts and lengths are checked against the size of the file before anything is allocated, and
tensors must lie side by side, as llama.cpp demands too. F32, F16, BF16, Q8_0, Q4_0 and Q4_1 are
read here, the other quantisations through the gguf package if it is installed.

The names and shapes are the file's. llama.cpp's converter permutes the rows of `attn_q` and
`attn_k` of llama models (half-split rotary pairs become interleaved ones); nothing of that is
undone here, it is the task of whoever knows the layout.

Source: ggml-org/ggml, docs/gguf.md and src/gguf.cpp; the blocks from src/ggml-common.h.
"""

import importlib.util
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from jaxblock.checkpoint.findings import checkpoint_error, show
from jaxblock.checkpoint.stored import Origin, StoredTensor, open_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUFFile:
    """The contents of a GGUF file.

    Attributes:
      metadata: keys as in the file. Arrays of strings are lists, arrays of numbers are NumPy's.
      tensors: by name; the shape is row-major, so in the opposite order of the file's.
    """

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Kind(NamedTuple):
    """How values are stored: in blocks of `block` values that take `size` bytes."""

    name: str
    block: int
    size: int


_KINDS = {
    0: _Kind("F32", 1, 4),
    1: _Kind("F16", 1, 2),
    2: _Kind("Q4_0", 32, 18),
    3: _Kind("Q4_1", 32, 20),
    6: _Kind("Q5_0", 32, 22),
    7: _Kind("Q5_1", 32, 24),
    8: _Kind("Q8_0", 32, 34),
    9: _Kind("Q8_1", 32, 40),
    10: _Kind("Q2_K", 256, 84),
    11: _Kind("Q3_K", 256, 110),
    12: _Kind("Q4_K", 256, 144),
    13: _Kind("Q5_K", 256, 176),
    14: _Kind("Q6_K", 256, 210),
    15: _Kind("Q8_K", 256, 292),
    16: _Kind("IQ2_XXS", 256, 66),
    17: _Kind("IQ2_XS", 256, 74),
    18: _Kind("IQ3_XXS", 256, 98),
    19: _Kind("IQ1_S", 256, 50),
    20: _Kind("IQ4_NL", 32, 18),
    21: _Kind("IQ3_S", 256, 110),
    22: _Kind("IQ2_S", 256, 82),
    23: _Kind("IQ4_XS", 256, 136),
    24: _Kind("I8", 1, 1),
    25: _Kind("I16", 1, 2),
    26: _Kind("I32", 1, 4),
    27: _Kind("I64", 1, 8),
    28: _Kind("F64", 1, 8),
    29: _Kind("IQ1_M", 256, 56),
    30: _Kind("BF16", 1, 2),
    34: _Kind("TQ1_0", 256, 54),
    35: _Kind("TQ2_0", 256, 66),
    39: _Kind("MXFP4", 32, 17),
}

_PLAIN = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}

# Bytes dequantised at once: what is needed beside the result stays small.
_CHUNK = 2**20


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a GGUF file.

    Args:
      path: the file; one file, not a part of a split one.

    Returns: metadata and tensors. Reading a tensor gives F32, F16, BF16, F64 and integers as they
      are, and a quantised one as float32: d * q, or d * q + m, in float32.

    Raises: CheckpointError, with all findings; one if nothing could be understood after it.
    """
    path = Path(path)
    findings: list[str] = []
    try:
        stream, origin = open_file(path)
        with stream:
            header = _Header(stream, origin)
            metadata, infos = _parse(header, findings)
        tensors = _place(header, metadata, infos, findings)
    except OSError as error:
        findings.append(f"a GGUF file must be a readable file; got {path} ({error.strerror})")
    except _Broken as finding:
        findings.append(str(finding))
    if findings:
        raise checkpoint_error("load_checkpoint", findings)
    return GGUFFile(metadata, tensors)


# The header ---------------------------------------------------------------------------------------


class _Broken(Exception):
    """After this nothing in the file can be understood; the text is a finding."""


class _Header:
    """A file from its beginning; every read is checked against the size of the file first."""

    def __init__(self, stream: BinaryIO, origin: Origin):
        self._stream = stream
        self.origin = origin
        self.place = 0

    @property
    def path(self) -> Path:
        return self.origin.path

    def take(self, count: int, what: str) -> bytes:
        self.check(count, 1, what)
        data = self._stream.read(count)
        if len(data) < count:
            raise _Broken(f"{self.path} must not change while it is loaded; got a shorter file")
        self.place += count
        return data

    def check(self, count: int, size: int, what: str) -> None:
        """That the rest of the file has room for `count` things of at least `size` bytes."""
        left = self.origin.size - self.place
        if count * size > left:
            raise _Broken(
                f"{what} must fit into the file; got {count} of at least {size} bytes each at "
                f"byte {self.place} of {self.path}, where {left} are left. The file is cut off or "
                "damaged"
            )

    def number(self, form: str, what: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str) -> str:
        data = self.take(self.number("Q", what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            must = f"{what} must be text in UTF-8"
            raise _Broken(f"{must}; got {show(data[:80])} in {self.path}") from error


class _Info(NamedTuple):
    """What the header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _parse(header: _Header, findings: list[str]) -> tuple[dict[str, Any], list[_Info]]:
    path = header.path
    if (magic := header.take(4, "the mark GGUF")) != MAGIC:
        raise _Broken(f"a GGUF file must begin with {MAGIC!r}; got {magic!r} in {path}")
    version = header.number("I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise _Broken(
            f"the version of a GGUF file must be one of {VERSIONS}; got {version} in {path}"
            + (". The file is big-endian: convert it again with little-endian values" * swapped)
        )
    num_tensors = header.number("Q", "the number of tensors")
    num_entries = header.number("Q", "the number of metadata entries")
    header.check(num_entries, 8 + 4 + 1, "the metadata")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = header.text("a key of the metadata")
        value = _value(header, header.number("I", "a type"), f"the value of {show(key)}")
        if key in metadata:
            findings.append(f"{show(key)} must be given once; got it twice in {path}")
        metadata[key] = value
    header.check(num_tensors, 8 + 4 + 4 + 8, "the list of tensors")
    return metadata, [_info(header) for _ in range(num_tensors)]


_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


def _value(header: _Header, kind: int, what: str) -> Any:
    if kind in _NUMBERS:
        return header.number(_NUMBERS[kind], what)
    if kind == _STRING:
        return header.text(what)
    if kind == _ARRAY:
        kind, count = header.number("I", what), header.number("Q", what)
        if kind in _NUMBERS:
            dtype = np.dtype("<" + _NUMBERS[kind])
            header.check(count, dtype.itemsize, what)
            return np.frombuffer(header.take(count * dtype.itemsize, what), dtype)
        if kind == _STRING:
            header.check(count, 8, what)
            return [header.text(what) for _ in range(count)]
        must = f"{what} must be an array of numbers or strings"
        raise _Broken(f"{must}; got an array of type {kind} in {header.path}")
    raise _Broken(f"{what} must have a type that GGUF knows; got type {kind} in {header.path}")


def _info(header: _Header) -> _Info:
    name = header.text("the name of a tensor")
    what = f"the description of {show(name)}"
    rank = header.number("I", what)
    if rank > MAX_DIMENSIONS:
        must = f"{show(name)} must have at most {MAX_DIMENSIONS} dimensions"
        raise _Broken(f"{must}; got {rank} in {header.path}")
    sizes = struct.unpack(f"<{rank}Q", header.take(8 * rank, what))
    return _Info(name, sizes[::-1], header.number("I", what), header.number("Q", what))


# The tensors --------------------------------------------------------------------------------------


def _place(
    header: _Header, metadata: dict[str, Any], infos: list[_Info], findings: list[str]
) -> dict[str, StoredTensor]:
    """Where each tensor is: side by side from the first aligned place after the header."""
    path, size = header.path, header.origin.size
    if (parts := metadata.get("split.count", 1)) != 1:
        findings.append(
            f"a GGUF file must be whole; got split.count={show(parts)} in {path}. Join the parts "
            "with llama.cpp's gguf-split --merge"
        )
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        must = "general.alignment must be a power of two up to 2^20"
        raise _Broken(f"{must}; got {show(alignment)} in {path}")

    def aligned(place: int) -> int:
        return -(-place // alignment) * alignment

    start = aligned(header.place)
    tensors: dict[str, StoredTensor] = {}
    unreadable: dict[int, list[str]] = {}
    place, before = 0, "the header"
    for info in sorted(infos, key=lambda info: info.offset):
        kind = _KINDS.get(info.kind)
        if kind is None or (reader := _reader(kind)) is None:
            unreadable.setdefault(info.kind, []).append(info.name)
        if kind is None:
            continue
        if min(info.shape, default=1) < 1 or (info.shape or (1,))[-1] % kind.block:
            findings.append(
                f"the sizes of {show(info.name)} must be at least 1, the last a multiple of "
                f"{kind.block} as its type {kind.name} has it; got {info.shape} in {path}"
            )
            continue
        length = math.prod(info.shape) // kind.block * kind.size
        if info.offset != place:
            findings.append(
                f"tensors must lie side by side; got {show(info.name)} at {info.offset} after "
                f"{before}, where {place} is next, in {path}"
            )
        if start + info.offset + length > size:
            findings.append(
                f"{show(info.name)} must lie inside the file; got bytes {start + info.offset} to "
                f"{start + info.offset + length} in {path} of {size}. The file is cut off"
            )
        place, before = max(place, aligned(info.offset + length)), show(info.name)
        if info.name in tensors:
            findings.append(f"{show(info.name)} must be in the file once; got it twice in {path}")
        if reader is not None:
            dtype = _PLAIN.get(kind.name, np.dtype(np.float32))
            read = partial(reader, header.origin, start + info.offset, info.shape)
            tensors[info.name] = StoredTensor(info.name, dtype, info.shape, path, read)
    # Without a tensor there need be no padding after the header either.
    if tensors and not findings and not unreadable and start + place < size:
        must = "the tensors must fill their file"
        findings.append(f"{must}; got {size - start - place} more bytes in {path}. Rest unknown")
    findings += [_unreadable(number, names, path) for number, names in unreadable.items()]
    return tensors


def _unreadable(number: int, names: list[str], path: Path) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    got = f"{_KINDS[number].name if number in _KINDS else f'number {number}'}"
    ours = ", ".join([*_PLAIN, *_UNPACK])
    help = "" if importlib.util.find_spec("gguf") else ". Or install the package gguf"
    return (
        f"the type of a tensor must be one that is understood, such as {ours}; got {got} for "
        f"{show(names[0])}{more} in {path}. Convert the file to F16 or Q8_0{help}"
    )


Reader = Callable[[Origin, int, tuple[int, ...]], np.ndarray]


def _reader(kind: _Kind) -> Reader | None:
    """What reads tensors of this kind, or None."""
    if kind.name in _PLAIN:
        dtype = _PLAIN[kind.name]
        return lambda origin, start, shape: origin.view(start, dtype, shape)
    unpack = _UNPACK.get(kind.name) or _from_package(kind)
    return unpack and partial(_dequantise, kind, unpack)


Unpack = Callable[[np.ndarray], np.ndarray]


def _dequantise(
    kind: _Kind, unpack: Unpack, origin: Origin, start: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Values of `shape` in float32, unpacked from whole blocks."""
    num_blocks = math.prod(shape) // kind.block
    blocks = origin.view(start, np.dtype(np.uint8), (num_blocks, kind.size))
    values = np.empty((num_blocks, kind.block), np.float32)
    step = max(_CHUNK // kind.size, 1)
    # A scale in a damaged file may be infinite or no number: then so are the values.
    with np.errstate(all="ignore"):
        for first in range(0, num_blocks, step):
            values[first : first + step] = unpack(blocks[first : first + step])
    return values.reshape(shape)


def _halves(blocks: np.ndarray, first: int) -> np.ndarray:
    """The 16-bit number at byte `first` of each block, in float32."""
    return blocks[:, first : first + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The low four bits of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    scaled = _halves(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32)
    return scaled + _halves(blocks, 2)


_UNPACK: dict[str, Unpack] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}


def _from_package(kind: _Kind) -> Unpack | None:
    """The gguf package's function for a kind, if it is installed and has one."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        return None

    def unpack(blocks: np.ndarray) -> np.ndarray:
        return dequantize(np.ascontiguousarray(blocks), GGMLQuantizationType[kind.name])

    try:
        # Some kinds have a name but no function.
        unpack(np.zeros((1, kind.size), np.uint8))
    except (NotImplementedError, KeyError):
        return None
    return unpack
