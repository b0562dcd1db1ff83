"""torch_ref, the specification: against torch.nn.functional and the transformers library."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import FLOAT16S, FLOATS, assert_matches_float64, random_arrays
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import jaxblock
import torch_ref
from jaxblock.parity.arrays import to_jax, to_numpy

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("shape_checks")]

SHAPES = [(7,), (3, 1), (2, 3, 64), (2, 1, 3, 33)]
EVERY_FLOAT = (*FLOATS, "float64")


def tensors(seed, dtype, *shapes):
    return [torch.tensor(a, dtype=getattr(torch, dtype)) for a in random_arrays(seed, *shapes)]


def assert_equal(actual, expected):
    """Dtype, shape and values."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def module_with(module, dtype, **parameters):
    """A transformers module in `dtype` with these parameters."""
    module = module.to(getattr(torch, dtype))
    for name, value in parameters.items():
        module.get_parameter(name).data = value
    return module.requires_grad_(False)


# RMSNorm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EVERY_FLOAT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_is_torch_rms_norm(shape, dtype):
    x, scale = tensors(0, dtype, shape, shape[-1:])
    expected = F.rms_norm(x, shape[-1:], scale, eps=1e-6)
    assert_equal(torch_ref.rms_norm(x, scale, eps=1e-6), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_before_scale_is_llama(shape, dtype):
    x, scale = tensors(0, dtype, shape, shape[-1:])
    llama = module_with(LlamaRMSNorm(shape[-1], eps=1e-5), dtype, weight=scale)
    assert_equal(torch_ref.rms_norm(x, scale, eps=1e-5, cast="before_scale"), llama(x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_after_scale_with_offset_is_gemma(shape, dtype):
    x, scale = tensors(0, dtype, shape, shape[-1:])
    gemma = module_with(GemmaRMSNorm(shape[-1], eps=1e-6), dtype, weight=scale)
    assert_equal(torch_ref.rms_norm(x, scale, eps=1e-6, scale_offset=1.0), gemma(x))


@pytest.mark.parametrize("dtype", FLOAT16S)
def test_the_two_conventions_differ(dtype):
    """Or the two tests above would prove nothing about the order of the casts."""
    x, scale = tensors(0, dtype, (64, 33), (33,))
    llama = module_with(LlamaRMSNorm(33, eps=1e-6), dtype, weight=scale)
    other = torch_ref.rms_norm(x, scale, eps=1e-6, cast="after_scale")
    assert (llama(x) != other).float().mean() > 0.1


def test_transformers_norms_are_no_float64_judge():
    """They compute in float32 whatever they are given: why torch_ref is the judge."""
    x, scale = tensors(0, "float64", (4, 33), (33,))
    llama = module_with(LlamaRMSNorm(33, eps=1e-6), "float64", weight=scale)
    error = (llama(x) - torch_ref.rms_norm(x, scale, eps=1e-6)).abs().max()
    assert 1e-9 < error < 33 * 2.0**-24 * scale.abs().max()


def test_gradients_of_rms_norm_are_those_of_torch():
    x, scale, dy = tensors(1, "float64", (2, 3, 33), (33,), (2, 3, 33))

    def gradients(function):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, scale)]
        return torch.autograd.grad(function(*leaves), leaves, dy)

    ours = gradients(partial(torch_ref.rms_norm, eps=1e-6))
    torchs = gradients(lambda x, scale: F.rms_norm(x, (33,), scale, eps=1e-6))
    for result, reference in zip(ours, torchs, strict=True):
        assert_matches_float64(result, to_numpy(reference), reduction_length=33, scale=6**0.5)


# The gated feed-forward --------------------------------------------------------------------------


def feed_forward_weights(seed, dtype, hidden, intermediate):
    """In torch's [out, in]."""
    gate, up, down = tensors(
        seed, dtype, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
    )
    return gate / hidden**0.5, up / hidden**0.5, down / intermediate**0.5


ACTIVATIONS = {
    "silu": (torch_ref.swiglu, F.silu),
    "gelu_pytorch_tanh": (torch_ref.geglu, partial(F.gelu, approximate="tanh")),
    "gelu": (partial(torch_ref.geglu, approximate=False), F.gelu),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_feed_forward_is_torch_linear_and_activation(activation, dtype):
    """Products with turned kernels may sum in another order: to the derived bound, in float64."""
    function, activate = ACTIVATIONS[activation]
    (x,) = tensors(0, dtype, (2, 3, 33))
    gate, up, down = feed_forward_weights(1, dtype, 33, 70)
    result = function(x, torch_ref.pack_gate_up(gate.T, up.T), down.T)
    assert result.dtype == x.dtype
    x, gate, up, down = (tensor.double() for tensor in (x, gate, up, down))
    expected = F.linear(activate(F.linear(x, gate)) * F.linear(x, up), down)
    assert_matches_float64(result, to_numpy(expected), reduction_length=70)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("module_class", "activation"),
    [(LlamaMLP, "silu"), (GemmaMLP, "gelu_pytorch_tanh"), (GemmaMLP, "gelu")],
)
def test_gated_feed_forward_is_the_module_of_transformers(module_class, activation, dtype):
    """Both within the bound of float64, which gives the module one rounding more: silu(gate)."""
    function, _ = ACTIVATIONS[activation]
    (x,) = tensors(0, dtype, (2, 3, 33))
    gate, up, down = feed_forward_weights(1, dtype, 33, 70)
    config = LlamaConfig(
        hidden_size=33,
        intermediate_size=70,
        num_attention_heads=3,
        head_dim=8,
        hidden_act=activation,
    )
    module = module_with(
        module_class(config),
        dtype,
        **{"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down},
    )
    ours = function(x, torch_ref.pack_gate_up(gate.T, up.T), down.T)
    wide = [tensor.double() for tensor in (x, gate, up, down)]
    expected = to_numpy(function(wide[0], torch_ref.pack_gate_up(wide[1].T, wide[2].T), wide[3].T))
    assert_matches_float64(ours, expected, reduction_length=70, roundings=2)
    assert_matches_float64(module(x), expected, reduction_length=70, roundings=3)


@pytest.mark.parametrize("dtype", FLOAT16S)
def test_swiglu_rounds_where_it_says(dtype):
    """One channel: the products are single numbers, so every rounding can be put down here."""
    x, gate, up, down = tensors(2, dtype, (50, 1), (1, 1), (1, 1), (1, 1))
    rounded = partial(torch.Tensor.to, dtype=x.dtype)
    gate_product, up_product = rounded(x.float() @ gate.float()), rounded(x.float() @ up.float())
    hidden = rounded(F.silu(gate_product.float()) * up_product.float())
    expected = rounded(hidden.float() @ down.float())
    assert_equal(torch_ref.swiglu(x, torch_ref.pack_gate_up(gate, up), down), expected)


@pytest.mark.parametrize("dtype", EVERY_FLOAT)
def test_packing_moves_bits_only(dtype):
    gate, up = tensors(0, dtype, (4, 6), (4, 6))
    packed = torch_ref.pack_gate_up(gate, up)
    assert packed.shape == (4, 2, 6)
    assert_equal(packed[:, 0], gate)
    assert_equal(packed[:, 1], up)
    for layout, fused, block_size in [
        ("gate_up", torch.cat([gate, up], -1), None),
        ("up_gate", torch.cat([up, gate], -1), None),
        ("interleaved", packed.transpose(-1, -2).reshape(4, 12), None),
        ("blocks", torch.cat([gate[:, :3], up[:, :3], gate[:, 3:], up[:, 3:]], -1), 3),
    ]:
        unpacked = torch_ref.unpack_gate_up(fused, layout=layout, block_size=block_size)
        assert_equal(unpacked[0], gate)
        assert_equal(unpacked[1], up)


def test_intermediate_size_is_the_same_on_both_sides():
    for hidden in (*range(1, 300), 4096, 5120, 6656, 8192, 16384):
        for multiple in (1, 32, 256):
            for multiplier in (None, 1.0, 1.3, 1.5):
                arguments = dict(multiple_of=multiple, ffn_dim_multiplier=multiplier)
                ours = jaxblock.intermediate_size(hidden, **arguments)
                assert ours == torch_ref.intermediate_size(hidden, **arguments)


# The table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EVERY_FLOAT)
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 3)])
def test_embed_is_torch_embedding(shape, dtype):
    (table,) = tensors(0, dtype, (11, 5))
    tokens = torch.randint(11, shape, generator=torch.Generator().manual_seed(0))
    assert_equal(torch_ref.embed(tokens, table), F.embedding(tokens, table))
    assert_equal(torch_ref.embed(tokens, table), table[tokens])
    with pytest.raises(IndexError):
        torch_ref.embed(torch.tensor([11]), table)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unembed_is_torch_linear(dtype):
    x, table = tensors(0, dtype, (2, 3, 33), (17, 33))
    assert_equal(torch_ref.unembed(x, table), F.linear(x, table))


