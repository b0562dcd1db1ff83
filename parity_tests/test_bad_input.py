"""Every bad argument is refused in the wording of the house, known or traced; the rest is right.

`{function}: {what must hold}; got {name}={value}[, ...]. {what to do}`
"""

import re
from functools import partial
from pathlib import Path

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblock
import jaxblock.linen
import jaxblock.nnx
from jaxblock import (
    embed,
    geglu,
    intermediate_size,
    pack_gate_up,
    resize_embedding,
    rms_norm,
    swiglu,
    unembed,
    unpack_gate_up,
)

# No shape_checks here: beartype would look first, and none of these messages would be seen.


def f32(*shape):
    return jnp.ones(shape, jnp.float32)


def i32(*values):
    return jnp.array(values, jnp.int32)


norm = partial(rms_norm, eps=1e-6)
X, SCALE, TABLE = f32(2, 4), f32(4), f32(8, 4)
GATE_UP, DOWN = f32(4, 2, 6), f32(6, 4)

# (function, arguments, keywords, class, message from behind the function's name)
SHAPES_AND_DTYPES = [
    # rms_norm: nothing broadcasts.
    (norm, (X, f32(1)), {}, ValueError, "scale must have the shape [D] of the last axis of x; "
     "got x=float32[2,4], scale=float32[1]"),
    (norm, (X, f32(5)), {}, ValueError, "scale must have the shape [D]"),
    (norm, (X, f32(1, 4)), {}, ValueError, "scale must have the shape [D]"),
    (norm, (X, f32()), {}, ValueError, "scale must have the shape [D]"),
    (norm, (f32(), f32(1)), {}, ValueError, "x must have at least one axis"),
    (norm, (f32(2, 0), f32(0)), {}, ValueError, "x must have no empty axis; got x=float32[2,0]"),
    (norm, (f32(0, 4), SCALE), {}, ValueError, "x must have no empty axis"),
    (norm, (i32(1, 2), f32(2)), {}, TypeError, "x must have one of the dtypes bfloat16, float16, "
     "float32, float64; got x=int32[2]"),
    (norm, (X, i32(1, 2, 3, 4)), {}, TypeError, "scale must have one of the dtypes"),
    (norm, (X > 0, SCALE), {}, TypeError, "x must have one of the dtypes"),
    (norm, (X.astype(jnp.complex64), SCALE), {}, TypeError, "x must have one of the"),
    (norm, (X.astype(jnp.float8_e4m3fn), SCALE), {}, TypeError, "x must have one of"),
    # swiglu and geglu: gate_up has an axis of 2 of its own, kernels are [in, out].
    (swiglu, (X, f32(4, 12), DOWN), {}, ValueError, "gate_up must have the shape [D 2 F] with D "
     "the last axis of x; got x=float32[2,4], gate_up=float32[4,12]. Build it with "
     "pack_gate_up(gate, up)."),
    (swiglu, (X, f32(4, 3, 6), DOWN), {}, ValueError, "gate_up must have the shape"),
    (swiglu, (X, f32(4, 1, 6), DOWN), {}, ValueError, "gate_up must have the shape"),
    (swiglu, (X, f32(2, 4, 6), DOWN), {}, ValueError, "gate_up must have the shape"),
    (swiglu, (X, f32(5, 2, 6), DOWN), {}, ValueError, "gate_up must have the shape"),
    (swiglu, (X, GATE_UP, f32(4, 6)), {}, ValueError, "down must have the shape [F D] with F the "
     "last axis of gate_up and D that of x; got x=float32[2,4], gate_up=float32[4,2,6], "
     "down=float32[4,6]. torch keeps kernels as [out, in]: turn them."),
    (swiglu, (X, GATE_UP, f32(6, 1)), {}, ValueError, "down must have the shape"),
    (swiglu, (X, GATE_UP, f32(12, 4)), {}, ValueError, "down must have the shape"),
    (swiglu, (f32(2, 0), f32(0, 2, 6), f32(6, 0)), {}, ValueError, "x must have no empty"),
    (swiglu, (X, f32(4, 2, 0), f32(0, 4)), {}, ValueError, "gate_up must have no empty"),
    (swiglu, (f32(), GATE_UP, DOWN), {}, ValueError, "x must have at least one axis"),
    (swiglu, (i32(1, 2, 3, 4), GATE_UP, DOWN), {}, TypeError, "x must have one of the"),
    (geglu, (X, f32(4, 12), DOWN), {}, ValueError, "gate_up must have the shape [D 2 F]"),
    (geglu, (X, GATE_UP, f32(4, 6)), {}, ValueError, "down must have the shape [F D]"),
    # Packing.
    (pack_gate_up, (f32(4, 6), f32(4, 1)), {}, ValueError, "gate and up must have the same shape "
     "[D F]; got gate=float32[4,6], up=float32[4,1]"),
    (pack_gate_up, (f32(6), f32(6)), {}, ValueError, "gate and up must have the"),
    (pack_gate_up, (f32(4, 6), f32(4, 6).astype(jnp.bfloat16)), {}, TypeError, "gate and up must "
     "have the same dtype; got gate=float32[4,6], up=bfloat16[4,6]. Cast one of them"),
    (pack_gate_up, (f32(4, 0), f32(4, 0)), {}, ValueError, "gate must have no empty"),
    (partial(unpack_gate_up, layout="gate_up"), (f32(4, 7),), {}, ValueError, "the last axis "
     "must be even (2F); got fused=float32[4,7]"),
    (partial(unpack_gate_up, layout="gate_up"), (f32(),), {}, ValueError, "fused must have at "
     "least one axis"),
    (partial(unpack_gate_up, layout="gate_up"), (i32(1, 2),), {}, TypeError, "fused must have "
     "one of the dtypes"),
    (partial(unpack_gate_up, layout="blocks", block_size=4), (f32(4, 12),), {}, ValueError,
     "block_size must divide F, half of the last axis; got block_size=4, fused=float32[4,12]"),
    # The table.
    (embed, (f32(3), TABLE), {}, TypeError, "tokens must have an integer dtype; got "
     "tokens=float32[3]. Cast explicitly if these really are ids."),
    (embed, (i32(1) > 0, TABLE), {}, TypeError, "tokens must have an integer dtype"),
    (embed, (i32(), TABLE), {}, ValueError, "tokens must have no empty axis; got tokens=int32[0]"),
    (embed, (i32(1), f32(8)), {}, ValueError, "embedding must be [V D]; got embedding=float32[8]"),
    (embed, (i32(1), f32(2, 8, 4)), {}, ValueError, "embedding must be [V D]"),
    (embed, (i32(1), f32(8, 0)), {}, ValueError, "embedding must have no empty axis"),
    (embed, (i32(1), TABLE.astype(jnp.int32)), {}, TypeError, "embedding must have one of"),
    (unembed, (X, f32(8, 5)), {}, ValueError, "embedding must be [V D] with D the last axis of "
     "x; got x=float32[2,4], embedding=float32[8,5]"),
    (unembed, (X, f32(4, 8)), {}, ValueError, "embedding must be [V D] with D the last"),
    (unembed, (X, f32(8, 1)), {}, ValueError, "embedding must be [V D] with D the last"),
    (unembed, (f32(), TABLE), {}, ValueError, "embedding must be [V D] with D the last"),
    (unembed, (i32(1, 2, 3, 4), TABLE), {}, TypeError, "x must have one of the dtypes"),
    (unembed, (f32(0, 4), TABLE), {}, ValueError, "x must have no empty axis"),
    (partial(resize_embedding, vocab_size=9), (f32(8),), {}, ValueError, "embedding must be [V D]"),
    (partial(resize_embedding, vocab_size=9), (TABLE.astype(jnp.int32),), {}, TypeError,
     "embedding must have one of the dtypes"),
]  # fmt: skip

