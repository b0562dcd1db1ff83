"""The decoder against transformers and float64: every family, forward, backward and cached."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import assert_same_bits, equations, random_params
from tiny_models import (
    FAMILIES,
    SIZES,
    jax_tree_of,
    map_tree,
    ragged,
    tensors_of,
    tiny_model,
    tree_of,
)

import jaxblock
from jaxblock.block import decoder_block, rotary_angles
from jaxblock.parameters import flatten, init_leaves
from jaxblock.parity.arrays import to_jax
from torch_ref import decoder as reference

pytestmark = pytest.mark.torch

TOKENS, MASK = ragged()
# Twelve rows, so that errors are compared over enough numbers to be steady.
MANY, MANY_MASK = ragged(seed=1, rows=12)
every_family = pytest.mark.parametrize("model_type", FAMILIES)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def torch_loss(logits, tokens, mask):
    """The mean over real tokens that follow real tokens, written down a second time."""
    counted = mask[:, 1:] & mask[:, :-1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probabilities = torch.log_softmax(wide[:, :-1], -1)
    nats = -log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]
    return nats[counted].sum() / counted.sum()


def run_torch(model, config, dtype):
    """transformers' logits [B T V] and the gradients of its parameters as a tree, in `dtype`."""
    tokens, mask = torch.tensor(MANY), torch.tensor(MANY_MASK)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model.to(dtype).zero_grad()
    out = model(
        tokens.masked_fill(~mask, 0),
        attention_mask=mask.long(),
        position_ids=positions,
        use_cache=False,
    ).logits
    torch_loss(out, tokens, mask).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return out.detach(), tree_of(gradients, config)


def run_reference(params, config):
    """The same in float64, with everything on the way."""
    tokens, mask = torch.tensor(MANY), torch.tensor(MANY_MASK)
    params = map_tree(lambda leaf: leaf.double().requires_grad_(), params)
    stages = reference.activations(params, tokens, config, mask=mask)
    torch_loss(stages.logits, tokens, mask).backward()
    return stages, map_tree(lambda leaf: leaf.grad, params)


def run_jax(params, config):
    """The same in JAX: one compilation for all of it."""

    @jax.jit
    def run(params):
        def loss(params):
            stages = jaxblock.activations(params, MANY, config, mask=MANY_MASK)
            labels = jaxblock.next_token_labels(jnp.asarray(MANY), mask=jnp.asarray(MANY_MASK))
            total, count = jaxblock.cross_entropy(stages.logits, labels)
            return total / count, stages

        return jax.grad(loss, has_aux=True)(params)

    gradients, stages = run(params)
    return stages, gradients


@lru_cache(maxsize=1)
def model_and_params(model_type):
    model, config = tiny_model(model_type)
    return model, config, jax_tree_of(model, config)


def relative_errors(actual, expected):
    """The rms error of every leaf, over the rms of the leaf."""
    actual = {path: np.asarray(leaf.float() if isinstance(leaf, torch.Tensor) else leaf, np.float64)
              for path, leaf in flatten(actual)}  # fmt: skip
    expected = {path: leaf.numpy() for path, leaf in flatten(expected)}
    assert actual.keys() == expected.keys()
    return {"/".join(path): rms(actual[path] - leaf) / rms(leaf) for path, leaf in expected.items()}


def assert_no_worse(name, ours, theirs, factor):
    assert ours <= factor * theirs, f"{name}: {ours:.3e} against PyTorch's {theirs:.3e}"


# Against PyTorch ----------------------------------------------------------------------------------

# PyTorch errs by other roundings in another order, so either side may be ahead. Over all logits and
# all gradients together, thousands of numbers, they are close: 1.5. One leaf may have 20 numbers
# that one rounding upstream moves together: 4.
ALL, ONE_LEAF = 1.5, 4.0


