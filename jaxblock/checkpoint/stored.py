"""A tensor in a file: what it is called and how it looks, and its values once they are asked for.

The readers of this package give these, whatever the format of the file.
"""

import io
import math
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxblock.checkpoint.findings import CheckpointError, checkpoint_error

# NumPy's own limit is 64 axes; parameters have three or four.
MAX_RANK = 8

# Bytes from which on a tensor is mapped. Below, its bytes are read into memory that the C library
# hands out again and again: that is faster than the faults of new pages (SmolLM2 loads in 0.85 of
# the time), and Python keeps a file open for each map.
MAPPED = 2**24


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
      name: as the file has it.
      dtype: of what `read` gives.
      shape: of what `read` gives.
      file: where it is.
      read: gives the values, row-major as stored. Nothing is read before. Where the file holds
        them as they are, and they are many, this is a read-only view of the mapped file, otherwise
        a new array. A file that was changed or exchanged since its header was read is refused with
        a CheckpointError. (A file that another program shortens while a view of it is in use ends
        the process, as with every memory map: exchange files, do not shorten them.)
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Origin:
    """A file as it was when its header was read.

    Attributes:
      path: where it is.
      size: in bytes.
      identity: what else tells it from another file, or from itself after a change.
    """

    path: Path
    size: int
    identity: tuple[int, int, int]

    def view(self, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The values from byte `start` on, read-only; the caller has checked the size."""
        if math.prod(shape) == 0:
            return np.empty(shape, dtype)
        try:
            stream, now = open_file(self.path)
        except OSError as error:
            must = f"{self.path} must stay readable while it is loaded"
            raise checkpoint_error("load_checkpoint", [f"{must}; got {error.strerror}"]) from error
        with stream:
            if now != self:
                raise self._changed()
            length = math.prod(shape) * dtype.itemsize
            if length >= MAPPED:
                try:
                    return _map(stream, start, length).view(dtype).reshape(shape)
                except OSError:
                    pass  # Not every file system can, nor without end.
            values = _memory(length, start)
            stream.seek(start)
            if stream.readinto(values.data) < length:
                raise self._changed()
            values.flags.writeable = False
            return values.view(dtype).reshape(shape)

    def _changed(self) -> CheckpointError:
        must = f"{self.path} must not change while it is loaded"
        return checkpoint_error("load_checkpoint", [f"{must}; got another size, time or file"])


def _memory(length: int, start: int) -> np.ndarray:
    """New bytes, half a page further into their page than byte `start` is into the file's.

    Processors of AMD copy a string many times slower if it goes to shortly behind where it comes
    from, counted within a page, and malloc's large pieces begin shortly behind a page's beginning.
    (Zen 3, 270 MB: 21 ms, 1 to 31 bytes behind 145 ms. Source: glibc, bug 30994.)
    """
    page = mmap.PAGESIZE
    memory = np.empty(length + page, np.uint8)
    # By whole lines, so that numbers are aligned wherever in a file they begin.
    first = (start // 64 * 64 + page // 2 - memory.ctypes.data) % page
    return memory[first : first + length]


def _map(stream: io.BufferedReader, start: int, length: int) -> np.ndarray:
    """Bytes of a file, mapped. Each tensor gets a map of its own, and they leave together."""
    before = start % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(
        stream.fileno(), before + length, access=mmap.ACCESS_READ, offset=start - before
    )
    return np.frombuffer(pages, np.uint8, length, before)


def open_file(path: Path) -> tuple[io.BufferedReader, Origin]:
    """Open a regular file; an OSError if it is anything else."""
    # Without waiting: opening a named pipe would wait for a writer, perhaps for ever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        number = os.open(path, flags)
    except ValueError as error:  # A NUL in the name.
        raise OSError(0, str(error)) from error
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        os.close(number)
        raise OSError(0, "not a regular file")
    identity = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return os.fdopen(number, "rb"), Origin(path, status.st_size, identity)
