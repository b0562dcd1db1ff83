"""Two processes taking turns: what one row takes on each side, in one run."""

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxblock.bench.contenders import LIMIT, OURS
from jaxblock.bench.rows import Row, work
from jaxblock.bench.worker import SIDES, Digest, First, cores, disagreement, serve

# Repetitions, and the least seconds of one: short computations are called several times in it.
REPEATS = 9
QUICK_REPEATS = 3
SPAN = 0.02
MOST_CALLS = 1000
# More work than this on a core, and others take it away from what is measured.
BUSY = 0.4

# How far two results may be apart, as a share of their rms. Not a proof of parity, which is the
# test suite's: a guard against timing two different things. Through 30 layers 8 bits of mantissa
# leave some percent; what is wrong (a half swapped, a factor lost) makes tens of percents.
AGREE = {"float32": 1e-3, "bfloat16": 0.1}


class PeerError(RuntimeError):
    """What a worker could not do; the text says why."""


class Side:
    """One side's process, seen from here."""

    def __init__(self, name: str):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name))
        self._process.start()
        theirs.close()

    def send(self, method: str, *args: Any) -> None:
        """Ask without waiting."""
        self._connection.send((method, args))

    def receive(self) -> Any:
        """Wait for the answer.

        Raises: PeerError with the error of the other side, or if its process ended.
        """
        try:
            kind, result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise PeerError(f"its process ended ({self._process.exitcode})") from error
        if kind == "error":
            raise PeerError(result)
        return result

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of its `Worker`."""
        try:
            self.send(method, *args)
        except (BrokenPipeError, ConnectionError) as error:
            raise PeerError("its process has ended") from error
        return self.receive()

    @property
    def alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


@contextmanager
def pair() -> Iterator[dict[str, Side]]:
    """Both sides for a while."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # Two share one GPU.
    sides = {name: Side(name) for name in SIDES}
    try:
        yield sides
    finally:
        for side in sides.values():
            side.close()