OPTIONS = [
    (rms_norm, (X, SCALE), dict(eps=-1e-6), ValueError, "eps must be finite and at least 0.0; "
     "got eps=-1e-06"),
    (rms_norm, (X, SCALE), dict(eps=float("nan")), ValueError, "eps must be finite"),
    (rms_norm, (X, SCALE), dict(eps=float("inf")), ValueError, "eps must be finite"),
    (rms_norm, (X, SCALE), dict(eps="1e-6"), TypeError, "eps must be a number; got eps='1e-6'"),
    (rms_norm, (X, SCALE), dict(eps=None), TypeError, "eps must be a number; got eps=None"),
    (rms_norm, (X, SCALE), dict(eps=True), TypeError, "eps must be a number"),
    (norm, (X, SCALE), dict(scale_offset=float("inf")), ValueError, "scale_offset must be finite"),
    (norm, (X, SCALE), dict(scale_offset=float("nan")), ValueError, "scale_offset must be finite"),
    (norm, (X, SCALE), dict(cast="late"), ValueError, "cast must be one of 'after_scale', "
     "'before_scale'; got cast='late'"),
    (norm, (X, SCALE), dict(cast=None), ValueError, "cast must be one of"),
    (geglu, (X, GATE_UP, DOWN), dict(approximate="tanh"), TypeError, "approximate must be True "
     "or False; got approximate='tanh'"),
    (geglu, (X, GATE_UP, DOWN), dict(approximate=1), TypeError, "approximate must be True"),
    (unpack_gate_up, (f32(4, 12),), dict(layout="halves"), ValueError, "layout must be one of "
     "'gate_up', 'up_gate', 'interleaved', 'blocks'; got layout='halves'"),
    (unpack_gate_up, (f32(4, 12),), dict(layout="blocks"), ValueError, "layout "
     '"blocks" needs block_size; got block_size=None'),
    (unpack_gate_up, (f32(4, 12),), dict(layout="blocks", block_size=0), ValueError,
     "block_size must be at least 1; got block_size=0"),
    (unpack_gate_up, (f32(4, 12),), dict(layout="blocks", block_size=2.0), TypeError,
     "block_size must be an integer; got block_size=2.0"),
    (unpack_gate_up, (f32(4, 12),), dict(layout="gate_up", block_size=2), ValueError,
     'block_size belongs to layout "blocks" only'),
    (intermediate_size, (0,), dict(multiple_of=4), ValueError, "hidden_size must be at least 1; "
     "got hidden_size=0"),
    (intermediate_size, (-8,), dict(multiple_of=4), ValueError, "hidden_size must be at least 1"),
    (intermediate_size, (8.0,), dict(multiple_of=4), TypeError, "hidden_size must be an integer; "
     "got hidden_size=8.0"),
    (intermediate_size, (True,), dict(multiple_of=4), TypeError, "hidden_size must be an integer"),
    (intermediate_size, (8,), dict(multiple_of=0), ValueError, "multiple_of must be at least 1"),
    (intermediate_size, (8,), dict(multiple_of=None), TypeError, "multiple_of must be an integer"),
    (intermediate_size, (8,), dict(multiple_of=4, ffn_dim_multiplier=0), ValueError,
     "ffn_dim_multiplier must be finite and above 0.0"),
    (intermediate_size, (8,), dict(multiple_of=4, ffn_dim_multiplier=-1.0), ValueError,
     "ffn_dim_multiplier must be finite and above 0.0"),
    (intermediate_size, (8,), dict(multiple_of=4, ffn_dim_multiplier=0.001), ValueError,
     "at least one channel must be left before rounding up; got hidden_size=8, "
     "ffn_dim_multiplier=0.001"),
    (intermediate_size, (8,), dict(multiple_of=4, ffn_dim_multiplier="1.3"), TypeError,
     "ffn_dim_multiplier must be a number"),
    (unembed, (X, TABLE), dict(softcap=0.0), ValueError, "softcap must be finite and above 0.0; "
     "got softcap=0.0"),
    (unembed, (X, TABLE), dict(softcap=-30.0), ValueError, "softcap must be finite"),
    (unembed, (X, TABLE), dict(softcap=float("inf")), ValueError, "softcap must be finite"),
    (unembed, (X, TABLE), dict(softcap=True), TypeError, "softcap must be a number"),
    (unembed, (X, TABLE), dict(num_valid=0), ValueError, "num_valid must be at least 1"),
    (unembed, (X, TABLE), dict(num_valid=9), ValueError, "num_valid must not exceed V, the rows "
     "of the table; got num_valid=9, embedding=float32[8,4]"),
    (unembed, (X, TABLE), dict(num_valid=7.0), TypeError, "num_valid must be an integer"),
    (resize_embedding, (TABLE, 7), {}, ValueError, "vocab_size must not be below V, the rows of "
     "the table; got vocab_size=7, V=8. Pass allow_shrink=True to cut rows off."),
    (resize_embedding, (TABLE, 0), dict(allow_shrink=True), ValueError, "vocab_size must be at "
     "least 1"),
    (resize_embedding, (TABLE, -1), {}, ValueError, "vocab_size must be at least"),
    (resize_embedding, (TABLE, 9.0), {}, TypeError, "vocab_size must be an integer"),
    (resize_embedding, (TABLE, True), {}, TypeError, "vocab_size must be an"),
    (resize_embedding, (TABLE, 9), dict(fill="random"), ValueError, "fill must be one of 'mean', "
     "'normal', 'zeros'; got fill='random'"),
    (resize_embedding, (TABLE, 9), dict(fill="normal"), ValueError, "a key must be "
     'given for fill "normal", and only for it; got fill=\'normal\', key=None'),
    (resize_embedding, (TABLE, 9), dict(key=jax.random.key(0)), ValueError, "a key must be given "
     "for fill"),
]  # fmt: skip