@every_family
def test_logits_and_gradients(model_type):
    model, config, params = model_and_params(model_type)
    stages, gradients = run_jax(params, config)
    exact, exact_gradients = run_reference(tree_of(tensors_of(model), config), config)
    logits, torch_gradients = run_torch(model, config, torch.float32)

    want = exact.logits.detach().numpy()[MANY_MASK]
    ours, theirs = np.asarray(stages.logits)[MANY_MASK] - want, logits.numpy()[MANY_MASK] - want
    assert 0 < rms(ours) < 1e-6 * rms(want)
    assert_no_worse("logits", rms(ours), rms(theirs), ALL)
    assert_no_worse("largest", np.abs(ours).max(), np.abs(theirs).max(), 2.0)
    np.testing.assert_array_equal(np.asarray(stages.logits)[MANY_MASK].argmax(-1), want.argmax(-1))
    for name in ("embedding", "final_norm"):
        value = getattr(exact, name).detach().numpy()[MANY_MASK]
        assert rms(np.asarray(getattr(stages, name))[MANY_MASK] - value) < 1e-6 * rms(value), name
    for block, value in zip(stages.blocks, exact.blocks.detach().numpy(), strict=True):
        assert rms(np.asarray(block)[MANY_MASK] - value[MANY_MASK]) < 1e-6 * rms(value[MANY_MASK])

    ours = relative_errors(gradients, exact_gradients)
    theirs = relative_errors(torch_gradients, exact_gradients)
    assert ours.keys() == {"/".join(path) for path, _ in flatten(config.parameter_shapes())}
    assert rms(list(theirs.values())) < 1e-5
    assert_no_worse("gradients", rms(list(ours.values())), rms(list(theirs.values())), ALL)
    for name in ours:
        assert_no_worse(name, ours[name], theirs[name], ONE_LEAF)


@pytest.mark.usefixtures("branches")
def test_logits_and_gradients_in_bfloat16():
    """Of the family with most in it; experts in bfloat16 are in test_moe."""
    model, config = tiny_model("gemma2")
    model.to(torch.bfloat16)
    params = jax_tree_of(model, config)
    exact, exact_gradients = run_reference(tree_of(tensors_of(model), config), config)
    logits, torch_gradients = run_torch(model, config, torch.bfloat16)
    stages, gradients = run_jax(params, config)
    assert stages.logits.dtype == jnp.float32
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(gradients))
    want = exact.logits.detach().numpy()[MANY_MASK]
    ours, theirs = (
        np.asarray(stages.logits)[MANY_MASK] - want,
        logits.float().numpy()[MANY_MASK] - want,
    )
    assert_no_worse("logits", rms(ours), rms(theirs), 1.1)
    ours = relative_errors(gradients, exact_gradients)
    theirs = relative_errors(torch_gradients, exact_gradients)
    assert_no_worse("gradients", rms(list(ours.values())), rms(list(theirs.values())), ALL)


def test_a_small_fault_in_one_gradient_is_caught():
    """The bounds above see one parameter of one layer off by 1e-5 of itself."""
    model, config, params = model_and_params("llama")
    v = params["layers"]["attention"]["v"]
    faulty = {**params, "layers": {**params["layers"], "attention": {
        **params["layers"]["attention"], "v": v.at[2].multiply(1 + 1e-5)}}}  # fmt: skip
    stages, gradients = run_jax(faulty, config)
    exact, exact_gradients = run_reference(tree_of(tensors_of(model), config), config)
    logits, torch_gradients = run_torch(model, config, torch.float32)
    want = exact.logits.detach().numpy()[MANY_MASK]
    theirs = rms(logits.numpy()[MANY_MASK] - want)
    assert rms(np.asarray(stages.logits)[MANY_MASK] - want) > ALL * theirs
    ours = relative_errors(gradients, exact_gradients)
    bound = relative_errors(torch_gradients, exact_gradients)
    assert rms(list(ours.values())) > ALL * rms(list(bound.values()))


def test_float64_is_float64(x64):
    _, config, params = model_and_params("gemma2")
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)
    logits = jaxblock.forward(params, MANY, config, mask=MANY_MASK)
    assert logits.dtype == jnp.float64
    torch_params = map_tree(lambda leaf: torch.tensor(np.asarray(leaf)), params)
    want = reference.forward(torch_params, torch.tensor(MANY), config, mask=torch.tensor(MANY_MASK))
    # All but the angles, which are float32 numbers by definition.
    np.testing.assert_allclose(
        np.asarray(logits)[MANY_MASK], want.numpy()[MANY_MASK], rtol=0, atol=1e-6
    )


# Rows as if alone, and the cache ------------------------------------------------------------------


