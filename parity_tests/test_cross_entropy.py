"""cross_entropy, linear_cross_entropy and next_token_labels: totals, counts, and one shift."""

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
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec

from jaxblock import cross_entropy, embed, linear_cross_entropy, next_token_labels, unembed
from jaxblock.parity import assert_parity

pytestmark = pytest.mark.usefixtures("shape_checks")

EVERYTHING = dict(num_valid=11, label_smoothing=0.1, z_loss=0.01)
# 2 x 5 rows of V = 13 columns, of which 11 are valid: ignored first, in the middle, not at the end.
LABELS = np.array([[-100, 3, 0, 10, 5], [3, -100, 7, 1, 3]], np.int32)
# Size of the logits, added to them.
LOGITS = {"initial": (1.0, 0.0), "large": (30.0, 0.0), "very negative": (1.0, -10000.0)}


def make_logits(name):
    size, shift = LOGITS[name]
    return random_arrays(0, (2, 5, 13))[0] * size + shift


def make_weights():
    weights = np.random.default_rng(2).uniform(0.5, 2.0, LABELS.shape)
    weights[1, 3] = 0.0
    return weights


def make_projection():
    """x [2 5 7] and a table [13 7]."""
    return random_arrays(0, (2, 5, 7), (13, 7))


def check_dense(jax_fn, torch_ref, dtype, logits="initial"):
    """What the parity tests of cross_entropy and their planted faults call."""

    def called(loss, logits, labels, weights):
        return loss(logits, labels, weights=weights, **EVERYTHING)

    return assert_parity(
        partial(called, jax_fn),
        partial(called, torch_ref.cross_entropy),
        (make_logits(logits), LABELS, make_weights()),
        dtypes=[dtype],
        # Nothing is rounded to 16 bits on the way.
        roundings=0,
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("logits", "dtype"),
    [("initial", "float16"), ("large", "bfloat16"), ("very negative", "float32")],
)
def test_cross_entropy_parity(logits, dtype, torch_ref):
    check_dense(cross_entropy, torch_ref, dtype, logits)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_cross_entropy_parity(dtype, torch_ref):
    def called(loss, x, table, labels, weights):
        return loss(x, table, labels, chunk_size=4, softcap=3.0, weights=weights, **EVERYTHING)

    assert_parity(
        partial(called, linear_cross_entropy),
        partial(called, torch_ref.linear_cross_entropy),
        (*make_projection(), LABELS, make_weights()),
        dtypes=[dtype],
        # The cotangents of the logits are the only values rounded on the way.
        roundings=0,
    )


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity_of_many_logits(dtype, torch_ref):
    """Enough of them for a CPU to sum in parts: dense, and 2 chunks of 12 rows x 8192."""
    labels = np.random.default_rng(3).integers(0, 8000, (2, 12)).astype(np.int32)
    labels[0, 3] = -100
    options = dict(num_valid=8000, label_smoothing=0.1, z_loss=0.01)
    x, table = random_arrays(4, (2, 12, 16), (8192, 16))

    def dense(loss, logits, labels):
        return loss(logits, labels, **options)

    def chunked(loss, x, table, labels):
        return loss(x, table, labels, chunk_size=12, **options)

    for called, name, inputs in (
        (dense, "cross_entropy", (x @ table.T, labels)),
        (chunked, "linear_cross_entropy", (x, table, labels)),
    ):
        ours, theirs = globals()[name], getattr(torch_ref, name)
        both = partial(called, ours), partial(called, theirs)
        assert_parity(*both, inputs, dtypes=[dtype], roundings=0)
        spoilt = [jnp.asarray(one, dtype) for one in inputs[:-1]]
        spoilt[0] = spoilt[0].at[1, 7, 3].set(jnp.nan)
        assert np.isnan(called(ours, *spoilt, jnp.asarray(labels))[0])


def smoothed_over_padding(logits, labels, *, num_valid, label_smoothing, **options):
    share = label_smoothing * num_valid / logits.shape[-1]
    return cross_entropy(logits, labels, num_valid=num_valid, label_smoothing=share, **options)


@pytest.mark.torch
def test_a_planted_fault_is_caught(torch_ref):
    with pytest.raises(AssertionError, match="FAIL .*output"):
        check_dense(smoothed_over_padding, torch_ref, "float32")