@dataclass
class Measured:
    """One contender's numbers.

    Attributes:
      first_s: of the first call.
      seconds: of a call, one number a repetition.
      peak: resident bytes of its process, and those before anything was made.
      difference: from jaxblock's outputs, as a share of their rms; None for jaxblock itself.
    """

    first_s: float
    seconds: list[float] = field(default_factory=list)
    peak: tuple[int, int] | None = None
    difference: float | None = None

    @property
    def median(self) -> float:
        """Of the repetitions."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The spread: a quarter of the repetitions was faster, a quarter slower."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


@dataclass
class Result:
    """What one row gave: all contenders by name, those that were left out, and why."""

    row: Row
    measured: dict[str, Measured]
    skipped: dict[str, str]
    setting: dict[str, str]

    @property
    def ours(self) -> Measured | None:
        """Of jaxblock, unless it failed."""
        return self.measured.get(OURS)

    @property
    def peers(self) -> dict[str, Measured]:
        """All but jaxblock and the limits."""
        names = [name for name in self.measured if name != OURS and not name.startswith(LIMIT)]
        return {name: self.measured[name] for name in names}

    @property
    def fastest_peer(self) -> str | None:
        """By its median."""
        peers = self.peers
        return min(peers, key=lambda name: peers[name].median) if peers else None

    @property
    def ratio(self) -> float | None:
        """Fastest peer / ours: above 1 jaxblock is faster."""
        if self.ours is None or self.fastest_peer is None:
            return None
        return self.peers[self.fastest_peer].median / self.ours.median

    @property
    def wrong(self) -> list[str]:
        """Peers whose result is not ours."""
        most = AGREE[self.row.dtype]
        return [
            name
            for name, peer in self.peers.items()
            if peer.difference is not None and not peer.difference <= most and not self._may_part
        ]

    @property
    def _may_part(self) -> bool:
        # Greedy text of 16-bit logits parts at near ties; `forward` of the same model is the check.
        return self.row.kind == "generate" and self.row.dtype != "float32"

    @property
    def limit_s(self) -> float | None:
        """The least time, by the best product and the best copy measured beside it."""
        needs, seconds = work(self.row), 0.0
        products = self._limits("product")
        copies = self._limits("copy")
        if not products and not copies:
            return None
        if products and needs.product is not None:
            rows, depth, columns = needs.product
            seconds += min(products) * needs.flops / (2 * rows * depth * columns)
        if copies:
            # A copy reads and writes every number once.
            seconds += min(copies) * needs.bytes / (2 * needs.copied * self.row.itemsize)
        return seconds

    def _limits(self, kind: str) -> list[float]:
        return [one.median for name, one in self.measured.items() if name.startswith(LIMIT + kind)]


Say = Callable[[str], None]


def measure(
    rows: Sequence[Row],
    *,
    repeats: int,
    fresh: bool,
    say: Say,
    leave_out: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Result]:
    """One result for each row, as it comes.

    Args:
      rows: what to measure.
      repeats: repetitions of each contender.
      fresh: every row in processes of its own: peak memory is its own, and nothing that an earlier
        row compiled or allocated helps. Otherwise all rows share one pair.
      say: is told what goes on.
      leave_out: contenders with one of these words in their name do not take part.
      stop: asked before each row; true ends it.
    """
    shared: dict[str, Side] = {}
    load = os.getloadavg()[0]
    if load > BUSY * cores():
        say(f"This machine is busy (load {load:.1f} on {cores()} cores): expect wrong ratios")
    how: dict[str, Any] = dict(repeats=repeats, say=say, leave_out=leave_out)
    # One cache for the run: torch.compile's headers alone take half a minute to compile.
    scratch = tempfile.TemporaryDirectory(prefix="jaxblock-bench-", ignore_cleanup_errors=True)
    with scratch as cache, ExitStack() as stack:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for row in rows:
            if stop():
                return
            if row.kind == "first":
                result = measure_first(row, **how)
            elif fresh:
                with pair() as sides:
                    result = measure_row(row, sides, **how)
            else:
                if not all(side.alive for side in shared.values()):
                    stack.close()
                    shared = {}
                shared = shared or stack.enter_context(pair())
                result = measure_row(row, shared, **how)
            result.setting["load before the run"] = f"{load:.1f}"
            yield result


def measure_row(
    row: Row,
    sides: Mapping[str, Side],
    *,
    repeats: int,
    say: Say,
    leave_out: Sequence[str] = (),
) -> Result:
    """First calls and a comparison of the results; then all contenders in turn, again and again."""
    result, where = _start(row, sides, say, leave_out)
    calls: dict[str, tuple[int, int]] = {}
    for name in list(result.measured):
        with _left_out(result, name):
            once = min(sides[where[name]].ask("time", name, 1, 0) for _ in range(2))
            # One call warms the caches that another process has filled, where calls are short.
            calls[name] = max(1, min(MOST_CALLS, round(SPAN / once))), int(once < SPAN)
    for repeat in range(repeats):
        names = list(result.measured)
        # Nobody always comes after the same other one.
        turn = repeat % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            with _left_out(result, name):
                seconds = sides[where[name]].ask("time", name, *calls[name])
                result.measured[name].seconds.append(seconds)
    return result


def measure_first(row: Row, *, repeats: int, say: Say, leave_out: Sequence[str] = ()) -> Result:
    """The first call in a new process, as often as there are repetitions.

    torch.compile takes a minute or more for it; `first_s` of the other rows says how long.
    """
    total: Result | None = None
    for repeat in range(repeats):
        with pair() as sides:
            result, _ = _start(row, sides, say if repeat == 0 else _silent, leave_out)
        for one in result.measured.values():
            one.seconds.append(one.first_s)
        if total is None:
            total = result
            continue
        for name, one in result.measured.items():
            if name in total.measured:
                total.measured[name].seconds += one.seconds
    assert total is not None
    return total


def _silent(line: str) -> None:
    pass


def _start(
    row: Row, sides: Mapping[str, Side], say: Say, leave_out: Sequence[str]
) -> tuple[Result, dict[str, str]]:
    """Make every contender, call it for the first time, and compare what comes out."""
    say(f"{row.name}, {row.dtype}")
    result, where = Result(row, {}, {}, {}), dict[str, str]()
    for side in sides.values():
        side.send("build", row)
    for name, side in sides.items():
        try:
            contenders, setting = side.receive()
        except PeerError as error:
            result.skipped[f"everything in {name}"] = str(error)
            continue
        result.setting |= setting
        taken = [one for one in contenders if not any(word in one for word in leave_out)]
        where |= dict.fromkeys(taken, name)
    outputs: dict[str, Mapping[str, Digest]] = {}
    for name, of in where.items():
        try:
            first: First = sides[of].ask("first", name)
        except PeerError as error:
            result.skipped[name] = str(error)
            continue
        result.measured[name] = Measured(first.seconds, peak=first.peak)
        outputs[name] = first.outputs
    if OURS in outputs:
        for name, peer in result.peers.items():
            peer.difference = disagreement(outputs[OURS], outputs[name])
    return result, where


@contextmanager
def _left_out(result: Result, name: str) -> Iterator[None]:
    """A contender that fails later on is left out, too."""
    if name not in result.measured:
        yield
        return
    try:
        yield
    except PeerError as error:
        del result.measured[name]
        result.skipped[name] = str(error)
