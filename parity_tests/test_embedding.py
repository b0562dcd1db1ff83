"""embed, unembed and resize_embedding: one [V, D] table, looked up, projected on, grown."""

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
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec

from jaxblock import embed, resize_embedding, unembed
from jaxblock.parity import assert_parity

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("shape_checks")]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
# Leading axes of x, D, V, size of the logits, softcap, num_valid. No leading axis and several, a
# one, a prime, a remainder; logits at initial scale, large, and very negative.
PROJECTIONS = {
    "no leading axis": ((), 7, 5, 1.0, None, None),
    "ones": ((1, 1), 1, 1, 1.0, None, None),
    "large": ((2, 3), 33, 17, 1000.0, None, None),
    "very negative": ((5,), 13, 11, -1000.0, None, 10),
    "cap and padding": ((2, 1, 3), 33, 70, 1.0, 2.0, 67),
}


def make_projection(layer, seed=0):
    leading, hidden, vocab, size, softcap, num_valid = PROJECTIONS[layer]
    x, table = random_arrays(seed, (*leading, hidden), (vocab, hidden))
    if size < 0:
        x, table = -np.abs(x), np.abs(table)
    return (x * abs(size), table / hidden**0.5), dict(softcap=softcap, num_valid=num_valid)


def make_tied(seed=0):
    """Ids with repetitions, and a table."""
    tokens = np.array([[3, 0, 3, 12], [3, 5, 1, 0]], np.int32)
    return tokens, random_arrays(seed, (13, 33))[0] / 33**0.5


def check_unembed(jax_fn, torch_ref, dtype, layer):
    """What every parity test of unembed and its planted faults call."""
    inputs, options = make_projection(layer)
    return assert_parity(
        partial(jax_fn, **options),
        partial(torch_ref.unembed, **options),
        inputs,
        dtypes=[dtype],
        # Nothing is rounded to 16 bits on the way; the cotangents of the products are.
        roundings=0,
    )


def check_tied(jax_fn, torch_ref, dtype):
    """What the parity test of the tied table and its planted faults call."""

    def torch_tied(tokens, table):
        return torch_ref.unembed(torch_ref.embed(tokens, table), table)

    # The gradient of the table is the sum of two that were rounded each.
    return assert_parity(jax_fn, torch_tied, make_tied(), dtypes=[dtype], roundings=1)


def tied(tokens, table):
    return unembed(embed(tokens, table), table)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", FLOATS)
def test_embed_parity(dtype, torch_ref):
    tokens, table = make_tied()
    # A lookup is exact; only sums of gradients round.
    report = assert_parity(
        embed, torch_ref.embed, (tokens, table), dtypes=[dtype], roundings=0, share_equal=1.0
    )
    assert report.judgements[0].jax.max_abs_error == 0.0


@pytest.mark.torch
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [(layer, dtype) for layer in ("large", "cap and padding") for dtype in FLOATS]
    + [("no leading axis", "float16"), ("ones", "bfloat16"), ("very negative", "float32")],
)
def test_unembed_parity(layer, dtype, torch_ref):
    check_unembed(unembed, torch_ref, dtype, layer)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", FLOATS)
def test_tied_parity(dtype, torch_ref):
    check_tied(tied, torch_ref, dtype)


def larger(x, table, **options):
    return unembed(x, table, **options) * 1.01


def leaking(x, table, *, num_valid, **options):
    return unembed(x, table, num_valid=num_valid + 1, **options)


def uncapped(x, table, *, softcap, **options):
    return unembed(x, table, **options)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [(fault, dtype) for fault in ("x1.01", "one masked column leaks") for dtype in FLOATS]
    + [("cap dropped", "float32")],
)
def test_planted_fault_is_caught(fault, dtype, torch_ref):
    wrong = PLANTED_FAULTS[fault]
    with pytest.raises(AssertionError, match="FAIL .*output"):
        check_unembed(wrong, torch_ref, dtype, "cap and padding")


PLANTED_FAULTS = {"x1.01": larger, "one masked column leaks": leaking, "cap dropped": uncapped}