@pytest.mark.torch
def test_the_specification_is_torch_cross_entropy(torch_ref):
    """Its mean is total / count; also with the weights that torch knows, one a class."""
    import torch
    import torch.nn.functional as F

    logits, labels = torch.tensor(make_logits("large")), torch.tensor(LABELS).long()
    class_weights = torch.linspace(0.5, 2.0, 13, dtype=torch.float64)
    for smoothing in (0.0, 0.1):
        mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
        total, count = torch_ref.cross_entropy(logits, labels, label_smoothing=smoothing)
        torch.testing.assert_close(total / count, mean, rtol=1e-14, atol=0)
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=class_weights)
    weights = class_weights[labels.clamp(min=0)]
    total, count = torch_ref.cross_entropy(logits, labels, weights=weights)
    torch.testing.assert_close(total / count, mean, rtol=1e-14, atol=0)
    with pytest.raises(IndexError):
        torch_ref.cross_entropy(logits, labels, num_valid=10)


# Scenarios ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "nats"), [(32000, 10.3734912), (151936, 11.9312147)])
def test_bfloat16_zeros_give_the_logarithm_of_the_vocabulary(size, nats):
    """B85: not 10.375 or 11.9375, the bfloat16 numbers."""
    total, count = cross_entropy(jnp.zeros(size, jnp.bfloat16), jnp.array(7))
    assert (total.dtype, count.dtype, count) == (jnp.float32, jnp.float32, 1)
    np.testing.assert_allclose(total, nats, rtol=2**-23)


def test_means_over_micro_batches():
    """B90: losses 4 and 2, 2, 2: the mean is 2.5, not 3; and so for gradients."""
    # log(1 + e^-z) for z = -log(e^4 - 1) is 4.
    logits = jnp.array([[-np.log(np.expm1(loss)), 0.0] for loss in (4, 2, 2, 2)], jnp.float32)
    labels = jnp.zeros(4, jnp.int32)

    @jax.jit
    def losses(logits):
        loss = jax.value_and_grad(cross_entropy, has_aux=True)
        return [loss(logits[rows], labels[rows]) for rows in (slice(4), slice(1), slice(1, 4))]

    whole, a, b = losses(logits)
    (total, count), gradient = whole
    np.testing.assert_allclose(total / count, 2.5, rtol=2**-22)
    np.testing.assert_allclose(a[0][0] + b[0][0], total, rtol=2**-22)
    assert a[0][1] + b[0][1] == count == 4
    assert_same_bits(np.concatenate([a[1], b[1]]) / 4, np.asarray(gradient) / 4)


def test_the_loss_does_not_shift():
    """B92: logits that predict the next token for certain."""
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    logits = 100.0 * jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), 7)
    labels = next_token_labels(tokens)
    total, count = cross_entropy(logits, labels)
    assert (total, count) == (0, 4)
    assert cross_entropy(logits, next_token_labels(jnp.maximum(labels, 0)))[0] > 100


def tied_losses(labels):
    """The tied loss of x, table: dense, and in chunks that do not divide the tokens."""

    def hidden(x, table):
        return x + embed(jnp.maximum(labels, 0), table)

    def dense(x, table, weights):
        logits = unembed(hidden(x, table), table, softcap=3.0)
        return cross_entropy(logits, labels, weights=weights, **EVERYTHING)

    def linear(x, table, weights):
        return linear_cross_entropy(
            hidden(x, table),
            table,
            labels,
            weights=weights,
            chunk_size=4,
            softcap=3.0,
            **EVERYTHING,
        )

    return dense, linear


def test_chunks_equal_the_dense_loss(x64):
    """B94, in float64, where only the order of the sums differs; in float32: the parity test."""
    arguments = [jnp.asarray(a) for a in (*make_projection(), make_weights())]

    def value_and_gradients(function):
        def mean(*arguments):
            total, count = function(*arguments)
            return total / count

        return jax.value_and_grad(mean, argnums=(0, 1, 2))

    @jax.jit
    def both(*arguments):
        losses = tied_losses(jnp.asarray(LABELS))
        return [value_and_gradients(function)(*arguments) for function in losses]

    (value, gradients), (other_value, other_gradients) = both(*arguments)
    np.testing.assert_allclose(other_value, value, rtol=1e-14)
    for other, gradient in zip(other_gradients, gradients, strict=True):
        np.testing.assert_allclose(other, gradient, rtol=0, atol=1e-14 * np.abs(gradient).max())


