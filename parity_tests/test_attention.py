"""attention: against PyTorch and float64, what nobody sees, its products, its memory, its paths."""

import importlib
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
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

# Of two sequences, 4 heads, 5 queries and 7 keys: the second has padding on the left, in the first
# one key is hidden from one head and one query sees nothing.
HOLES = np.ones((2, 4, 5, 7), bool)
HOLES[1, :, :, :3] = False
HOLES[0, 1, :, 4] = False
HOLES[0, :, 2, :] = False
PADDING = np.ones((2, 1, 1, 9), bool)
PADDING[1, :, :, 6:8] = False

# B, T, S, N, K, H and the options. Grouped heads and single ones, T < S, T > S, a prime, a one.
LAYERS = {
    "grouped": ((2, 5, 5, 6, 2, 7), dict(scale=0.4)),
    "window and cap": ((1, 5, 11, 3, 1, 16), dict(scale=0.5, window=4, softcap=1.5)),
    "holes": ((2, 5, 7, 4, 4, 1), dict(scale=1.0, mask=HOLES)),
    "one query": ((2, 1, 9, 2, 1, 8), dict(scale=0.3, window=6, mask=PADDING)),
    "both ways": ((1, 7, 3, 4, 2, 5), dict(scale=0.4, causal=False)),
}


def make_inputs(shape, seed=0):
    B, T, S, N, K, H = shape
    return random_arrays(seed, (B, T, N, H), (B, S, K, H), (B, S, K, H))


def check_against_torch(jax_fn, dtype, layer, **judged):
    """What every parity test and every planted fault below calls."""
    shape, options = LAYERS[layer]
    options = dict(options)
    mask = options.pop("mask", None)
    torch_fn = importlib.import_module("torch_ref.attention").attention
    return assert_parity(
        lambda q, k, v, mask: jax_fn(q, k, v, mask=mask, **options),
        lambda q, k, v, mask: torch_fn(q, k, v, mask=mask, **options),
        [*make_inputs(shape), mask],
        dtypes=[dtype],
        # The weights are rounded on the way.
        roundings=1,
        **judged,
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        *((layer, "float32") for layer in LAYERS),
        ("grouped", "bfloat16"),
        ("window and cap", "float16"),
    ],
)
def test_parity(layer, dtype):
    check_against_torch(attention, dtype, layer)


def with_option(name, change):
    def fault(q, k, v, **options):
        return attention(q, k, v, **{**options, name: change(options.get(name))})

    return fault


def interleaved(q, k, v, **options):
    """Head n of q looks at head n % K of k."""
    order = np.arange(q.shape[2]).reshape(-1, k.shape[2]).T.ravel()
    return attention(q[:, :, order], k, v, **options)[:, :, np.argsort(order)]


def at_the_beginning(q, k, v, *, window, mask, **options):
    age = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    mask = ((age >= 0) & (age < window))[None, None]
    return attention(q, k, v, causal=False, mask=mask, **options)


