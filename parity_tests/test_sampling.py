"""greedy, sample, top_k and top_p: which tokens can come, how often, and on what they depend."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, random_arrays

from jaxblock import embed, greedy, sample, top_k, top_p
from jaxblock.parity import assert_parity

pytestmark = pytest.mark.usefixtures("shape_checks")

# 11 columns without ties, of which 9 are valid; the largest of all is padding.
LOGITS = np.array([0.3, -1.2, 2.1, 0.9, -np.inf, 1.6, -0.4, 0.1, 1.1, 3.0, 2.5], np.float32)
DRAWS = 4096
# Name of the function -> its options; the warpers of transformers that do the same.
SAMPLERS = {
    "sample": dict(temperature=0.7),
    "top_k": dict(k=4, temperature=1.5),
    "top_p": dict(p=0.8, temperature=1.3),
}
FUNCTIONS = {"sample": sample, "top_k": top_k, "top_p": top_p}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def sampler(name, **options):
    return partial(FUNCTIONS[name], **{**SAMPLERS[name], **options})


def warped(name, logits, *, temperature=1.0, k=None, p=None, num_valid=None):
    """The logits after the warpers of transformers, in float64: -inf where they drop a token."""
    import torch
    from transformers.generation import logits_process as warpers

    scores = torch.tensor(np.asarray(logits), dtype=torch.float64).reshape(-1, len(LOGITS))
    if num_valid is not None:
        scores[:, num_valid:] = -torch.inf
    scores = warpers.TemperatureLogitsWarper(temperature)(None, scores)
    if k is not None:
        scores = warpers.TopKLogitsWarper(k)(None, scores)
    if p is not None:
        scores = warpers.TopPLogitsWarper(p)(None, scores)
    return scores


def assert_drawn_from(tokens, probabilities):
    """Nothing of probability 0, and a chi-square statistic that chance exceeds once in 10^6.

    X of m degrees of freedom is above m + 2 sqrt(m t) + 2 t with a probability of at most e^-t
    (Laurent and Massart, Adaptive Estimation of a Quadratic Functional, 2000, lemma 1).
    """
    counts = np.bincount(np.asarray(tokens), minlength=len(probabilities))
    kept = probabilities > 0
    assert counts[~kept].sum() == 0, counts
    expected = counts.sum() * probabilities[kept]
    # The statistic is chi-square where every expected count is at least about five.
    assert expected.min() > 5, expected
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    degrees, t = kept.sum() - 1, np.log(1e6)
    assert statistic < degrees + 2 * np.sqrt(degrees * t) + 2 * t, (statistic, counts, expected)


@pytest.fixture(scope="module")
def draws():
    """Name -> tokens [DRAWS] for the logits above, one key each, in one compiled program."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (DRAWS, len(LOGITS)))

    @jax.jit
    def draw(rows, keys):
        return {name: sampler(name, num_valid=9)(rows, keys) for name in SAMPLERS}

    return draw(rows, keys)


# Probabilities -----------------------------------------------------------------------------------


@pytest.mark.torch
@every_sampler
def test_draws_follow_the_warpers_of_transformers(name, draws, torch_ref):
    import torch

    (scores,) = warped(name, LOGITS, num_valid=9, **SAMPLERS[name])
    probabilities = scores.softmax(dim=-1).numpy()
    assert scores.isfinite().sum() == {"sample": 8, "top_k": 4, "top_p": 5}[name]
    assert_drawn_from(draws[name], probabilities)
    rows = torch.tensor(LOGITS).expand(DRAWS, -1)
    generator = torch.Generator().manual_seed(0)
    reference = getattr(torch_ref, name)(rows, generator, num_valid=9, **SAMPLERS[name])
    assert_drawn_from(reference, probabilities)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sample", dict(temperature=0.8)),
        ("sample", dict(num_valid=10)),
        ("top_k", dict(temperature=2.2)),
        ("top_k", dict(k=3)),
        ("top_k", dict(k=5)),
        ("top_p", dict(p=0.6)),
        ("top_p", dict(p=0.9)),
    ],
    ids=str,
)
def test_wrong_probabilities_are_caught(name, wrong, draws):
    (scores,) = warped(name, LOGITS, **{"num_valid": 9, **SAMPLERS[name], **wrong})
    with pytest.raises(AssertionError):
        assert_drawn_from(draws[name], scores.softmax(dim=-1).numpy())


