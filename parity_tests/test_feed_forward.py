"""swiglu, geglu and what builds their weights: against PyTorch and float64, memory, extremes."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FLOATS,
    assert_derivatives,
    assert_matches_float64,
    assert_same_bits,
    random_arrays,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxblock import geglu, intermediate_size, pack_gate_up, swiglu, unpack_gate_up
from jaxblock.ops import cpu
from jaxblock.parity import assert_parity

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("shape_checks")]

# Leading axes, D, F: none and several, a one, a prime, a remainder.
LAYERS = {
    "no leading axis": ((), 7, 5),
    "one hidden channel": ((5,), 13, 1),
    "many axes": ((2, 1, 3), 33, 70),
}
SOME_FLOATS = ("bfloat16", "float64")
ACTIVATIONS = {
    "silu": (swiglu, "swiglu", {}),
    "gelu_tanh": (geglu, "geglu", {"approximate": True}),
    "gelu": (geglu, "geglu", {"approximate": False}),
}


compiled_swiglu = jax.jit(swiglu)
compiled_unpack = jax.jit(unpack_gate_up, static_argnames=("layout", "block_size"))


def make_inputs(leading, hidden, intermediate, seed=0):
    """Gate and up products of about standard normal numbers."""
    x, gate_up, down = random_arrays(
        seed, (*leading, hidden), (hidden, 2, intermediate), (intermediate, hidden)
    )
    return x, gate_up / hidden**0.5, down / intermediate**0.5


def check_against_torch(jax_fn, torch_ref, dtype, layer, activation="silu"):
    """What every parity test and every planted fault below calls."""
    _, name, options = ACTIVATIONS[activation]
    return assert_parity(
        partial(jax_fn, **options),
        partial(getattr(torch_ref, name), **options),
        make_inputs(*LAYERS[layer]),
        dtypes=[dtype],
        # The gate/up product and the elementwise product are rounded on the way.
        roundings=2,
    )


@pytest.mark.torch
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_swiglu_parity(layer, dtype, torch_ref):
    check_against_torch(swiglu, torch_ref, dtype, layer)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("activation", "dtype"), [*(("gelu_tanh", dtype) for dtype in FLOATS), ("gelu", "float32")]
)
def test_geglu_parity(activation, dtype, torch_ref):
    check_against_torch(geglu, torch_ref, dtype, "many axes", activation)


@pytest.mark.torch
def test_parity_with_float32_weights(torch_ref):
    x, gate_up, down = make_inputs((4,), 33, 13)
    report = assert_parity(
        swiglu,
        torch_ref.swiglu,
        [jnp.asarray(x, jnp.bfloat16), jnp.asarray(gate_up, "f4"), jnp.asarray(down, "f4")],
        # Here the weights are rounded too.
        roundings=3,
    )
    dtypes = [judgement.jax.dtype for judgement in report.judgements]
    assert dtypes == ["bfloat16", "bfloat16", "bfloat16", "float32", "float32"]


def swapped(x, gate_up, down):
    return swiglu(x, gate_up[:, ::-1], down)


def larger(x, gate_up, down):
    y = swiglu(x, gate_up, down)
    return (y.astype(jnp.float32) * 1.01).astype(y.dtype)


PLANTED_FAULTS = {
    "x1.01": (larger, FLOATS),
    "gate and up swapped": (swapped, FLOATS),
    "GELU for SiLU": (geglu, FLOATS),
}


@pytest.mark.torch
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fault", PLANTED_FAULTS)
def test_planted_fault_is_caught(fault, dtype, torch_ref):
    with pytest.raises(AssertionError, match="FAIL .*output"):
        check_against_torch(PLANTED_FAULTS[fault][0], torch_ref, dtype, "many axes")


@pytest.mark.torch
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
def test_the_other_gelu_is_caught(activation, torch_ref):
    """They differ by 4.7e-4 at most, less than one unit of a 16-bit dtype: float32 only."""

    def other(x, gate_up, down, *, approximate):
        return geglu(x, gate_up, down, approximate=not approximate)

    with pytest.raises(AssertionError, match="FAIL .*output"):
        check_against_torch(other, torch_ref, "float32", "many axes", activation)


def float64_activation(name, z):
    """The activation and its derivative."""
    if name == "silu":
        sigmoid = 1 / (1 + np.exp(-z))
        return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    if name == "gelu":
        below = (1 + np.vectorize(math.erf)(z / math.sqrt(2))) / 2
        return z * below, below + z * density
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)
    tanh = np.tanh(inner)
    return z * (1 + tanh) / 2, (1 + tanh) / 2 + z * (1 - tanh**2) * slope / 2


def float64_layer_and_gradients(name, x, gate_up, down, dy):
    """The gated feed-forward and its three gradients, by hand, on rows [B D]."""
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    active, slope = float64_activation(name, gate)
    d_hidden = dy @ down.T
    d_gate, d_up = d_hidden * up * slope, d_hidden * active
    dx = d_gate @ gate_up[:, 0].T + d_up @ gate_up[:, 1].T
    d_gate_up = np.stack([x.T @ d_gate, x.T @ d_up], axis=1)
    return (active * up) @ down, dx, d_gate_up, (active * up).T @ dy


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [*(("silu", dtype) for dtype in (*FLOATS, "float64"))]
    + [(activation, dtype) for activation in ("gelu_tanh", "gelu") for dtype in SOME_FLOATS],
)
def test_against_float64(activation, dtype):
    function, _, options = ACTIVATIONS[activation]
    leading, hidden, intermediate = LAYERS["many axes"]
    with jax.enable_x64(dtype == "float64"):
        inputs = [jnp.asarray(a, dtype) for a in make_inputs(leading, hidden, intermediate)]
        dy = jnp.asarray(random_arrays(1, (*leading, hidden))[0], dtype)

        @jax.jit
        def value_and_gradients(inputs, dy):
            y, pull_back = jax.vjp(partial(function, **options), *inputs)
            return y, *pull_back(dy)

        results = value_and_gradients(inputs, dy)
        assert [result.dtype for result in results] == 4 * [jnp.dtype(dtype)]
        x, gate_up, down, dy = (np.asarray(a, np.float64) for a in (*inputs, dy))
        rows = x.reshape(-1, hidden)
        references = float64_layer_and_gradients(
            activation, rows, gate_up, down, dy.reshape(rows.shape)
        )
        for index, (result, reference) in enumerate(zip(results, references, strict=True)):
            assert_matches_float64(
                result,
                reference.reshape(result.shape),
                reduction_length=max(2 * intermediate, hidden, len(rows)),
                # As in assert_parity: a gradient has the values again, and their cotangents.
                roundings=2 if index == 0 else 5,
            )


@pytest.mark.parametrize("weight_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_backward_keeps_x_and_the_gate_up_product(activation, dtype, weight_dtype):
    function, _, options = ACTIVATIONS[activation]
    weight_dtype = weight_dtype or dtype
    kept = jax.eval_shape(
        lambda *arguments: jax.vjp(partial(function, **options), *arguments)[1],
        jax.ShapeDtypeStruct((3, 5, 8), dtype),
        jax.ShapeDtypeStruct((8, 2, 6), weight_dtype),
        jax.ShapeDtypeStruct((6, 8), weight_dtype),
    )
    described = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(kept))
    # x, the gate/up product, and the weights, which are the caller's arrays.
    assert described == sorted(
        [
            ((3, 5, 8), dtype),
            ((3, 5, 2, 6), dtype),
            ((8, 2, 6), weight_dtype),
            ((6, 8), weight_dtype),
        ]
    )


def test_a_layer_of_a_compiled_training_step_keeps_two_hidden_arrays():
    """What XLA allocates for forward and backward of a stack of layers, by its own account.

    A layer more costs the two arrays [T F] of the gate/up product and its small x. Saving the
    activation or the elementwise product would make that three at least (without checkpointing
    it is six).
    """
    tokens, hidden, intermediate = 256, 8, 512

    def loss(x, gate_up, down):
        y, _ = jax.lax.scan(lambda x, w: (swiglu(x, *w), None), x, (gate_up, down))
        return jnp.sum(y)

    def allocated(layers):
        shapes = (
            (tokens, hidden),
            (layers, hidden, 2, intermediate),
            (layers, intermediate, hidden),
        )
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    a_layer = (allocated(16) - allocated(8)) / 8
    assert 2.0 <= a_layer / (4 * tokens * intermediate) < 2.1


@pytest.fixture
def one_device(monkeypatch):
    """The suite has four, for meshes; what is cut over them is not taken to pieces."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def run_in_pieces(one_device):
    """What a function of ten rows gives with so many numbers in a piece, and the loops in it."""

    def compiled(numbers, function):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "PIECE", numbers)
            jax.clear_caches()
            text = jax.jit(function).lower(*arguments).as_text()
            return jax.jit(function)(*arguments), text.count("stablehlo.while")

    shapes = (2, 5, 19), (19, 2, 29), (29, 19), (2, 29), (19,)
    arguments = [jnp.asarray(array, jnp.float32) for array in random_arrays(0, *shapes)]
    return compiled