def lookup_lost(tokens, table):
    return unembed(embed(tokens, lax.stop_gradient(table)), table)


def projection_lost(tokens, table):
    return unembed(embed(tokens, table), lax.stop_gradient(table))


def separate_head(tokens, table):
    return unembed(embed(tokens, table), jnp.roll(table, 1, axis=0))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [(wrong, dtype) for wrong in (lookup_lost, projection_lost) for dtype in FLOATS]
    + [(separate_head, "float32")],
)
def test_a_lost_tie_is_caught(wrong, dtype, torch_ref):
    with pytest.raises(AssertionError, match="FAIL .*gradient of input 1"):
        check_tied(wrong, torch_ref, dtype)


# Lookup ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), "float32"), ((1,), "bfloat16"), ((7,), "float64"), ((2, 1, 3), "float16")],
    ids=str,
)
def test_a_lookup_is_exact(shape, dtype, x64):
    (table,) = random_arrays(0, (11, 5))
    table = table.astype(dtype)
    tokens = np.random.default_rng(1).integers(0, 11, shape)
    tokens, expected = jnp.asarray(tokens), table[tokens]
    assert_same_bits(embed(tokens, jnp.asarray(table)), expected)
    assert_same_bits(jax.jit(embed)(tokens, table), expected)


@pytest.mark.parametrize("wide_types", [False, True], ids=["32 bits", "64 bits"])
def test_ids_of_every_integer_dtype(wide_types):
    table = np.arange(600, dtype=np.float32).reshape(300, 2)
    with jax.enable_x64(wide_types):
        for dtype in INTEGERS:
            tokens = jnp.asarray(np.array([0, 5, 127], dtype))
            assert_same_bits(embed(tokens, jnp.asarray(table)), table[[0, 5, 127]])
            assert_same_bits(jax.jit(embed)(tokens, table), table[[0, 5, 127]])


@pytest.mark.parametrize("V", [7, 1000])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
def test_gradient_of_a_lookup_against_float64(dtype, V, x64):
    """More tokens than rows, and fewer; some of them occur often, some rows never."""
    tokens = np.random.default_rng(0).integers(0, 7, (5, 33)) * (V // 7)
    table, dy = (a.astype(dtype) for a in random_arrays(1, (V, 5), (5, 33, 5)))

    @jax.jit
    def gradient_of_table(tokens, table, dy):
        return jax.vjp(partial(embed, tokens), table)[1](dy)[0]

    gradient = gradient_of_table(tokens, table, dy)
    expected = np.zeros((V, 5))
    np.add.at(expected, tokens, dy.astype(np.float64))
    assert gradient.dtype == dtype
    assert not np.any(np.asarray(gradient)[np.setdiff1d(np.arange(V), tokens)])
    # A sum of about 24 standard normal numbers a row.
    assert_matches_float64(gradient, expected, reduction_length=165, scale=(165 / 7) ** 0.5)


@pytest.mark.parametrize("dtype", FLOAT16S)
def test_gradient_of_a_frequent_id_loses_nothing(dtype):
    """4096 ones: a 16-bit sum would stop at 256 (bfloat16) or 2048 (float16)."""
    tokens, table = jnp.zeros(4096, jnp.int32), jnp.ones((2, 3), dtype)
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(embed(tokens, table).astype("f4"))))(table)
    assert_same_bits(gradient, np.array([[4096] * 3, [0] * 3], dtype))


@pytest.mark.parametrize("dtype", FLOAT16S)
def test_gradient_of_few_ids_makes_no_float32_table(dtype):
    V, D = 20_000, 64
    tokens = jnp.array([[5, -1, 5], [V, 19_999, 5]])
    table, dy = jnp.zeros((V, D), dtype), jnp.ones((2, 3, D), dtype)
    gradient = jax.jit(lambda tokens, table, dy: jax.vjp(partial(embed, tokens), table)[1](dy)[0])
    assert_same_bits(
        gradient(tokens, table, dy),
        np.zeros((V, D), dtype)
        + np.array([3 * (v == 5) + (v == V - 1) for v in range(V)], dtype)[:, None],
    )
    memory = gradient.lower(tokens, table, dy).compile().memory_analysis()
    assert memory.temp_size_in_bytes < V * D


