"""attention: against PyTorch and float64, what nobody sees, its products, its memory, its paths."""

import importlib
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FLOAT16S,
    FLOATS,
    assert_derivatives,
    assert_matches_float64,
    assert_same_bits,
    equations,
    random_arrays,
)
from jax.sharding import NamedSharding, PartitionSpec

from jaxblock.ops.attention import attention
from jaxblock.parity import assert_parity

pytestmark = pytest.mark.usefixtures("shape_checks")

# What the second sequence of two sees of 7 keys by 5 queries and 4 heads: padding on the left, one
# key that a single head misses, one query with nothing to see.
HOLES = np.ones((2, 4, 5, 7), bool)
HOLES[1, :, :, :3] = False
HOLES[0, 1, :, 4] = False
HOLES[0, :, 2, :] = False

# B, T, S, N, K, H and the options. Scores are of size 1, so that every visible key has a say.
LAYERS = {
    "grouped": ((2, 5, 5, 6, 2, 7), dict(scale=0.4)),
    "window and cap": ((1, 5, 11, 3, 1, 16), dict(scale=0.5, window=4, softcap=1.5)),
    "holes": ((2, 5, 7, 4, 4, 1), dict(scale=1.0, mask=HOLES)),
    "one query": ((2, 1, 9, 2, 1, 8), dict(scale=0.3, window=6, mask=HOLES[:, :1, :1, [0] * 9])),
    "both ways": ((1, 7, 3, 4, 2, 5), dict(scale=0.4, causal=False)),
}


def make_inputs(layer, seed=0):
    (B, T, S, N, K, H), options = LAYERS[layer]
    return random_arrays(seed, (B, T, N, H), (B, S, K, H), (B, S, K, H)), options


def check_against_torch(jax_fn, torch_ref, dtype, layer, **judged):
    """What every parity test and every planted fault below calls."""
    inputs, options = make_inputs(layer)
    options = dict(options)
    mask = options.pop("mask", None)
    return assert_parity(
        lambda q, k, v, mask: jax_fn(q, k, v, mask=mask, **options),
        lambda q, k, v, mask: torch_ref.attention(q, k, v, mask=mask, **options),
        [*inputs, mask],
        dtypes=[dtype],
        # The weights are rounded on the way.
        roundings=1,
        **judged,
    )


@pytest.fixture(scope="module")
def torch_ref():
    return importlib.import_module("torch_ref.attention")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        *((layer, "float32") for layer in LAYERS),
        *((layer, "bfloat16") for layer in ("grouped", "window and cap", "holes")),
        *((layer, "float16") for layer in ("window and cap", "one query")),
    ],
)
def test_parity(layer, dtype, torch_ref):
    check_against_torch(attention, torch_ref, dtype, layer)


def interleaved(q, k, v, **options):
    """Head n of q looks at head n % K of k."""
    order = np.arange(q.shape[2]).reshape(-1, k.shape[2]).T.ravel()
    return attention(q[:, :, order], k, v, **options)[:, :, np.argsort(order)]


def at_the_beginning(q, k, v, *, window=None, **options):
    T, S = q.shape[1], k.shape[1]
    age = np.arange(T)[:, None] - np.arange(S)
    mask = jnp.asarray((age >= 0) & (age < (window or S)))[None, None]
    return attention(q, k, v, **{**options, "causal": False, "mask": mask})


def mean_where_empty(q, k, v, *, mask, **options):
    return attention(q, k, v, mask=mask | ~mask.any(axis=-1, keepdims=True), **options)


def leaking(q, k, v, *, mask, **options):
    """One masked column of one head."""
    return attention(q, k, v, mask=mask.at[0, 1, :, 4].set(True), **options)


def changed(**changes):
    def fault(q, k, v, **options):
        return attention(q, k, v, **{name: change(options[name]) for name, change in changes.items()})

    return lambda q, k, v, **options: attention(
        q, k, v, **{**options, **{name: change(options) for name, change in changes.items()}}
    )


PLANTED_FAULTS = {
    "x1.01": (lambda q, k, v, **options: 1.01 * attention(q, k, v, **options), "grouped"),
    "scale": (changed(scale=lambda options: 1.02 * options["scale"]), "grouped"),
    "interleaved heads": (interleaved, "grouped"),
    "not causal": (changed(causal=lambda options: False), "grouped"),
    "queries at the beginning": (at_the_beginning, "window and cap"),
    "window one less": (changed(window=lambda options: options["window"] - 1), "window and cap"),
    "cap dropped": (changed(softcap=lambda options: None), "window and cap"),
    "causal": (changed(scale=lambda options: -options["scale"]), "both ways"),
    "mean where nothing is visible": (mean_where_empty, "holes"),
    "one masked column leaks": (leaking, "holes"),
}