def with_biases(x, gate_up, down, gate_up_bias, down_bias):
    return swiglu(x, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias)


def without_biases(x, gate_up, down, gate_up_bias, down_bias):
    return geglu(x, gate_up, down)


@pytest.mark.parametrize("function", [with_biases, without_biases])
# Of ten rows; with four the last piece has two of the one before it.
@pytest.mark.parametrize("rows", [2, 4])
def test_pieces_are_the_whole(run_in_pieces, function, rows):
    run = run_in_pieces
    whole, loops = run(cpu.PIECE, function)
    assert loops == 0
    pieces, loops = run(rows * 2 * 29, function)
    assert loops == (jax.default_backend() == "cpu")
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-6 * np.abs(whole).max())
    many = jax.vmap(function, (0, None, None, None, None))
    whole, pieces = run(cpu.PIECE, many)[0], run(rows * 2 * 29, many)[0]
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-6 * np.abs(whole).max())


def test_what_is_differentiated_is_not_made_in_pieces(run_in_pieces):
    """Of all arguments or of some, in both modes: the program is the same."""
    run = run_in_pieces

    def gradient(*arguments):
        loss = lambda *arguments: jnp.sum(jnp.sin(with_biases(*arguments)))  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3, 4))(*arguments), jax.grad(loss, 2)(*arguments)

    def slope(*arguments):
        x, *others = arguments
        return jax.jvp(lambda x: with_biases(x, *others), [x], [jnp.cos(x)])

    for function in (gradient, slope):
        (whole, _), (pieces, loops) = run(cpu.PIECE, function), run(2 * 2 * 29, function)
        assert loops == 0
        for one, other in zip(*map(jax.tree.leaves, (pieces, whole)), strict=True):
            assert_same_bits(one, other)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="as a whole elsewhere")
