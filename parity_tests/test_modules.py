"""The Flax modules: thin shells that give the bits of the functions, for Linen and NNX alike."""

import copy
import math
import pickle
import re
from functools import partial
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import FLOATS, assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxblock
import jaxblock.linen
import jaxblock.nnx

EPS = 1e-6
D, F, V = 7, 12, 11

graph_modes = pytest.mark.parametrize("graph", [True, False], ids=["graph mode", "tree mode"])


def nnx_mode(graph: bool):
    """Graph mode with its dynamic updates, or tree mode, for one `with` block."""
    return nnx.set_graph_mode(graph)


def draw(shape, dtype="float32", *, seed=0, size=1.0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(size * rng.standard_normal(shape), dtype)


def assert_same_trees(actual, expected):
    """The same structure, and leaves of the same bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(assert_same_bits, actual, expected)


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


# One dict, three forms.


class Case(NamedTuple):
    """A component in its three forms, its parameters and its input."""

    function: Any  # (params, x) -> y
    linen: nn.Module
    make_nnx: Any  # rngs -> module
    params: dict[str, tuple[int, ...]]  # name -> shape
    method: str = "__call__"


def norm_case(**options):
    return Case(
        lambda p, x: jaxblock.rms_norm(x, p["scale"], eps=EPS, **options),
        jaxblock.linen.RMSNorm(eps=EPS, **options),
        lambda rngs: jaxblock.nnx.RMSNorm(D, eps=EPS, **options, rngs=rngs),
        {"scale": (D,)},
    )


def feed_forward_case(function, activation):
    return Case(
        lambda p, x: function(x, p["gate_up"], p["down"]),
        jaxblock.linen.SwiGLU(F, activation=activation),
        lambda rngs: jaxblock.nnx.SwiGLU(D, F, activation=activation, rngs=rngs),
        {"gate_up": (D, 2, F), "down": (F, D)},
    )


def embedding_case(function, method, **options):
    return Case(
        function,
        jaxblock.linen.TiedEmbedding(V, D, **options),
        lambda rngs: jaxblock.nnx.TiedEmbedding(V, D, **options, rngs=rngs),
        {"embedding": (V, D)},
        method,
    )


def embed(p, tokens):
    return jaxblock.embed(tokens, p["embedding"])


def unembed(p, x, **options):
    return jaxblock.unembed(x, p["embedding"], **options)


geglu_exact = partial(jaxblock.geglu, approximate=False)
capped = {"softcap": 2.5, "num_valid": V - 1}
CASES = {
    "norm": norm_case(),
    "norm, llama": norm_case(cast="before_scale"),
    "norm, gemma": norm_case(scale_offset=1.0),
    "swiglu": feed_forward_case(jaxblock.swiglu, "silu"),
    "geglu": feed_forward_case(geglu_exact, "gelu"),
    "geglu, tanh": feed_forward_case(jaxblock.geglu, "gelu_tanh"),
    "embed": embedding_case(embed, "embed"),
    "call": embedding_case(embed, "__call__"),
    "unembed": embedding_case(unembed, "unembed"),
    "unembed, capped": embedding_case(partial(unembed, **capped), "unembed", **capped),
}


def forms(case):
    """The three forms of a component as functions of (params, x)."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: case.make_nnx(nnx.Rngs(0))))
    assert shapes(nnx.to_pure_dict(state)) == case.params

    def run_linen(params, x):
        return case.linen.apply({"params": params}, x, method=case.method)

    def run_nnx(params, x):
        return getattr(nnx.merge(graphdef, params), case.method)(x)

    return case.function, run_linen, run_nnx


def input_of(case, shape, dtype):
    """Tokens for a lookup, otherwise activations."""
    if "embedding" in case.params and case.method != "unembed":
        return jnp.asarray(np.random.default_rng(1).integers(V, size=shape[:-1]), "int32")
    return draw(shape, dtype, seed=1)


# (activations, parameters, shape of the input): no leading axis, a one, a prime, a batch.
SETTINGS = [
    ("float32", "float32", (5, D)),
    ("bfloat16", "float32", (2, 3, D)),
    ("bfloat16", "bfloat16", (1, D)),
    ("float16", "float16", (D,)),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_dict_gives_the_same_bits_in_all_three(name, setting):
    case = CASES[name]
    dtype, param_dtype, shape = setting
    params = {key: draw(s, param_dtype, size=0.5) for key, s in case.params.items()}
    x = input_of(case, shape, dtype)
    expected, *others = [jax.jit(form)(params, x) for form in forms(case)]
    assert np.any(np.asarray(expected, "float32"))
    for actual in others:
        assert_same_trees(actual, expected)


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=str)
@pytest.mark.parametrize("name", ["norm", "swiglu", "embed", "unembed, capped"])
def test_one_dict_gives_the_same_gradients_in_all_three(name, setting):
    case = CASES[name]
    dtype, param_dtype, shape = setting
    params = {key: draw(s, param_dtype, size=0.5) for key, s in case.params.items()}
    x = input_of(case, shape, dtype)

    def gradients(form):
        @partial(jax.jit, static_argnums=0)
        def run(argnums, params, x):
            def loss(params, x):
                y = form(params, x)
                y = jnp.where(jnp.isfinite(y), y, 0).astype("float32")
                return jnp.sum(y * draw(y.shape, seed=2))

            return jax.grad(loss, argnums)(params, x)

        return run((0,) if x.dtype == "int32" else (0, 1), params, x)

    expected, *others = [gradients(form) for form in forms(case)]
    for leaf in jax.tree.leaves(expected):
        assert np.any(np.asarray(leaf, "float32"))
    for actual in others:
        assert_same_trees(actual, expected)


def test_one_dict_gives_the_same_bits_in_float64():
    with jax.enable_x64(True):
        for name in ("norm", "swiglu", "unembed"):
            case = CASES[name]
            params = {key: draw(s, "float64") for key, s in case.params.items()}
            expected, *others = [jax.jit(f)(params, draw((3, D), "float64")) for f in forms(case)]
            assert expected.dtype == "float64"
            for actual in others:
                assert_same_trees(actual, expected)


@pytest.mark.parametrize("name", CASES)
@graph_modes
def test_the_dict_goes_in_and_out_of_nnx(name, graph):
    case = CASES[name]
    params = {key: draw(shape, seed=3) for key, shape in case.params.items()}
    with nnx_mode(graph):
        module = case.make_nnx(nnx.Rngs(0))
        nnx.update(module, params)
        assert_same_trees(nnx.to_pure_dict(nnx.state(module)), params)


# A stack of layers over the nested tree, scanned: bfloat16 activations beside float32 parameters.

L = 3


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.feed_forward_norm = jaxblock.nnx.RMSNorm(D, eps=EPS, rngs=rngs)
        self.feed_forward = jaxblock.nnx.SwiGLU(D, F, rngs=rngs)

    def __call__(self, x):
        return x + self.feed_forward(self.feed_forward_norm(x))


class NnxDecoder(jaxblock.nnx.TiedEmbedding):
    def __init__(self, rngs, **options):
        super().__init__(V, D, rngs=rngs, **options)
        self.final_norm = jaxblock.nnx.RMSNorm(D, eps=EPS, rngs=rngs)
        self.layers = nnx.split_rngs(splits=L)(nnx.vmap(NnxBlock))(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def scan(x, layer):
            return layer(x)

        return self.unembed(self.final_norm(scan(self.embed(tokens), self.layers)))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = jaxblock.linen.RMSNorm(eps=EPS, name="feed_forward_norm")(x)
        return x + jaxblock.linen.SwiGLU(F, name="feed_forward")(y), None


class LinenDecoder(jaxblock.linen.TiedEmbedding):
    def setup(self):
        super().setup()
        self.final_norm = jaxblock.linen.RMSNorm(eps=EPS)
        scanned = nn.scan(
            LinenBlock, length=L, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        self.layers = scanned()

    def __call__(self, tokens):
        x, _ = self.layers(self.embed(tokens), None)
        return self.unembed(self.final_norm(x))


def decoder(params, tokens, dtype):
    def layer(x, p):
        y = jaxblock.rms_norm(x, p["feed_forward_norm"]["scale"], eps=EPS)
        return x + jaxblock.swiglu(y, **p["feed_forward"]), None

    x = jaxblock.embed(tokens, params["embedding"]).astype(dtype)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = jaxblock.rms_norm(x, params["final_norm"]["scale"], eps=EPS)
    return jaxblock.unembed(x, params["embedding"])


TREE = {
    "embedding": (V, D),
    "final_norm": {"scale": (D,)},
    "layers": {
        "feed_forward_norm": {"scale": (L, D)},
        "feed_forward": {"gate_up": (L, D, 2, F), "down": (L, F, D)},
    },
}
TOKENS = np.array([[1, 4, 7], [2, 4, 9]], "int32")


@graph_modes
def test_one_nested_dict_drives_a_scanned_stack(graph, dtype="bfloat16"):
    with nnx_mode(graph):
        graphdef, state = nnx.split(nnx.eval_shape(lambda: NnxDecoder(nnx.Rngs(0), dtype=dtype)))
        linen = LinenDecoder(V, D, dtype=dtype)
        assert shapes(nnx.to_pure_dict(state)) == TREE
        assert shapes(jax.eval_shape(linen.init, jax.random.key(0), TOKENS)["params"]) == TREE
        params = jax.tree.map(
            lambda shape: draw(shape, size=0.5), TREE, is_leaf=lambda x: isinstance(x, tuple)
        )
        decoders = [
            lambda p: decoder(p, TOKENS, dtype),
            lambda p: linen.apply({"params": p}, TOKENS),
            lambda p: nnx.merge(graphdef, p)(TOKENS),
        ]

        def loss(run, params):
            logits = run(params)
            assert logits.dtype == "float32"  # reached without a carry-type error (B09)
            return jnp.sum(jax.nn.logsumexp(logits, axis=-1)), logits

        expected, *others = [
            jax.jit(jax.value_and_grad(partial(loss, run), has_aux=True))(params)
            for run in decoders
        ]
    assert shapes(expected[1]) == TREE
    for actual in others:
        assert_same_trees(actual, expected)


@graph_modes
def test_nnx_transforms_reach_the_parameters(graph):
    """nnx.jit, nnx.grad and nnx.vmap take the modules as they are."""
    x = draw((4, D))
    with nnx_mode(graph):
        module = jaxblock.nnx.SwiGLU(D, F, rngs=nnx.Rngs(0))
        params = nnx.to_pure_dict(nnx.state(module))
        expected = jaxblock.swiglu(x, **params)
        by_row = nnx.vmap(lambda module, x: module(x), in_axes=(None, 0))(module, x)
        np.testing.assert_allclose(by_row, expected, rtol=0, atol=matmul_bound(x, params))
        assert_same_trees(
            nnx.jit(lambda module, x: module(x))(module, x), jax.jit(jaxblock.swiglu)(x, **params)
        )
        gradient = nnx.to_pure_dict(nnx.state(nnx.grad(lambda m: jnp.sum(m(x)))(module)))
    assert_same_trees(gradient, jax.grad(lambda p: jnp.sum(jaxblock.swiglu(x, **p)))(params))


# dtype and param_dtype.


def nnx_and_linen(name, *sizes, **options):
    """The same component twice, as functions (params, x, method)."""
    linen_sizes = {"RMSNorm": (), "SwiGLU": sizes[1:], "TiedEmbedding": sizes}[name]
    linen = getattr(jaxblock.linen, name)(*linen_sizes, **options)
    make_nnx = getattr(jaxblock.nnx, name)
    abstract = nnx.eval_shape(lambda: make_nnx(*sizes, **options, rngs=nnx.Rngs(0)))
    graphdef, _ = nnx.split(abstract)

    def run_linen(params, x, method="__call__"):
        return linen.apply({"params": params}, x, method=method)

    def run_nnx(params, x, method="__call__"):
        return getattr(nnx.merge(graphdef, params), method)(x)

    return run_linen, run_nnx


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("dtype", [None, *FLOATS])
def test_dtype_is_the_dtype_of_the_computation(dtype, x_dtype):
    x = draw((3, D), x_dtype)
    used = dtype or x_dtype  # None follows the input; float32 parameters promote nothing
    scale, table = draw((D,)), draw((V, D))
    kernels = {"gate_up": draw((D, 2, F)), "down": draw((F, D))}
    for run in nnx_and_linen("RMSNorm", D, eps=EPS, dtype=dtype):
        assert_same_trees(
            run({"scale": scale}, x), jaxblock.rms_norm(x.astype(used), scale, eps=EPS)
        )
    for run in nnx_and_linen("SwiGLU", D, F, dtype=dtype):
        assert_same_trees(run(kernels, x), jaxblock.swiglu(x.astype(used), **kernels))
    for run in nnx_and_linen("TiedEmbedding", V, D, dtype=dtype):
        logits = run({"embedding": table}, x, "unembed")
        assert_same_trees(logits, jaxblock.unembed(x.astype(used), table))
        rows = run({"embedding": table.astype(x_dtype)}, TOKENS, "embed")
        assert_same_trees(rows, table.astype(x_dtype)[TOKENS].astype(used))


@pytest.mark.parametrize("param_dtype", FLOATS)
def test_param_dtype_is_the_dtype_of_the_parameters(param_dtype):
    sizes = {"RMSNorm": (D,), "SwiGLU": (D, F), "TiedEmbedding": (V, D)}
    for name in sizes:
        options = {"param_dtype": param_dtype} | ({"eps": EPS} if name == "RMSNorm" else {})
        made = partial(initial_values, name, *sizes[name], **options)
        for leaf in jax.tree.leaves(jax.eval_shape(made)):
            assert leaf.dtype == param_dtype


def test_embed_casts_rows_and_not_the_table():
    table = jnp.zeros((1000, D))
    for run in nnx_and_linen("TiedEmbedding", 1000, D, dtype="bfloat16"):
        lookup = partial(run, x=TOKENS, method="embed")
        jaxpr = str(jax.make_jaxpr(lookup)({"embedding": table}))
        assert "bf16[2,3,7]" in jaxpr
        assert "bf16[1000,7]" not in jaxpr


# Initial values.


def initial_values(name, *sizes, **options):
    """The parameters that NNX and Linen make, as two dicts."""
    linen_sizes = {"RMSNorm": (), "SwiGLU": sizes[1:], "TiedEmbedding": sizes}[name]
    linen = getattr(jaxblock.linen, name)(*linen_sizes, **options)
    x = TOKENS if name == "TiedEmbedding" else jnp.zeros((1, sizes[0]))
    module = getattr(jaxblock.nnx, name)(*sizes, **options, rngs=nnx.Rngs(0))
    return linen.init(jax.random.key(0), x)["params"], nnx.to_pure_dict(nnx.state(module))


def test_a_new_norm_starts_at_a_factor_of_one():
    x = draw((3, D))
    expected = jaxblock.rms_norm(x, jnp.ones(D), eps=EPS)
    for scale_offset, value in ((0.0, 1.0), (1.0, 0.0)):
        options = {"eps": EPS, "scale_offset": scale_offset}
        made = initial_values("RMSNorm", D, **options)
        for params, run in zip(made, nnx_and_linen("RMSNorm", D, **options), strict=True):
            np.testing.assert_array_equal(params["scale"], np.full(D, value))
            np.testing.assert_array_equal(run(params, x), expected)
        for params in initial_values(
            "RMSNorm", D, **options, scale_init=nn.initializers.constant(0.5)
        ):
            np.testing.assert_array_equal(params["scale"], np.full(D, 0.5))


def variance_deviation(kernel, fan_in):
    """|fan_in * mean square - 1| over what chance allows once in 10^9.

    A normal truncated at two deviations and scaled to a variance of 1 ends at 2 / 0.8796 = 2.274,
    so its squares lie in [0, 5.17]. Hoeffding: P(|mean of n squares - 1| >= t) is at most
    2 exp(-2 n t^2 / 5.17^2), which is 1e-9 at t = 5.17 sqrt(ln(2e9) / (2 n)).
    """
    allowed = 5.17 * math.sqrt(math.log(2e9) / (2 * kernel.size))
    return abs(fan_in * float(jnp.mean(kernel**2)) - 1) / allowed


def test_kernels_start_with_the_variance_of_their_fan_in():
    wide_D, wide_F = 64, 509
    for params in initial_values("SwiGLU", wide_D, wide_F):
        gate, up = params["gate_up"][:, 0], params["gate_up"][:, 1]
        assert variance_deviation(gate, wide_D) < 1
        assert variance_deviation(up, wide_D) < 1
        assert variance_deviation(params["down"], wide_F) < 1
        assert float(jnp.max(jnp.abs(gate))) <= 2.274 / math.sqrt(wide_D)
        # Control: with the axes as for a plain [in, out] kernel the fan-in would be 2D.
        naive = nn.initializers.lecun_normal()(jax.random.key(0), (wide_D, 2, wide_F))
        assert variance_deviation(naive, wide_D) > 1
    # The same numbers as Flax's own layers from the same key.
    table = jaxblock.nnx.TiedEmbedding(V, D, rngs=nnx.Rngs(5)).embedding[...]
    assert_same_trees(table, nnx.Embed(V, D, rngs=nnx.Rngs(5)).embedding[...])
    params, _ = initial_values("TiedEmbedding", V, D)
    flax_params = nn.Embed(V, D).init(jax.random.key(0), TOKENS)["params"]
    assert_same_trees(params, flax_params)


def test_initialisers_are_replaceable():
    def filled(value):
        return nn.initializers.constant(value)

    for params in initial_values("SwiGLU", D, F, gate_up_init=filled(2), down_init=filled(3)):
        assert_same_trees(
            params, {"gate_up": jnp.full((D, 2, F), 2.0), "down": jnp.full((F, D), 3.0)}
        )
    for params in initial_values("TiedEmbedding", V, D, embedding_init=filled(4)):
        assert_same_trees(params, {"embedding": jnp.full((V, D), 4.0)})


# Partitioning.

AXES = {
    "scale": (None,),
    "gate_up": (None, None, "model"),
    "down": ("model", None),
    "embedding": ("model", None),
}


def mesh_of(num_devices):
    return jax.make_mesh(
        (num_devices,), ("model",), (AxisType.Auto,), devices=jax.devices()[:num_devices]
    )


def partitioned_nnx(F=F, by="metadata"):
    """The modules with their partitioning given in either way that Flax has."""
    inits = {
        "scale": nn.initializers.ones,
        "gate_up": jaxblock.nnx.default_gate_up_init,
        "down": jaxblock.nnx.default_down_init,
        "embedding": jaxblock.nnx.default_embedding_init,
    }

    def options(*names):
        if by == "metadata":
            return {f"{name}_metadata": {"out_sharding": AXES[name]} for name in names}
        return {f"{name}_init": nnx.with_partitioning(inits[name], AXES[name]) for name in names}

    rngs = nnx.Rngs(0)
    return {
        "norm": jaxblock.nnx.RMSNorm(D, eps=EPS, rngs=rngs, **options("scale")),
        "feed_forward": jaxblock.nnx.SwiGLU(D, F, rngs=rngs, **options("gate_up", "down")),
        "table": jaxblock.nnx.TiedEmbedding(V + 1, D, rngs=rngs, **options("embedding")),
    }


def partitioned_linen(F=F):
    def boxed(init, name):
        return nn.with_partitioning(init, AXES[name])

    return {
        "norm": jaxblock.linen.RMSNorm(EPS, scale_init=boxed(nn.initializers.ones, "scale")),
        "feed_forward": jaxblock.linen.SwiGLU(
            F,
            gate_up_init=boxed(jaxblock.linen.default_gate_up_init, "gate_up"),
            down_init=boxed(jaxblock.linen.default_down_init, "down"),
        ),
        "table": jaxblock.linen.TiedEmbedding(
            V + 1, D, embedding_init=boxed(jaxblock.linen.default_embedding_init, "embedding")
        ),
    }


SPECS = {
    "norm": {"scale": P(None)},
    "feed_forward": {"gate_up": P(None, None, "model"), "down": P("model", None)},
    "table": {"embedding": P("model", None)},
}


def linen_variables(module, key=0):
    x = TOKENS if isinstance(module, jaxblock.linen.TiedEmbedding) else jnp.zeros((1, D))
    return module.init(jax.random.key(key), x)


@pytest.mark.parametrize("by", ["metadata", "initialiser"])
def test_nnx_partition_metadata(by):
    with jax.set_mesh(mesh_of(2)):
        modules = partitioned_nnx(by=by)
    for name, module in modules.items():
        assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(module))) == SPECS[name]
        for parameter, array in nnx.to_pure_dict(nnx.state(module)).items():
            assert array.sharding.spec == SPECS[name][parameter]
            assert len(array.addressable_shards) == 2


def test_linen_partition_metadata():
    mesh = mesh_of(2)
    for name, module in partitioned_linen().items():
        abstract = jax.eval_shape(partial(linen_variables, module))
        specs = nn.get_partition_spec(abstract)
        assert specs["params"] == SPECS[name]
        shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
        with jax.set_mesh(mesh):
            variables = jax.jit(partial(linen_variables, module), out_shardings=shardings)()
            boxed = variables["params"]
            for parameter, array in nn.unbox(boxed).items():
                assert array.sharding.spec == SPECS[name][parameter]
        # Boxed parameters are applied as they are, and carry the same numbers as plain ones.
        x = TOKENS if name == "table" else draw((2, D))
        assert_same_trees(
            module.apply({"params": boxed}, x), module.apply({"params": nn.unbox(boxed)}, x)
        )


def test_stacking_layers_names_the_new_axis():
    @nnx.split_rngs(splits=L)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack(rngs):
        metadata = {"out_sharding": AXES["gate_up"]}
        return jaxblock.nnx.SwiGLU(D, F, rngs=rngs, gate_up_metadata=metadata)

    mesh = jax.make_mesh(
        (1, 2), ("layers", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh), nnx_mode(True):
        stacked = nnx.eval_shape(lambda: stack(nnx.Rngs(0)))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(stacked)))
    assert specs["gate_up"] == P("layers", None, None, "model")
    assert stacked.gate_up.shape == (L, D, 2, F)


