"""Values from stored order into a leaf and back, at the speed of the memory.

Kernels are turned on the way, and turning is what loading costs. NumPy's own copy of a transposed
view is as fast as its loop over elements, if what it reads fits into a core's cache; so it goes in
strips. NumPy lets other threads run while it copies.
"""

import os
from collections.abc import Sequence

import numpy as np

# Bytes of a strip, but at least so many rows as fill two lines of the cache: rows are read side by
# side, column by column, and what is written of each column should be whole lines. Measured, one
# thread, 16 bits, GB/s, whole and in strips: [576, 1536] 2.5 and 7.5; [1536, 576] 4.0 and 8.4.
# (Strips of half the size are as fast; twice the size takes up to twice as long.)
_STRIP = 2**17
_LINE = 64

# Rows that lie a multiple of this apart share too few places of a core's cache, which are 4,096
# bytes apart: each line is fetched again for every column. So these strips are copied first, with
# an odd number of lines to a row. Strips without and with this, GB/s: 16 bits [4096, 4096] 0.7 and
# 2.6, [576, 1536] 2.8 and 4.3; 32 bits [4096, 4096] 2.4 and 3.5.
_COLLISION = 512
# XLA on CPU takes memory over without a copy if it is aligned to this.
_ALIGNMENT = 64

# More threads than this wait for the memory.
THREADS = min(8, os.cpu_count() or 1)


def empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that JAX on CPU can take over as it is."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def copy(target: np.ndarray, values: np.ndarray) -> None:
    """target[...] = values, rounded once to the dtype of `target`.

    Raises: FloatingPointError for a finite value that has no finite float16.
    """
    values = values.reshape(target.shape)
    if values.dtype != target.dtype:
        values = cast(values, target.dtype)
    if target.dtype.itemsize == 2:
        # As integers, because NumPy copies its own types faster than bfloat16.
        target, values = target.view(np.uint16), values.view(np.uint16)
    # Along the rows of what is read, whichever of the two is in the order of the file.
    order = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
    _copy(target.transpose(order), values.transpose(order))


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`values` rounded once; see `copy`."""
    if dtype == np.float16:
        # bfloat16 knows no errors of its own; what it holds is a float32.
        with np.errstate(over="raise"):
            return values.astype(np.float32).astype(dtype)
    return values.astype(dtype)


def _copy(target: np.ndarray, values: np.ndarray) -> None:
    rows = values.size // values.shape[-1]
    strip = max(2 * _LINE // values.itemsize, _STRIP * rows // values.nbytes)
    if values.ndim < 2 or rows <= strip:
        target[...] = values
        return
    inner = rows // len(values)
    if inner > strip:
        for part, part_values in zip(target, values, strict=True):
            _copy(part, part_values)
        return
    step = strip // inner
    is_turned = target.strides[-1] > target.itemsize
    collide = is_turned and values.strides[-2] % _COLLISION == 0
    apart = _rows_apart((step, *values.shape[1:]), values.dtype) if collide else None
    for first in range(0, len(values), step):
        part_values = values[first : first + step]
        if apart is not None:
            room = apart[: len(part_values)]
            room[...] = part_values
            part_values = room
        target[first : first + step] = part_values


def _rows_apart(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array whose rows lie an odd number of lines apart."""
    line = _LINE // dtype.itemsize
    lines = -(-shape[-1] // line) | 1
    return np.empty((*shape[:-1], lines * line), dtype)[..., : shape[-1]]