@pytest.mark.usefixtures("one_device")
def test_memory_does_not_grow_with_the_rows():
    def temporary(rows):
        shapes = (rows, 64), (64, 2, 256), (256, 64)
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return jax.jit(swiglu).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2**16) <= 32e6 and temporary(2**17) < 1.1 * temporary(2**16)


def test_derivatives_of_all_orders_and_modes(x64):
    assert_derivatives(swiglu, *(jnp.asarray(a) for a in make_inputs((2,), 3, 2)))


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("silu", "float32"), ("silu", "float16"), ("gelu_tanh", "float16"), ("gelu", "float16")],
)
def test_large_and_very_negative_gates(activation, dtype):
    """Saturated: the gate itself or 0, with finite gradients; no inf / inf, no 0 * inf."""
    function, _, options = ACTIVATIONS[activation]
    x = jnp.array([[1.0], [-1.0]], dtype)
    # The gate is 8000 of x's sign, up is 2: gradients of up to 32000 are within float16.
    gate_up = jnp.array([[[8000.0], [2.0]]], dtype)
    down = jnp.ones((1, 1), dtype)

    @jax.jit
    def value_and_gradients(x, gate_up, down):
        y, pull_back = jax.vjp(partial(function, **options), x, gate_up, down)
        return y, *pull_back(jnp.ones_like(y))

    y, *gradients = value_and_gradients(x, gate_up, down)
    exact = np.asarray(gate_up[0, 0, 0] * 2)
    np.testing.assert_array_equal(y, np.array([[exact], [0.0]], y.dtype))
    assert all(np.isfinite(np.asarray(gradient, np.float64)).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("x_spec", "gate_up_spec", "down_spec", "dtype"),
    [
        ((), (None, None, "model"), ("model",), "float32"),
        (("data",), (None, None, "model"), ("model",), "bfloat16"),
    ],
    ids=["F", "tokens and F"],
)
def test_sharded_equals_unsharded(x_spec, gate_up_spec, down_spec, dtype):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    inputs = [jnp.asarray(a, dtype) for a in make_inputs((4, 3), 8, 6)]
    dy = jnp.asarray(random_arrays(1, (4, 3, 8))[0], dtype)

    @jax.jit
    def value_and_gradients(inputs, dy):
        y, pull_back = jax.vjp(swiglu, *inputs)
        return y, *pull_back(dy)

    sharded = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        for array, spec in zip(inputs, (x_spec, gate_up_spec, down_spec), strict=True)
    ]
    results = value_and_gradients(sharded, dy)
    expected = value_and_gradients(inputs, dy)
    for index, (result, reference) in enumerate(zip(results, expected, strict=True)):
        # Sums in another order: in 16 bits that moves a rounding now and then, in every value on
        # the way of both sides.
        assert_matches_float64(
            result,
            np.asarray(reference, np.float64),
            reduction_length=24,
            roundings=2 if index == 0 else 5,
        )