def gamma(length):
    """Relative error of a sum of `length` float32 products in any order (Higham, section 3.1)."""
    unit = length * 2.0**-24
    return unit / (1 - unit)


def swiglu_float64(x, gate_up, down):
    """SwiGLU in float64, and a bound on the error of a float32 one, element by element.

    Each product errs by at most gamma(length) times the product of the absolute values, whatever
    the order of the sum. |silu'| <= 1.1 carries the gate's error on; silu itself is given 4 units
    in the last place, 8 * 2^-24, and the elementwise product rounds once more.
    """
    x, gate_up, down = (np.asarray(a, "float64") for a in (x, gate_up, down))
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    gate_error, up_error = (gamma(x.shape[-1]) * (abs(x) @ abs(gate_up[:, i])) for i in (0, 1))
    silu = gate / (1 + np.exp(-gate))
    silu_error = 1.1 * gate_error + 8 * 2.0**-24 * (abs(silu) + gate_error)
    hidden = silu * up
    hidden_error = silu_error * (abs(up) + up_error) + abs(silu) * up_error
    hidden_error += 2.0**-24 * (abs(hidden) + hidden_error)
    error = hidden_error @ abs(down)
    error += gamma(down.shape[0]) * ((abs(hidden) + hidden_error) @ abs(down))
    return hidden @ down, error


