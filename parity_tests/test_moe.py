"""Mixture of experts: routing and the experts' feed-forward, against PyTorch and float64."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from helpers import (
    assert_matches_float64,
    assert_same_bits,
    random_arrays,
)
from jax import export

from jaxblock import pack_gate_up, swiglu
from jaxblock.ops.moe import moe_swiglu, route_top_k
from jaxblock.parity import assert_parity

pytestmark = pytest.mark.usefixtures("shape_checks")

compiled_route = jax.jit(route_top_k, static_argnames=("num_active", "renormalize"))


def make_inputs(leading=(2, 5), hidden=7, intermediate=6, experts=5, *, seed=0):
    x, router, gate_up, down = random_arrays(
        seed,
        (*leading, hidden),
        (hidden, experts),
        (experts, hidden, 2, intermediate),
        (experts, intermediate, hidden),
    )
    return x, router, gate_up / hidden**0.5, down / intermediate**0.5


def float32s(*arrays):
    return [jnp.asarray(array, jnp.float32) for array in arrays]


# Routing ------------------------------------------------------------------------------------------


def test_route_by_hand():
    """Probabilities of [2, 1, 0, -1]; the lower index of equal logits, a zero of any sign."""
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0], [-0.0, 0.0, -1.0, 0.0], [-1.0, 3.0, 3.0, 3.0]])
    weights, experts = compiled_route(logits, num_active=4, renormalize=False)
    assert weights.dtype == jnp.float32 and experts.dtype == jnp.int32
    np.testing.assert_array_equal(experts, [[0, 1, 2, 3], [0, 1, 3, 2], [1, 2, 3, 0]])
    np.testing.assert_allclose(weights[0], [0.6439, 0.2369, 0.0871, 0.0321], atol=5e-5)
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-6)
    weights, experts = compiled_route(logits, num_active=2, renormalize=True)
    np.testing.assert_array_equal(experts, [[0, 1], [0, 1], [1, 2]])
    odds = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(weights, [[odds, 1 - odds], [0.5, 0.5], [0.5, 0.5]], rtol=1e-6)


def test_logits_whose_probabilities_underflow_keep_their_order():
    logits = jnp.array([-500.0, -300.0, 0.0, -200.0])
    _, experts = compiled_route(logits, num_active=4, renormalize=True)
    np.testing.assert_array_equal(experts, [2, 3, 1, 0])


@pytest.mark.torch
def test_route_parity(torch_moe):
    """Experts exactly, weights (and their gradient) to rounding."""
    options = dict(num_active=3, renormalize=True)
    (logits,) = random_arrays(0, (4, 3, 7))

    def ours(logits):
        return route_top_k(logits, **options)

    report = assert_parity(
        ours,
        partial(torch_moe.route_top_k, **options),
        [logits * 3],
        dtypes=["float32"],
        roundings=0,
    )
    assert {judgement.jax.dtype for judgement in report.judgements} == {"float32", "int32"}
    weights, experts = route_top_k(jnp.asarray(logits, jnp.bfloat16), **options)
    again = route_top_k(jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32), **options)
    assert_same_bits(weights, again[0])
    assert_same_bits(experts, again[1])


# Experts ------------------------------------------------------------------------------------------

LAYERS = {
    "two of five": (make_inputs(), "float32", dict(num_active=2, renormalize=True)),
    "one token, most experts without any": (
        make_inputs((), 5, 1, experts=11),
        "bfloat16",
        dict(num_active=2, renormalize=False),
    ),
    # Square matrices: which axis is which must come from the place, not from the size.
    "square": (
        make_inputs((4,), 4, 4, experts=4),
        "bfloat16",
        dict(num_active=2, renormalize=True),
    ),
    "square when fused, all experts": (
        make_inputs((5,), 4, 2, experts=4),
        "float16",
        dict(num_active=4, renormalize=False),
    ),
}


@pytest.mark.torch
def test_moe_parity(torch_moe):
    options = dict(num_active=2, renormalize=True)
    assert_parity(
        partial(moe_swiglu, **options),
        partial(torch_moe.moe_swiglu, **options),
        make_inputs((3, 1, 4)),
        dtypes=["bfloat16"],
        # The gate/up product and the hidden values, and in torch an expert's result, are rounded.
        roundings=3,
    )


def forward_and_backward(options, *arrays):
    *inputs, dy = arrays
    y, pull_back = jax.vjp(partial(moe_swiglu, **options), *inputs)
    return y, *pull_back(dy)


@pytest.mark.torch
def test_layers_of_every_kind_against_torch_ref_in_float64(torch_moe):
    """Forward and backward, with float32 experts beside activations of 16 bits."""
    import torch

    arguments = {}
    for name, ((x, router, gate_up, down), dtype, _) in LAYERS.items():
        (dy,) = random_arrays(1, x.shape)
        x, router, dy = (jnp.asarray(a, dtype) for a in (x, router, dy))
        arguments[name] = (x, router, *float32s(gate_up, down), dy)

    @jax.jit
    def run(arguments):
        return {
            name: forward_and_backward(LAYERS[name][2], *arrays)
            for name, arrays in arguments.items()
        }

    for name, results in run(arguments).items():
        *inputs, dy = arguments[name]
        _, dtype, options = LAYERS[name]
        # The experts are rounded on their way into the products.
        rounded = [np.asarray(a.astype(dtype), np.float64) for a in inputs]
        tensors = [torch.tensor(a, requires_grad=True) for a in rounded]
        y = torch_moe.moe_swiglu(*tensors, **options)
        y.backward(torch.tensor(np.asarray(dy, np.float64)))
        references = [y.detach(), *(tensor.grad for tensor in tensors)]
        assert [a.dtype.name for a in results] == [*3 * [dtype], *2 * ["float32"]], name
        for index, (result, reference) in enumerate(zip(results, references, strict=True)):
            # A float32 gradient holds values that were rounded to 16 bits on their way.
            assert_matches_float64(
                result.astype(dtype),
                reference.numpy(),
                reduction_length=32,
                roundings=2 if index == 0 else 5,
            )


def swapped(x, router, gate_up, down, **options):
    return moe_swiglu(x, router, gate_up[:, :, ::-1], down, **options)


def not_renormalized(x, router, gate_up, down, *, num_active, renormalize):
    return moe_swiglu(x, router, gate_up, down, num_active=num_active, renormalize=not renormalize)


def one_expert_less(x, router, gate_up, down, *, num_active, renormalize):
    return moe_swiglu(x, router, gate_up, down, num_active=num_active - 1, renormalize=renormalize)


def experts_moved(x, router, gate_up, down, **options):
    return moe_swiglu(x, router, jnp.roll(gate_up, 1, axis=0), down, **options)


def router_turned(x, router, gate_up, down, **options):
    return moe_swiglu(x, router.T, gate_up, down, **options)


def down_turned(x, router, gate_up, down, **options):
    return moe_swiglu(x, router, gate_up, down.swapaxes(1, 2), **options)


FAULTS = (swapped, not_renormalized, one_expert_less, experts_moved, router_turned, down_turned)


@pytest.mark.torch
def test_planted_faults_are_caught(torch_moe):
    """Each on the square layer in bfloat16, by the bound of the test above."""
    import torch

    inputs, dtype, options = LAYERS["square"]
    inputs = [jnp.asarray(a, dtype) for a in inputs]
    wide = [torch.tensor(np.asarray(a, np.float64)) for a in inputs]
    reference = torch_moe.moe_swiglu(*wide, **options).numpy()
    check = partial(assert_matches_float64, reference=reference, reduction_length=32, roundings=2)
    functions = (moe_swiglu, *FAULTS)
    sound, *faulty = jax.jit(lambda *args: [f(*args, **options) for f in functions])(*inputs)
    check(sound)
    for fault, result in zip(FAULTS, faulty, strict=True):
        with pytest.raises(AssertionError, match="allowed"):
            check(result)
            pytest.fail(fault.__name__, pytrace=False)


@pytest.mark.torch
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_against_transformers(family):
    """The families' own blocks with their layouts, forward and backward, float32."""
    import torch
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    x, router, gate_up, down = make_inputs((2, 8), 12, 10, experts=6)
    renormalize = family == "mixtral"
    sizes = dict(hidden_size=12, num_experts_per_tok=3, experts_implementation="eager")
    if family == "mixtral":
        config = MixtralConfig(num_local_experts=6, intermediate_size=10, **sizes)
        block = MixtralSparseMoeBlock(config)
    else:
        sizes |= dict(num_experts=6, moe_intermediate_size=10, norm_topk_prob=renormalize)
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes))
    # Kernels [out, in]; gate first, then up, in one axis.
    gate_and_up = gate_up.transpose(0, 2, 3, 1).reshape(6, 20, 12)
    parameters = (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    for parameter, value in zip(
        parameters, (router.T, gate_and_up, down.transpose(0, 2, 1)), strict=True
    ):
        parameter.data = torch.tensor(value, dtype=torch.float32)
    (dy,) = random_arrays(1, x.shape)
    tokens = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    y = block(tokens)
    y.backward(torch.tensor(dy, dtype=torch.float32))
    theirs = [y.detach(), tokens.grad, *(parameter.grad for parameter in parameters)]
    theirs = [a.double().numpy() for a in theirs]
    theirs[2] = theirs[2].T
    theirs[3] = theirs[3].reshape(6, 2, 10, 12).transpose(0, 3, 1, 2)
    theirs[4] = theirs[4].transpose(0, 2, 1)

    options = dict(num_active=3, renormalize=renormalize)
    ours = jax.jit(partial(forward_and_backward, options))(*float32s(x, router, gate_up, down, dy))
    for result, reference in zip(ours, theirs, strict=True):
        # Both err: twice the roundings of a sum over D, F, E and the tokens of an expert.
        assert_matches_float64(result, reference, reduction_length=2 * 64, roundings=8)


@pytest.mark.parametrize("routing", ["all to expert 2", "random"])
def test_no_token_is_dropped(routing):
    """64 tokens, 4 experts: a loop over tokens and experts, each by swiglu, in float32."""
    x, router, gate_up, down = make_inputs((64,), 7, 6, experts=4)
    if routing != "random":
        x[:, 0] = 1.0
        router[:] = np.eye(7)[:, :1] * [0, 0, 50, 0]
    x, router, gate_up, down = float32s(x, router, gate_up, down)
    y = jax.jit(partial(moe_swiglu, num_active=1, renormalize=True))(x, router, gate_up, down)
    every = jax.jit(jax.vmap(swiglu, in_axes=(None, 0, 0)))(x, gate_up, down)
    chosen = np.argmax(np.asarray(x) @ np.asarray(router), axis=1)
    assert set(chosen) == ({2} if routing != "random" else {0, 1, 2, 3})
    expected = np.asarray(every, np.float64)[chosen, np.arange(64)]
    assert_matches_float64(y, expected, reduction_length=14)


def test_one_certain_expert_is_swiglu_with_w1_as_gate():
    """B24: w1 is the gate, w3 up, w2 down; with w1 and w3 traded the value differs."""
    one = jnp.ones((1, 1))
    w1, w3 = jnp.array([[[2.0]]]), jnp.array([[[3.0]]])
    options = dict(num_active=1, renormalize=True)
    y = moe_swiglu(one, one, pack_gate_up(w1, w3), one[None], **options)
    np.testing.assert_allclose(y, [[5.284782467867294]], rtol=1e-6)
    y = moe_swiglu(one, one, pack_gate_up(w3, w1), one[None], **options)
    np.testing.assert_allclose(y, [[5.7154447609345995]], rtol=1e-6)


def test_a_row_of_nan_reaches_no_other_row():
    """Forward and in the gradient of x, bit for bit, though all its experts are shared."""
    run = jax.jit(partial(forward_and_backward, dict(num_active=2, renormalize=True)))
    x, *weights = (jnp.asarray(a, jnp.bfloat16) for a in make_inputs((6,), experts=2))
    dy = jnp.ones_like(x)
    clean = run(x, *weights, dy)
    spoilt = run(x.at[3].set(jnp.nan), *weights, dy)
    others = np.arange(6) != 3
    for one, other in zip(clean[:2], spoilt[:2], strict=True):
        assert np.isnan(np.asarray(other, np.float32)[3]).all()
        assert_same_bits(np.asarray(one)[others], np.asarray(other)[others])


def test_vmap_equals_a_loop():
    """Over x, or over some weights, forward and backward, to the bit.

    `lax.ragged_dot` alone can be mapped over all of its operands only: not over rows with the
    experts in common, and not where, as in a gradient of the second call, nothing is mapped.
    """
    x, router, gate_up, down = (jnp.asarray(a, jnp.bfloat16) for a in make_inputs((2, 3)))
    dy = jnp.asarray(random_arrays(1, x.shape)[0], jnp.bfloat16)
    run = partial(forward_and_backward, dict(num_active=2, renormalize=True))
    calls = [
        ((0, None, None, None, 0), (x, router, gate_up, down, dy)),
        ((None, None, 0, None, None), (x[0], router, jnp.stack([gate_up, -gate_up]), down, dy[0])),
    ]
    one = jax.jit(run)
    for axes, arrays in calls:
        results = jax.jit(jax.vmap(run, in_axes=axes))(*arrays)
        for index in range(2):
            single = one(
                *(a if axis is None else a[index] for a, axis in zip(arrays, axes, strict=True))
            )
            for result, expected in zip(results, single, strict=True):
                assert_same_bits(result[index], expected)


def test_second_derivatives_in_float64(x64):
    """Forward over reverse along a random direction, against a difference of gradients.

    Central differences of step h err by h^2 times a third derivative and by rounding, 2^-53 / h.
    """
    arrays = [jnp.asarray(a) for a in make_inputs((3,), 3, 2, experts=3)]
    direction = [jnp.asarray(a) for a in random_arrays(1, *(a.shape for a in arrays))]
    h = 1e-5

    def loss(*arrays):
        return jnp.sum(jnp.sin(moe_swiglu(*arrays, num_active=2, renormalize=True)))

    gradient = jax.jit(jax.grad(loss, argnums=range(4)))
    up, down = (
        gradient(*(a + step * d for a, d in zip(arrays, direction, strict=True)))
        for step in (h, -h)
    )
    curvature = jax.jvp(gradient, tuple(arrays), tuple(direction))[1]
    for exact, plus, minus in zip(curvature, up, down, strict=True):
        atol = 1e-7 * np.abs(exact).max()
        np.testing.assert_allclose(exact, (plus - minus) / (2 * h), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("float16",) * 2]
)
def test_backward_keeps_x_the_routing_and_the_gate_up_product(dtype, weight_dtype):
    shapes = [(3, 4, 8), (8, 5), (5, 8, 2, 6), (5, 6, 8)]
    arguments = [
        jax.ShapeDtypeStruct(shape, weight_dtype if index else dtype)
        for index, shape in enumerate(shapes)
    ]
    function = partial(moe_swiglu, num_active=2, renormalize=True)
    y, kept = jax.eval_shape(lambda *args: jax.vjp(function, *args), *arguments)
    assert (y.shape, y.dtype) == ((3, 4, 8), dtype)
    gradients = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1](args[0]), *arguments)
    assert [g.dtype.name for g in gradients] == [dtype, *3 * [weight_dtype]]
    large = sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(kept) if a.size > 12 * 5)
    # The weights are the caller's arrays; 24 rows of the product; everything else is as small as
    # the logits, [12 5] and [12 2].
    assert large == sorted(
        [
            ((12, 8), dtype),
            ((24, 12), dtype),
            *((shape, weight_dtype) for shape in shapes[2:]),
        ]
    )


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_products_that_are_lowered(platform):
    """Three of the router and six of the experts, 16-bit operands and a float32 sum in each."""
    shapes = [(2, 5, 8), (8, 4), (4, 8, 2, 6), (4, 6, 8)]

    def run(*args):
        y, pull_back = jax.vjp(partial(moe_swiglu, num_active=2, renormalize=True), *args)
        return pull_back(y)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = export.export(jax.jit(run), platforms=[platform])(*arguments).mlir_module()
    # A ragged product names, beside itself, its meaning in plain ones; the CPU has those alone.
    plain = re.findall(r"stablehlo\.dot_general .*: \((.*)\) -> (tensor<.*?>)", text)
    ragged = re.findall(r'composite "chlo\.ragged_dot" .*: \((.*)\) -> (tensor<.*?>)', text)
    assert len(plain) == text.count("stablehlo.dot_general")
    assert len(ragged) == text.count('composite "chlo.ragged_dot"')
    assert "stablehlo.dot " not in text
    if platform == "cpu":
        assert (len(plain), len(ragged)) == (9, 0)
    else:
        assert (len(plain), len(ragged)) == (3 + 6 * 4, 6)
    for operands, result in plain + ragged:
        types = re.findall(r"tensor<[^>]*x(\w+)>", operands)
        assert types[:2] == ["bf16", "bf16"]
        assert result.endswith("xf32>")