def test_three_hidden_channels_on_two_devices_are_refused():
    """2F = 6 would divide, but half of the gate and half of the up projection are no shard."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("model",))
    with pytest.raises(ValueError, match="dimension size is 3"):
        jax.device_put(jnp.ones((4, 2, 3)), NamedSharding(mesh, PartitionSpec(None, None, "model")))


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
@pytest.mark.parametrize("weight_dtype", [*FLOATS, "float64"])
def test_result_and_gradients_have_the_dtypes_of_the_inputs(dtype, weight_dtype, x64):
    def value_and_gradients(*arguments):
        y, pull_back = jax.vjp(swiglu, *arguments)
        return y, *pull_back(y)

    arguments = (
        jax.ShapeDtypeStruct((2, 3), dtype),
        jax.ShapeDtypeStruct((3, 2, 4), weight_dtype),
        jax.ShapeDtypeStruct((4, 3), weight_dtype),
    )
    results = jax.eval_shape(value_and_gradients, *arguments)
    expected = [dtype, dtype, weight_dtype, weight_dtype]
    assert [result.dtype.name for result in results] == expected


def test_scan_and_vmap_over_layers():
    x, *_ = (jnp.asarray(a, jnp.bfloat16) for a in make_inputs((4,), 7, 5))
    stacks = [make_inputs((4,), 7, 5, seed)[1:] for seed in range(3)]
    gate_up, down = (jnp.asarray(np.stack(s), jnp.float32) for s in zip(*stacks, strict=True))
    y, _ = jax.jit(lambda x: jax.lax.scan(lambda x, w: (swiglu(x, *w), None), x, (gate_up, down)))(
        x
    )
    per_layer = jax.jit(jax.vmap(swiglu, in_axes=(None, 0, 0)))(x, gate_up, down)
    one = jax.jit(swiglu)
    expected = x
    for layer in range(3):
        single = one(x, gate_up[layer], down[layer])
        assert_matches_float64(
            per_layer[layer], np.asarray(single, np.float64), reduction_length=7, roundings=2
        )
        expected = one(expected, gate_up[layer], down[layer])
    assert y.dtype == jnp.bfloat16
    assert_matches_float64(y, np.asarray(expected, np.float64), reduction_length=7, roundings=8)


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize(
    ("layout", "block_size"),
    [
        ("gate_up", None),
        ("up_gate", None),
        ("interleaved", None),
        ("blocks", 1),
        ("blocks", "F"),
        ("blocks", "F/2"),
    ],
)
def test_unpack_undoes_pack(layout, block_size, width):
    """Every layout is built from the two parts by its definition, taken apart and packed."""
    width = 2 * width if block_size == "F/2" else width
    block = {"F": width, "F/2": width // 2}.get(block_size, block_size)
    gate, up = (a.astype("bfloat16") for a in random_arrays(0, (2, 5, width), (2, 5, width)))
    # fused[..., place] is channel `channel` of part `part` (0 gate, 1 up).
    fused = np.empty((2, 5, 2 * width), gate.dtype)
    for part, values in enumerate((gate, up)):
        for channel in range(width):
            place = {
                "gate_up": part * width + channel,
                "up_gate": (1 - part) * width + channel,
                "interleaved": 2 * channel + part,
                "blocks": (2 * (channel // block) + part) * block + channel % block
                if block
                else None,
            }[layout]
            fused[..., place] = values[..., channel]
    unpacked = compiled_unpack(fused, layout=layout, block_size=block)
    assert_same_bits(unpacked[0], gate)
    assert_same_bits(unpacked[1], up)
    packed = jax.jit(pack_gate_up)(*unpacked)
    assert packed.shape == (2, 5, 2, width)
    assert_same_bits(np.asarray(packed)[..., 0, :], gate)
    assert_same_bits(np.asarray(packed)[..., 1, :], up)


def test_unpacking_leaves_the_source_alone_in_any_order():
    fused = np.arange(12, dtype=np.float32).reshape(2, 6)
    source = jnp.asarray(fused)
    gate, up = unpack_gate_up(source, layout="gate_up")
    again = unpack_gate_up(source, layout="gate_up")
    assert_same_bits(source, fused)
    assert_same_bits(again[1], up)
    assert_same_bits(again[0], gate)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((4096, 256, None), 11008),
        ((8192, 4096, 1.3), 28672),
        ((4096, 1024, 1.3), 14336),
        ((1, 1, None), 2),
        ((7, 5, 1.0), 20),
        ((7, 256, 1.0), 256),
    ],
)
def test_intermediate_size(arguments, expected):
    hidden, multiple, multiplier = arguments
    size = intermediate_size(hidden, multiple_of=multiple, ffn_dim_multiplier=multiplier)
    assert type(size) is int and size == expected


@given(
    hidden=st.integers(1, 2**20),
    multiple=st.integers(1, 4096),
    multiplier=st.none() | st.floats(0.51, 16),
)
def test_intermediate_size_is_the_least_multiple(hidden, multiple, multiplier):
    """Step by step as in Meta's FeedForward: cut, multiply, cut, round up."""
    channels = int(2 * (4 * hidden) / 3)
    if multiplier is not None:
        channels = int(multiplier * channels)
    size = intermediate_size(hidden, multiple_of=multiple, ffn_dim_multiplier=multiplier)
    assert size % multiple == 0
    assert 0 <= size - channels < multiple
    assert size <= intermediate_size(
        hidden + 1, multiple_of=multiple, ffn_dim_multiplier=multiplier
    )