def matmul_bound(x, params):
    """The largest difference that two float32 results of `swiglu` may have."""
    return 2 * float(np.max(swiglu_float64(x, **params)[1]))


def test_sharded_swiglu_equals_the_single_device_one(num_devices=2):
    """B18: F over two devices; every shard holds matching halves of gate and up."""
    x = draw((5, D))
    with jax.set_mesh(mesh_of(num_devices)):
        module = partitioned_nnx()["feed_forward"]
        y = nnx.jit(lambda module, x: module(x))(module, x)
    gate_up, down = module.gate_up[...], module.down[...]
    assert len(gate_up.addressable_shards) == num_devices
    expected, bound = swiglu_float64(x, gate_up, down)
    single = jaxblock.swiglu(x, jnp.asarray(np.asarray(gate_up)), jnp.asarray(np.asarray(down)))
    assert np.all(abs(np.asarray(single) - expected) <= bound)
    assert np.all(abs(np.asarray(y) - expected) <= bound)

    # A shard is a SwiGLU of its own, and the results of all of them add up.
    local = F // num_devices
    total = np.zeros_like(expected)
    halves = zip(gate_up.addressable_shards, down.addressable_shards, strict=True)
    for g, d in halves:
        channels = g.index[2]
        assert g.data.shape == (D, 2, local)
        assert d.index[0] == channels
        assert_same_trees(np.asarray(g.data), np.asarray(gate_up)[:, :, channels])
        total += swiglu_float64(x, g.data, d.data)[0]
    np.testing.assert_allclose(total, expected, rtol=1e-12)

    # Control: cut as one concatenated axis of 2F, the first devices hold gates only.
    concatenated = np.asarray(gate_up).reshape(D, 2 * F)
    total = np.zeros_like(expected)
    for i in range(num_devices):
        kernel = concatenated[:, 2 * local * i : 2 * local * (i + 1)].reshape(D, 2, local)
        total += swiglu_float64(x, kernel, np.asarray(down)[local * i : local * (i + 1)])[0]
    assert np.any(abs(total - expected) > bound)


