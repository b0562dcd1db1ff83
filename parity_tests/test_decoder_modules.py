"""Attention, DecoderBlock and Decoder of nnx and linen: the tree and the bits of the functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from helpers import assert_same_bits, random_params

import jaxblock
import jaxblock.linen
import jaxblock.nnx
from jaxblock import DecoderConfig
from jaxblock.parameters import flatten, layer_shapes

GEMMA3 = DecoderConfig.from_hf(
    dict(
        model_type="gemma3_text",
        vocab_size=13,
        hidden_size=8,
        intermediate_size=11,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        rms_norm_eps=1e-6,
        sliding_window=3,
        sliding_window_pattern=2,
    )
)
MIXTRAL = DecoderConfig.from_hf(
    dict(
        model_type="mixtral",
        vocab_size=13,
        hidden_size=8,
        intermediate_size=5,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
    )
)
CONFIGS = pytest.mark.parametrize("config", [GEMMA3, MIXTRAL], ids=["gemma3_text", "mixtral"])
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 6))
MASK = np.array([[True] * 6, [False, False, True, True, True, True]])


def empty(module, *args, **keywords):
    """A module of nnx with shapes for values: drawing them costs more than all that is tested."""
    return nnx.eval_shape(lambda: module(*args, **keywords, rngs=nnx.Rngs(0)))


def shapes_of(tree):
    return {path: leaf.shape for path, leaf in flatten(tree)}


@CONFIGS
def test_decoder(config):
    params = random_params(config)
    logits = jaxblock.forward(params, TOKENS, config, mask=MASK)

    module = empty(jaxblock.nnx.Decoder, config)
    assert shapes_of(module.params()) == dict(flatten(config.parameter_shapes()))
    nnx.update(module, params)
    assert_same_bits(module(TOKENS, mask=MASK), logits)
    jax.tree.map(assert_same_bits, module.params(), params)

    same = jaxblock.linen.Decoder(config)
    assert_same_bits(same.apply({"params": params}, TOKENS, mask=MASK), logits)
    made = jax.eval_shape(same.init, jax.random.key(0), TOKENS)["params"]
    assert shapes_of(made) == dict(flatten(config.parameter_shapes()))
    tied = config.tie_word_embeddings
    assert ("unembedding" in made) != tied
    assert len(jax.tree.leaves(nnx.state(module))) == len(jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("config", "name"),
    [(GEMMA3, "Attention"), (GEMMA3, "DecoderBlock"), (MIXTRAL, "DecoderBlock")],
    ids=["gemma3_text-Attention", "gemma3_text-DecoderBlock", "mixtral-DecoderBlock"],
)
def test_parts_of_a_layer(config, name):
    """Each layer of the stacked tree through the module gives what the scanned decoder gives."""
    params = random_params(config)
    stages = jaxblock.activations(params, TOKENS, config, mask=MASK)
    x = stages.embedding
    for layer, kind in enumerate(config.layers):
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        tree = one["attention"] if name == "Attention" else one
        module = empty(getattr(jaxblock.nnx, name), config, kind=kind)
        expected = layer_shapes(config)
        expected = expected["attention"] if name == "Attention" else expected
        assert shapes_of(module.params()) == dict(flatten(expected))
        nnx.update(module, tree)
        y = module(x, mask=MASK)
        same = getattr(jaxblock.linen, name)(config, kind=kind)
        assert_same_bits(same.apply({"params": tree}, x, mask=MASK), y)
        if name == "DecoderBlock":
            limit = 1e-5 * float(jnp.abs(stages.blocks[layer]).max())
            real = np.asarray(MASK)
            np.testing.assert_allclose(
                np.asarray(y)[real], np.asarray(stages.blocks[layer])[real], rtol=0, atol=limit
            )
        x = stages.blocks[layer]


@pytest.fixture(scope="module")
def drawn():
    """A Decoder of nnx with the values that it draws itself."""
    return jaxblock.nnx.Decoder(GEMMA3, rngs=nnx.Rngs(0))


def test_dtypes(drawn):
    module = empty(jaxblock.nnx.Decoder, GEMMA3, dtype=jnp.bfloat16)
    nnx.update(module, drawn.params())
    assert module.params()["embedding"].dtype == jnp.float32
    narrow, wide = module(TOKENS), drawn(TOKENS)
    assert narrow.dtype == wide.dtype == jnp.float32
    assert 1e-4 < float(jnp.abs(narrow - wide).max()) < 0.5
    stored = jaxblock.linen.Decoder(GEMMA3, param_dtype=jnp.bfloat16)
    made = jax.eval_shape(stored.init, jax.random.key(0), TOKENS)["params"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(made)} == {"bfloat16"}
    block = empty(jaxblock.nnx.DecoderBlock, GEMMA3, dtype=jnp.bfloat16)
    graph, state = nnx.split(block)
    run = jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x), state, jnp.ones((1, 2, 8)))
    assert run.dtype == jnp.bfloat16


def test_an_optimizer_of_nnx_takes_a_step(drawn):
    optimizer = nnx.Optimizer(drawn, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        def loss(module):
            labels = jaxblock.next_token_labels(jnp.asarray(TOKENS))
            total, count = jaxblock.cross_entropy(module(TOKENS), labels)
            return total / count

        value, gradients = nnx.value_and_grad(loss)(module)
        optimizer.update(module, gradients)
        return value

    first = step(drawn, optimizer)
    assert step(drawn, optimizer) < first


def test_wrong_input_is_refused():
    attention = empty(jaxblock.nnx.Attention, GEMMA3)
    with pytest.raises(ValueError, match=r"Attention: x must be \[B T D\] with D = 8"):
        attention(jnp.ones((1, 2, 9)))
    block = jaxblock.linen.DecoderBlock(GEMMA3)
    with pytest.raises(ValueError, match=r"DecoderBlock: mask must have the shape \[B T\] of x"):
        jax.eval_shape(
            lambda key: block.init(key, jnp.ones((1, 2, 8)), mask=np.ones((1, 3), bool)),
            jax.random.key(0),
        )
    with pytest.raises(IndexError, match=r"forward: tokens must lie in \[0, 13\)"):
        empty(jaxblock.nnx.Decoder, GEMMA3)(np.array([[13]]))
    params = jax.tree.map(
        lambda shape: jnp.zeros(shape),
        GEMMA3.parameter_shapes(),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    params["embedding"] = params["embedding"][:, :-1]
    with pytest.raises((ValueError, errors.ScopeParamShapeError), match="embedding"):
        jaxblock.linen.Decoder(GEMMA3).apply({"params": params}, TOKENS)