def function_name(case):
    return getattr(case[0], "func", case[0]).__name__


def name_of(case):
    _, arguments, keywords, _, _ = case
    given = [f"{a.dtype}{list(a.shape)}" if isinstance(a, jax.Array) else str(a) for a in arguments]
    given += [f"{key}={value}" for key, value in keywords.items()]
    return f"{function_name(case)}({', '.join(given)})"


def refused(kind, message):
    return pytest.raises(kind, match="^" + re.escape(message))


@pytest.mark.parametrize("case", SHAPES_AND_DTYPES + OPTIONS, ids=name_of)
def test_refused(case):
    function, arguments, keywords, kind, message = case
    with refused(kind, f"{function_name(case)}: {message}") as raised:
        function(*arguments, **keywords)
    assert raised.type is kind


@pytest.mark.parametrize("case", SHAPES_AND_DTYPES, ids=name_of)
def test_refused_when_traced(case):
    """Shapes and dtypes are known in every transformation: the same error under each."""
    function, arguments, keywords, kind, message = case
    message = f"{function_name(case)}: {message}"
    with refused(kind, message):
        jax.jit(partial(function, **keywords))(*arguments)
    with refused(kind, message):
        jax.eval_shape(
            jax.vmap(partial(function, **keywords), axis_size=3, in_axes=None), *arguments
        )