def test_lookup_and_cast_touch_no_whole_table():
    """Two rows of a float32 table in bfloat16: nothing of the size [V D] is made."""
    jaxpr = jax.make_jaxpr(lambda tokens, table: embed(tokens, table).astype(jnp.bfloat16))(
        jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((1000, 8), jnp.float32)
    )
    shapes = [variable.aval.shape for e in equations(jaxpr) for variable in e.outvars]
    assert shapes and (1000, 8) not in shapes


# Ids out of range --------------------------------------------------------------------------------

TABLE = np.arange(16, dtype=np.float32).reshape(8, 2)
BAD_IDS = {
    "V": np.array([2, 8], np.int32),
    "far above": np.array([2, 100], np.int32),
    "negative": np.array([2, -1], np.int32),
    "-V": np.array([2, -8], np.int32),
    "least int32": np.array([2, -(2**31)], np.int32),
    "int8": np.array([2, -1], np.int8),
    "uint8": np.array([2, 255], np.uint8),
    "uint32": np.array([2, 2**32 - 1], np.uint32),
    # Numbers that are 1 modulo 2^32, and negative ones beyond 32 bits.
    "int64": np.array([2, 2**32 + 1], np.int64),
    "least int64": np.array([2, -(2**63) + 1], np.int64),
    "uint64": np.array([2, 2**63 + 1], np.uint64),
}


def transformed(function):
    """function(tokens, table) for tokens [B], under each transformation."""
    return {
        "jit": jax.jit(function),
        "vmap": jax.jit(jax.vmap(function, in_axes=(0, None))),
        "scan": jax.jit(
            lambda tokens, table: lax.scan(
                lambda carry, token: (carry, function(token, table)), 0, tokens
            )[1]
        ),
        "remat": jax.jit(jax.checkpoint(function)),
    }


@pytest.mark.parametrize("name", BAD_IDS)
def test_a_known_bad_id_is_refused(name):
    # Whether or not 64-bit types are on: nothing wraps around before it is looked at.
    for wide_types in (False, True):
        with jax.enable_x64(wide_types), pytest.raises(IndexError, match=r"position=\(1,\), V=8"):
            embed.__wrapped__(BAD_IDS[name], TABLE)


@pytest.mark.parametrize("token", [-1, 8])
def test_a_known_bad_id_without_axes_is_refused(token):
    with pytest.raises(IndexError, match=rf"tokens={token}, position=\(\), V=8"):
        embed(jnp.asarray(token), jnp.asarray(TABLE))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in BAD_IDS]
    + [(name, dtype) for name in ("negative", "int64") for dtype in FLOAT16S],
)
def test_a_traced_bad_id_gives_nan_and_no_gradient(name, dtype, x64):
    tokens, table = jnp.asarray(BAD_IDS[name]), jnp.asarray(TABLE, dtype)
    assert tokens.dtype == BAD_IDS[name].dtype

    def value_and_gradient(tokens, table):
        y, pull_back = jax.vjp(partial(embed, tokens), table)
        return y, *pull_back(jnp.ones_like(y))

    y, gradient = jax.jit(value_and_gradient)(tokens, table)
    assert_same_bits(y, np.array([[4, 5], [np.nan, np.nan]], dtype))
    expected = np.zeros((8, 2), dtype)
    expected[2] = 1
    assert_same_bits(gradient, expected)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [("jit", "bfloat16"), ("vmap", "float16"), ("scan", "bfloat16"), ("remat", "float32")],
)
def test_bad_ids_under_every_transformation(way, dtype):
    tokens = jnp.array([2, 8, -1, 100, 0])
    table = jnp.asarray(TABLE, dtype)
    y = transformed(embed)[way](tokens, table)
    nan = [np.nan, np.nan]
    assert_same_bits(y, np.array([[4, 5], nan, nan, nan, [0, 1]], dtype))
    gradient = jax.jit(
        jax.grad(lambda table: jnp.nansum(transformed(embed)[way](tokens, table).astype("f4")))
    )(table)
    expected = np.zeros((8, 2), dtype)
    expected[[0, 2]] = 1
    assert_same_bits(gradient, expected)


