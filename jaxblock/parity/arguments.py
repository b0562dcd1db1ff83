"""What goes into both functions and what comes out, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxblock.parity.arrays import is_array, is_float, to_numpy


@dataclass(frozen=True)
class Arguments:
    """Parameters and inputs: the arrays among them by name, and the rest, which is passed as it is.

    Attributes:
      arrays: NumPy arrays, the parameters' first.
      names: one for each.
    """

    arrays: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    _leaves: tuple[Any, ...]
    _structure: Any

    @classmethod
    def of(cls, parameters: Mapping[str, Any], inputs: Any) -> "Arguments":
        """Of the named parameters of a module and the inputs of `assert_parity`."""
        if not isinstance(inputs, Mapping | list | tuple):
            inputs = (inputs,)
        with_path, structure = jax.tree_util.tree_flatten_with_path((dict(parameters), inputs))
        return cls(
            arrays=tuple(to_numpy(leaf) for _, leaf in with_path if is_array(leaf)),
            names=tuple(_argument_name(path) for path, leaf in with_path if is_array(leaf)),
            _leaves=tuple(leaf for _, leaf in with_path),
            _structure=structure,
        )

    def rounded(self, dtype: str | None) -> list[np.ndarray]:
        """The arrays, floats in `dtype`; None means as JAX would take them."""
        return [
            array.astype(dtype)
            if dtype is not None and is_float(array)
            else array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
            if array.dtype.kind not in "iub"
            else array
            for array in self.arrays
        ]

    def filled(self, arrays: Any) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
        """Put one value in the place of each array: named parameters, arguments, keywords."""
        values = iter(arrays)
        leaves = [next(values) if is_array(leaf) else leaf for leaf in self._leaves]
        parameters, inputs = jax.tree_util.tree_unflatten(self._structure, leaves)
        if isinstance(inputs, Mapping):
            return parameters, (), dict(inputs)
        return parameters, tuple(inputs), {}


def named_outputs(result: Any) -> dict[str, Any]:
    """The arrays of a result by their path in it; a single array has the name "".

    Mappings and sequences are the same whatever their type, so that a named tuple or an output
    class of one framework can stand beside a tuple or a dictionary of the other.
    """
    with_path, _ = jax.tree_util.tree_flatten_with_path(_plain(result))
    return {_path_name(path): leaf for path, leaf in with_path}


def _plain(result: Any) -> Any:
    if isinstance(result, Mapping):
        return {str(key): _plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [_plain(value) for value in result]
    return result


def _path_name(path: Any) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _argument_name(path: Any) -> str:
    (source, *rest) = path
    return ("parameter " if source.idx == 0 else "input ") + _path_name(rest)
