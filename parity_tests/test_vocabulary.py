"""More and fewer rows: what stays to the bit, what is never counted, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import ops
from jaxblock.config import DecoderConfig
from jaxblock.config.groups import SpecialTokens
from jaxblock.decoder import forward
from jaxblock.parameters import flatten, unflatten
from jaxblock.vocabulary import pad_vocabulary, resize_vocabulary, unpad_vocabulary

V, D = 13, 8
FILE = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 7,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 11],
}
TOKENS = jnp.array([[3, 0, 12, 7]], jnp.int32)
LABELS = jnp.array([[0, 12, 7, -100]], jnp.int32)


def decoder(*, tied, dtype="float32"):
    config = DecoderConfig.from_hf({**FILE, "tie_word_embeddings": tied})
    random = np.random.default_rng(0).standard_normal
    leaves = {path: random(shape) / 4 for path, shape in flatten(config.parameter_shapes())}
    return config, unflatten({path: jnp.asarray(leaf, dtype) for path, leaf in leaves.items()})


def same_bits(one, other):
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def without_tables(params):
    return {name: leaf for name, leaf in params.items() if "embedding" not in name}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fill", ["mean", "normal", "zeros"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_growing(tied, fill, dtype):
    """B77: old rows keep their bits, tied stays one leaf, each table grows from its own rows."""
    config, params = decoder(tied=tied, dtype=dtype)
    before = jax.tree.map(jnp.copy, params)
    key = jax.random.key(1) if fill == "normal" else None
    grown_config, grown = resize_vocabulary(config, params, V + 4, fill=fill, key=key)
    assert grown_config == dataclasses.replace(config, vocab_size=V + 4)
    assert same_bits(params, before)
    assert without_tables(grown) == without_tables(params)  # The very same arrays.
    tables = ["embedding"] if tied else ["embedding", "unembedding"]
    assert sorted(grown) == sorted([*tables, "final_norm", "layers"])
    for name in tables:
        assert grown[name].shape == (V + 4, D) and grown[name].dtype == params[name].dtype
        assert same_bits(grown[name][:V], params[name])
        new, old = (np.asarray(a, np.float64) for a in (grown[name][V:], params[name]))
        if fill == "mean":
            # A sum of V numbers in float32 and one rounding to the dtype.
            u = V * 2.0**-24 + float(jnp.finfo(dtype).eps)
            assert np.all(np.abs(new - old.mean(0)) <= u * np.abs(old).mean(0))
        assert np.any(new) == (fill != "zeros")
    if fill == "normal" and not tied:
        assert not np.any(grown["embedding"][V:] == grown["unembedding"][V:])


def test_old_tokens_keep_their_logits():
    """B77, through the whole model; and shrinking is the way back, to the bit."""
    config, params = decoder(tied=False)
    grown_config, grown = resize_vocabulary(config, params, V + 4)
    run = jax.jit(forward, static_argnames="config")
    logits, more = run(params, TOKENS, config), run(grown, TOKENS, grown_config)
    assert more.shape == (1, 4, V + 4)
    # Two sums of D numbers, in two compiled programs.
    np.testing.assert_allclose(more[..., :V], logits, rtol=0, atol=4 * D * 2.0**-24)
    back_config, back = resize_vocabulary(grown_config, grown, V, allow_shrink=True)
    assert back_config == config and same_bits(back, params)


def test_padding_is_never_counted_or_chosen():
    """Loss, gradients and tokens are those without padding; unpadding is exact."""
    config, params = decoder(tied=True)
    padded_config, padded = pad_vocabulary(config, params, 8)
    assert (padded_config.vocab_size, padded_config.num_valid) == (16, V)
    assert not np.any(padded["embedding"][V:]) and padded["embedding"].shape == (16, D)

    def loss(params, config):
        logits = forward(params, TOKENS, config)
        total, count = ops.cross_entropy(logits, LABELS)
        return total / count, (logits, ops.greedy(logits))

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (value, (_, chosen)), gradient = run(params, config)
    (padded_value, (more, padded_chosen)), more_gradient = run(padded, padded_config)
    assert np.all(np.asarray(more[..., V:]) == -np.inf)
    assert np.isfinite(padded_value)
    np.testing.assert_allclose(padded_value, value, rtol=2.0**-20)
    np.testing.assert_array_equal(padded_chosen, chosen)
    unpadded_config, unpadded_gradient = unpad_vocabulary(padded_config, more_gradient)
    assert unpadded_config == config
    for ours, other in zip(
        jax.tree.leaves(unpadded_gradient), jax.tree.leaves(gradient), strict=True
    ):
        np.testing.assert_allclose(ours, other, rtol=0, atol=2.0**-20)
    assert not np.any(more_gradient["embedding"][V:])
    assert same_bits(unpad_vocabulary(padded_config, padded)[1], params)


def test_padding_again_and_padding_nothing():
    config, params = decoder(tied=False)
    once = pad_vocabulary(config, params, 8)
    assert all(once[1][name].shape == (16, D) for name in ("embedding", "unembedding"))
    twice = pad_vocabulary(*once, 5)
    assert (twice[0].vocab_size, twice[0].num_valid) == (15, V)
    assert same_bits(twice[1], pad_vocabulary(config, params, 5)[1])
    for same in (pad_vocabulary(config, params, V), unpad_vocabulary(config, params)):
        assert same[0] == config and same_bits(same[1], params)


def test_what_is_refused():
    config, params = decoder(tied=True)
    untied, both = decoder(tied=False)
    with pytest.raises(ValueError, match=r"^resize_embedding: vocab_size must not be below V"):
        resize_vocabulary(config, params, V - 1)
    with pytest.raises(
        ValueError, match=r"must keep the special tokens; got vocab_size=9, special_tokens=\(11,\)"
    ):
        resize_vocabulary(config, params, 9, allow_shrink=True)
    # One that has no row anyhow is no reason against growing.
    strange = dataclasses.replace(config, special_tokens=SpecialTokens(pad_token_id=V + 9))
    assert resize_vocabulary(strange, params, V + 1)[0].vocab_size == V + 1
    with pytest.raises(ValueError, match=r"must not be padded; got num_valid=13\. Undo it with"):
        resize_vocabulary(*pad_vocabulary(config, params, 8), 20)
    with pytest.raises(ValueError, match="a key must be given"):
        resize_vocabulary(config, params, V + 1, fill="normal")
    with pytest.raises(TypeError, match=r"^resize_vocabulary: vocab_size must be an integer"):
        resize_vocabulary(config, params, 20.0)
    with pytest.raises(ValueError, match=r"^pad_vocabulary: multiple_of must be at least 1"):
        pad_vocabulary(config, params, 0)
    # A tree of another configuration, in each of the three.
    with pytest.raises(ValueError, match=r"^resize_vocabulary: .*unexpected='unembedding'"):
        resize_vocabulary(config, both, V + 1)
    with pytest.raises(ValueError, match=r"^pad_vocabulary: .*missing='unembedding'"):
        pad_vocabulary(untied, params, 8)
    other = dataclasses.replace(config, vocab_size=16, num_valid=V)
    with pytest.raises(ValueError, match=r"^unpad_vocabulary: embedding must have the shape"):
        unpad_vocabulary(other, params)