def test_sharded_gradients_and_16_bit_equal_the_single_device_ones():
    x = draw((5, D), "bfloat16")
    modules = partitioned_linen()
    plain = nn.unbox(linen_variables(modules["feed_forward"]))["params"]
    mesh = mesh_of(2)
    sharded = jax.device_put(
        plain, {k: NamedSharding(mesh, spec) for k, spec in SPECS["feed_forward"].items()}
    )

    @jax.jit
    def loss_and_gradient(params, x):
        def loss(params):
            y = modules["feed_forward"].apply({"params": params}, x)
            return jnp.sum(y.astype("float32"))

        return jax.value_and_grad(loss)(params)

    _, expected = loss_and_gradient(plain, x)
    _, actual = loss_and_gradient(sharded, x)
    for name, leaf in actual.items():
        assert leaf.dtype == "float32"
        # One device rounds the same float32 sums to bfloat16 as two do, but for ties that the order
        # of a sum decides: each 16-bit intermediate may move by one unit, 2^-8 of itself. There are
        # four on the longest path: gate/up product, hidden, its gradient, that of the product.
        scale = float(jnp.max(jnp.abs(expected[name])))
        np.testing.assert_allclose(leaf, expected[name], rtol=0, atol=4 * 2.0**-8 * scale)


def test_an_odd_intermediate_size_is_not_cut_in_two():
    """B18: 2F = 6 divides by two devices, F = 3 does not, and is refused."""
    with jax.set_mesh(mesh_of(2)), pytest.raises(ValueError, match="3"):
        partitioned_nnx(F=3)
    module = partitioned_linen(F=3)["feed_forward"]
    specs = nn.get_partition_spec(jax.eval_shape(partial(linen_variables, module)))
    shardings = jax.tree.map(partial(NamedSharding, mesh_of(2)), specs)
    with pytest.raises(ValueError, match="3"):
        jax.jit(partial(linen_variables, module), out_shardings=shardings)()