@pytest.mark.parametrize("dtype", FLOAT16S)
def test_unembed_is_torch_linear_without_the_last_rounding(dtype):
    x, table = tensors(0, dtype, (2, 3, 33), (17, 33))
    logits = torch_ref.unembed(x, table)
    assert_equal(logits, F.linear(x.float(), table.float()))
    expected = to_numpy(F.linear(x.double(), table.double()))
    # One rounding of what may be summed in float32 in another order.
    assert_matches_float64(F.linear(x, table), expected, reduction_length=33)
    assert_matches_float64(logits, expected, reduction_length=33)


def test_unembed_with_cap_and_padding():
    x, table = tensors(0, "float64", (3, 33), (17, 33))
    plain = F.linear(x, table)
    logits = torch_ref.unembed(x, table, softcap=2.0, num_valid=15)
    # As in transformers' gemma2: divide, tanh, multiply.
    assert_equal(logits[:, :15], torch.tanh(plain[:, :15] / 2.0) * 2.0)
    assert torch.isneginf(logits[:, 15:]).all()


@pytest.mark.parametrize("dtype", EVERY_FLOAT)
def test_resize_embedding(dtype):
    (table,) = tensors(0, dtype, (7, 5))
    grown = torch_ref.resize_embedding(table, 9)
    assert_equal(grown[:7], table)
    mean = to_numpy(table).astype(np.float64).mean(axis=0)
    assert_matches_float64(grown[7:], np.stack([mean, mean]), reduction_length=7, scale=1.0)
    assert not torch_ref.resize_embedding(table, 9, fill="zeros")[7:].any()
    normal = partial(torch_ref.resize_embedding, table, 9, fill="normal")
    first, again, other = (normal(key=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert_equal(first, again)
    assert_equal(first[:7], table)
    assert not (first[7:] == other[7:]).all()
    assert_equal(torch_ref.resize_embedding(table, 7), table)
    assert_equal(torch_ref.resize_embedding(table, 2, allow_shrink=True), table[:2])
    with pytest.raises(ValueError, match="resize_embedding"):
        torch_ref.resize_embedding(table, 2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fill", ["mean", "zeros"])
def test_resize_embedding_is_the_same_on_both_sides(fill, dtype):
    # Eight rows of small integers: every way to take their mean is exact.
    table = torch.arange(40, dtype=getattr(torch, dtype)).reshape(8, 5)
    ours = jaxblock.resize_embedding(to_jax(table), 11, fill=fill)
    np.testing.assert_array_equal(
        to_numpy(ours), to_numpy(torch_ref.resize_embedding(table, 11, fill=fill))
    )