@pytest.mark.torch
def test_the_specification_keeps_what_transformers_keeps(torch_ref):
    """Every k and many p, on rows without ties: the same logits to the bit."""
    import torch

    from torch_ref import sampling

    logits = torch.tensor(random_arrays(0, (50, 11))[0])
    for k in range(1, 12):
        expected = warped("top_k", logits, k=k)
        torch.testing.assert_close(sampling._keep_top_k(logits, k), expected, rtol=0, atol=0)
    for p in (1e-6, *np.linspace(0.03, 0.97, 20), 1.0):
        expected = warped("top_p", logits, p=float(p))
        torch.testing.assert_close(sampling._keep_top_p(logits, float(p)), expected, rtol=0, atol=0)


@pytest.mark.torch
def test_greedy_parity(torch_ref):
    logits = random_arrays(0, (2, 3, 11))[0]
    logits[0, 0, 5] = np.nan
    logits[1, 2] = 0.0
    logits[1, 1] = -np.inf
    for dtype in ("float32", "bfloat16", "float16"):
        inputs = dict(logits=np.asarray(logits, jnp.dtype(dtype)))
        for num_valid in (None, 7):
            functions = (partial(f, num_valid=num_valid) for f in (greedy, torch_ref.greedy))
            assert_parity(*functions, inputs, gradients=False)


# Ties, limits, padding ---------------------------------------------------------------------------


def test_ties_and_limits():
    """Of equal logits the lowest ids; the limits of every option."""
    keys = jax.random.split(jax.random.key(1), 512)
    (random,) = random_arrays(0, (512, 6))
    rows = jnp.asarray(random, jnp.float32)
    ties = jnp.broadcast_to(jnp.array([0.0, 1, 1, 1, 1, 0]), (512, 6))

    @jax.jit
    def draw(rows, ties, keys):
        of_ties = [top_k(ties, keys, k=3), top_p(ties, keys, p=0.6), greedy(ties)]
        largest = [
            greedy(rows),
            top_k(rows, keys, k=1),
            top_p(rows, keys, p=1e-9),
            # Dividing first would overflow; the temperature itself underflows.
            sample(1e37 * rows, keys, temperature=1e-45),
        ]
        unequal = jnp.zeros((512, 6)).at[:, 5].set(-17.0)
        everything = [top_k(ties, keys, k=6), top_p(unequal, keys, p=1.0, temperature=100.0)]
        return of_ties, largest, everything

    of_ties, largest, everything = draw(rows, ties, keys)
    # The four ones have a probability of 0.22 each: three of them reach 0.6.
    assert [set(np.asarray(tokens).tolist()) for tokens in of_ties] == [{1, 2, 3}, {1, 2, 3}, {1}]
    for tokens in largest:
        assert_same_bits(tokens, np.argmax(random.astype(np.float32), axis=1).astype(np.int32))
    for tokens in everything:
        assert set(np.asarray(tokens).tolist()) == set(range(6))


def test_rows_without_a_token_give_minus_one():
    """A NaN among the valid logits or nothing above -inf; padding may hold anything."""
    inf, nan = np.inf, np.nan
    rows = np.array(
        [
            [nan, nan, nan, nan, nan],
            [0.0, nan, 5.0, 1.0, 1.0],
            [-inf, -inf, -inf, 9.0, 9.0],
            [-inf, 2.0, -inf, nan, inf],
            [-inf, 2.0, inf, -inf, nan],
        ]
    )
    expected = np.array([-1, -1, -1, 1, 2], np.int32)
    key = jax.random.key(0)

    @jax.jit
    def draw(rows):
        drawn = [sampler(name, num_valid=3)(rows, key) for name in ("sample", "top_p")]
        return [greedy(rows, num_valid=3), greedy(rows.astype(jnp.bfloat16), num_valid=3), *drawn]

    for tokens in draw(jnp.asarray(rows, jnp.float32)):
        assert_same_bits(tokens, expected)


