"""The parameter tree: its initial values, and the check that a tree belongs to a configuration."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from jaxblock.config import DecoderConfig
from jaxblock.config.decoder_config import Shapes, check_config
from jaxblock.ops import checks

Params = dict[str, Any]
Path = tuple[str, ...]

# The axes of a kernel that are summed over, counted from its end; any before are a batch of them.
_SUMMED_AXES = {
    "embedding": (-1,),
    "unembedding": (-1,),
    "q": (-3,),
    "k": (-3,),
    "v": (-3,),
    "o": (-3, -2),
    "router": (-2,),
    "gate_up": (-3,),
    "down": (-2,),
}
# A normal distribution cut at two standard deviations has this share of its standard deviation.
_TRUNCATED = 0.87962566


def init_params(config: DecoderConfig, key: PRNGKeyArray, *, dtype: DTypeLike) -> Params:
    """params = normal with variance 1 / fan-in for kernels, scales that multiply by 1, biases of 0

    Args:
      config: the decoder.
      key: one key. Every leaf draws from its own, so equal keys give equal trees.
      dtype: of every leaf.

    Returns: the parameter tree, `config.parameter_shapes()` with arrays for leaves. The fan-in is
      the length of the sum that an element is part of; for a table, which is looked up and
      projected with, D. Rows of padding (`num_valid`) are drawn like the others.

    Raises: ValueError for a dtype that is no float.

    Differs from torch: transformers draws every kernel with `initializer_range`, 0.02, whatever its
      size.
    """
    check_config("init_params", config)
    return init_leaves("init_params", config, config.parameter_shapes(), key, dtype=dtype)


def layer_shapes(config: DecoderConfig) -> Shapes:
    """`layers` of `config.parameter_shapes()` for one layer: without the leading axis L."""
    layers = config.parameter_shapes()["layers"]
    assert isinstance(layers, Mapping)
    return unflatten({path: shape[1:] for path, shape in flatten(layers)})


def attention_shapes(config: DecoderConfig) -> Shapes:
    """`layers/attention` of `config.parameter_shapes()` for one layer."""
    attention = layer_shapes(config)["attention"]
    assert isinstance(attention, dict)
    return attention


def init_leaves(
    function: str, config: DecoderConfig, shapes: Shapes, key: PRNGKeyArray, *, dtype: DTypeLike
) -> Params:
    """`init_params` for a part of the tree."""
    checks.choice(function, "dtype", jnp.dtype(dtype).name, checks.FLOAT_DTYPES)
    leaves = tuple(flatten(shapes))
    return unflatten(_draw(key, leaves=leaves, config=config, dtype=jnp.dtype(dtype)))


# Jitted, so that a call outside `jit` is one compiled program and not a dozen for every leaf.
@partial(jax.jit, static_argnames=("leaves", "config", "dtype"), inline=True)
def _draw(
    key: jax.Array,
    *,
    leaves: tuple[tuple[Path, tuple[int, ...]], ...],
    config: DecoderConfig,
    dtype: jnp.dtype,
) -> dict[Path, jax.Array]:
    keys = jax.random.split(key, len(leaves))
    return {
        path: _initial(config, path, shape, leaf_key, dtype)
        for (path, shape), leaf_key in zip(leaves, keys, strict=True)
    }


def _initial(
    config: DecoderConfig, path: Path, shape: tuple[int, ...], key: jax.Array, dtype: DTypeLike
) -> jax.Array:
    name = path[-1]
    if name == "scale":
        return jnp.full(shape, config.norm.initial_scale, dtype)
    if name.endswith("_bias"):
        return jnp.zeros(shape, dtype)
    fan_in = math.prod(shape[axis] for axis in _SUMMED_AXES[name])
    draw = initializers.truncated_normal(fan_in**-0.5 / _TRUNCATED)
    return draw(key, shape, dtype)


def check_params(function: str, params: Any, config: DecoderConfig) -> None:
    """`params` must have the paths and shapes of `config.parameter_shapes()`, and float leaves.

    Shapes are static, so under `jit` this costs nothing when the compiled program runs.
    """
    check_config(function, config)
    checks.require(
        isinstance(params, Mapping),
        function,
        "params must be the parameter tree, nested dicts",
        kind=TypeError,
        hint="A module's own: nnx.to_pure_dict(nnx.state(module)); Linen: variables['params'].",
        params=type(params).__name__,
    )
    expected = dict(flatten(config.parameter_shapes()))
    given = dict(flatten(params))
    missing, extra = expected.keys() - given.keys(), given.keys() - expected.keys()
    checks.require(
        not missing and not extra,
        function,
        "params must be the tree of this config",
        hint="Its paths are those of config.parameter_shapes().",
        missing=_names(missing),
        unexpected=_names(extra),
    )
    for path, leaf in given.items():
        # Not by `checks.floating`, which would send a NumPy leaf to the device just to look at it.
        name, dtype = "/".join(path), getattr(leaf, "dtype", type(leaf).__name__)
        must = f"{name} must be an array of one of the dtypes {', '.join(checks.FLOAT_DTYPES)}"
        fits = str(dtype) in checks.FLOAT_DTYPES
        checks.require(fits, function, must, kind=TypeError, dtype=str(dtype))
        must = f"{name} must have the shape {list(expected[path])} of this config"
        checks.require(leaf.shape == expected[path], function, must, **{name: leaf})


def flatten(tree: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf of nested dicts by its path."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*path, name))
        else:
            yield (*path, name), value


def unflatten(leaves: Mapping[Path, Any]) -> Params:
    """The nested dicts of which `flatten` gives the leaves."""
    tree: Params = {}
    for path, leaf in leaves.items():
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = leaf
    return tree


def _names(paths: Any) -> str:
    return ", ".join(sorted("/".join(path) for path in paths)) or "none"
