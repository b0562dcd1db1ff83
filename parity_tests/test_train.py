"""The loss and the train step: against PyTorch, over micro-batches, with a donated state."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import random_params

import jaxblock
from jaxblock import DecoderConfig
from jaxblock.ops.remat import POLICIES

CONFIG = DecoderConfig.from_hf(
    dict(
        model_type="llama",
        vocab_size=13,
        hidden_size=8,
        intermediate_size=11,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
)
TOKENS = np.random.default_rng(0).integers(0, 13, (4, 6))
MASK = np.array([[True] * 6, [False, False, True, True, True, True], [True] * 6, [True] * 6])


@pytest.fixture
def params():
    return jaxblock.init_params(CONFIG, jax.random.key(0), dtype=jnp.float32)


def jitted(optimizer, **keywords):
    step = partial(jaxblock.train_step, config=CONFIG, optimizer=optimizer, **keywords)
    return jax.jit(step, donate_argnames="state")


def test_a_donated_tied_state_learns(params):
    """B72: one table, no array twice, three and more steps that donate their state."""
    optimizer = optax.adamw(3e-2)
    state = jaxblock.init_train_state(params, optimizer)
    step = jitted(optimizer)
    memory = step.lower(state, TOKENS, mask=MASK).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    losses = []
    for number in range(30):
        state, metrics = step(state, TOKENS, mask=MASK)
        assert state.step == number + 1
        losses.append(float(metrics.loss))
    assert metrics.num_tokens == 5 + 3 + 5 + 5
    # Normed activations on rows of variance 1 / D: logits of variance 1.
    assert losses[0] == pytest.approx(np.log(13) + 0.5, rel=0.2)
    assert losses[-1] < 0.5 * losses[0]
    moments = state.opt_state[0]
    assert moments.mu["embedding"].shape == (13, 8) and "unembedding" not in moments.mu


def test_sums_over_micro_batches(params):
    """B90: gradients of parts, summed and divided by the count of all, are those of the whole."""

    @jax.jit
    def run(params, tokens, mask):
        loss = partial(jaxblock.next_token_loss, tokens=tokens, config=CONFIG, mask=mask)
        return jax.value_and_grad(loss, has_aux=True)(params)

    (whole, count), gradient = run(params, TOKENS, MASK)
    parts = [run(params, TOKENS[:2], MASK[:2]), run(params, TOKENS[2:], MASK[2:])]
    assert count == sum(part[0][1] for part in parts) == 18
    assert whole == pytest.approx(sum(float(part[0][0]) for part in parts), rel=1e-6)
    added = jax.tree.map(jnp.add, parts[0][1], parts[1][1])
    for one, other in zip(jax.tree.leaves(added), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


# Wide enough that what a layer keeps outweighs all else that is temporary.
WIDE = DecoderConfig.from_hf(
    CONFIG.to_hf() | dict(hidden_size=32, intermediate_size=96, num_hidden_layers=6)
)


def loss_of(config, **options):
    def loss(params):
        total, count = jaxblock.next_token_loss(params, TOKENS, config, mask=MASK, **options)
        return total / count

    return loss


@pytest.mark.usefixtures("branches")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_kept_changes_memory_and_no_gradient(dtype):
    params = random_params(WIDE, dtype)
    bytes_, gradients = {}, {}
    for remat in POLICIES:
        gradient = jax.jit(jax.grad(loss_of(WIDE, remat=remat)))
        compiled = gradient.lower(params).compile()
        bytes_[remat] = compiled.memory_analysis().temp_size_in_bytes
        gradients[remat] = compiled(params)
    assert bytes_["none"] > 1.3 * bytes_["matmul_outputs"] > 1.3 * bytes_["block_inputs"]
    # By rms: a few roundings, which are others where a value is kept and not computed again.
    limit = 1e-6 if dtype == "float32" else 0.02
    for remat in POLICIES:
        for one, other in zip(
            *map(jax.tree.leaves, (gradients[remat], gradients["none"])), strict=True
        ):
            one, other = (np.asarray(leaf, np.float64) for leaf in (one, other))
            assert np.linalg.norm(one - other) <= limit * np.linalg.norm(other)


def test_layers_go_through_loops_as_they_are():
    """bfloat16 stacks are neither converted to float32 nor kept a second time, and nor are their
    gradients: on CPU XLA would do so."""
    params = random_params(WIDE, "bfloat16")
    shapes = {leaf.shape for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2}
    forward = jax.jit(jaxblock.forward, static_argnames="config").lower(params, TOKENS, WIDE)
    gradient = jax.jit(jax.grad(loss_of(WIDE))).lower(params)
    for lowered in (forward, gradient):
        loops = [line for line in lowered.compile().as_text().splitlines() if " while(" in line]
        assert loops
        for shape in shapes:
            stack = f"[{','.join(map(str, shape))}]"
            assert not any(f"f32{stack}" in line for line in loops)
        assert any("16[6," in line for line in loops)


def test_the_loss_in_chunks_is_that_of_all_logits(params):
    whole = jax.jit(jax.value_and_grad(loss_of(CONFIG, chunk_size=None)))(params)
    chunks = jax.jit(jax.value_and_grad(loss_of(CONFIG, chunk_size=5)))(params)
    for one, other in zip(*map(jax.tree.leaves, (chunks, whole)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(other).max())
    # Forward mode is there without chunks.
    tangents = jax.tree.map(jnp.ones_like, params)
    _, slope = jax.jvp(loss_of(CONFIG, chunk_size=None), (params,), (tangents,))
    along_ones = sum(float(leaf.sum()) for leaf in jax.tree.leaves(whole[1]))
    assert slope == pytest.approx(along_ones, rel=1e-3)


def test_an_unknown_policy_is_refused(params):
    with pytest.raises(ValueError, match="forward: remat must be one of 'none', 'matmul_outputs'"):
        jaxblock.next_token_loss(params, TOKENS, CONFIG, remat="everything")
    with pytest.raises(ValueError, match="forward: remat must be one of"):
        jaxblock.forward(params, TOKENS, CONFIG, remat=None)


def test_bfloat16_over_float32_parameters(params):
    """Gradients and moments stay float32; the loss is that of a bfloat16 model to its rounding."""
    optimizer = optax.adamw(1e-3)
    state = jaxblock.init_train_state(params, optimizer)
    wide, metrics = jitted(optimizer)(jax.tree.map(jnp.copy, state), TOKENS)
    narrow, narrow_metrics = jitted(optimizer, dtype=jnp.bfloat16)(state, TOKENS)
    for leaf in jax.tree.leaves((narrow.params, narrow.opt_state[0].mu, narrow.opt_state[0].nu)):
        assert leaf.dtype == jnp.float32
    assert 0 < abs(metrics.loss - narrow_metrics.loss) < 0.02
    del wide


def test_second_moments_have_the_dtype_of_the_parameters():
    """B99: why `init_train_state` says to keep float32 parameters."""
    optimizer = optax.scale_by_adam(b2=0.999)
    for dtype, moment in ((jnp.float32, 1 - 0.999**300), (jnp.bfloat16, 0.337890625)):
        gradient = {"x": jnp.ones(1, dtype)}
        with jax.numpy_dtype_promotion("standard"):
            state = optimizer.init(gradient)
            update = jax.jit(lambda gradient, state: optimizer.update(gradient, state)[1])
            for _ in range(300):
                state = update(gradient, state)
        assert float(state.nu["x"][0]) == pytest.approx(moment, rel=1e-4)


def test_a_batch_without_anything_to_learn(params):
    optimizer = optax.sgd(1.0)
    state = jaxblock.init_train_state(params, optimizer)
    kept = jax.tree.map(np.asarray, params)
    after, metrics = jitted(optimizer)(state, TOKENS[:, :1])
    assert (metrics.loss, metrics.num_tokens, metrics.gradient_norm) == (0, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, after.params, kept)


def test_the_optimizers_state_of_another_shape_is_refused(params):
    """B77: after the vocabulary grew."""
    optimizer = optax.adam(1e-3)
    state = jaxblock.init_train_state(params, optimizer)
    config, grown = jaxblock.resize_vocabulary(CONFIG, params, 17)
    message = r"train_step: state.opt_state must be.*embedding.*\(13, 8\).*\(17, 8\).*init_train"
    with pytest.raises(ValueError, match=message):
        jaxblock.train_step(state._replace(params=grown), TOKENS, config, optimizer)
    with pytest.raises(ValueError, match="opt_state must be the optimizer's"):
        jaxblock.train_step(state, TOKENS, CONFIG, optax.sgd(1e-3))


@pytest.mark.torch
def test_a_step_of_adamw_is_that_of_torch(params):
    """Three steps, compared as update / lr; decay, betas and eps passed on both sides (B97)."""
    import torch

    from jaxblock.parity.arrays import to_torch
    from torch_ref import decoder as reference

    lr, decay, betas, eps = 1e-2, 0.1, (0.8, 0.9), 1e-3
    optimizer = optax.adamw(lr, *betas, eps=eps, weight_decay=decay)
    state = jaxblock.init_train_state(params, optimizer)
    step = jitted(optimizer)

    torch_params = jax.tree.map(lambda leaf: to_torch(leaf).double().requires_grad_(), params)
    leaves, _ = jax.tree.flatten(torch_params)
    torch_optimizer = torch.optim.AdamW(leaves, lr, betas, eps, decay)
    tokens, mask = torch.tensor(TOKENS), torch.tensor(MASK)
    counted = mask[:, 1:] & mask[:, :-1]
    for _ in range(3):
        before = jax.tree.map(np.asarray, state.params)
        torch_before = [leaf.detach().clone() for leaf in leaves]
        state, metrics = step(state, TOKENS, mask=MASK)
        logits = reference.forward(torch_params, tokens, CONFIG, mask=mask)
        nats = -torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
        torch_optimizer.zero_grad()
        loss = nats[counted].mean()
        loss.backward()
        torch_optimizer.step()
        assert float(metrics.loss) == pytest.approx(loss.item(), rel=1e-6)
        for one, old, leaf, torch_old in zip(
            jax.tree.leaves(state.params),
            jax.tree.leaves(before),
            leaves,
            torch_before,
            strict=True,
        ):
            update = (np.asarray(one, np.float64) - old) / lr
            torch_update = ((leaf.detach() - torch_old) / lr).numpy()
            # An update is about 1: g / (|g| + eps). A parameter of size 1 is rounded to 6e-8, lr
            # times smaller: 6e-6. Gradients of size 0.1 err by 1e-7 of themselves, eps times
            # smaller: 1e-5 where a gradient nearly vanishes.
            assert np.abs(update - torch_update).max() < 1e-4
            assert np.sqrt(np.mean((update - torch_update) ** 2)) < 1e-5


def test_gradients_of_sharded_parameters(params):
    """B71: the tied table cut by rows, heads and F cut too; two batch shapes in turn."""
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    config, params = jaxblock.resize_vocabulary(CONFIG, params, 14)
    config, params = jaxblock.pad_vocabulary(config, params, 16)
    cut = {
        "embedding": P("model"),
        "q": P(None, None, "model"),
        "o": P(None, "model"),
    }

    def place(path, leaf):
        spec = cut.get(path[-1].key, P())
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

    sharded = jax.tree_util.tree_map_with_path(place, params)
    assert not sharded["embedding"].sharding.is_fully_replicated

    @jax.jit
    def run(params, tokens):
        def loss(params):
            return jaxblock.next_token_loss(params, tokens, config)[0]

        return jax.value_and_grad(loss)(params)

    for length in (6, 4):
        (value, gradient) = run(sharded, TOKENS[:, :length])
        (alone, expected) = run(params, TOKENS[:, :length])
        assert float(value) == pytest.approx(float(alone), rel=1e-6)
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