def test_minus_one_is_no_token():
    """What `embed` makes of it: an error where it is known, NaN again where it is traced."""
    table = jnp.ones((5, 2))

    def step(logits):
        return embed(greedy(logits), table)

    logits = jnp.array([[0.0, 1.0], [jnp.nan, 0.0]])
    with pytest.raises(IndexError, match="tokens=-1"):
        step(logits)
    np.testing.assert_array_equal(np.isnan(jax.jit(step)(logits)), [[False] * 2, [True] * 2])


# Keys --------------------------------------------------------------------------------------------


def test_a_row_depends_on_its_key_and_logits_alone():
    """Alone, in another order, under vmap: the same token. One key is folded with the row."""
    (random,) = random_arrays(0, (2, 16, 11))
    logits, key = jnp.asarray(random, jnp.float32), jax.random.key(3)
    folded = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(32)).reshape(2, 16)

    def whole(logits, keys):
        return {name: sampler(name)(logits, keys) for name in SAMPLERS}

    tokens = whole(logits, folded)
    assert all(len(np.unique(drawn)) > 1 for drawn in tokens.values())
    for name, drawn in whole(logits[::-1, ::-1], folded[::-1, ::-1]).items():
        assert_same_bits(drawn[::-1, ::-1], tokens[name])
    draw = sampler("top_p")
    assert_same_bits(jax.jit(jax.vmap(draw))(logits[0], folded[0]), tokens["top_p"][0])
    assert_same_bits(draw(logits, key), tokens["top_p"])
    # The old kind of key.
    assert_same_bits(draw(logits, jax.random.key_data(key)), tokens["top_p"])


def test_float64_logits(x64):
    logits = jnp.array([0.0, 1.0, 1.0 + 1e-12])
    assert_same_bits(greedy(logits), np.array(2, np.int32))
    assert_same_bits(top_p(logits, jax.random.key(0), p=0.1), np.array(2, np.int32))


# Errors ------------------------------------------------------------------------------------------

Z, KEY = jnp.ones((2, 5)), jax.random.key(0)
ERRORS = {
    "no axis": (lambda: greedy(jnp.ones(())), "greedy: logits must have at least one axis; got"),
    "integer logits": (lambda: greedy(Z.astype(jnp.int32)), "greedy: logits must have one of the"),
    "num_valid": (
        lambda: sample(Z, KEY, num_valid=6),
        r"sample: num_valid must not exceed V.*; got num_valid=6, logits=float32\[2,5\]",
    ),
    "temperature": (
        lambda: sample(Z, KEY, temperature=0.0),
        r"sample: temperature must be above 0; got temperature=0.0. .* use greedy",
    ),
    "infinite temperature": (
        lambda: top_k(Z, KEY, k=2, temperature=float("inf")),
        "top_k: temperature must be finite",
    ),
    "k of zero": (lambda: top_k(Z, KEY, k=0), "top_k: k must be at least 1; got k=0"),
    "k above V": (
        lambda: top_k(Z, KEY, k=6),
        r"top_k: k must not exceed V; got k=6, logits=float32\[2,5\]",
    ),
    "p of zero": (lambda: top_p(Z, KEY, p=0.0), "top_p: p must be above 0 and at most 1; got p=0"),
    "p above one": (lambda: top_p(Z, KEY, p=1.5), "top_p: p must be above 0 and at most 1"),
    "p of NaN": (lambda: top_p(Z, KEY, p=float("nan")), "top_p: p must be finite"),
    "a seed": (
        lambda: sample(Z, 0),
        r"sample: key must be a key of jax.random.*; got key=0. Make one with jax.random.key\(seed",
    ),
    "too many keys": (
        lambda: sample(Z, jax.random.split(KEY, 3)),
        r"sample: key must be one key or have the shape of logits without its last axis; got "
        r"key=\(3,\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_must_hold(name, monkeypatch):
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    call, message = ERRORS[name]
    for form in (call, jax.jit(call)):
        with pytest.raises((ValueError, TypeError), match=message):
            form()