@pytest.mark.parametrize("way", transformed(embed))
def test_checkify_reports_a_traced_bad_id(way):
    checked = checkify.checkify(transformed(embed)[way])
    error, _ = checked(jnp.array([2, 0]), TABLE)
    error.throw()
    error, y = checked(jnp.array([2, 9]), TABLE)
    with pytest.raises(
        checkify.JaxRuntimeError, match=r"embed: tokens must lie in \[0, 8\); got 9"
    ):
        error.throw()
    assert np.isnan(y[1]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkify_reports_a_bad_id_in_a_gradient(dtype):
    def loss(table, tokens):
        return jnp.sum(embed(tokens, table).astype(jnp.float32))

    checked = checkify.checkify(jax.jit(jax.grad(loss)))
    error, gradient = checked(jnp.asarray(TABLE, dtype), jnp.array([2, -3]))
    with pytest.raises(checkify.JaxRuntimeError, match="embed: tokens must lie in .* got -3"):
        error.throw()
    assert np.count_nonzero(np.asarray(gradient, np.float32)) == 2


def test_a_bad_id_reaches_the_logits():
    logits = jax.jit(partial(tied))(jnp.array([1, 8]), TABLE)
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()


# Projection --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [("cap and padding", dtype) for dtype in (*FLOATS, "float64")]
    + [("large", "bfloat16"), ("very negative", "float16")],
)
def test_unembed_against_float64(layer, dtype):
    inputs, options = make_projection(layer)
    softcap, num_valid = options["softcap"], options["num_valid"]
    with jax.enable_x64(dtype == "float64"):
        x, table = (jnp.asarray(a, dtype) for a in inputs)
        logits_dtype = "float64" if dtype == "float64" else "float32"
        dy = jnp.asarray(random_arrays(1, (*x.shape[:-1], len(table)))[0], logits_dtype)
        # So that rounding the cotangents to 16 bits changes nothing.
        dy = dy.astype(dtype).astype(logits_dtype)

        @jax.jit
        def value_and_gradients(x, table, dy):
            y, pull_back = jax.vjp(partial(unembed, **options), x, table)
            return y, *pull_back(dy)

        results = value_and_gradients(x, table, dy)
        assert [r.dtype.name for r in results] == [logits_dtype, dtype, dtype]
        x, table, dy = (np.asarray(a, np.float64) for a in (x, table, dy))
        rows = x.reshape(-1, x.shape[-1])
        plain = rows @ table.T
        logits, slope = plain, np.ones_like(plain)
        if softcap is not None:
            tanh = np.tanh(plain / softcap)
            logits, slope = softcap * tanh, 1 - tanh**2
        valid = np.arange(len(table)) < (num_valid or len(table))
        logits = np.where(valid, logits, -np.inf)
        d_plain = dy.reshape(plain.shape) * slope * valid
        references = logits, d_plain @ table, d_plain.T @ rows
        for index, (result, reference) in enumerate(zip(results, references, strict=True)):
            assert_matches_float64(
                result,
                reference.reshape(result.shape),
                reduction_length=max(*table.shape, len(rows)),
                roundings=0 if index == 0 else 1,
            )


def test_gradient_of_a_tied_table_sums_both_uses():
    table = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    tokens = jnp.array([0])
    both = jax.grad(lambda table: tied(tokens, table).sum())(table)
    np.testing.assert_array_equal(both, [[3, 2], [1, 0], [1, 0]])
    lookup = jax.grad(lambda rows: unembed(embed(tokens, rows), table).sum())(table)
    np.testing.assert_array_equal(lookup, [[2, 2], [0, 0], [0, 0]])