PLANTED_FAULTS = {
    "scale x1.01": (with_option("scale", lambda scale: 1.01 * scale), "grouped"),
    "heads interleaved": (interleaved, "grouped"),
    "not causal": (with_option("causal", lambda _: False), "grouped"),
    "queries at the beginning": (at_the_beginning, "window and cap"),
    "the current token not counted": (with_option("window", lambda w: w + 1), "window and cap"),
    "cap dropped": (with_option("softcap", lambda _: None), "window and cap"),
    "mean where nothing is visible": (
        with_option("mask", lambda mask: mask | ~mask.any(axis=-1, keepdims=True)),
        "holes",
    ),
    "one masked column leaks": (
        with_option("mask", lambda mask: mask.at[0, 1, :, 4].set(True)),
        "holes",
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("fault", PLANTED_FAULTS)
def test_planted_fault_is_caught(fault):
    jax_fn, layer = PLANTED_FAULTS[fault]
    with pytest.raises(AssertionError, match="FAIL .*output"):
        check_against_torch(jax_fn, "float32", layer, gradients=False)


@pytest.mark.torch
def test_the_specification_against_torch_and_transformers():
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    from torch_ref.attention import attention

    def heads_first(*arrays):
        return [torch.tensor(array).transpose(1, 2) for array in arrays]

    causal = make_inputs((2, 5, 5, 6, 2, 7))
    theirs = scaled_dot_product_attention(
        *heads_first(*causal), is_causal=True, scale=0.4, enable_gqa=True
    )
    ours = attention(*map(torch.tensor, causal), scale=0.4)
    torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=1e-13, atol=1e-13)

    q, k, v = map(torch.tensor, make_inputs((2, 5, 7, 4, 2, 3)))
    mask = torch.tensor(HOLES[:, :1]) | (torch.arange(7) == 0)
    masked = dict(scale=0.4, causal=False, mask=mask)
    ours = attention(q, k, v, **masked).transpose(1, 2)
    theirs = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.4, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)

    module = torch.nn.Module()
    module.num_key_value_groups = 2
    theirs, _ = eager_attention_forward(
        module.eval(),
        *(x.transpose(1, 2) for x in (q, k, v)),
        torch.where(mask, 0.0, -torch.inf),
        scaling=0.4,
        softcap=0.5,
    )
    # Their softmax is float32 even here: weights, which sum to 1, to a few units of 2^-24.
    limit = 8 * 2**-24 * float(v.abs().max())
    ours = attention(q, k, v, softcap=0.5, **masked)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=limit)


def test_derivatives(x64):
    options = dict(scale=0.7, window=4, softcap=1.5, mask=jnp.asarray(HOLES))
    assert_derivatives(partial(attention, **options), *make_inputs((2, 5, 7, 4, 2, 1)))


def test_identities(x64):
    q, k, v = make_inputs((2, 5, 8, 4, 2, 3))
    constant = random_arrays(1, (1, 1, 2, 3))[0]
    band = np.tril(np.ones((5, 8), bool), 3) & ~np.tril(np.ones((5, 8), bool), 0)
    attend = partial(attention, scale=0.7)

    @jax.jit
    def compute(q, k, v, constant):
        narrow = attend(q, k, v, window=3)
        return {
            "the last queries alone": (
                attend(q[:, 3:], k, v, window=3, softcap=1.0),
                attend(q, k, v, window=3, softcap=1.0)[:, 3:],
            ),
            "one query of a longer cache": (attend(q[:, 4:], k, v, window=3), narrow[:, 4:]),
            "a mask for a window": (
                attend(q, k, v, causal=False, mask=jnp.asarray(band)[None, None]),
                narrow,
            ),
            "keys and values repeated": (
                attend(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)),
                attend(q, k, v),
            ),
            # B46: a key bias adds the same to every score of a query.
            "a constant key bias": (attend(q, k + constant, v), attend(q, k, v)),
            "a constant value bias": (
                attend(q, k, v + constant),
                attend(q, k, v) + jnp.repeat(constant, 2, axis=2),
            ),
            "a window of one": (attend(q, k, v, window=1), jnp.repeat(v[:, 3:], 2, axis=2)),
            "a window of more than all": (attend(q, k, v, window=99), attend(q, k, v)),
        }

    for name, (one, other) in compute(q, k, v, constant).items():
        assert one.dtype == jnp.float64, name
        assert_matches_float64(one, np.asarray(other), reduction_length=8)


