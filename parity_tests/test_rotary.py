"""Rotary frequencies, their scaling, angles and the turning of heads."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from helpers import FLOAT16S, assert_same_bits, random_arrays

from jaxblock.ops.rotary import (
    SCALING_CONSTANTS,
    apply_rotary,
    rotary_cos_sin,
    rotary_frequencies,
    rotary_magnitude,
)
from jaxblock.parity import assert_parity

pytestmark = pytest.mark.usefixtures("shape_checks")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "linear, integer": {"type": "linear", "factor": 2},
    "llama3": LLAMA3,
    "llama3, Llama 3.2": {**LLAMA3, "factor": 32.0},
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2, "truncate": True},
    "yarn, DeepSeek": {**YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, attention factor": {**YARN, "attention_factor": 1.25, "mscale": 2, "mscale_all_dim": 1},
    "yarn, factor 1": {**YARN, "factor": 1.0},
    # The places of both betas lie before the first pair, or coincide after being cut.
    "yarn, short": {**YARN, "original_max_position_embeddings": 4, "truncate": False},
    "yarn, long": {**YARN, "original_max_position_embeddings": 2**40},
}
each_scaling = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)


# Frequencies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "factor", "kept", "divided"), [(64, 32.0, 15, 18), (128, 8.0, 29, 35)]
)
def test_llama3_keeps_blends_and_divides(head_dim, factor, kept, divided):
    """Llama-3.2-1B and Llama-3.1-8B: which frequencies are whose."""
    plain = rotary_frequencies(head_dim, theta=500000.0)
    scaled = rotary_frequencies(head_dim, theta=500000.0, scaling={**LLAMA3, "factor": factor})
    assert_same_bits(scaled[:kept], plain[:kept])
    assert_same_bits(scaled[divided:], plain[divided:] / factor)  # a power of two: exact
    ratio = np.asarray(scaled / plain)[kept:divided]
    assert ((1 / factor < ratio) & (ratio < 1)).all() and (np.diff(ratio) < 0).all()


def test_yarn_by_hand():
    """theta 100, 8 channels, length 200 pi: the turns are 100, 31.6, 10 and 3.16.

    Betas of 10 and 1 therefore stand at i = 2 and i = 4: the frequencies of i = 0, 1, 2 are kept,
    that of i = 3 is half kept, so (1 + 1/4) / 2 of it.
    """
    scaling = {**YARN, "beta_fast": 10, "beta_slow": 1.0, "truncate": False}
    scaling["original_max_position_embeddings"] = 628
    plain = np.asarray(rotary_frequencies(8, theta=100.0), np.float64)
    ratio = np.asarray(rotary_frequencies(8, theta=100.0, scaling=scaling)) / plain
    # 628 for 200 pi moves both places by log(628 / 200 pi) * 4 / log(100) = -0.0004.
    np.testing.assert_allclose(ratio, [1, 1, 1, 0.625], atol=2e-4)


@pytest.mark.torch
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, None), (22, None), (64, 6), (128, None)])
@each_scaling
def test_frequencies_and_magnitude_against_torch_ref(scaling, head_dim, rotary_dim, torch_rotary):
    for theta in (1.5, 10000.0, 5e5):
        arguments = dict(theta=theta, scaling=scaling, rotary_dim=rotary_dim)
        ours = rotary_frequencies(head_dim, **arguments)
        theirs = torch_rotary.rotary_frequencies(head_dim, **arguments).numpy()
        assert ours.dtype == theirs.dtype == np.float32
        assert ours.shape == theirs.shape == ((rotary_dim or head_dim) // 2,)
        # Both round a float64 number once, and the two numbers differ by 1e-14 of themselves.
        np.testing.assert_array_max_ulp(np.asarray(ours), theirs, 1)
    theirs = torch_rotary.rotary_magnitude(scaling)
    assert math.isclose(rotary_magnitude(scaling), theirs, rel_tol=1e-15)


@pytest.mark.torch
@each_scaling
def test_frequencies_and_magnitude_against_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta, head_dim = 500000.0, 64
    entries = {"rope_theta": theta, "rope_type": "default", **(scaling or {})}
    entries["rope_type"] = entries.pop("type", entries["rope_type"])
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=entries)
    table = LlamaRotaryEmbedding(config)
    ours = np.asarray(rotary_frequencies(head_dim, theta=theta, scaling=scaling), np.float64)
    # transformers computes in float32. A rounded exponent e moves theta^e by ln(theta) u; pow and
    # a dozen products by a u each. The share that is kept is as good absolutely, while the blend
    # may be as small as 1 / factor.
    relative = (math.log(theta) + 16) * (1 + entries.get("factor", 0)) * 2.0**-24
    np.testing.assert_allclose(ours, table.inv_freq.double().numpy(), rtol=relative)
    assert math.isclose(rotary_magnitude(scaling), table.attention_scaling, rel_tol=1e-15)


def test_frequencies_are_constants_under_jit_and_float32_under_x64(x64):
    eager = rotary_frequencies(22, theta=10000.0, scaling=YARN)
    compiled = jax.jit(lambda: rotary_frequencies(22, theta=10000.0, scaling=YARN))()
    assert_same_bits(eager, compiled)
    assert eager.dtype == jnp.float32
    exact = 10000.0 ** (-np.arange(0, 22, 2) / 22)
    assert_same_bits(rotary_frequencies(22, theta=10000.0), exact.astype(np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(head_dim=5), "head_dim must be even; got head_dim=5"),
        (dict(head_dim=0), "head_dim must be at least 1"),
        (dict(theta=1.0), r"theta must be finite and above 1\.0; got theta=1\.0"),
        (dict(rotary_dim=3), "rotary_dim must be even and at most head_dim; got rotary_dim=3"),
        (dict(rotary_dim=10), "rotary_dim must be even and at most head_dim"),
        (dict(scaling="linear"), "scaling must be a mapping or None; got scaling='linear'"),
        (dict(scaling={"factor": 2.0}), "must name its rope_type once"),
        (dict(scaling={"rope_type": "linear", "type": "yarn"}), "must name its rope_type once"),
        (dict(scaling={"rope_type": "spiral"}), "rope_type must be one of .*; got .*'spiral'"),
        (dict(scaling={"rope_type": ["linear"]}), "rope_type must be one of"),
        (
            dict(scaling={"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}),
            r"'llama3' .*missing=\('low_freq_factor', 'original_max_position_embeddings'\)",
        ),
        (
            dict(scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            r"'linear' must have no other keys; got unknown=\('rope_theta',\)\. It may have factor",
        ),
        (dict(scaling={"rope_type": "default", "factor": 2.0}), r"unknown=\('factor',\)"),
        (dict(scaling={"rope_type": "linear", "factor": 0.5}), "factor must be finite and at le"),
        (dict(scaling={"rope_type": "linear", "factor": None}), "factor must be a number"),
        (dict(scaling={**YARN, "truncate": 1}), "truncate must be True or False"),
        (dict(scaling={**YARN, "original_max_position_embeddings": 4096.0}), "must be an integer"),
        (dict(scaling={**YARN, "mscale": 1.0}), "mscale and mscale_all_dim must come together"),
        (dict(scaling={**YARN, "beta_fast": 1.0}), "beta_slow must be below beta_fast; got beta_s"),
        (dict(scaling={**LLAMA3, "low_freq_factor": 4.0}), "low_freq_factor must be below high"),
        (dict(scaling={**YARN, "attention_factor": 0.0}), "attention_factor must be finite and ab"),
    ],
)
def test_bad_frequencies_are_refused(arguments, message, no_shape_checks):
    arguments = {"head_dim": 8, "theta": 10000.0, **arguments}
    with pytest.raises((ValueError, TypeError), match=f"^rotary_frequencies: .*{message}"):
        rotary_frequencies(**arguments)
    if "scaling" in arguments:
        with pytest.raises((ValueError, TypeError), match=f"^rotary_magnitude: .*{message}"):
            rotary_magnitude(arguments["scaling"])


def test_every_constant_of_every_scaling_is_used():
    """A constant that changes nothing is one that is not read."""
    full = {
        "llama3": LLAMA3,
        "linear": SCALINGS["linear"],
        "yarn": {**SCALINGS["yarn, betas"], "attention_factor": 1.5},
    }
    for rope_type, (required, optional) in SCALING_CONSTANTS.items():
        for key in {*required, *optional} - {"mscale", "mscale_all_dim"}:  # tested above
            scaling = full[rope_type]
            other = {**scaling, key: False if key == "truncate" else scaling[key] * 2}
            if key == "low_freq_factor":
                other[key] = 2.0
            results = [
                (np.asarray(rotary_frequencies(64, theta=1e4, scaling=s)), rotary_magnitude(s))
                for s in (scaling, other)
            ]
            same = np.array_equal(results[0][0], results[1][0])
            assert not same or results[0][1] != results[1][1], (rope_type, key)


# Angles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int32", "uint8", "float32"])
def test_cos_and_sin_of_the_float32_angle(kind):
    largest = 255 if kind == "uint8" else 2**20
    positions = np.array([[0, 1, 2, 7], [100, largest // 2, largest - 1, largest]], kind)
    frequencies = rotary_frequencies(22, theta=10000.0)
    cos, sin = rotary_cos_sin(jnp.asarray(positions), frequencies, magnitude=1.5)
    assert cos.shape == sin.shape == (2, 4, 11) and cos.dtype == sin.dtype == jnp.float32
    angles = positions.astype(np.float32)[..., None] * np.asarray(frequencies)
    assert angles.dtype == np.float32
    # Good to 4 units in the last place of 1, whatever the size of the angle, and one rounding more
    # for the magnitude.
    for ours, function in ((cos, np.cos), (sin, np.sin)):
        exact = 1.5 * function(angles.astype(np.float64))
        np.testing.assert_allclose(ours, exact, rtol=0, atol=1.5 * 5 * 2.0**-23)


def test_angles_are_float32_under_x64_and_float64_for_float64_frequencies(x64):
    positions = jnp.arange(2**20 - 3, 2**20)
    assert positions.dtype == jnp.int64
    narrow = rotary_frequencies(6, theta=10000.0)
    assert rotary_cos_sin(positions, narrow)[0].dtype == jnp.float32
    assert rotary_cos_sin(positions.astype(jnp.float64), narrow)[1].dtype == jnp.float32
    wide = narrow.astype(jnp.float64)
    cos, sin = rotary_cos_sin(positions, wide)
    exact = np.asarray(positions, np.float64)[:, None] * np.asarray(wide)
    np.testing.assert_allclose(cos, np.cos(exact), rtol=0, atol=1e-15)
    np.testing.assert_allclose(sin, np.sin(exact), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(positions=jnp.ones((2, 3), jnp.bfloat16)), "positions must be integers, float32 or"),
        (dict(positions=jnp.array(3)), r"positions must be \[\*B T\]; got positions="),
        (dict(positions=jnp.ones((2, 0))), "positions must have no empty axis"),
        (dict(positions=[0, 1]), "positions must be a JAX or NumPy array; got positions='list'"),
        (dict(positions=jnp.ones((2,), bool)), "positions must have one of the dtypes"),
        (dict(frequencies=jnp.ones((1, 2))), r"frequencies must be \[M\]; got .*float32\[1,2\]"),
        (dict(frequencies=jnp.ones((2,), jnp.float16)), "frequencies must be float32 or float64"),
        (dict(magnitude=0.0), "magnitude must be finite and above 0"),
    ],
)
def test_bad_angles_are_refused(changes, message, no_shape_checks):
    arguments = {"positions": jnp.arange(3), "frequencies": jnp.ones(2), **changes}
    with pytest.raises((ValueError, TypeError), match=f"^rotary_cos_sin: {message}"):
        rotary_cos_sin(**arguments)


# Turning ------------------------------------------------------------------------------------------

PAIRINGS = ("half", "interleaved")
compiled_apply = jax.jit(apply_rotary, static_argnames="pairing")


def make_inputs(leading=(2, 5), heads=3, head_dim=10, pairs=3):
    x, angles = random_arrays(0, (*leading, heads, head_dim), (*leading, pairs))
    return x, np.cos(angles), np.sin(angles)


def check_against_torch(function, torch_rotary, dtype, pairing):
    x, cos, sin = make_inputs()
    x = jnp.asarray(x, dtype)
    return assert_parity(
        partial(function, pairing=pairing),
        partial(torch_rotary.apply_rotary, pairing=pairing),
        [x, jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)],
        # A rotation adds two products; a gradient of cos and sin adds heads too.
        reduction_length=6,
        roundings=0,
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("dtype", "pairing"),
    [
        ("float32", "half"),
        ("float32", "interleaved"),
        ("bfloat16", "half"),
        ("float16", "interleaved"),
    ],
)
def test_apply_rotary_parity(dtype, pairing, torch_rotary):
    check_against_torch(apply_rotary, torch_rotary, dtype, pairing)


def other_pairing(x, cos, sin, *, pairing):
    return apply_rotary(x, cos, sin, pairing=PAIRINGS[pairing == "half"])


def turned_back(x, cos, sin, *, pairing):
    return apply_rotary(x, cos, -sin, pairing=pairing)


@pytest.mark.torch
@pytest.mark.parametrize("fault", [other_pairing, turned_back])
def test_planted_fault_is_caught(fault, torch_rotary):
    with pytest.raises(AssertionError, match="FAIL .*output"):
        check_against_torch(fault, torch_rotary, "bfloat16", "half")


@pytest.mark.torch
def test_heads_turn_as_in_transformers():
    """A yarn-scaled llama at positions beyond its original length, float32, tables and all."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    entries = {"rope_theta": 10000.0, **SCALINGS["yarn, DeepSeek"]}
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, rope_parameters=entries)
    positions = np.array([[0, 1, 5000], [7, 4095, 131071]])
    (q,) = random_arrays(1, (2, 3, 2, 16))
    q = q.astype(np.float32)
    table = modeling_llama.LlamaRotaryEmbedding(config)(torch.ones(1), torch.tensor(positions))
    heads = torch.tensor(q).transpose(1, 2)
    theirs = modeling_llama.apply_rotary_pos_emb(heads, heads, *table)[0].transpose(1, 2).numpy()

    frequencies = rotary_frequencies(16, theta=10000.0, scaling=SCALINGS["yarn, DeepSeek"])
    magnitude = rotary_magnitude(SCALINGS["yarn, DeepSeek"])
    tables = rotary_cos_sin(jnp.asarray(positions), frequencies, magnitude=magnitude)
    ours = apply_rotary(jnp.asarray(q), *tables)
    # Their frequencies err by the bound above (ln(1e4) + 16 units, 41 times for the factor); an
    # angle by that much of itself, where it was blended: at most one turn in 32 of the length.
    angles = positions[..., None] * np.asarray(frequencies, np.float64)
    bound = (math.log(1e4) + 16) * 41 * 2.0**-24 * angles + 8 * 2.0**-24
    bound = 2 * np.abs(q).max() * np.tile(bound, 2)[:, :, None, :]
    assert (np.abs(np.asarray(ours) - theirs) <= bound).all()
    # So wide a bound for large angles would hide much; the small ones are exact to 1e-4.
    small = np.broadcast_to(bound < 1e-3, ours.shape)
    assert small.mean() > 0.5
    np.testing.assert_allclose(np.asarray(ours)[small], theirs[small], atol=1e-4)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", FLOAT16S)