def test_a_table_sharded_by_rows_gives_the_same_rows():
    with jax.set_mesh(mesh_of(4)):
        module = partitioned_nnx()["table"]
        rows = nnx.jit(lambda module: module.embed(TOKENS))(module)
        logits = nnx.jit(lambda module: module.unembed(draw((5, D))))(module)
    table = jnp.asarray(np.asarray(module.embedding[...]))
    assert_same_trees(np.asarray(rows), np.asarray(table)[TOKENS])
    x64, table64 = np.asarray(draw((5, D)), "float64"), np.asarray(table, "float64")
    bound = gamma(D) * (abs(x64) @ abs(table64.T))
    assert np.all(abs(np.asarray(logits) - x64 @ table64.T) <= bound)


def test_a_table_sharded_by_rows_gives_the_same_gradient():
    """B71, with whole numbers: every sum is exact, so its order cannot matter."""
    table = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (V + 1, D)), "float32")
    sharded = jax.device_put(table, NamedSharding(mesh_of(4), SPECS["table"]["embedding"]))
    module = jaxblock.linen.TiedEmbedding(V + 1, D)

    @jax.jit
    def gradient(table, tokens):
        def loss(table):
            params = {"embedding": table}
            return module.apply({"params": params}, tokens, method=sum_of_logits)

        return jax.grad(loss)(table)

    for tokens in (TOKENS, np.array([3, 0, 3, V, 5], "int32")):  # two shapes in turn
        expected = gradient(table, tokens)
        assert np.any(expected)
        np.testing.assert_array_equal(gradient(sharded, tokens), expected)


