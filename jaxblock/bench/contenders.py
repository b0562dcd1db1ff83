"""What both sides give to their worker, and the numbers that both start from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxblock.bench.rows import Row
from jaxblock.parameters import flatten

OURS = "jaxblock"
# Contenders of this prefix measure what the machine can do, not what a peer does.
LIMIT = "limit: "

EPS = 1e-5
# The defaults of torch.optim.AdamW, which are not those of optax.
ADAMW = {"learning_rate": 1e-3, "weight_decay": 0.01}
CHECKED_STEPS = 3


def _nothing(result: Any) -> Mapping[str, np.ndarray]:
    return {}


def _no_wait(result: Any) -> None:
    pass


def _no_state() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """One implementation of a row.

    Attributes:
      call: computes the row once; where a device works through a queue, it may return before the
        result is there. A train step goes on from where the last call ended.
      outputs: of a result, as float32 NumPy arrays by names that all contenders share; of a train
        step the first losses, which calls it again.
      wait: until the result is there.
      reset: to the start, where there is a state.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], Mapping[str, np.ndarray]] = _nothing
    wait: Callable[[Any], Any] = _no_wait
    reset: Callable[[], None] = _no_state


# Name -> how to make it. One that raises is left out, with the reason.
Builders = dict[str, Callable[[], Contender]]


def component_inputs(row: Row) -> dict[str, np.ndarray]:
    """Standard normal activations and cotangents, weights that keep their size, ids."""
    random = np.random.default_rng(0)
    s = row.sizes
    T, D = s["T"], s["D"]

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return random.standard_normal(shape, np.float32) * np.float32(scale)

    if row.kind == "rms_norm":
        return {"x": normal(T, D), "scale": 1 + normal(D, scale=0.1), "dy": normal(T, D)}
    if row.kind == "swiglu":
        F = s["F"]
        return {
            "x": normal(T, D),
            "gate": normal(D, F, scale=D**-0.5),
            "up": normal(D, F, scale=D**-0.5),
            "down": normal(F, D, scale=F**-0.5),
            "dy": normal(T, D),
        }
    V = s["V"]
    table = normal(V, D, scale=D**-0.5)
    if row.kind == "embed":
        tokens = random.integers(0, V, T)
        # One token 1,000 times among 2,048.
        tokens[random.permutation(T)[: T * 1000 // 2048]] = V // 3
        return {"tokens": tokens, "table": table, "dy": normal(T, D)}
    return {"x": normal(T, D), "table": table, "labels": random.integers(0, V, T)}


def model_tokens(row: Row) -> np.ndarray:
    """Ids [B T]."""
    shape = row.sizes["B"], row.sizes["T"]
    return np.random.default_rng(1).integers(0, row.config["vocab_size"], shape)


def model_parameters(row: Row) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """The parameter tree of jaxblock, leaf by leaf: normal with deviation 0.02, scales of 1."""
    random = np.random.default_rng(2)
    for path, shape in flatten(row.decoder.parameter_shapes()):
        if path[-1] == "scale":
            yield path, np.ones(shape, np.float32)
        else:
            leaf = random.standard_normal(shape, np.float32)
            leaf *= np.float32(0.02)
            yield path, leaf