def test_float32_inside_and_rounded_once(dtype, pairing):
    x, cos, sin = make_inputs()
    x = x.astype(dtype)
    cos, sin = cos.astype(np.float32), sin.astype(np.float32)
    y = compiled_apply(x, cos, sin, pairing=pairing)
    exact = compiled_apply(x.astype(np.float32), cos, sin, pairing=pairing)
    assert_same_bits(y, np.asarray(exact).astype(dtype))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_channels_beyond_rotary_dim_pass_bit_for_bit(pairing):
    """A share of 0.25 of 16 channels: 4-15 leave unchanged, NaN payloads and signs of zero too."""
    bits = np.random.default_rng(0).integers(0, 2**16, (3, 2, 16), dtype=np.uint16)
    x = bits.view("bfloat16")
    x[..., :4] = 1
    frequencies = rotary_frequencies(16, theta=10000.0, rotary_dim=4)
    assert_same_bits(frequencies, rotary_frequencies(4, theta=10000.0))
    y = compiled_apply(x, *rotary_cos_sin(jnp.arange(1, 4), frequencies), pairing=pairing)
    np.testing.assert_array_equal(np.asarray(y).view(np.uint16)[..., 4:], bits[..., 4:])
    assert (np.asarray(y)[..., :4] != x[..., :4]).all()