def extended():
    """The ragged rows with six more tokens each: padding left, none, and in between."""
    more = np.random.default_rng(4).integers(0, SIZES["vocab_size"], (3, 6))
    mask = np.concatenate([MASK, np.ones((3, 6), bool)], 1)
    mask[2, 9] = False  # The end of the second piece below.
    return np.concatenate([TOKENS, more], 1), mask


def scatter_limit(logits):
    """Two orders of float32 sums over such sizes: 1e-5 of the largest logit."""
    return 1e-5 * np.abs(logits[np.isfinite(logits)]).max()


@every_family
def test_the_cache_gives_what_forward_gives(model_type):
    """A prompt in two pieces, longer than the window, and five steps; rows of three lengths."""
    model, config, params = model_and_params(model_type)
    tokens, mask = extended()
    exact = map_tree(lambda leaf: leaf.double(), tree_of(tensors_of(model), config))
    whole = reference.forward(exact, torch.tensor(tokens), config, mask=torch.tensor(mask)).numpy()
    cache = jaxblock.init_cache(config, 3, 15, dtype=jnp.float32)
    _, cache = jaxblock.prefill(params, tokens[:, :5], cache, config, mask=mask[:, :5])
    logits, cache = jaxblock.prefill(params, tokens[:, 5:10], cache, config, mask=mask[:, 5:10])
    for row in range(3):
        last = np.flatnonzero(mask[row, :10])[-1]
        np.testing.assert_allclose(logits[row], whole[row, last], rtol=0, atol=scatter_limit(whole))
    for step in range(10, 15):
        logits, cache = jaxblock.decode_step(params, tokens[:, step], cache, config)
        np.testing.assert_allclose(logits, whole[:, step], rtol=0, atol=scatter_limit(whole))
    assert cache.lengths.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_each_row_is_as_if_alone(model_type):
    _, config, params = model_and_params(model_type)
    tokens, mask = extended()
    hidden = np.where(mask, tokens, -7)  # Padding may hold anything.
    together = np.asarray(jaxblock.forward(params, hidden, config, mask=mask))
    for row in range(3):
        alone = np.asarray(jaxblock.forward(params, tokens[row][mask[row]][None], config))[0]
        limit = scatter_limit(alone)
        np.testing.assert_allclose(together[row, mask[row]], alone, rtol=0, atol=limit)


def test_a_window_keeps_a_cache_of_the_window():
    _, config = tiny_model("gemma3_text")
    cache = jaxblock.init_cache(config, 2, 100, dtype=jnp.bfloat16)
    kinds = [kind.window for kind in config.layer_kinds]
    assert kinds == [4, None]
    assert [stack.shape for stack in cache.keys] == [(3, 2, 2, 10, 4), (2, 2, 2, 10, 100)]
    assert [stack.shape for stack in cache.values] == [(3, 2, 2, 4, 10), (2, 2, 2, 100, 10)]
    # Bit patterns, so that the CPU backend does not convert a cache to write a token.
    assert {leaf.dtype.name for leaf in (*cache.keys, *cache.values)} == {"uint16"}
    assert cache.dtype == jnp.bfloat16


