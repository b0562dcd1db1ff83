"""Arrays with explicit sharding, as on a mesh of `jax.make_mesh`: the same numbers, laid out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import random_arrays
from jax.sharding import NamedSharding, PartitionSpec

import jaxblock
from jaxblock import DecoderConfig
from jaxblock.ops.sharding import along, axes, like

TOKENS = np.array([[3, 1, 7, 7, 0], [5, 5, 5, 2, 1], [0, 6, 4, 3, 2], [7, 1, 1, 1, 6]], np.int32)


@pytest.fixture(autouse=True)
def mesh():
    """Two by two devices, entered, as JAX asks for outside `jit` when nothing has come in yet."""
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    assert all(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)
    with jax.set_mesh(mesh):
        yield mesh


def put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def floats(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(random_arrays(seed, shape)[0], dtype)


def layout(array):
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


X, TABLE = floats(0, 4, 5, 6), floats(1, 8, 6)
GATE_UP, DOWN, SCALE = floats(2, 6, 2, 8), floats(3, 8, 6), floats(4, 6)
HEADS = [floats(seed, 4, 5, heads, 8) for seed, heads in ((5, 4), (6, 2), (7, 2))]
COS_SIN = jaxblock.ops.rotary_cos_sin(
    np.arange(20).reshape(4, 5), jaxblock.ops.rotary_frequencies(8, theta=10000.0)
)
EXPERTS = floats(8, 6, 4), floats(9, 4, 6, 2, 8), floats(10, 4, 8, 6)
ROWS, COLUMNS = ("data",), (None, None, "model")


# Each with its arrays, how they are cut, and how the result is.
FUNCTIONS = {
    "embed": (jaxblock.embed, [TOKENS, TABLE], [ROWS, ("model",)], ("data", None, None)),
    "embed, channels cut": (
        jaxblock.embed,
        [TOKENS, TABLE],
        [ROWS, (None, "model")],
        ("data", None, "model"),
    ),
    "embed, both cut by one axis": (
        jaxblock.embed,
        [TOKENS, TABLE],
        [ROWS, (None, "data")],
        ("data", None, None),
    ),
    "unembed": (jaxblock.unembed, [X, TABLE], [ROWS, ("model",)], ("data", None, "model")),
    "unembed, channels cut": (
        jaxblock.unembed,
        [X, TABLE],
        [("data", None, "model"), (None, "model")],
        ("data", None, None),
    ),
    "rms_norm": (
        partial(jaxblock.rms_norm, eps=1e-6),
        [X, SCALE],
        [("data", None, "model"), ("model",)],
        ("data", None, "model"),
    ),
    "swiglu": (
        jaxblock.swiglu,
        [X, GATE_UP, DOWN],
        [ROWS, COLUMNS, ("model",)],
        ("data", None, None),
    ),
    "moe_swiglu": (
        partial(jaxblock.ops.moe_swiglu, num_active=2, renormalize=True),
        [X, *EXPERTS],
        [ROWS, (), (None, None, None, "model"), (None, "model")],
        ("data", None, None),
    ),
    "attention": (
        partial(jaxblock.ops.attention, scale=0.3),
        HEADS,
        [("data", None, "model")] * 3,
        ("data", None, "model", None),
    ),
    "apply_rotary": (
        jaxblock.ops.apply_rotary,
        [HEADS[0], *COS_SIN],
        [("data", None, "model"), ROWS, ROWS],
        ("data", None, "model", None),
    ),
    "cross_entropy": (
        lambda logits, labels: jaxblock.cross_entropy(logits, labels)[0],
        [floats(11, 4, 5, 8), TOKENS],
        [("data", None, "model"), ROWS],
        (),
    ),
    "linear_cross_entropy": (
        lambda *arrays: jaxblock.linear_cross_entropy(*arrays, chunk_size=3)[0],
        [X, TABLE, TOKENS],
        [ROWS, ("model",), ROWS],
        (),
    ),
    "greedy": (jaxblock.ops.greedy, [floats(12, 4, 8)], [("data", "model")], ("data",)),
    "top_k": (
        lambda logits: jaxblock.ops.top_k(logits, jax.random.key(0), k=3),
        [floats(12, 4, 8)],
        [("data", "model")],
        ("data",),
    ),
    "next_token_labels": (
        jaxblock.ops.next_token_labels,
        [TOKENS[:, :4]],
        [("data", "model")],
        ("data", "model"),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_functions(mesh, name, jit):
    function, arrays, specs, expected = FUNCTIONS[name]
    sharded = [put(mesh, array, *spec) for array, spec in zip(arrays, specs, strict=True)]
    result = (jax.jit(function) if jit else function)(*sharded)
    assert layout(result) == expected
    np.testing.assert_allclose(result, function(*arrays), rtol=0, atol=1e-5)


# In bfloat16 those that have a form of their own for it.
DIFFERENTIABLE = [
    (name, dtype)
    for name in FUNCTIONS.keys()
    - {"greedy", "top_k", "next_token_labels", "embed, both cut by one axis"}
    for dtype in (jnp.float32, jnp.bfloat16)
    if dtype == jnp.float32 or name in ("embed", "swiglu", "attention", "linear_cross_entropy")
]


@pytest.mark.parametrize(("name", "dtype"), sorted(DIFFERENTIABLE, key=str))
def test_gradients(mesh, name, dtype):
    """Each is laid out as what it is the gradient of."""
    function, arrays, specs, _ = FUNCTIONS[name]
    cast = [jnp.asarray(a, dtype if jnp.asarray(a).dtype.kind == "f" else None) for a in arrays]
    sharded = [put(mesh, array, *spec) for array, spec in zip(cast, specs, strict=True)]
    wrt = [place for place, array in enumerate(cast) if jnp.issubdtype(array.dtype, jnp.floating)]

    def total(*arrays):
        y = function(*arrays).astype(jnp.float32)
        return jnp.sum(y * y)

    gradient = jax.jit(jax.grad(total, wrt))
    for place, ours, plain in zip(wrt, gradient(*sharded), gradient(*cast), strict=True):
        assert layout(ours) == layout(sharded[place])
        ours, plain = np.asarray(ours, np.float64), np.asarray(plain, np.float64)
        limit = 1e-5 if dtype == jnp.float32 else 0.02
        assert np.linalg.norm(ours - plain) <= limit * np.linalg.norm(plain)


def test_a_traced_bad_id_gives_nan(mesh):
    bad = put(mesh, np.where(TOKENS == 5, 8, TOKENS), "data")
    rows = jax.jit(jaxblock.embed)(bad, put(mesh, TABLE, "model"))
    np.testing.assert_array_equal(np.isnan(rows).all(-1), TOKENS == 5)
    with pytest.raises(IndexError, match=r"embed: tokens must lie in \[0, 8\).*got tokens=8"):
        jaxblock.embed(bad, TABLE)


def test_layouts(mesh):
    array = put(mesh, np.zeros((4, 2, 2)), ("data", "model"))
    assert like(array) == PartitionSpec(("data", "model"), None, None)
    assert along(*axes(array, but=2), (array, -1)) == PartitionSpec(("data", "model"), None)
    # An axis of the mesh that is taken cuts nothing more.
    assert along((array, 0), (array, 0)) == PartitionSpec(("data", "model"), None)
    assert along() == PartitionSpec()


# The decoder --------------------------------------------------------------------------------------

CUT = {
    "embedding": ("model",),
    "q": (None, None, "model"),
    "k": (None, None, "model"),
    "v": (None, None, "model"),
    "o": (None, "model"),
    "down": (None, "model"),
    "gate_up": (None, None, None, "model"),
}


CONFIG = DecoderConfig.from_hf(
    dict(
        model_type="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
)


@pytest.fixture
def both(mesh):
    """Parameters and tokens, plain and sharded."""
    params = jaxblock.init_params(CONFIG, jax.random.key(0), dtype=jnp.float32)
    sharded = jax.tree_util.tree_map_with_path(
        lambda path, leaf: put(mesh, leaf, *CUT.get(path[-1].key, ())), params
    )
    return (params, TOKENS), (sharded, put(mesh, TOKENS, "data"))


def assert_close(ours, plain, atol=1e-5):
    for one, other in zip(*map(jax.tree.leaves, (ours, plain)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def test_forward(both):
    run = jax.jit(jaxblock.activations, static_argnames="config")
    plain, ours = (run(params, tokens, CONFIG) for params, tokens in both)
    assert layout(ours.logits) == ("data", None, "model")
    assert layout(ours.blocks) == (None, "data", None, None)
    assert_close(ours, plain)
    assert_close(jaxblock.forward(*both[1], CONFIG), plain.logits)  # outside jit


def test_padding(mesh, both):
    mask = np.arange(5) >= np.arange(4)[:, None]
    run = jax.jit(jaxblock.forward, static_argnames="config")
    plain, ours = (
        run(params, tokens, CONFIG, mask=real)
        for (params, tokens), real in zip(both, (mask, put(mesh, mask, "data")), strict=True)
    )
    assert_close(np.asarray(ours)[mask], np.asarray(plain)[mask])


def test_decoding(both):
    def run(params, tokens):
        cache = jaxblock.init_cache(CONFIG, 4, 8, dtype=jnp.float32)
        _, cache = jaxblock.prefill(params, tokens, cache, CONFIG)
        return jaxblock.decode_step(params, tokens[:, 0], cache, CONFIG)

    plain, ours = (run(*arrays) for arrays in both)
    assert layout(ours[0]) == ("data", "model")
    assert_close(ours, plain)
    texts = [jaxblock.generate(*arrays, CONFIG, max_new_tokens=4) for arrays in both]
    np.testing.assert_array_equal(*texts)


def test_training(both):
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params, tokens):
        state = jaxblock.init_train_state(params, optimizer)
        return jaxblock.train_step(state, tokens, CONFIG, optimizer)

    (plain, _), (ours, _) = (step(*arrays) for arrays in both)
    assert_close(ours.params, plain.params)
    jax.tree.map(
        lambda one, other: np.testing.assert_equal(layout(one), layout(other)),
        ours.params,
        both[1][0],
    )