def test_scores_depend_on_the_distance_alone_in_both_pairings(x64):
    """In float64: a score of q at m and k at n is that at m + 1000 and n + 1000.

    And the two pairings are one rotation: of a head of 4, channels [0, 2, 1, 3] of the one are
    those of the other.
    """
    (q, k) = (jnp.asarray(a) for a in random_arrays(2, (4, 1, 4), (4, 1, 4)))
    frequencies = rotary_frequencies(4, theta=100.0).astype(jnp.float64)

    @jax.jit
    def scores(q, k, positions, distances):
        results = {}
        for pairing in PAIRINGS:
            q_turned = apply_rotary(q, *rotary_cos_sin(positions, frequencies), pairing=pairing)
            keys = positions + distances
            k_turned = apply_rotary(k, *rotary_cos_sin(keys, frequencies), pairing=pairing)
            results[pairing] = jnp.sum(q_turned * k_turned, axis=(1, 2)), q_turned
        return results

    distances = jnp.array([0, 1, -3, 50])
    here = scores(q, k, jnp.arange(4), distances)
    there = scores(q, k, jnp.arange(4) + 1000, distances)
    for pairing in PAIRINGS:
        np.testing.assert_allclose(here[pairing][0], there[pairing][0], atol=1e-11)
    np.testing.assert_allclose(here["half"][0][0], jnp.sum(q[0] * k[0]), rtol=1e-14)
    order = np.array([0, 2, 1, 3])
    permuted = scores(q[..., order], k[..., order], jnp.arange(4), distances)
    np.testing.assert_allclose(
        here["interleaved"][1][..., order], permuted["half"][1], rtol=0, atol=1e-15
    )
    # Position 0 alone could not tell the two apart.
    assert np.abs(here["interleaved"][1] - here["half"][1])[1:].max() > 0.1