@pytest.mark.parametrize("dtype", FLOATS)
def test_padding_rows_are_never_counted(dtype):
    """-inf logits, no gradient to or from the padding, and the valid ones keep their bits."""
    x, table = (jnp.asarray(a, dtype) for a in random_arrays(0, (3, 7), (10, 7)))
    project = jax.jit(unembed, static_argnames=("num_valid", "softcap"))
    plain, masked = project(x, table), project(x, table, num_valid=8)
    assert_same_bits(np.asarray(masked)[:, :8], np.asarray(plain)[:, :8])
    assert np.isneginf(np.asarray(masked)[:, 8:]).all()

    def loss(x, table, num_valid):
        return jnp.sum(jax.nn.logsumexp(unembed(x, table, num_valid=num_valid), axis=-1))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    dx, dtable = gradients(x, table, 8)
    short_dx, short_dtable = gradients(x, table[:8], None)
    assert not np.asarray(dtable, np.float32)[8:].any()
    for result, reference in ((dx, short_dx), (dtable[:8], short_dtable)):
        assert_matches_float64(
            result, np.asarray(reference, np.float64), reduction_length=10, roundings=2
        )


def test_the_cap_saturates_without_nan():
    x, table = jnp.array([[3e38], [-3e38], [0.0]]), jnp.ones((2, 1))

    @jax.jit
    def value_and_gradients(x, table):
        y, pull_back = jax.vjp(partial(unembed, softcap=30.0), x, table)
        return y, *pull_back(jnp.ones_like(y))

    y, dx, dtable = value_and_gradients(x, table)
    np.testing.assert_array_equal(y, [[30, 30], [-30, -30], [0, 0]])
    np.testing.assert_array_equal(dx, [[0], [0], [2]])
    np.testing.assert_array_equal(dtable, [[0], [0]])


def test_derivatives_of_all_orders_and_modes(x64):
    """Through lookup, projection and cap at once."""
    tokens, table = jnp.array([2, 0, 2]), jnp.asarray(random_arrays(0, (4, 3))[0])
    assert_derivatives(lambda table: unembed(embed(tokens, table), table, softcap=2.0), table)


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
@pytest.mark.parametrize("table_dtype", [*FLOATS, "float64"])
def test_dtypes_of_logits_rows_and_gradients(dtype, table_dtype, x64):
    def value_and_gradients(x, table):
        y, pull_back = jax.vjp(unembed, x, table)
        return y, *pull_back(y)

    x, table = jax.ShapeDtypeStruct((2, 3), dtype), jax.ShapeDtypeStruct((5, 3), table_dtype)
    y, dx, dtable = jax.eval_shape(value_and_gradients, x, table)
    assert y.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
    assert (dx.dtype, dtable.dtype) == (x.dtype, table.dtype)
    rows = jax.eval_shape(embed, jax.ShapeDtypeStruct((4,), jnp.int64), table)
    assert (rows.dtype, rows.shape) == (table.dtype, (4, 3))


@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_of_the_cap_keeps_the_logits_only(dtype):
    kept = jax.eval_shape(
        lambda x, table: jax.vjp(partial(unembed, softcap=3.0, num_valid=10), x, table)[1],
        jax.ShapeDtypeStruct((3, 5, 8), dtype),
        jax.ShapeDtypeStruct((11, 8), dtype),
    )
    described = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(kept))
    assert described == [((3, 5, 8), dtype), ((3, 5, 11), "float32"), ((11, 8), dtype)]