def test_chunks_never_hold_all_logits():
    """64 tokens, V = 50, in chunks of 8: nothing of 64 x 50, forward or backward."""
    arguments = (
        jax.ShapeDtypeStruct((4, 16, 3), jnp.float32),
        jax.ShapeDtypeStruct((50, 3), jnp.float32),
        jax.ShapeDtypeStruct((4, 16), jnp.int32),
    )

    def sizes(loss):
        gradient = jax.grad(lambda *args: loss(*args)[0], argnums=(0, 1))
        for e in equations(jax.make_jaxpr(gradient)(*arguments)):
            yield from (variable.aval.size for variable in e.outvars)

    # The control: the dense loss does.
    assert max(sizes(lambda x, table, labels: cross_entropy(unembed(x, table), labels))) == 64 * 50
    assert max(sizes(partial(linear_cross_entropy, chunk_size=8))) == 8 * 50


@pytest.mark.parametrize(("dtype", "chunk_size"), [(jnp.float32, 128), (jnp.bfloat16, 256)])
def test_memory_is_the_tables_gradient_and_one_chunk(dtype, chunk_size):
    """SmolLM2's table. More tokens add two float32 arrays of the shape of x, and no logits."""
    V, D = 49152, 576

    def temporary(tokens):
        arguments = (
            jax.ShapeDtypeStruct((tokens, D), dtype),
            jax.ShapeDtypeStruct((V, D), dtype),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        )
        loss = lambda *args: linear_cross_entropy(*args, chunk_size=chunk_size)[0]  # noqa: E731
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return gradients.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    at_1024 = temporary(1024)
    assert at_1024 <= 4 * V * D + 40e6
    assert temporary(4096) - at_1024 <= 1.01 * 2 * 4 * D * (4096 - 1024)


@pytest.mark.parametrize("dtype", FLOAT16S)
def test_the_gradient_of_a_table_is_summed_in_float32(dtype):
    """1024 times a half in chunks of 4: a 16-bit sum (bfloat16) would stop at 256."""

    def loss(table):
        x, labels = jnp.ones((1028, 1), dtype), jnp.zeros(1028, jnp.int32)
        return linear_cross_entropy(x, table, labels, chunk_size=4)[0]

    gradient = jax.jit(jax.grad(loss))(jnp.zeros((2, 1), dtype))
    assert_same_bits(gradient, np.array([[-514], [514]], dtype))