def test_vmap_and_a_scan_over_positions_equal_one_call():
    x, _, _ = (a.astype(np.float32) for a in make_inputs(leading=(2, 5)))
    frequencies = rotary_frequencies(10, theta=10000.0, rotary_dim=6)
    positions = jnp.arange(10).reshape(2, 5)

    def turn(x, positions):
        return apply_rotary(x, *rotary_cos_sin(positions, frequencies))

    def step(position, tokens):
        return position + 1, turn(tokens[None], position[None])[0]

    @jax.jit
    def all_ways(x, positions):
        return (
            turn(x, positions),
            jax.vmap(turn)(x, positions),
            jax.lax.scan(step, positions[1, 0], x[1])[1],
        )

    whole, mapped, scanned = all_ways(x, positions)
    np.testing.assert_allclose(mapped, whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(scanned, whole[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x=jnp.ones((3, 4))), r"x must be \[\*B T N H\]"),
        (dict(x=jnp.ones((3, 2, 5))), "H, the last axis of x, must be even"),
        (dict(x=jnp.ones((3, 2, 4), jnp.int32)), "x must have one of the dtypes"),
        (dict(cos=jnp.ones((1, 2)), sin=jnp.ones((1, 2))), r"cos and sin must be \[\*B T M\]"),
        (dict(cos=jnp.ones((2,)), sin=jnp.ones((2,))), r"cos and sin must be \[\*B T M\]"),
        (dict(x=jnp.ones((2, 3, 2, 4))), r"with the axes \*B T of x; .*broadcast_to\(positions"),
        (dict(sin=jnp.ones((3, 1))), r"cos and sin must be \[\*B T M\]"),
        (dict(cos=jnp.ones((3, 4)), sin=jnp.ones((3, 4))), "at most H/2 numbers a token"),
        (dict(pairing="pairs"), "pairing must be one of 'half', 'interleaved'; got .*'pairs'"),
    ],
)
def test_bad_turns_are_refused(changes, message, no_shape_checks):
    tables = dict(cos=jnp.ones((3, 2)), sin=jnp.ones((3, 2)))
    arguments = {"x": jnp.ones((3, 2, 4)), **tables, **changes}
    with pytest.raises((ValueError, TypeError), match=f"^apply_rotary: .*{message}"):
        apply_rotary(**arguments)


# Fixtures -----------------------------------------------------------------------------------------


@pytest.fixture
def torch_rotary(torch_ref):
    from torch_ref import rotary

    return rotary


@pytest.fixture
def no_shape_checks(monkeypatch):
    """Our own messages, where the annotations would speak first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