def test_a_step_holds_no_second_copy_of_parameters_or_cache():
    """In bfloat16, where XLA's CPU backend would convert both to float32, layer stacks whole."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 12, "head_dim": 32}
    _, config = tiny_model("mistral", **sizes)
    params = random_params(config, jnp.bfloat16)
    cache = jaxblock.init_cache(config, 2, 500, dtype=jnp.bfloat16)
    step = jax.jit(jaxblock.decode_step, static_argnames="config", donate_argnames="cache")
    tokens = jnp.zeros(2, jnp.int32)
    memory = step.lower(params, tokens, cache, config).compile().memory_analysis()
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert largest > 700_000
    assert memory.temp_size_in_bytes < largest / 2
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in cache.keys + cache.values)


def test_past_the_end_of_the_cache():
    _, config, params = model_and_params("llama")
    tokens = TOKENS[:2, :4]
    mask = np.array([[True] * 4, [False, False, True, True]])
    cache = jaxblock.init_cache(config, 2, 4, dtype=jnp.float32)
    _, cache = jaxblock.prefill(params, tokens, cache, config, mask=mask)
    message = r"decode_step: every row must fit into the cache; got tokens=5, capacity=4\. Make"
    with pytest.raises(ValueError, match=message):
        jaxblock.decode_step(params, tokens[:, 0], cache, config)
    with pytest.raises(ValueError, match="prefill: every row must fit"):
        jaxblock.prefill(params, tokens[:, :1], cache, config)
    step = jax.jit(jaxblock.decode_step, static_argnames="config")
    logits, after = step(params, tokens[:, 0], cache, config)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    for old, new in zip(cache.keys + cache.values, after.keys + after.values, strict=True):
        assert_same_bits(new[:, 0], old[:, 0])
    logits, _ = step(params, tokens[:, 0], after, config)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_a_row_without_a_real_token():
    _, config, params = model_and_params("llama")
    cache = jaxblock.init_cache(config, 2, 4, dtype=jnp.float32)
    mask = np.array([[True, True], [False, False]])
    logits, cache = jaxblock.prefill(params, TOKENS[:2, :2], cache, config, mask=mask)
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()
    assert cache.lengths.tolist() == [2, 0]


def test_how_often_it_compiles():
    """Once for each length of a whole row; once for all steps of decoding."""
    _, config, params = model_and_params("llama")
    traces = []

    @partial(jax.jit, donate_argnames="cache")
    def step(params, tokens, cache):
        traces.append(1)
        return jaxblock.decode_step(params, tokens, cache, config)

    cache = jaxblock.init_cache(config, 1, 24, dtype=jnp.float32)
    for token in range(20):
        _, cache = step(params, jnp.array([token]), cache)
    assert len(traces) == 1
    assert cache.lengths.tolist() == [20]

    def run(params, tokens):
        traces.append(tokens.shape)
        return jaxblock.forward(params, tokens, config)

    traces.clear()
    abstract = jax.jit(run)
    for length in [*range(1, 21)] * 2:
        abstract.trace(params, jax.ShapeDtypeStruct((1, length), jnp.int32))
    assert len(traces) == 20


# Structure ----------------------------------------------------------------------------------------


def test_scanned_layers_are_a_loop_over_layers():
    """L = D = F = 4: a scan over a wrong axis would have the right shapes."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 4, "head_dim": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    model, config = tiny_model("qwen3", **sizes)
    params = jax_tree_of(model, config)
    stages = jaxblock.activations(params, TOKENS, config)
    kind = config.layer_kinds[0]
    positions = jnp.broadcast_to(jnp.arange(9), (3, 9))
    angles = rotary_angles(positions, kind, config)

    def attend(q, k, v):
        return jaxblock.attention(q, k, v, scale=config.attention.scale), None

    x = jaxblock.embed(TOKENS, params["embedding"])
    for layer in range(4):
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        x, _ = decoder_block(one, x, config, angles=angles, attend=attend)
        limit = scatter_limit(np.asarray(x))
        np.testing.assert_allclose(stages.blocks[layer], x, rtol=0, atol=limit)


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "gemma2"])
def test_where_the_norms_stand(model_type):
    """B50: zero outputs leave the residual stream; a constant from attention is normed or not."""
    model, config = tiny_model(model_type, attention_bias=True)
    params = jax_tree_of(model, config)
    layers = params["layers"]
    layers["feed_forward"]["down"] *= 0
    layers["attention"]["o"] *= 0
    layers["attention"]["o_bias"] *= 0
    if config.feed_forward.bias:
        layers["feed_forward"]["down_bias"] *= 0
    stages = jaxblock.activations(params, TOKENS, config)
    np.testing.assert_array_equal(stages.blocks[-1], stages.embedding)
    constant = jnp.arange(1.0, 1.0 + config.hidden_size)
    layers["attention"]["o_bias"] = jnp.stack([constant] * config.num_hidden_layers)
    added = constant
    if config.norm.post_norm:
        scale = 0.5 * jnp.ones_like(constant)
        layers["attention_post_norm"]["scale"] = jnp.stack([scale] * config.num_hidden_layers)
        factor = scale + config.norm.scale_offset
        added = factor * constant / jnp.sqrt(jnp.mean(constant**2) + config.norm.eps)
    stages = jaxblock.activations(params, TOKENS, config)
    np.testing.assert_allclose(
        stages.blocks[0], stages.embedding + added[None, None], rtol=1e-5, atol=1e-5
    )