# The tie.

TIED_TABLE = np.array([[1, 0], [0, 1], [1, 1]], "float32")
FIRST = np.array(0, "int32")


def tied_nnx(table=TIED_TABLE):
    module = jaxblock.nnx.TiedEmbedding(*table.shape, rngs=nnx.Rngs(0))
    nnx.update(module, {"embedding": jnp.asarray(table)})
    return module


def sum_of_logits(module, tokens=FIRST):
    return jnp.sum(module.unembed(module.embed(tokens)))


@graph_modes
def test_the_gradient_sums_both_uses(graph):
    """B67, with the published numbers."""
    with nnx_mode(graph):
        module = tied_nnx()
        assert len(jax.tree.leaves(nnx.state(module))) == 1
        gradients = [
            nnx.grad(sum_of_logits)(module).embedding[...],
            nnx.jit(nnx.grad(sum_of_logits))(module).embedding[...],
        ]
    linen = jaxblock.linen.TiedEmbedding(3, 2)
    variables = linen.init(jax.random.key(0), FIRST)
    assert shapes(variables) == {"params": {"embedding": (3, 2)}}

    def linen_loss(params):
        return linen.apply({"params": params}, method=sum_of_logits)

    gradients.append(jax.grad(linen_loss)({"embedding": jnp.asarray(TIED_TABLE)})["embedding"])
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, [[3, 2], [1, 0], [1, 0]])

    def untied(table, head):
        return jnp.sum(jaxblock.unembed(jaxblock.embed(FIRST, table), head))

    lookup, projection = jax.grad(untied, (0, 1))(TIED_TABLE, TIED_TABLE)
    np.testing.assert_array_equal(lookup, [[2, 2], [0, 0], [0, 0]])
    np.testing.assert_array_equal(lookup + projection, gradients[0])


