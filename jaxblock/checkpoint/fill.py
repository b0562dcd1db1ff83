"""The tree of parameters, filled leaf after leaf."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest

import jax
import numpy as np

from jaxblock.checkpoint import copying
from jaxblock.checkpoint.findings import checkpoint_error
from jaxblock.checkpoint.layout import Part, leaf_shapes
from jaxblock.checkpoint.plan import FUNCTION, Plan
from jaxblock.checkpoint.stored import StoredTensor

Progress = Callable[[int, int], None]


def fill(
    plan: Plan, dtype: np.dtype | None = None, progress: Progress | None = None
) -> dict[str, jax.Array]:
    """Every leaf by its path.

    Beside the leaves there are only a tensor for each thread and, on an accelerator, two leaves.

    Raises: CheckpointError for values that float16 does not hold, if that is asked for.
    """
    shapes = leaf_shapes(plan.config)
    leaves: dict[str, jax.Array] = {}
    done, total = 0, plan.num_bytes
    with ThreadPoolExecutor(copying.THREADS) as pool:

        def start(leaf: str) -> tuple[np.ndarray, list[Future[int]]]:
            memory = copying.empty(shapes[leaf], dtype or plan.dtype(leaf))
            return memory, [pool.submit(_place, memory, *part) for part in plan.parts[leaf]]

        # The threads begin with the next leaf while the last parts of one are under way.
        names = [*shapes]
        following = start(names[0])
        for name, after in zip_longest(names, names[1:]):
            memory, tasks = following
            if after is not None:
                following = start(after)
            for task in tasks:
                done += task.result()
                if progress is not None:
                    progress(done, total)
            # On CPU this is the array itself, and nothing writes to it from here on.
            leaves[name] = jax.device_put(memory, may_alias=True).block_until_ready()
    return leaves


def _place(memory: np.ndarray, tensor: StoredTensor, part: Part) -> int:
    values = tensor.read()[part.rows]
    try:
        copying.copy(part.in_stored_order(memory[part.index]), values)
    except FloatingPointError as error:
        finding = f"{tensor.name} must fit into float16; got larger values in {tensor.file}"
        raise checkpoint_error(FUNCTION, [finding]) from error
    return values.nbytes
