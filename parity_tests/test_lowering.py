"""What XLA is given for GPUs and TPUs: everything public can be lowered, and multiplies 16 bits.

The tests of single functions count their products; here is the whole of them, and the train step.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

import jaxblock
from jaxblock import DecoderConfig

CONFIG = DecoderConfig.from_hf(
    dict(
        model_type="llama",
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
)
OPTIMIZER = optax.adamw(1e-3)


def floats(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


KEY = jax.eval_shape(lambda: jax.random.key(0))
X, LOGITS, TABLE = floats(2, 5, 16), floats(2, 5, 29, dtype=jnp.float32), floats(29, 16)
GATE_UP, DOWN = floats(16, 2, 24), floats(24, 16)
QUERIES, ROW_KEYS = floats(2, 5, 4, 8), floats(2, 5, 2, 8)
ANGLES = floats(2, 5, 4, dtype=jnp.float32)
TOKENS, MASK = ids(2, 5), jax.ShapeDtypeStruct((2, 5), jnp.bool_)
LAST = floats(2, 29, dtype=jnp.float32)

PARAMS = jax.eval_shape(partial(jaxblock.init_params, CONFIG, dtype=jnp.bfloat16), KEY)
WIDE = jax.tree.map(lambda leaf: floats(*leaf.shape, dtype=jnp.float32), PARAMS)
CACHE = jax.eval_shape(partial(jaxblock.init_cache, CONFIG, 2, 9, dtype=jnp.bfloat16))
STATE = jax.eval_shape(partial(jaxblock.init_train_state, optimizer=OPTIMIZER), WIDE)

# Function -> its arrays, the other arguments, and how many products it takes, at least: forward,
# or forward and backward where its result is differentiated.
FUNCTIONS = {
    "rms_norm": ((X, floats(16)), dict(eps=1e-5), 0),
    "swiglu": ((X, GATE_UP, DOWN), {}, 6),
    "geglu": ((X, GATE_UP, DOWN), {}, 6),
    "pack_gate_up": ((DOWN, DOWN), {}, 0),
    "unpack_gate_up": ((floats(16, 48),), dict(layout="interleaved"), 0),
    "embed": ((TOKENS, TABLE), {}, 0),
    "unembed": ((X, TABLE), dict(softcap=3.0, num_valid=27), 3),
    "resize_embedding": ((TABLE,), dict(vocab_size=31), 0),
    "rotary_cos_sin": ((TOKENS, floats(4, dtype=jnp.float32)), {}, 0),
    "apply_rotary": ((QUERIES, ANGLES, ANGLES), {}, 0),
    "attention": ((QUERIES, ROW_KEYS, ROW_KEYS), dict(scale=0.3, window=3, softcap=2.0), 6),
    "route_top_k": ((floats(2, 5, 4),), dict(num_active=2, renormalize=True), 0),
    "moe_swiglu": (
        (X, floats(16, 4), floats(4, 16, 2, 24), floats(4, 24, 16)),
        dict(num_active=2, renormalize=True),
        9,
    ),
    "cross_entropy": ((LOGITS, TOKENS), dict(label_smoothing=0.1, z_loss=0.1), 0),
    "linear_cross_entropy": ((X, TABLE, TOKENS), dict(chunk_size=4, softcap=3.0), 3),
    "next_token_labels": ((TOKENS,), {}, 0),
    "greedy": ((LAST,), {}, 0),
    "sample": ((LAST, KEY), {}, 0),
    "top_k": ((LAST, KEY), dict(k=3), 0),
    "top_p": ((LAST, KEY), dict(p=0.9), 0),
    # Seven products of a layer, its two of attention, and the logits; three times so many with
    # the gradients.
    "forward": ((PARAMS, TOKENS), dict(config=CONFIG), 3 * 9),
    "activations": ((PARAMS, TOKENS), dict(config=CONFIG), 3 * 9),
    "next_token_loss": ((WIDE, TOKENS), dict(config=CONFIG, dtype=jnp.bfloat16), 3 * 9),
    "prefill": ((PARAMS, TOKENS, CACHE), dict(config=CONFIG), 9),
    "decode_step": ((PARAMS, ids(2), CACHE), dict(config=CONFIG), 9),
    "generate": ((PARAMS, TOKENS), dict(config=CONFIG, max_new_tokens=3), 2 * 9),
    "train_step": (
        (STATE, TOKENS),
        dict(config=CONFIG, optimizer=OPTIMIZER, dtype=jnp.bfloat16),
        3 * 9,
    ),
}
# Run once, on the host or whatever there is, or no function of arrays at all.
OTHERS = {
    "Cache",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DecoderConfig",
    "TrainState",
    "init_cache",
    "init_params",
    "init_train_state",
    "intermediate_size",
    "load_checkpoint",
    "pad_vocabulary",
    "resize_vocabulary",
    "rotary_frequencies",
    "rotary_magnitude",
    "save_checkpoint",
    "unpad_vocabulary",
}
NO_GRADIENT = {"prefill", "decode_step", "generate", "train_step"}


def test_the_table_is_complete():
    assert FUNCTIONS.keys() | OTHERS == set(jaxblock.__all__)


def differentiable(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def forward_and_backward(function, *args):
    """The result, and the gradients of all float arguments."""
    leaves, tree = jax.tree.flatten(args)
    chosen = [place for place, leaf in enumerate(leaves) if differentiable(leaf)]

    def of_floats(floats):
        given = list(leaves)
        for place, leaf in zip(chosen, floats, strict=True):
            given[place] = leaf
        return [y for y in jax.tree.leaves(function(*tree.unflatten(given))) if differentiable(y)]

    y, pull_back = jax.vjp(of_floats, [leaves[place] for place in chosen])
    return y, pull_back(y)


def product_types(text):
    """Operands and result of every matrix product in a module, by their dtypes."""
    found = re.findall(r"stablehlo\.dot_general .*: \((.*)\) -> (tensor<.*?>)", text)
    assert len(found) == text.count("stablehlo.dot_general") and "stablehlo.dot " not in text
    ragged = re.findall(r'composite "chlo\.ragged_dot" .*: \((.*)\) -> (tensor<.*?>)', text)
    types = [re.findall(r"tensor<([^>]*)>", f"{a} {b}") for a, b in found + ragged]
    return [[one.split("x")[-1] for one in operands] for operands in types]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_lowered_for_gpu_and_tpu(name):
    arrays, options, products = FUNCTIONS[name]
    function = partial(getattr(jaxblock, name), **options)
    if name not in NO_GRADIENT and any(map(differentiable, jax.tree.leaves(arrays))):
        function = partial(forward_and_backward, function)
    exported = export.export(jax.jit(function), platforms=["cuda", "tpu"])(*arrays)
    assert exported.platforms == ("cuda", "tpu")
    types = product_types(exported.mlir_module())
    assert len(types) >= products
    for left, right, *_, result in types:
        assert (left, right, result) == ("bf16", "bf16", "f32")