@graph_modes
def test_training_keeps_one_table_with_one_pair_of_moments(graph):
    """B67 and B72: three steps that donate module and optimizer, against the same on a dict."""
    optimizer = optax.adamw(1e-2)
    table = np.asarray(draw((V, D)))

    def nnx_step(module, state):
        loss, gradient = nnx.value_and_grad(partial(sum_of_logits, tokens=TOKENS))(module)
        state.update(module, gradient)
        return loss

    def step(params, state):
        def loss(params):
            rows = jaxblock.embed(TOKENS, params["embedding"])
            return jnp.sum(jaxblock.unembed(rows, params["embedding"]))

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    # Standard promotion, because optax raises a decay to an integer count.
    with nnx_mode(graph), jax.numpy_dtype_promotion("standard"):
        module = tied_nnx(table)
        state = nnx.Optimizer(module, optimizer, wrt=nnx.Param)
        moments = [leaf for leaf in jax.tree.leaves(nnx.state(state)) if leaf.shape == (V, D)]
        assert len(moments) == 2
        del moments
        nnx_step = nnx.jit(nnx_step, donate_argnums=(0, 1))
        step = jax.jit(step, donate_argnums=(0, 1))
        params = {"embedding": jnp.asarray(table)}
        opt_state = optimizer.init(params)
        for _ in range(3):
            before = module.embedding[...]
            loss = nnx_step(module, state)
            assert before.is_deleted()
            expected_loss, params, opt_state = step(params, opt_state)
            assert_same_trees(loss, expected_loss)
            assert_same_trees(module.embedding[...], params["embedding"])
        assert int(state.step[...]) == 3
        assert np.all(np.asarray(params["embedding"]) != table)
        # After the steps rows and logits still come from the one table.
        x = draw((2, D))
        assert_same_trees(module.embed(TOKENS), params["embedding"][TOKENS])
        assert_same_trees(module.unembed(x), jaxblock.unembed(x, params["embedding"]))


