"""Which change to a parameter or an input would make PyTorch give what JAX gave."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from jaxblock.parity.arrays import is_float


def changed(
    arrays: Sequence[np.ndarray], names: Sequence[str]
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """The usual mistakes, each in words and as the arrays that it would make of these.

    Two arrays that change places (gate and up, key and value), a square matrix transposed, a scale
    that is stored less one, and the halves of an axis swapped (a packed gate and up).
    """
    floats = [i for i, array in enumerate(arrays) if is_float(array)]

    def with_one(index: int, array: np.ndarray) -> list[np.ndarray]:
        return [array if i == index else other for i, other in enumerate(arrays)]

    for i, j in combinations(floats, 2):
        if arrays[i].shape == arrays[j].shape and not np.array_equal(arrays[i], arrays[j]):
            exchanged = list(arrays)
            exchanged[i], exchanged[j] = arrays[j], arrays[i]
            yield f"{names[i]} and {names[j]} change places", exchanged
    for i in floats:
        if arrays[i].ndim == 2 and arrays[i].shape[0] == arrays[i].shape[1] > 1:
            yield f"{names[i]} is transposed", with_one(i, arrays[i].T)
    for i in floats:
        if arrays[i].ndim == 1:
            yield f"1 is added to {names[i]}", with_one(i, arrays[i] + 1)
            yield f"1 is subtracted from {names[i]}", with_one(i, arrays[i] - 1)
    for i in floats:
        for axis, n in enumerate(arrays[i].shape):
            if n % 2 == 0:
                text = f"the halves of axis {axis} of {names[i]} change places"
                yield text, with_one(i, np.roll(arrays[i], n // 2, axis))