@pytest.mark.parametrize(
    ("table_spec", "dtype"),
    [(("model",), "bfloat16"), ((None, "model"), "float32")],
    ids=["table by rows", "table by columns"],
)
def test_sharded_tied_table_equals_unsharded(table_spec, dtype):
    """Two batch shapes in turn, tokens over one mesh axis and the table over the other."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    table = jnp.asarray(random_arrays(0, (12, 8))[0] / 8**0.5, dtype)
    sharded_table = jax.device_put(table, NamedSharding(mesh, PartitionSpec(*table_spec)))

    @jax.jit
    def loss_and_gradient(tokens, table):
        def loss(table):
            logits = tied(tokens, table)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

        return jax.value_and_grad(loss)(table)

    for batch in (2, 4):
        tokens = jnp.asarray(np.random.default_rng(batch).integers(0, 12, (batch, 3)))
        sharded_tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        results = loss_and_gradient(sharded_tokens, sharded_table)
        expected = loss_and_gradient(tokens, table)
        assert np.isfinite(np.asarray(results[1], np.float32)).all()
        for result, reference in zip(results, expected, strict=True):
            # Sums in another order; the gradient adds two products that were rounded each.
            assert_matches_float64(
                result, np.asarray(reference, np.float64), reduction_length=96, roundings=3
            )


def test_a_donated_tied_table_is_trained():
    def loss(table, tokens):
        return jnp.mean(jax.nn.logsumexp(tied(tokens, table), axis=-1))

    @partial(jax.jit, donate_argnums=0)
    def step(table, tokens):
        value, gradient = jax.value_and_grad(loss)(table, tokens)
        return table - 0.5 * gradient, value

    tokens, table = make_tied()
    table = jnp.asarray(table, jnp.float32)
    losses = []
    for _ in range(3):
        table, value = step(table, tokens)
        losses.append(float(value))
    assert losses[0] > losses[1] > losses[2]


# Resizing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [("mean", dtype) for dtype in (*FLOATS, "float64")]
    + [("normal", "float16"), ("normal", "float64"), ("zeros", "bfloat16")],
)
def test_growing_keeps_old_rows_and_fills_new_ones(fill, dtype):
    with jax.enable_x64(dtype == "float64"):
        table = random_arrays(0, (7, 5))[0].astype(dtype)
        key = jax.random.key(0) if fill == "normal" else None
        grow = jax.jit(resize_embedding, static_argnums=1, static_argnames="fill")
        grown = np.asarray(grow(table, 12, fill=fill, key=key))
        assert_same_bits(grown[:7], table)
        assert grown.shape == (12, 5)
        if fill == "zeros":
            assert not grown[7:].any()
        if fill == "mean":
            wide = table.astype(np.float64)
            assert_matches_float64(
                grown[7:], np.tile(wide.mean(axis=0), (5, 1)), reduction_length=7, scale=1.0
            )
            assert_same_bits(grown[8:], np.tile(grown[7], (4, 1)))
        if fill == "normal":
            assert np.unique(grown[7:].astype(np.float64)).size > 20


def test_mean_is_the_default_fill():
    table = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    np.testing.assert_array_equal(resize_embedding(table, 3), [[1, 2], [3, 6], [2, 4]])


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_normal_rows_have_the_deviation_of_the_table(size):
    """Within six standard errors of mean and variance of 64000 normal numbers (two in 10^9)."""
    table = jnp.asarray(size * random_arrays(0, (50, 64))[0], jnp.float32)
    rows = resize_embedding(table, 1050, fill="normal", key=jax.random.key(1))[50:]
    rows = np.asarray(rows, np.float64)
    deviation = np.sqrt(np.mean(np.square(np.asarray(table, np.float64))))
    count = rows.size
    assert abs(rows.mean()) < 6 * deviation / count**0.5
    assert abs(rows.var() / deviation**2 - 1) < 6 * (2 / count) ** 0.5
    # A normal variable is within one deviation with the chance 0.6827.
    within = np.mean(np.abs(rows) < deviation)
    assert abs(within - 0.6827) < 6 * (0.6827 * 0.3173 / count) ** 0.5


def test_normal_rows_follow_the_key():
    table = jnp.ones((2, 3))
    grow = partial(resize_embedding, table, 4, fill="normal")
    first = grow(key=jax.random.key(0))
    assert_same_bits(grow(key=jax.random.key(0)), first)
    assert_same_bits(grow(key=jax.random.PRNGKey(0)), first)
    assert not np.any(np.asarray(grow(key=jax.random.key(1)))[2:] == np.asarray(first)[2:])


@pytest.mark.parametrize("dtype", FLOATS)
def test_shrinking_cuts_rows_off(dtype):
    table = random_arrays(0, (7, 5))[0].astype(dtype)
    assert_same_bits(resize_embedding(jnp.asarray(table), 1, allow_shrink=True), table[:1])
    assert_same_bits(resize_embedding(jnp.asarray(table), 7), table)


def test_growing_leaves_old_ids_alone():
    """Tied before, tied after: one array, the same rows, the same logits for the old ids."""
    tokens, table = make_tied()
    table = jnp.asarray(table, jnp.float32)
    grown = resize_embedding(table, 20)
    assert_same_bits(embed(jnp.asarray(tokens), grown), embed(jnp.asarray(tokens), table))
    before, after = tied(jnp.asarray(tokens), table), tied(jnp.asarray(tokens), grown)
    assert_matches_float64(after[..., :13], np.asarray(before, np.float64), reduction_length=33)


# Properties --------------------------------------------------------------------------------------

compiled_unembed = jax.jit(unembed, static_argnames=("softcap", "num_valid"))


@given(
    st.lists(st.integers(-3, 9), min_size=5, max_size=5),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_a_lookup_is_the_product_with_one_hot_rows(tokens, dtype):
    """Where the id is in range; elsewhere NaN, for which no one-hot row exists."""
    table = random_arrays(0, (7, 3))[0].astype(dtype)
    y = np.asarray(jax.jit(embed)(np.asarray(tokens, np.int32), table), np.float64)
    one_hot = np.asarray(tokens)[:, None] == np.arange(7)
    expected = one_hot @ table.astype(np.float64)
    expected[~one_hot.any(axis=1)] = np.nan
    np.testing.assert_array_equal(y, expected)


@given(st.integers(0, 99), st.sampled_from(FLOATS))
def test_tied_logits_are_a_gram_matrix(seed, dtype):
    """unembed(embed(all ids)) = E E^T: symmetric, with squared lengths on the diagonal."""
    table = random_arrays(seed, (7, 5))[0].astype(dtype)
    gram = jax.jit(tied)(np.arange(7), table)
    assert gram.dtype == jnp.float32
    wide = table.astype(np.float64)
    assert_matches_float64(gram, wide @ wide.T, reduction_length=5)
    assert_matches_float64(gram, np.asarray(gram, np.float64).T, reduction_length=5)


@given(
    exponent=st.integers(-6, 6),
    dtype=st.sampled_from(FLOATS),
    num_valid=st.sampled_from([None, 1, 8]),
)
def test_unembed_is_exactly_homogeneous(exponent, dtype, num_valid):
    x, table = (a.astype(dtype) for a in random_arrays(0, (3, 7), (8, 7)))
    factor = np.asarray(2.0**exponent, dtype)
    plain = compiled_unembed(x, table, num_valid=num_valid)
    scaled = compiled_unembed((x * factor).astype(dtype), table, num_valid=num_valid)
    assert_same_bits(scaled, np.asarray(plain) * np.float32(factor))


@given(
    logits=st.lists(st.floats(-60000, 60000, width=16), min_size=8, max_size=8),
    cap=st.sampled_from([0.5, 30.0, 50000.0]),
    dtype=st.sampled_from(FLOATS),
)
def test_the_cap_bounds_and_keeps_the_order(logits, cap, dtype):
    table = np.asarray(logits, dtype)[:, None]
    one = np.ones((1,), dtype)
    plain = np.asarray(compiled_unembed(one, table), np.float64)
    np.testing.assert_array_equal(plain, table[:, 0].astype(np.float64))
    capped = np.asarray(compiled_unembed(one, table, softcap=cap), np.float64)
    assert np.all(np.abs(capped) <= cap)
    # Never larger than the logit itself (tanh z <= z), but for some units in the last place.
    assert np.all(np.abs(capped) <= np.abs(plain) * (1 + 16 * 2.0**-24))
    order = np.argsort(plain, kind="stable")
    assert np.all(np.diff(capped[order]) >= -cap * 16 * 2.0**-24)


def test_a_loop_does_not_convert_the_table_before_it():
    """As a loop of decode steps would: all of it to float32, to look a few rows of 16 bits up."""
    V, D = 20_000, 64

    def walk(tokens, table):
        def step(_, tokens):
            return jnp.argmax(embed(tokens, table).astype(jnp.float32), axis=-1).astype(jnp.int32)

        return lax.fori_loop(0, 4, step, tokens)

    arguments = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((V, D), jnp.bfloat16)
    memory = jax.jit(walk).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < V * D