@pytest.mark.parametrize(
    "case", [case for case in OPTIONS if isinstance(case[1][0], jax.Array)], ids=name_of
)
def test_options_are_refused_when_arrays_are_traced(case):
    function, (array, *rest), keywords, kind, message = case
    arrays = [array, *(value for value in rest if isinstance(value, jax.Array))]
    others = [value for value in rest if not isinstance(value, jax.Array)]
    with refused(kind, f"{function_name(case)}: {message}"):
        jax.jit(lambda *arrays: function(*arrays, *others, **keywords))(*arrays)


@pytest.mark.parametrize(
    "value", [None, [1.0, 2.0], 3.0, "x", (1.0,), pytest.param(object(), id="object")], ids=repr
)
def test_what_is_no_array_is_refused(value):
    hint = r"must be a JAX or NumPy array; got {0}='{1}'\. Convert it with jnp\.asarray\({0}\)\."
    kind = type(value).__name__
    for call, name, function in [
        (lambda: norm(value, SCALE), "x", "rms_norm"),
        (lambda: norm(X, value), "scale", "rms_norm"),
        (lambda: swiglu(X, value, DOWN), "gate_up", "swiglu"),
        (lambda: embed(value, TABLE), "tokens", "embed"),
        (lambda: unembed(X, value), "embedding", "unembed"),
        (lambda: pack_gate_up(value, GATE_UP), "gate", "pack_gate_up"),
    ]:
        with pytest.raises(TypeError, match=f"^{function}: {name} {hint.format(name, kind)}$"):
            call()