def test_scores_of_the_cases(x64):
    """B52 and B53, read off the weights: with v the identity they are the result."""

    def score(size, **options):
        q = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(size)
        k = jnp.concatenate([q, jnp.zeros_like(q)], axis=1)
        weights = attention(q, k, jnp.eye(2, 4)[None, :, None], **options)[0, 0, 0]
        return jnp.log(weights[0] / weights[1])

    @jax.jit
    def scores():
        return (
            score(2.0, scale=0.5),
            score(10.0, scale=1.0),
            score(10.0, scale=1.0, softcap=50.0),
        )

    # A logarithm of 100 in float64 is good to 1e-14 of it; the case gives the third to 8 digits.
    halved, plain, capped = map(float, scores())
    assert (halved, plain) == pytest.approx((2.0, 100.0), rel=1e-13)
    assert capped == pytest.approx(48.2013790, abs=5e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_visible_leaves_no_trace(dtype):
    *inputs, dy = (
        jnp.asarray(array, dtype)
        for array in (*make_inputs((2, 5, 7, 4, 2, 8)), *random_arrays(1, (2, 5, 4, 8)))
    )

    @jax.jit
    def run(q, k, v):
        attend = partial(attention, scale=0.4, softcap=2.0, mask=jnp.asarray(HOLES))
        y, pull_back = jax.vjp(attend, q, k, v)
        return y, *pull_back(dy)

    def replaced(places, value):
        q, k, v = inputs
        return run(q, k.at[places].set(value), v.at[places].set(value))

    plain = run(*inputs)
    y, dq, dk, dv = plain
    assert_same_bits(y[0, 2], jnp.zeros_like(y[0, 2]))
    assert_same_bits(dq[0, 2], jnp.zeros_like(y[0, 2]))
    padding = np.s_[1, :3]
    assert not dk[padding].any() and not dv[padding].any()
    for value in (1e4, jnp.inf, jnp.nan):
        for result, expected in zip(replaced(padding, value), plain, strict=True):
            assert_same_bits(result, expected)
    # The last key is seen by the last query alone, and a masked one by three heads of four.
    later = replaced(np.s_[0, 6], 1e4)
    assert_same_bits(later[0][:, :4], y[:, :4])
    assert_same_bits(later[1][:, :4], dq[:, :4])
    assert not np.array_equal(later[0][0, 4], y[0, 4])
    assert_same_bits(replaced(np.s_[0, 4], 1e4)[0][0, :, 1], y[0, :, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_keeps_q_k_and_v(dtype):
    kept = jax.eval_shape(
        lambda q, k, v: jax.vjp(partial(attention, scale=0.4, softcap=2.0), q, k, v)[1],
        *(jax.ShapeDtypeStruct(array.shape, dtype) for array in make_inputs((2, 5, 5, 4, 2, 3))),
    )
    shapes = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(kept)]
    assert shapes == [((2, 5, 4, 3), dtype), ((2, 5, 2, 3), dtype), ((2, 5, 2, 3), dtype)]


def test_every_product_has_16_bit_operands_and_a_float32_sum():
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in make_inputs((2, 5, 7, 4, 2, 8))]

    def loss(q, k, v):
        return attention(q, k, v, scale=0.4, softcap=2.0, mask=jnp.asarray(HOLES)).sum()

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    # Two forward, the scores once more, and two gradients of each.
    assert len(products) == 7
    for product in products:
        assert [x.aval.dtype.name for x in product.invars] == ["bfloat16", "bfloat16"]
        assert [x.aval.dtype.name for x in product.outvars] == ["float32"]


def value_and_gradients(q, k, v, dy, **options):
    y, pull_back = jax.vjp(partial(attention, scale=0.4, **options), q, k, v)
    return y, *pull_back(dy)


def test_vmap_and_shards_equal_one_batch():
    """Batch and heads over devices: no communication, the same numbers."""
    shape = (4, 5, 5, 4, 2, 8)
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in make_inputs(shape)]
    arrays.append(jnp.asarray(random_arrays(1, (4, 5, 4, 8))[0], jnp.bfloat16))
    expected = jax.jit(value_and_gradients)(*arrays)
    mapped = jax.jit(jax.vmap(value_and_gradients))(
        *(a.reshape(2, 2, *a.shape[1:]) for a in arrays)
    )
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    spec = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    sharded = jax.device_put(arrays, spec)
    compiled = jax.jit(value_and_gradients).lower(*sharded).compile()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in compiled.as_text()
    for results in (mapped, compiled(*sharded)):
        for result, reference in zip(results, expected, strict=True):
            assert_matches_float64(
                np.asarray(result).reshape(reference.shape),
                np.asarray(reference, np.float64),
                reduction_length=10,
                roundings=1,
            )


