"""The process of one side: it makes its contenders and runs them when it is told to.

JAX and PyTorch each keep a pool of threads that goes on spinning for a while after a computation.
In one process they would take the cores from each other; in two that take turns they do not.
"""

import gc
import importlib
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxblock.bench.contenders import Contender
from jaxblock.bench.rows import Row

# Module of each side.
SIDES = {"jax": "jaxblock.bench.jax_side", "torch": "jaxblock.bench.torch_side"}

# Numbers of each output that are compared, and how long the pools get to fall asleep.
SAMPLE = 20_000
PAUSE = 0.01


class Digest(NamedTuple):
    """Enough of an array to tell whether two of them agree."""

    shape: tuple[int, ...]
    rms: float
    sample: np.ndarray


class First(NamedTuple):
    """What the first calls of a contender gave.

    Attributes:
      seconds: of the very first.
      outputs: to be compared.
      peak: resident bytes: the most of this process during a later call, and those before anything
        was made in it; None where that cannot be known.
    """

    seconds: float
    outputs: dict[str, Digest]
    peak: tuple[int, int] | None


class Worker:
    """The contenders of one side for one row at a time."""

    def __init__(self, side: str):
        self._side: Any = importlib.import_module(SIDES[side])
        self._builders: dict[str, Any] = {}
        self._made: dict[str, Contender] = {}
        self._resident = memory("VmRSS")

    def build(self, row: Row) -> tuple[list[str], dict[str, str]]:
        """The names of its contenders, and what the numbers depend on."""
        self._made = {}
        self._builders = {}
        gc.collect()
        setting = self._side.setup(row)
        self._builders = self._side.builders(row)
        return list(self._builders), setting | {"cores": str(cores())}

    def first(self, name: str) -> First:
        """Make it, and call it for the first time: tracing and compiling are in that."""
        contender = self._builders[name]()
        contender.reset()
        start = time.perf_counter()
        result = contender.call()
        contender.wait(result)
        seconds = time.perf_counter() - start
        self._made[name] = contender
        outputs = {key: digest(array) for key, array in contender.outputs(result).items()}
        del result
        # Limits have no outputs, and nobody asks for their memory.
        return First(seconds, outputs, self._peak(contender) if outputs else None)

    def time(self, name: str, calls: int, warm: int) -> float:
        """Seconds a call takes, over `calls` of them after `warm` that are not counted."""
        time.sleep(PAUSE)
        contender, result = self._made[name], None
        for _ in range(warm):
            contender.wait(contender.call())
        start = time.perf_counter()
        for _ in range(calls):
            result = contender.call()
            if not self._side.queues():
                contender.wait(result)
        contender.wait(result)
        return (time.perf_counter() - start) / calls

    def _peak(self, contender: Contender) -> tuple[int, int] | None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Forget the most so far.
        except OSError:
            return None
        contender.wait(contender.call())
        return memory("VmHWM"), self._resident


def serve(connection: Connection, side: str) -> None:
    """Answer (method, arguments) until the connection ends: ("ok", result) or ("error", text)."""
    worker = None
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        answer: tuple[str, Any]
        try:
            worker = worker or Worker(side)
            answer = "ok", getattr(worker, method)(*args)
        except Exception as error:  # A peer may fail in any way; the others go on.
            lines = str(error).strip().splitlines() or [""]
            answer = "error", f"{type(error).__name__}: {lines[0][:300]}"
        connection.send(answer)


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))


def memory(entry: str) -> int:
    """VmRSS or VmHWM of this process in bytes; 0 where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(entry)), 0)


def digest(array: np.ndarray) -> Digest:
    """Size, root mean square, and numbers at even distances."""
    flat = np.asarray(array).reshape(-1)
    step = max(1, flat.size // SAMPLE)
    # An odd step meets all columns of the usual sizes.
    sample = flat[:: step + (step % 2 == 0)]
    rms = float(np.sqrt(np.mean(np.square(flat, dtype=np.float64))))
    return Digest(array.shape, rms, np.asarray(sample, np.float64))


def disagreement(one: Mapping[str, Digest], other: Mapping[str, Digest]) -> float:
    """The largest rms difference of an output, relative to its rms; infinite for other outputs."""
    if one.keys() != other.keys():
        return float("inf")
    worst = 0.0
    for name, mine in one.items():
        theirs = other[name]
        if mine.shape != theirs.shape:
            return float("inf")
        scale = max(np.sqrt(np.mean(theirs.sample**2)), theirs.rms, 1e-30)
        difference = np.sqrt(np.mean((mine.sample - theirs.sample) ** 2)) / scale
        difference = max(difference, abs(mine.rms - theirs.rms) / scale)
        worst = float("inf") if np.isnan(difference) else max(worst, float(difference))
    return worst