def test_a_sharded_batch_stays_sharded():
    """No device collects the tokens of the others, and the loss is the same."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("data",))
    by_batch, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    x, table = (jnp.asarray(a, jnp.float32) for a in random_arrays(0, (8, 4, 16), (12, 16)))
    labels = jnp.asarray(np.random.default_rng(0).integers(0, 12, (8, 4)))

    def mean(x, table, labels):
        total, count = linear_cross_entropy(x, table, labels, chunk_size=8)
        return total / count

    sharded = jax.device_put((x, table, labels), (by_batch, whole, by_batch))
    step = jax.jit(jax.value_and_grad(mean, argnums=(0, 1))).lower(*sharded).compile()
    assert "all-gather" not in step.as_text()
    value, (dx, dtable) = step(*sharded)
    rows, table = (np.asarray(a, np.float64).reshape(-1, 16) for a in (x, table))
    logits, one_hot = rows @ table.T, np.eye(12)[np.asarray(labels).ravel()]
    log_sums = np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    dlogits = (np.exp(logits - log_sums) - one_hot) / 32
    mean_loss = np.mean(log_sums) - (logits * one_hot).sum() / 32
    assert_matches_float64(value, mean_loss, reduction_length=32)
    for result, reference in ((dx, dlogits @ table), (dtable, dlogits.T @ rows)):
        assert_matches_float64(result, reference.reshape(result.shape), reduction_length=32)


# What is not counted -----------------------------------------------------------------------------


def test_padding_and_ignored_rows_do_nothing():
    """NaN or infinite, they change no bit of the loss, and their gradient is exactly 0."""
    clean = jnp.asarray(make_logits("initial"), jnp.float32)
    weights = jnp.asarray(make_weights(), jnp.float32)
    uncounted = jnp.asarray(LABELS == -100) | (weights == 0)
    assert uncounted.sum() == 3

    @jax.jit
    def value_and_gradients(logits, weights):
        loss = partial(cross_entropy, labels=jnp.asarray(LABELS), **EVERYTHING)
        return jax.value_and_grad(
            lambda logits, weights: loss(logits, weights=weights), (0, 1), has_aux=True
        )(logits, weights)

    expected = value_and_gradients(clean, weights)
    assert not np.asarray(expected[1][0])[np.asarray(uncounted)].any()
    assert not np.asarray(expected[1][0])[..., 11:].any()
    assert np.asarray(expected[1][0])[~np.asarray(uncounted)][:, :11].all()
    for bad in (np.nan, np.inf, -np.inf):
        logits = clean.at[..., 11:].set(bad)
        logits = jnp.where(uncounted[..., None], bad, logits)
        jax.tree.map(assert_same_bits, value_and_gradients(logits, weights), expected)


def test_an_ignored_row_of_nan_does_not_reach_the_table():
    x, table = (jnp.asarray(a, jnp.float32) for a in make_projection())
    labels = jnp.asarray(LABELS)

    @jax.jit
    def value_and_gradients(x, labels):
        def loss(x, table):
            return linear_cross_entropy(x, table, labels, chunk_size=4)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, table)

    expected = value_and_gradients(x, labels)
    bad = jnp.where(jnp.expand_dims(labels == -100, -1), jnp.nan, x)
    jax.tree.map(assert_same_bits, value_and_gradients(bad, labels), expected)
    # All ignored: a total and a count of 0, and no gradient.
    of_nothing = value_and_gradients(x, jnp.full((2, 5), -100))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(of_nothing))


@pytest.mark.parametrize(("ignore_index", "dtype"), [(-1, "int32"), (0, "int8"), (250, "uint8")])
def test_any_label_can_be_the_ignored_one(ignore_index, dtype):
    logits = jnp.asarray(random_arrays(0, (3, 5))[0], jnp.float32)
    labels = jnp.array([ignore_index, 3, ignore_index], dtype)
    expected = np.log(np.exp(np.asarray(logits[1], np.float64)).sum()) - float(logits[1, 3])
    loss = partial(cross_entropy, ignore_index=ignore_index)
    for total, count in (loss(logits, labels), jax.jit(loss)(logits, labels)):
        np.testing.assert_allclose(total, expected, rtol=2**-21)
        assert count == 1


# Labels out of range -----------------------------------------------------------------------------


def losses_of_labels(way):
    """x [3 2], labels [3] -> total, count; dense or in chunks; of V = 5 columns 4 are valid."""
    table = jnp.asarray(random_arrays(0, (5, 2))[0], jnp.float32)

    def dense(x, labels):
        return cross_entropy(unembed(x, table), labels, num_valid=4)

    def linear(x, labels):
        return linear_cross_entropy(x, table, labels, num_valid=4, chunk_size=2)

    return dense if way == "dense" else linear


@pytest.mark.parametrize("way", ["dense", "linear"])
def test_a_bad_label(way):
    """Known: IndexError. Traced: NaN, in the gradient of its row too, and reported by checkify."""
    loss, x = losses_of_labels(way), jnp.ones((3, 2))
    with_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    checked = jax.jit(checkify.checkify(loss))
    for label in (-1, 4, 5, -101, 3):
        labels = jnp.array([0, -100, label])
        (total, count), gradient = with_gradient(x, labels)
        error, _ = checked(x, labels)
        assert count == 2
        if label == 3:
            error.throw()
            assert np.isfinite(total) and np.isfinite(gradient).all()
            continue
        assert np.isnan(total)
        np.testing.assert_array_equal(np.isnan(gradient).any(axis=1), [False, False, True])
        allowed = r"labels must lie in \[0, 4\) or be -100, which is ignored; got "
        with pytest.raises(IndexError, match=rf"{allowed}labels={label}, position=\(2,\), V=4"):
            loss(x, labels)
        with pytest.raises(checkify.JaxRuntimeError, match=f"{allowed}{label}"):
            error.throw()


# Derivatives, dtypes, transformations ------------------------------------------------------------


def test_derivatives_of_all_orders_and_modes(x64):
    labels = jnp.array([2, -100, 0])
    logits, weights = (jnp.asarray(a) for a in random_arrays(0, (3, 5), (3,)))
    options = dict(num_valid=4, label_smoothing=0.2, z_loss=0.1)
    assert_derivatives(
        lambda logits, weights: cross_entropy(logits, labels, weights=weights, **options)[0],
        logits,
        weights,
    )


def test_chunks_have_no_forward_mode():
    x, table = jnp.ones((3, 2)), jnp.ones((5, 2))
    loss = partial(linear_cross_entropy, labels=jnp.zeros(3, jnp.int32), chunk_size=2)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x, table), (x, table))


def test_vmap_gives_the_loss_of_each_row():
    logits = jnp.asarray(make_logits("initial"), jnp.float32)
    x, table = (jnp.asarray(a, jnp.float32) for a in make_projection())
    labels = jnp.asarray(LABELS)

    @jax.jit
    def each(logits, x, table, labels):
        dense = jax.vmap(cross_entropy)(logits, labels)
        linear = jax.vmap(partial(linear_cross_entropy, chunk_size=2), in_axes=(0, None, 0))
        totals, pull_back = jax.vjp(lambda table: linear(x, table, labels)[0], table)
        return dense, (totals, dense[1]), pull_back(jnp.array([1.0, 0.0]))[0]

    dense, linear, dtable = each(logits, x, table, labels)
    plain = np.asarray(logits, np.float64), np.asarray(x, np.float64) @ np.asarray(table).T
    for results, z in zip((dense, linear), plain, strict=True):
        log_sums = np.log(np.exp(z).sum(axis=-1))
        losses = log_sums - np.take_along_axis(z, np.maximum(LABELS, 0)[..., None], -1)[..., 0]
        np.testing.assert_allclose(results[0], (losses * (LABELS >= 0)).sum(axis=-1), rtol=2**-20)
        np.testing.assert_array_equal(results[1], [4, 4])
    # The first row's total, and nothing of the second's.
    p = np.exp(plain[1][0]) / np.exp(plain[1][0]).sum(axis=-1, keepdims=True)
    dlogits = (p - np.eye(13)[np.maximum(LABELS[0], 0)]) * (LABELS[0] >= 0)[:, None]
    assert_matches_float64(dtable, dlogits.T @ np.asarray(x[0], np.float64), reduction_length=13)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dtypes_of_results_and_gradients(dtype, x64):
    wide = "float64" if dtype == "float64" else "float32"
    for table_dtype in ("bfloat16", "float64"):

        def gradients(x, table, weights):
            logits = unembed(x, table)
            results, pull_back = jax.vjp(
                lambda *args: cross_entropy(args[0], jnp.asarray(LABELS), weights=args[1]),
                logits.astype(dtype),
                weights,
            )
            linear, linear_pull_back = jax.vjp(
                lambda *args: linear_cross_entropy(
                    *args[:2], jnp.asarray(LABELS), chunk_size=4, weights=args[2]
                ),
                x,
                table,
                weights,
            )
            return results, linear, pull_back(results), linear_pull_back(linear)

        results, linear, dense_gradients, linear_gradients = jax.eval_shape(
            gradients,
            jax.ShapeDtypeStruct((2, 5, 7), dtype),
            jax.ShapeDtypeStruct((13, 7), table_dtype),
            jax.ShapeDtypeStruct((2, 5), "float32"),
        )
        assert [r.dtype.name for r in (*results, *linear)] == [wide] * 4
        assert [g.dtype.name for g in dense_gradients] == [dtype, "float32"]
        assert [g.dtype.name for g in linear_gradients] == [dtype, table_dtype, "float32"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_backward_pass_keeps_the_logits_and_numbers_a_row(dtype):
    kept = jax.eval_shape(
        lambda logits: jax.vjp(
            lambda z: cross_entropy(z, jnp.asarray(LABELS), **EVERYTHING)[0], logits
        )[1],
        jax.ShapeDtypeStruct((2, 5, 13), dtype),
    )
    leaves = jax.tree.leaves(kept)
    assert [leaf.dtype.name for leaf in leaves if leaf.ndim == 3] == [dtype]
    assert all(leaf.size <= 10 for leaf in leaves if leaf.ndim < 3)


# Labels ------------------------------------------------------------------------------------------


def test_next_token_labels():
    tokens = np.array([[5, 6, 7, 8], [9, 2**31 - 1, 0, 1]])
    mask = np.array([[True, True, False, True], [False, True, True, True]])
    assert_same_bits(
        next_token_labels(jnp.asarray(tokens)),
        np.array([[6, 7, 8, -100], [2**31 - 1, 0, 1, -100]], np.int32),
    )
    expected = np.array([[6, -1, -1, -1], [-1, 0, 1, -1]], np.int32)
    labelled = jax.jit(partial(next_token_labels, ignore_index=-1))
    assert_same_bits(labelled(tokens, mask=mask), expected)
    assert_same_bits(next_token_labels(jnp.array([7], jnp.uint8)), np.array([-100], np.int32))
    for row in range(2):
        # A batch axis or none.
        assert_same_bits(labelled(tokens[row], mask=mask[row]), expected[row])


@pytest.mark.torch
def test_next_token_labels_parity(torch_ref):
    random = np.random.default_rng(0)
    tokens, mask = random.integers(0, 9, (2, 3, 6), np.int32), random.random((2, 3, 6)) < 0.7
    for inputs in (dict(tokens=tokens), dict(tokens=tokens, mask=mask)):
        assert_parity(next_token_labels, torch_ref.next_token_labels, inputs)


# Errors ------------------------------------------------------------------------------------------

Z, Y, TABLE = jnp.ones((2, 5)), jnp.array([0, 1]), jnp.ones((7, 5))
ERRORS = {
    "no axis": (
        lambda: cross_entropy(jnp.ones(()), Y),
        r"cross_entropy: logits must have at least one axis; got logits=",
    ),
    "integer logits": (lambda: cross_entropy(Z.astype(jnp.int32), Y), "logits must have one of"),
    "float labels": (
        lambda: cross_entropy(Z, Y.astype(jnp.float32)),
        "labels must have an integer dtype",
    ),
    "labels of another length": (
        lambda: cross_entropy(Z, jnp.array([0])),
        r"labels must have the shape of logits without its last axis; got labels=int32\[1\], "
        r"logits=float32\[2,5\]",
    ),
    "weights of another length": (
        lambda: cross_entropy(Z, Y, weights=jnp.ones(1)),
        r"weights must have the shape of labels; got weights=float32\[1\]",
    ),
    "a mask as weights": (
        lambda: cross_entropy(Z, Y, weights=Y == 0),
        "weights must have one of the dtypes",
    ),
    "too many valid": (lambda: cross_entropy(Z, Y, num_valid=6), "num_valid must not exceed V"),
    "smoothing": (
        lambda: cross_entropy(Z, Y, label_smoothing=1.5),
        "label_smoothing must be at most 1; got label_smoothing=1.5",
    ),
    "z_loss": (lambda: cross_entropy(Z, Y, z_loss=-1.0), "z_loss must be finite and at least 0"),
    "ignore_index": (
        lambda: cross_entropy(Z, Y, ignore_index=None),
        "ignore_index must be an integer of 32 bits; got ignore_index=None",
    ),
    "table": (
        lambda: linear_cross_entropy(Z, TABLE[:, :1], Y, chunk_size=2),
        r"linear_cross_entropy: embedding must be \[V D\] with D the last axis of x",
    ),
    "chunk_size": (
        lambda: linear_cross_entropy(Z, TABLE, Y, chunk_size=0),
        "chunk_size must be at least 1; got chunk_size=0",
    ),
    "softcap": (
        lambda: linear_cross_entropy(Z, TABLE, Y, chunk_size=2, softcap=0.0),
        "softcap must be finite and above 0",
    ),
    "labels that do not fit x": (
        lambda: linear_cross_entropy(Z, TABLE, Y[:1], chunk_size=2),
        "linear_cross_entropy: labels must have the shape of x without its last axis",
    ),
    "integer mask": (lambda: next_token_labels(Y, mask=Y), "mask must have the dtype bool"),
    "mask of another length": (
        lambda: next_token_labels(Y, mask=Y[:1] == 0),
        r"next_token_labels: mask must have the shape of tokens",
    ),
    "scalar token": (lambda: next_token_labels(Y[0]), "tokens must have at least one axis"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_must_hold(name, monkeypatch):
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    call, message = ERRORS[name]
    for form in (call, jax.jit(call)):
        with pytest.raises((ValueError, TypeError), match=message):
            form()