def test_cudnn_is_called_where_it_computes_the_same_function(monkeypatch):
    """With a stand-in for the kernel, which nothing can trace where cuDNN is not installed."""
    calls = []

    def kernel(q, k, v, **options):
        calls.append(options)
        return jnp.cos(q)

    module = importlib.import_module("jaxblock.ops.attention")
    monkeypatch.setattr(module, "_has_cudnn", lambda: True)
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)

    def calls_it(platform, shape=(1, 13, 13, 2, 1, 8), dtype="bfloat16", **options):
        q, k, v = (jnp.asarray(a, dtype) for a in make_inputs(shape))
        function = jax.jit(partial(attention, scale=0.4, **options))
        text = function.trace(q, k, v).lower(lowering_platforms=(platform,)).as_text()
        # Either the kernel or the two products of the plain path.
        kernel, products = text.count("stablehlo.cosine"), text.count("stablehlo.dot_general")
        assert (kernel, products) in ((1, 0), (0, 2))
        return bool(kernel)

    assert calls_it("cuda")
    assert calls_it("cuda", window=5, dtype="float16")
    assert calls_it("cuda", causal=False)
    common = dict(scale=0.4, implementation="cudnn")
    assert calls == [
        dict(is_causal=True, local_window_size=None, **common),
        # Theirs counts the tokens before the current one.
        dict(is_causal=True, local_window_size=(4, 0), **common),
        dict(is_causal=False, local_window_size=None, **common),
    ]
    assert not calls_it("tpu")
    assert not calls_it("cpu")
    assert not calls_it("cuda", dtype="float32")
    assert not calls_it("cuda", softcap=2.0)
    assert not calls_it("cuda", mask=jnp.ones((1, 1, 13, 13), bool))
    assert not calls_it("cuda", shape=(1, 13, 14, 2, 1, 8))
    assert not calls_it("cuda", shape=(1, 1, 1, 2, 1, 8))
    assert not calls_it("cuda", shape=(1, 13, 13, 2, 1, 12))
    assert not calls_it("cuda", shape=(1, 13, 13, 2, 1, 136))


Q, KV = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8))
BAD_CALLS = {
    r"q must be \[B T N H\]; got q=float32\[3,4,8\]": dict(q=Q[0]),
    "k must be .* with the B and H of q; got .* k=float32.2,3,2,1": dict(k=KV[..., :1]),
    "k must be .* with the B and H of q; got .* k=float32.1,3,2,8": dict(k=KV[:1]),
    r"v must have the shape of k; got .* v=float32\[2,3,1,8\]": dict(v=KV[:, :, :1]),
    "q, k and v must have one dtype; got .* k=bfloat16": dict(k=KV.astype(jnp.bfloat16)),
    "N must be a multiple of K": dict(q=Q[:, :, :3]),
    "k must have no empty axis": dict(k=KV[:, :0], v=KV[:, :0]),
    "q must have one of the dtypes": dict(q=Q.astype(jnp.int32)),
    "scale must be a number": dict(scale=None),
    "scale must be finite; got scale=inf": dict(scale=math.inf),
    "causal must be True or False": dict(causal=1),
    "T must not exceed S with causal.*stand at the end": dict(k=KV[:, :2], v=KV[:, :2]),
    "window must be at least 1; got window=0": dict(window=0),
    "window must be an integer": dict(window=2.0),
    "window needs causal": dict(window=2, causal=False),
    "softcap must be finite and above 0.*; got softcap=0": dict(softcap=0.0),
    "mask must have the dtype bool": dict(mask=jnp.ones((2, 1, 1, 3))),
    r"mask must be \[B N T S\].*mask\[:, None, None, :\]": dict(mask=jnp.ones((2, 3), bool)),
    "mask must be .* mask=bool.2,1,1,2": dict(mask=jnp.ones((2, 1, 1, 2), bool)),
}


@pytest.mark.parametrize("match", BAD_CALLS)
def test_bad_calls_are_refused(match, request):
    import jaxtyping

    # beartype would speak first.
    jaxtyping.config.update("jaxtyping_disable", True)
    request.addfinalizer(lambda: jaxtyping.config.update("jaxtyping_disable", False))
    arguments = dict(q=Q, k=KV, v=KV, scale=0.5) | BAD_CALLS[match]
    with pytest.raises((ValueError, TypeError), match=f"^attention: {match}"):
        attention(**arguments)
