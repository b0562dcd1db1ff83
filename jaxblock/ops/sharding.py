"""Arrays with explicit sharding, which is what the axes of `jax.make_mesh` stand for.

JAX then wants to be told the layout of every result that does not follow from its operands. Here it
is said once for each function as a whole; what happens inside is left to XLA, as it is for arrays
of any other mesh, and of none. Source: "Explicit sharding", JAX's documentation.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

P = ParamSpec("P")
R = TypeVar("R")


def laid_out(layout: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose positional arguments are arrays, or trees of them.

    `layout` is given these and returns that of the result, by `like` or `along`, or a tree of it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def laid_out_function(*arrays: P.args, **options: P.kwargs) -> R:
            mesh = _explicit_mesh(arrays)
            if mesh is None:
                return function(*arrays, **options)
            shardings = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec),
                layout(*arrays),
                is_leaf=lambda node: isinstance(node, PartitionSpec),
            )
            result: R = auto_axes(
                lambda *arrays: function(*arrays, **options),
                axes=mesh.explicit_axes,
                out_sharding=shardings,
            )(*arrays)
            return result

        return laid_out_function

    return decorate


def like(array: Any) -> PartitionSpec:
    """The layout of this array."""
    return along(*axes(array))


def axes(array: Any, but: int = 0) -> list[tuple[Any, int]]:
    """Its axes, but for the last ones, for `along`."""
    return [(array, axis) for axis in range(jax.numpy.ndim(array) - but)]


def along(*wanted: tuple[Any, int] | None) -> PartitionSpec:
    """A layout, axis by axis: as (array, axis) is, or not cut."""
    taken: set[str] = set()
    spec: list[Any] = []
    for axis in wanted:
        cut = None if axis is None else _cut(*axis)
        names = {cut} if isinstance(cut, str) else set(cut or ())
        # A mesh axis cuts one axis of an array, the first that asks for it.
        spec.append(None if names & taken else cut)
        taken |= names
    return PartitionSpec(*spec)


def _cut(array, axis):
    spec = tuple(jax.typeof(array).sharding.spec)
    axis %= jax.numpy.ndim(array)
    return spec[axis] if axis < len(spec) else None


def _explicit_mesh(arrays):
    """The mesh of the arrays, or else the one that is entered; None if no axis is explicit."""
    meshes = [
        jax.typeof(leaf).sharding.mesh
        for leaf in jax.tree.leaves(arrays)
        if isinstance(leaf, jax.Array)
    ]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None