@graph_modes
def test_one_module_used_twice_is_still_one_leaf(graph):
    """A model refers to the table once: nothing is shared that tree mode would refuse."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.table = jaxblock.nnx.TiedEmbedding(V, D, rngs=rngs)
            self.norm = jaxblock.nnx.RMSNorm(D, eps=EPS, rngs=rngs)

        def __call__(self, tokens):
            return self.table.unembed(self.norm(self.table.embed(tokens)))

    with nnx_mode(graph):
        model = Model(nnx.Rngs(0))
        graphdef, state = nnx.split(model)
        assert shapes(nnx.to_pure_dict(state)) == {
            "table": {"embedding": (V, D)},
            "norm": {"scale": (D,)},
        }
        run = nnx.jit(lambda model: model(TOKENS))
        assert_same_trees(run(nnx.merge(graphdef, state)), run(model))
        assert np.any(run(model))
        # With one row left, a change of that row is the only thing that either use can see.
        table = np.zeros((V, D), "float32")
        table[TOKENS[0, 0]] = 1
        model.table.embedding[...] = jnp.asarray(table)
        assert np.count_nonzero(run(model)) == 1


# Abstract values, copies, text.


@graph_modes
def test_abstract_initialisation(graph):
    with nnx_mode(graph):
        for name, case in CASES.items():
            abstract = nnx.eval_shape(lambda make=case.make_nnx: make(nnx.Rngs(0)))
            leaves = nnx.to_pure_dict(nnx.state(abstract))
            assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves.values())
            assert {key: leaf.shape for key, leaf in leaves.items()} == case.params, name


def test_abstract_initialisation_in_linen():
    for case in CASES.values():
        abstract = jax.eval_shape(partial(linen_variables, case.linen))["params"]
        assert {key: leaf.shape for key, leaf in abstract.items()} == case.params


@pytest.mark.parametrize("name", CASES)
def test_modules_can_be_copied_pickled_compared_and_printed(name):
    case = CASES[name]
    module = case.make_nnx(nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(module))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert nnx.graphdef(twin) == nnx.graphdef(module)
        assert_same_trees(nnx.to_pure_dict(nnx.state(twin)), params)
        nnx.update(twin, jax.tree.map(jnp.zeros_like, params))
        assert_same_trees(nnx.to_pure_dict(nnx.state(module)), params)
    for twin in (copy.deepcopy(case.linen), pickle.loads(pickle.dumps(case.linen))):
        assert twin == case.linen
        assert hash(twin) == hash(case.linen)
    for text in (repr(module), repr(case.linen)):
        assert text.startswith(type(case.linen).__name__)
        assert " object at 0x" not in text
        assert "param_dtype" in text
    for parameter in case.params:
        assert parameter in repr(module)


# Wrong inputs.


def test_sizes_must_be_sizes():
    rngs = nnx.Rngs(0)
    x = draw((2, D))
    message = "RMSNorm: hidden_size must be at least 1; got hidden_size=0"
    with pytest.raises(ValueError, match=message):
        jaxblock.nnx.RMSNorm(0, eps=EPS, rngs=rngs)
    message = "SwiGLU: intermediate_size must be an integer; got intermediate_size=2.5"
    with pytest.raises(TypeError, match=message):
        jaxblock.nnx.SwiGLU(D, 2.5, rngs=rngs)
    with pytest.raises(TypeError, match=message):
        jaxblock.linen.SwiGLU(2.5).init(jax.random.key(0), x)
    message = "TiedEmbedding: vocab_size must be at least 1; got vocab_size=-1"
    with pytest.raises(ValueError, match=message):
        jaxblock.nnx.TiedEmbedding(-1, D, rngs=rngs)
    with pytest.raises(ValueError, match=message):
        jaxblock.linen.TiedEmbedding(-1, D).init(jax.random.key(0), TOKENS)


def test_constants_of_the_model_have_no_default():
    with pytest.raises(TypeError, match="eps"):
        jaxblock.nnx.RMSNorm(D, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="eps"):
        jaxblock.linen.RMSNorm()


def test_unknown_options_are_refused():
    x, params = draw((2, D)), {"scale": jnp.ones(D)}
    message = (
        "SwiGLU: activation must be one of 'silu', 'gelu', 'gelu_tanh'; got activation='gelu_new'"
    )
    with pytest.raises(ValueError, match=message):
        jaxblock.nnx.SwiGLU(D, F, activation="gelu_new", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        jaxblock.linen.SwiGLU(F, activation="gelu_new").init(jax.random.key(0), x)
    for run in nnx_and_linen("RMSNorm", D, eps=EPS, cast="never"):
        with pytest.raises(ValueError, match="rms_norm: cast must be one of .*; got cast='never'"):
            run(params, x)
    for run in nnx_and_linen("TiedEmbedding", V, D, softcap=0.0):
        with pytest.raises(ValueError, match="unembed: softcap must be finite and above 0.0"):
            run({"embedding": draw((V, D))}, x, "unembed")
    for run in nnx_and_linen("TiedEmbedding", V, D, num_valid=V + 1):
        with pytest.raises(ValueError, match="unembed: num_valid must not exceed V"):
            run({"embedding": draw((V, D))}, x, "unembed")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_inputs_that_a_cast_would_hide_are_refused(dtype):
    params = {
        "RMSNorm": {"scale": jnp.ones(D)},
        "SwiGLU": {"gate_up": draw((D, 2, F)), "down": draw((F, D))},
        "TiedEmbedding": {"embedding": draw((V, D))},
    }
    calls = [
        ("RMSNorm", (D,), {"eps": EPS}, "__call__"),
        ("SwiGLU", (D, F), {}, "__call__"),
        ("TiedEmbedding", (V, D), {}, "unembed"),
    ]
    for name, sizes, options, method in calls:
        for run in nnx_and_linen(name, *sizes, **options, dtype=dtype):
            call = partial(run, params[name], method=method)
            with pytest.raises(
                TypeError, match=f"^{name}.*: x must have one of the dtypes .*int32"
            ):
                call(jnp.ones((2, D), "int32"))
            with pytest.raises(TypeError, match=f"^{name}.*: x must be a JAX or NumPy array"):
                call([[1.0] * D])
            with pytest.raises(ValueError, match=f"^{name}.*: x must have at least one axis"):
                call(jnp.float32(1))
            with pytest.raises(ValueError, match=f"^{name}.*: x must have no empty axis"):
                call(jnp.ones((0, D)))
    for run in nnx_and_linen("TiedEmbedding", V, D, dtype=dtype):
        call = partial(run, params["TiedEmbedding"], method="embed")
        with pytest.raises(TypeError, match="embed: tokens must have an integer dtype"):
            call(jnp.ones((2,)))
        with pytest.raises(IndexError, match=r"embed: tokens must lie in \[0, 11\).*tokens=11"):
            call(np.array([1, V], "int32"))
        with pytest.raises(IndexError, match=r"tokens=-1, position=\(0,\)"):
            call(np.array([-1, V], "int32"))
        traced = jax.jit(call)(np.array([-1, 1, V], "int32"))
        np.testing.assert_array_equal(np.isnan(traced).all(axis=-1), [True, False, True])


def test_a_dtype_that_is_not_a_float_is_refused():
    for run in nnx_and_linen("TiedEmbedding", V, D, dtype="int8"):
        with pytest.raises(ValueError, match="TiedEmbedding.embed: dtype must be .*dtype='int8'"):
            run({"embedding": draw((V, D))}, TOKENS, "embed")
    for run in nnx_and_linen("SwiGLU", D, F, dtype="float8_e4m3fn"):
        with pytest.raises(ValueError, match="SwiGLU: dtype must be .*dtype='float8_e4m3fn'"):
            run({"gate_up": draw((D, 2, F)), "down": draw((F, D))}, draw((2, D)))


def test_parameters_of_another_shape_are_refused():
    """NNX takes any array, so the function answers; Linen compares shapes itself."""
    x = draw((2, D))
    wrong = [
        ("RMSNorm", (D,), {"eps": EPS}, {"scale": jnp.ones(1)}, "scale must have the shape [D]"),
        (
            "SwiGLU",
            (D, F),
            {},
            {"gate_up": draw((D, 2 * F)), "down": draw((F, D))},
            "gate_up must have the shape [D 2 F]",
        ),
        (
            "SwiGLU",
            (D, F),
            {},
            {"gate_up": draw((D, 2, F)), "down": draw((D, F))},
            "down must have the shape [F D]",
        ),
        ("TiedEmbedding", (V, D), {}, {"embedding": draw((D, V))}, "embedding must be [V D]"),
    ]
    for name, sizes, options, params, message in wrong:
        method = "unembed" if name == "TiedEmbedding" else "__call__"
        run_linen, run_nnx = nnx_and_linen(name, *sizes, **options)
        with pytest.raises(ValueError, match=re.escape(message)):
            run_nnx(params, x, method)
        with pytest.raises(flax.errors.ScopeParamShapeError, match="shape"):
            run_linen(params, x, method)
    with pytest.raises(flax.errors.ScopeParamNotFoundError, match="down"):
        jaxblock.linen.SwiGLU(F).apply({"params": {"gate_up": draw((D, 2, F))}}, x)