def test_initial_values():
    """B03: norms start at a factor of one; kernels at a variance of 1 / fan-in."""
    for model_type in FAMILIES:
        _, config = tiny_model(model_type)
        init = partial(jaxblock.init_params, config, dtype=jnp.bfloat16)
        leaves = dict(flatten(jax.eval_shape(init, jax.random.key(1))))
        shapes = {path: leaf.shape for path, leaf in leaves.items()}
        assert shapes == dict(flatten(config.parameter_shapes()))
        assert {leaf.dtype.name for leaf in leaves.values()} == {"bfloat16"}
        key, scale = jax.random.key(1), {"scale": (18,)}
        made = init_leaves("init_params", config, scale, key, dtype=jnp.float32)
        assert (made["scale"] == (0 if model_type.startswith("gemma") else 1)).all()
    _, config = tiny_model("llama", hidden_size=120, intermediate_size=400, vocab_size=500)
    shapes = dict(flatten(config.parameter_shapes()))
    fan_in = {"embedding": 120, "q": 120, "o": 60, "gate_up": 120, "down": 400, "o_bias": 0}
    some = {path[-1]: shape for path, shape in shapes.items() if path[-1] in fan_in}
    made = init_leaves("init_params", config, some, key, dtype=jnp.float32)
    for name, leaf in made.items():
        # Of tens of thousands of draws.
        deviation = fan_in[name] ** -0.5 if fan_in[name] else 0.0
        assert rms(leaf) == pytest.approx(deviation, rel=0.02), name
    again = init_leaves("init_params", config, some, key, dtype=jnp.float32)
    jax.tree.map(assert_same_bits, made, again)


def test_positions_turn_and_do_not_hide():
    _, config, params = model_and_params("llama")
    counted = jnp.broadcast_to(jnp.arange(9), (3, 9))
    plain = jaxblock.forward(params, TOKENS, config)
    assert_same_bits(jaxblock.forward(params, TOKENS, config, positions=counted), plain)
    # Only differences of positions count.
    moved = jaxblock.forward(params, TOKENS, config, positions=counted + 5)
    np.testing.assert_allclose(moved, plain, rtol=0, atol=scatter_limit(plain))
    stretched = jaxblock.forward(params, TOKENS, config, positions=2 * counted)
    assert rms(stretched - plain) > 1e-3