BAD = [
    (
        dict(x=jnp.ones((3, 5))),
        r"router must have the shape \[D E\] with D the last axis of x; got",
    ),
    (dict(router=jnp.ones((3, 4))), r"router must have the shape \[D E\]"),
    (dict(router=jnp.ones((4,))), r"router must have the shape \[D E\]"),
    (dict(router=jnp.ones((4, 2))), r"gate_up must have the shape \[E D 2 F\]"),
    (dict(gate_up=jnp.ones((3, 4, 4))), r"gate_up must have .*Build it with pack_gate_up"),
    (dict(gate_up=jnp.ones((3, 2, 4, 2))), r"gate_up must have the shape \[E D 2 F\]"),
    (dict(gate_up=jnp.ones((1, 4, 2, 2))), r"gate_up must have the shape \[E D 2 F\]"),
    (dict(down=jnp.ones((3, 4, 2))), r"down must have the shape \[E F D\] .*turn them"),
    (dict(down=jnp.ones((1, 2, 4))), r"down must have the shape \[E F D\]"),
    (dict(x=jnp.ones((0, 4))), "x must have no empty axis"),
    (dict(x=jnp.ones((3, 4), jnp.int32)), "x must have one of the dtypes"),
    (dict(x=jnp.float32(1)), "x must have at least one axis"),
    (dict(num_active=0), "num_active must be at least 1; got num_active=0"),
    (dict(num_active=4), "num_active must not exceed E, .*; got num_active=4, E=3"),
    (dict(num_active=1.0), "num_active must be an integer"),
    (dict(renormalize=1), "renormalize must be True or False"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_refused(changes, message, no_shape_checks):
    weights = dict(
        router=jnp.ones((4, 3)), gate_up=jnp.ones((3, 4, 2, 2)), down=jnp.ones((3, 2, 4))
    )
    arguments = dict(x=jnp.ones((3, 4)), **weights, num_active=2, renormalize=True)
    with pytest.raises((ValueError, TypeError), match=f"^moe_swiglu: {message}"):
        moe_swiglu(**{**arguments, **changes})
    routing = {key: value for key, value in changes.items() if key in ("num_active", "renormalize")}
    if routing:
        options = {"num_active": 2, "renormalize": True, **routing}
        with pytest.raises((ValueError, TypeError), match=f"^route_top_k: {message}"):
            route_top_k(jnp.ones((2, 3)), **options)


def test_bad_logits_are_refused(no_shape_checks):
    options = dict(num_active=1, renormalize=True)
    with pytest.raises(ValueError, match="^route_top_k: router_logits must have at least one axis"):
        route_top_k(jnp.float32(1), **options)
    with pytest.raises(TypeError, match="^route_top_k: router_logits must have one of the dtypes"):
        route_top_k(jnp.ones((2, 3), jnp.int32), **options)
    for function in (route_top_k, moe_swiglu):
        with pytest.raises(TypeError, match="num_active"):
            function(*make_inputs()[: 1 if function is route_top_k else 4], renormalize=True)


@pytest.fixture
def torch_moe(torch_ref):
    from torch_ref import moe

    return moe


@pytest.fixture
def no_shape_checks(monkeypatch):
    """Our own messages, where the annotations would speak first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