@pytest.mark.parametrize("config", [None, {"model_type": "llama"}, "llama"], ids=repr)
def test_another_kind_of_configuration_is_refused(config, tmp_path):
    """Such as a dict, or that of transformers; wherever one is taken, before anything else."""
    key, rngs, tokens = jax.random.key(0), flax.nnx.Rngs(0), np.ones((1, 2), np.int32)
    float32 = {"dtype": jnp.float32}
    for call, function in [
        (lambda: jaxblock.init_params(config, key, **float32), "init_params"),
        (lambda: jaxblock.init_cache(config, 1, 2, **float32), "init_cache"),
        (lambda: jaxblock.forward({}, tokens, config), "forward"),
        (lambda: jaxblock.activations({}, tokens, config), "activations"),
        (lambda: jaxblock.prefill({}, tokens, None, config), "prefill"),
        (lambda: jaxblock.decode_step({}, tokens[:, 0], None, config), "decode_step"),
        (lambda: jaxblock.generate({}, tokens, config, max_new_tokens=1), "generate"),
        (lambda: jaxblock.next_token_loss({}, tokens, config), "forward"),
        (lambda: jaxblock.resize_vocabulary(config, {}, 8), "resize_vocabulary"),
        (lambda: jaxblock.pad_vocabulary(config, {}, 8), "pad_vocabulary"),
        (lambda: jaxblock.unpad_vocabulary(config, {}), "unpad_vocabulary"),
        (lambda: jaxblock.save_checkpoint(tmp_path / "new", config, {}), "save_checkpoint"),
        (lambda: jaxblock.nnx.Attention(config, rngs=rngs), "Attention"),
        (lambda: jaxblock.nnx.DecoderBlock(config, rngs=rngs), "DecoderBlock"),
        (lambda: jaxblock.nnx.Decoder(config, rngs=rngs), "init_params"),
        (lambda: jaxblock.linen.Attention(config).init(key, X), "Attention"),
        (lambda: jaxblock.linen.DecoderBlock(config).init(key, X), "DecoderBlock"),
        (lambda: jaxblock.linen.Decoder(config).init(key, tokens), "Decoder"),
    ]:
        # Linen freezes a dict.
        must = rf"^{function}: config must be a DecoderConfig; got config='\w+'\. Build it with"
        with pytest.raises(TypeError, match=must):
            call()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("dtype", ["<U1", object])
def test_numpy_arrays_of_no_number_are_refused(dtype):
    with pytest.raises(TypeError, match="^rms_norm: x must"):
        norm(np.array(["a", "b"], dtype), f32(2))
    with pytest.raises(TypeError, match="^embed: tokens must"):
        embed(np.array(["a", "b"], dtype), TABLE)


@pytest.mark.torch
def test_a_torch_tensor_is_refused():
    import torch

    with pytest.raises(
        TypeError, match="^rms_norm: x must be a JAX or NumPy array; got x='Tensor'"
    ):
        norm(torch.ones(2, 4), SCALE)


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (lambda: rms_norm(X, SCALE), "eps"),
        (lambda: intermediate_size(8), "multiple_of"),
        (lambda: unpack_gate_up(f32(4, 12)), "layout"),
        (lambda: resize_embedding(TABLE), "vocab_size"),
    ],
)
def test_constants_of_the_model_have_no_default(call, missing):
    with pytest.raises(TypeError, match=f"missing 1 required .* argument: '{missing}'"):
        call()