def test_padded_rows_of_the_vocabulary():
    _, config, params = model_and_params("qwen3")
    config, params = jaxblock.pad_vocabulary(config, params, 16)
    assert (config.vocab_size, config.num_valid) == (32, 29)
    logits = jaxblock.forward(params, TOKENS, config)
    assert np.isneginf(logits[..., 29:]).all() and np.isfinite(logits[..., :29]).all()

    def loss(params):
        total, count = jaxblock.next_token_loss(params, TOKENS, config)
        return total / count

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    assert (gradients["embedding"][29:] == 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


# Bad input ----------------------------------------------------------------------------------------


def test_a_bad_id_stays_in_its_row():
    """B73: NaN in its own row of the batch, nothing elsewhere; no gradient to another row."""
    _, config, params = model_and_params("llama")
    bad = TOKENS.copy()
    bad[1, 4] = SIZES["vocab_size"]
    with pytest.raises(
        IndexError, match=r"forward: tokens must lie in \[0, 29\).*position=\(1, 4\)"
    ):
        jaxblock.forward(params, bad, config)
    forward = jax.jit(jaxblock.forward, static_argnames="config")
    logits, fine = forward(params, bad, config), forward(params, TOKENS, config)
    assert np.isnan(logits[1]).all()
    assert_same_bits(logits[np.array([0, 2])], fine[np.array([0, 2])])
    huge = TOKENS.astype(np.int64)
    huge[0, 0] = 2**32
    with pytest.raises(IndexError, match="4294967296"):
        jaxblock.forward(params, huge, config, mask=np.ones_like(MASK))


def test_bad_arguments():
    _, config, params = model_and_params("llama")
    forward = partial(jaxblock.forward, config=config)
    for tokens, kind, message in [
        (TOKENS[0], ValueError, r"forward: tokens must be \[B T\]; got tokens=int"),
        (TOKENS.astype(np.float32), TypeError, "forward: tokens must have an integer dtype"),
        (TOKENS.tolist(), TypeError, "forward: tokens must be a JAX or NumPy array"),
    ]:
        with pytest.raises(kind, match=message):
            forward(params, tokens)
    with pytest.raises(ValueError, match=r"forward: mask must have the shape \[B T\] of tokens"):
        forward(params, TOKENS, mask=MASK[:, :4])
    with pytest.raises(TypeError, match="forward: mask must have the dtype bool"):
        forward(params, TOKENS, mask=MASK.astype(np.int32))
    with pytest.raises(ValueError, match=r"forward: positions must have the shape"):
        forward(params, TOKENS, positions=np.arange(9))

    lost = {name: leaf for name, leaf in params.items() if name != "final_norm"}
    with pytest.raises(ValueError, match="params must be the tree.*missing='final_norm/scale'"):
        forward(lost, TOKENS)
    with pytest.raises(ValueError, match="unexpected='extra/bias'"):
        forward({**params, "extra": {"bias": params["embedding"]}}, TOKENS)
    with pytest.raises(ValueError, match=r"embedding must have the shape \[29, 18\]"):
        forward({**params, "embedding": params["embedding"][:-1]}, TOKENS)
    with pytest.raises(TypeError, match="embedding must be an array of one of the dtypes"):
        forward({**params, "embedding": params["embedding"].astype(jnp.int32)}, TOKENS)
    with pytest.raises(TypeError, match="params must be the parameter tree"):
        forward([params], TOKENS)

    cache = jaxblock.init_cache(config, 3, 9, dtype=jnp.float32)
    with pytest.raises(ValueError, match="prefill: cache must have a row for each of tokens"):
        jaxblock.prefill(params, TOKENS[:2], cache, config)
    with pytest.raises(ValueError, match=r"decode_step: tokens must be \[B\]"):
        jaxblock.decode_step(params, TOKENS[:, :1], cache, config)
    with pytest.raises(TypeError, match="decode_step: cache must be one of init_cache"):
        jaxblock.decode_step(params, TOKENS[:, 0], None, config)
    _, other = tiny_model("gemma3_text")
    with pytest.raises(ValueError, match="cache must be one of this config"):
        other_cache = jaxblock.init_cache(other, 3, 9, dtype=jnp.float32)
        jaxblock.decode_step(params, TOKENS[:, 0], other_cache, config)
    for size in (0, 1.5):
        with pytest.raises((ValueError, TypeError), match="init_cache: length"):
            jaxblock.init_cache(config, 1, size, dtype=jnp.float32)
    with pytest.raises(ValueError, match="init_params: dtype must be one of"):
        jaxblock.init_params(config, jax.random.key(0), dtype=jnp.int32)


# Other backends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe"])
def test_products_have_16_bit_operands(model_type):
    """Forward and backward, in bfloat16: in the jaxpr, and lowered for GPU and TPU."""
    _, config = tiny_model(model_type)
    init = partial(jaxblock.init_params, config, dtype=jnp.bfloat16)
    params = jax.eval_shape(init, jax.random.key(0))

    def loss(params):
        total, _ = jaxblock.next_token_loss(params, TOKENS, config)
        return total

    gradient = jax.grad(loss)
    products = [
        equation
        for equation in equations(jax.make_jaxpr(gradient)(params))
        if "dot_general" in equation.primitive.name
    ]
    assert len(products) > 10
    for equation in products:
        assert {operand.aval.dtype.name for operand in equation.invars[:2]} == {"bfloat16"}
    for platform in ("cuda", "tpu"):
        exported = jax.export.export(jax.jit(gradient), platforms=[platform])(params)
        assert exported.platforms == (platform,)


def test_the_tree_round_trips_through_torch():
    """`tiny_models.tree_of` is no part of the product; that it loses nothing is tested here."""
    model, config, params = model_and_params("phi3")
    count = sum(leaf.numel() for leaf in tensors_of(model).values())
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count == config.num_parameters()
    table = to_jax(model.model.embed_tokens.weight.detach())
    assert_same_bits(params["embedding"], table)