@given(
    exponent=st.integers(-6, 6),
    dtype=st.sampled_from(FLOATS),
    layer=st.sampled_from(["no leading axis", "one hidden channel"]),
    seed=st.integers(0, 9),
)
def test_linear_in_up_and_in_down(exponent, dtype, layer, seed):
    """A power of two in front of the up or the down projection is in front of y, to the bit."""
    inputs = make_inputs(*LAYERS[layer], seed=seed)
    x, gate_up, down = (a.astype(dtype) for a in inputs)
    factor = np.asarray(2.0**exponent, dtype)
    expected = np.asarray(compiled_swiglu(x, gate_up, down)) * factor
    larger_up = np.stack([gate_up[:, 0], gate_up[:, 1] * factor], axis=1)
    by_up = compiled_swiglu(x, larger_up, down)
    by_down = compiled_swiglu(x, gate_up, down * factor)
    # In float16 a factor on the way may make a value subnormal: there the bits may differ by the
    # rounding of the hidden product.
    if dtype == "float16":
        np.testing.assert_allclose(
            np.asarray(by_up, np.float64), expected.astype(np.float64), rtol=2.0**-8, atol=2.0**-16
        )
    else:
        assert_same_bits(by_up, expected)
        assert_same_bits(by_down, expected)


@given(st.permutations(range(5)))
def test_order_of_hidden_channels_does_not_matter(order):
    """F is summed over: gate, up and down may be permuted together (a shard of F is a layer)."""
    x, gate_up, down = (a.astype(np.float32) for a in make_inputs((4,), 7, 5))
    order = np.asarray(order)
    plain = compiled_swiglu(x, gate_up, down)
    permuted = compiled_swiglu(x, gate_up[:, :, order], down[order])
    assert_matches_float64(permuted, np.asarray(plain, np.float64), reduction_length=2 * 7)
    parts = [compiled_swiglu(x, gate_up[:, :, part], down[part]) for part in ([0, 1], [2, 3, 4])]
    assert_matches_float64(parts[0] + parts[1], np.asarray(plain, np.float64), reduction_length=14)


COMPILED = {
    name: jax.jit(partial(function, **options))
    for name, (function, _, options) in ACTIVATIONS.items()
}


@given(
    st.lists(st.floats(-60000, 60000, width=16), min_size=4, max_size=4),
    st.sampled_from(FLOATS),
    st.sampled_from(sorted(ACTIVATIONS)),
)
def test_finite_for_every_gate(gates, dtype, activation):
    """up = down = 1: y is the activation alone, between its least value and |gate|."""
    gate_up = np.ones((4, 2, 4), dtype)
    gate_up[:, 0] = gates
    y = COMPILED[activation](np.eye(4, dtype=dtype), gate_up, np.eye(4, dtype=dtype))
    y = np.diagonal(np.asarray(y, np.float64))
    gates = gate_up[0, 0].astype(np.float64)
    # silu is never below -0.278465, gelu never below -0.170041; then one rounding.
    one_rounding = 1 + float(jnp.finfo(dtype).eps)
    assert np.all((-0.278465 * one_rounding <= y) & (y <= np.maximum(gates, 0) * one_rounding))