def test_keyword_arguments_cannot_be_given_by_position():
    for call in (
        lambda: rms_norm(X, SCALE, 1e-6),
        lambda: geglu(X, GATE_UP, DOWN, True),
        lambda: unembed(X, TABLE, 30.0),
        lambda: unpack_gate_up(f32(4, 12), "gate_up"),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()


def test_a_traced_constant_is_refused_by_name():
    with pytest.raises(TypeError, match="^rms_norm: eps must be a number"):
        jax.jit(lambda eps: rms_norm(X, SCALE, eps=eps))(1e-6)


# Ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "bad", "position"),
    [
        ([0, 8], 8, "(1,)"),
        ([[1, 2], [100, 0]], 100, "(1, 0)"),
        ([[1, -1], [100, 0]], -1, "(0, 1)"),
        (-3, -3, "()"),
    ],
)
def test_a_bad_id_is_named_with_its_position(tokens, bad, position):
    message = (
        f"embed: tokens must lie in [0, 8), the rows of the table; got tokens={bad}, "
        f"position={position}, V=8. Negative ids do not count from the end; resize the table"
    )
    for array in (jnp.asarray(tokens), np.asarray(tokens), np.asarray(tokens, np.int64)):
        with refused(IndexError, message):
            embed(array, TABLE)


def test_known_ids_are_looked_at_under_grad_and_as_constants_of_jit():
    tokens = jnp.array([1, 8])
    with pytest.raises(IndexError, match="^embed: tokens"):
        jax.grad(lambda table: embed(tokens, table).sum())(TABLE)
    with pytest.raises(IndexError, match="^embed: tokens"):
        jax.jit(lambda table: embed(tokens, table))(TABLE)


def test_large_ids_do_not_wrap_into_range():
    """With 64-bit types off JAX would read 2^32 + 1 as 1."""
    for tokens in (
        np.array([2**32 + 1]),
        np.array([2**63 + 1], np.uint64),
        np.array([2**31], np.uint32),
        np.int64(2**32),
    ):
        with pytest.raises(IndexError, match="^embed: tokens must lie in"):
            embed(tokens, TABLE)


# Right numbers, not errors -----------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["after_scale", "before_scale"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [0.0, 300.0, 60000.0, -60000.0])
def test_constant_rows_are_finite_and_exact(value, dtype, cast):
    x = jnp.full((2, 8), value, dtype)
    y = np.asarray(rms_norm(x, jnp.ones(8, dtype), eps=1e-6, cast=cast))
    assert y.dtype == dtype
    # rsqrt in float32 is good to 4 units in the last place, which 16 bits do not show.
    tolerance = 4 * 2.0**-23 if dtype == "float32" else 0
    expected = np.full((2, 8), np.sign(value))
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=0)


def test_numpy_arrays_and_numpy_numbers_are_welcome():
    y = rms_norm(np.ones((2, 4), np.float32), np.ones(4, np.float32), eps=np.float32(0.0))
    np.testing.assert_array_equal(y, np.ones((2, 4)))
    assert intermediate_size(np.int64(4096), multiple_of=np.int32(256)) == 11008
    assert rms_norm(X, SCALE, eps=0).dtype == jnp.float32


@pytest.mark.parametrize("other", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_follow_x_and_nothing_is_promoted(dtype, other):
    """Strict promotion is on: an implicit cast anywhere would raise."""
    x = jax.ShapeDtypeStruct((2, 4), dtype)
    scale, gate_up, down, table = (
        jax.ShapeDtypeStruct(array.shape, other) for array in (SCALE, GATE_UP, DOWN, TABLE)
    )
    assert jax.eval_shape(norm, x, scale).dtype == x.dtype
    assert jax.eval_shape(swiglu, x, gate_up, down).dtype == x.dtype
    assert jax.eval_shape(unembed, x, table).dtype == jnp.float32
    assert jax.eval_shape(embed, i32(1), table).dtype == table.dtype


def test_every_function_is_covered():
    """Here, or in the file of its own, by the start of the message that it must give."""
    covered = {function_name(case) for case in SHAPES_AND_DTYPES + OPTIONS}
    stems = ("rotary", "attention", "moe", "cross_entropy", "sampling")
    texts = [Path(__file__).with_name(f"test_{stem}.py").read_text() for stem in stems]
    for name in set(jaxblock.ops.__all__) - covered:
        assert any(f"{name}: " in text for text in texts), name
