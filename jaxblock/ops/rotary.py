"""Rotary position embedding: frequencies and their scaling, angles, and the turning of heads."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from jaxblock.ops import checks
from jaxblock.ops.precision import arithmetic_dtype
from jaxblock.ops.sharding import along, axes, laid_out, like


class ScalingConstants(NamedTuple):
    """The keys of a `scaling` beside its type."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


# By the rope_type of a configuration: the one table that the reader of configurations uses too.
SCALING_CONSTANTS: Mapping[str, ScalingConstants] = {
    "default": ScalingConstants(),
    "linear": ScalingConstants(("factor",)),
    "llama3": ScalingConstants(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    "yarn": ScalingConstants(
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def rotary_frequencies(
    head_dim: int,
    *,
    theta: float,
    scaling: Mapping[str, str | float | int | bool] | None = None,
    rotary_dim: int | None = None,
) -> Float[Array, "M"]:
    """frequencies_i = theta^(-2i / rotary_dim) for i < M = rotary_dim / 2, then scaled

    Args:
      head_dim: H, even.
      theta: the base, above 1. No default: 10000, 500000 and 1000000 are all in use.
      scaling: the mapping of a configuration: `rope_type` (older files: `type`) and its constants,
        SCALING_CONSTANTS. With f for a frequency, s for `factor` and n for
        `original_max_position_embeddings`: "default" f. "linear" f / s. "llama3" and "yarn"
        (1 - r) f / s + r f, where the share r that is kept falls from 1 to 0: for "llama3" in the
        turns over the original length, n f / 2 pi, from `high_freq_factor` down to
        `low_freq_factor`; for "yarn" in i, between the places where the turns are `beta_fast` (32
        if absent) and `beta_slow` (1), moved out to whole i unless `truncate` is False. None means
        none.
      rotary_dim: how many channels of a head turn, the first ones; even, at most H. None means all.

    Returns: radians a position, float32. The channels that turn by angle i are a pair, see
      `apply_rotary`.

    Raises: ValueError or TypeError for an odd H or rotary_dim, a rotary_dim above H, a theta of 1
      or less; in the scaling for an unknown type or key, a missing constant, or one out of range.

    Precision: computed in float64 from the constants alone, when traced, and rounded once.

    Differs from torch: transformers computes in float32 (up to 2e-6 of a frequency), and ignores a
      `mscale` without a `mscale_all_dim`, which is refused here.

    Source: Su et al., RoFormer, 2021, section 3.2.2; Chen et al., Extending Context Window by
      Positional Interpolation, 2023 (linear); Peng et al., YaRN, 2023, section 3.2; llama3 and the
      keys: huggingface/transformers src/transformers/modeling_rope_utils.py.
    """
    function = "rotary_frequencies"
    head_dim = checks.size(function, "head_dim", head_dim)
    checks.require(head_dim % 2 == 0, function, "head_dim must be even", head_dim=head_dim)
    theta = checks.number(function, "theta", theta, minimum=1.0, strict=True)
    rope_type, constants = _read_scaling(function, scaling)
    if rotary_dim is None:
        rotary_dim = head_dim
    rotary_dim = checks.size(function, "rotary_dim", rotary_dim)
    checks.require(
        rotary_dim % 2 == 0 and rotary_dim <= head_dim,
        function,
        "rotary_dim must be even and at most head_dim",
        rotary_dim=rotary_dim,
        head_dim=head_dim,
    )

    frequencies = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if rope_type == "linear":
        frequencies = frequencies / constants["factor"]
    elif rope_type in ("llama3", "yarn"):
        kept = (
            _kept_by_llama3(frequencies, constants)
            if rope_type == "llama3"
            else _kept_by_yarn(rotary_dim, theta, constants)
        )
        frequencies = (1 - kept) * frequencies / constants["factor"] + kept * frequencies
    return jnp.asarray(frequencies.astype(np.float32))


def rotary_magnitude(scaling: Mapping[str, str | float | int | bool] | None) -> float:
    """magnitude = m(mscale) / m(mscale_all_dim),  m(a) = 1 + a ln(factor) / 10  (yarn; else 1.0)

    Args:
      scaling: as in `rotary_frequencies`. An `attention_factor` is the magnitude itself; without
        `mscale` and `mscale_all_dim` it is m(1).

    Returns: what cos and sin are multiplied by, so scores by its square.

    Raises: ValueError or TypeError, as `rotary_frequencies` does for the scaling.

    Source: Peng et al., YaRN, 2023, equation 22; the keys: huggingface/transformers
      src/transformers/modeling_rope_utils.py.
    """
    rope_type, constants = _read_scaling("rotary_magnitude", scaling)
    if rope_type != "yarn":
        return 1.0
    if "attention_factor" in constants:
        return constants["attention_factor"]
    log_factor = math.log(constants["factor"])
    above = 1 + 0.1 * constants.get("mscale", 1.0) * log_factor
    return above / (1 + 0.1 * constants.get("mscale_all_dim", 0.0) * log_factor)


def rotary_cos_sin(
    positions: Integer[Array, "*B T"] | Float[Array, "*B T"],
    frequencies: Float[Array, "M"],
    *,
    magnitude: float = 1.0,
) -> tuple[Float[Array, "*B T M"], Float[Array, "*B T M"]]:
    """cos, sin = magnitude * (cos(a), sin(a)),  a = positions * frequencies

    Args:
      positions: integers, or float32 or float64 numbers. 16-bit floats are refused: from 257 on
        bfloat16 no longer has every integer.
      frequencies: those of `rotary_frequencies`; float32 or float64.
      magnitude: that of `rotary_magnitude`, above 0; 1.0 but for YaRN.

    Returns: cos and sin in the dtype of the frequencies.

    Raises: ValueError or TypeError for 16-bit positions or frequencies, frequencies that are not
      [M], positions without an axis, a magnitude of 0 or less.

    Precision: positions, angles, cos and sin in float32 whatever the activations are (float64 for
      float64 frequencies): in float32 an angle of 100000 is good to 0.004 radians, in torch too.

    Source: huggingface/transformers models/llama/modeling_llama.py, LlamaRotaryEmbedding.
    """
    function = "rotary_cos_sin"
    is_integer = jnp.issubdtype(getattr(positions, "dtype", np.float32), jnp.integer)
    if is_integer:
        positions = checks.integers(function, "positions", positions)
    else:
        (positions,) = checks.floating(function, positions=positions)
    (frequencies,) = checks.floating(function, frequencies=frequencies)
    checks.require(
        is_integer or jnp.finfo(positions.dtype).bits > 16,
        function,
        "positions must be integers, float32 or float64",
        kind=TypeError,
        positions=positions,
    )
    checks.require(positions.ndim >= 1, function, "positions must be [*B T]", positions=positions)
    checks.require(
        jnp.finfo(frequencies.dtype).bits > 16,
        function,
        "frequencies must be float32 or float64",
        kind=TypeError,
        frequencies=frequencies,
    )
    checks.require(
        frequencies.ndim == 1, function, "frequencies must be [M]", frequencies=frequencies
    )
    magnitude = checks.number(function, "magnitude", magnitude, minimum=0.0, strict=True)
    return _cos_sin(positions, frequencies, magnitude=magnitude)


def apply_rotary(
    x: Float[Array, "*B T N H"],
    cos: Float[Array, "*B T M"],
    sin: Float[Array, "*B T M"],
    *,
    pairing: Literal["half", "interleaved"] = "half",
) -> Float[Array, "*B T N H"]:
    """y_a = x_a * cos - x_b * sin,  y_b = x_b * cos + x_a * sin  for pairs (a, b)

    Args:
      x: queries or keys.
      cos: M = rotary_dim / 2 numbers a token, the same for every head; axes *B T as in x.
      sin: the same shape.
      pairing: which channels are pair i. "half": i and i + M (transformers' files). "interleaved":
        2i and 2i + 1 (Meta's files).

    Returns: the shape and dtype of x. Channels from 2 M on are those of x, bit for bit.

    Raises: ValueError or TypeError for cos and sin of any other shape (nothing is broadcast), an
      odd H, more pairs than H / 2, an unknown pairing.

    Precision: float32 (float64 for float64 x), rounded once.

    Differs from torch: transformers rounds cos and sin to the dtype of x first, and every product
      after; cos.astype(x.dtype) does the former here too.

    Source: Su et al., RoFormer, 2021, equation 34 (interleaved); huggingface/transformers
      models/llama/modeling_llama.py, apply_rotary_pos_emb (half).
    """
    function = "apply_rotary"
    x, cos, sin = checks.floating(function, x=x, cos=cos, sin=sin)
    checks.require(x.ndim >= 3, function, "x must be [*B T N H]", x=x)
    checks.require(x.shape[-1] % 2 == 0, function, "H, the last axis of x, must be even", x=x)
    checks.require(
        cos.shape == sin.shape and cos.shape[:-1] == x.shape[:-2],
        function,
        "cos and sin must be [*B T M] with the axes *B T of x",
        hint="Give positions the axes *B T of x: jnp.broadcast_to(positions, x.shape[:-2]).",
        x=x,
        cos=cos,
        sin=sin,
    )
    checks.require(
        2 * cos.shape[-1] <= x.shape[-1],
        function,
        "cos and sin must have at most H/2 numbers a token, one for each pair of channels",
        x=x,
        cos=cos,
    )
    checks.choice(function, "pairing", pairing, ("half", "interleaved"))
    return _turn(x, cos, sin, pairing=pairing)


# Jitted, so that a call outside `jit` is one compiled program and gives the bits of one inside it.
@laid_out(lambda positions, _: (along(*axes(positions), None),) * 2)
@partial(jax.jit, static_argnames="magnitude", inline=True)
def _cos_sin(
    positions: jax.Array, frequencies: jax.Array, *, magnitude: float
) -> tuple[jax.Array, jax.Array]:
    rows = positions.astype(frequencies.dtype)[..., None]
    angles = rows * frequencies.reshape((1,) * positions.ndim + frequencies.shape)
    return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)


@laid_out(lambda x, cos, sin: like(x))
@partial(jax.jit, static_argnames="pairing", inline=True)
def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array, *, pairing: str) -> jax.Array:
    wide = arithmetic_dtype(x.dtype)
    pairs = cos.shape[-1]
    turning, passing = x[..., : 2 * pairs], x[..., 2 * pairs :]
    # The axis of size 2 holds the two channels of a pair.
    axis = -2 if pairing == "half" else -1
    split = (2, pairs) if pairing == "half" else (pairs, 2)
    split_channels = turning.astype(wide).reshape(*x.shape[:-1], *split)
    a, b = (part.squeeze(axis) for part in jnp.split(split_channels, 2, axis=axis))
    cos, sin = (table.astype(wide)[..., None, :] for table in (cos, sin))
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=axis).astype(x.dtype)
    return jnp.concatenate([turned.reshape(turning.shape), passing], axis=-1)


def _kept_by_llama3(frequencies: np.ndarray, constants: Mapping[str, Any]) -> np.ndarray:
    low, high = constants["low_freq_factor"], constants["high_freq_factor"]
    turns = constants["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    return np.clip((turns - low) / (high - low), 0.0, 1.0)


def _kept_by_yarn(rotary_dim: int, theta: float, constants: Mapping[str, Any]) -> np.ndarray:
    def place(turns: float) -> float:
        """The i, not whole, whose frequency makes so many turns over the original length."""
        length = constants["original_max_position_embeddings"]
        return rotary_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    first = place(constants.get("beta_fast", 32.0))
    last = place(constants.get("beta_slow", 1.0))
    if constants.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    # As transformers has it: cut at rotary_dim - 1, though the last i is half of that, and two
    # places that coincide moved apart.
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    return 1 - np.clip((np.arange(rotary_dim // 2) - first) / (last - first), 0.0, 1.0)


def _read_scaling(
    function: str, scaling: Mapping[str, Any] | None
) -> tuple[str, Mapping[str, Any]]:
    """The type of a scaling and its constants, each checked."""
    if scaling is None:
        return "default", {}
    checks.require(
        isinstance(scaling, Mapping),
        function,
        "scaling must be a mapping or None",
        kind=TypeError,
        scaling=scaling,
    )
    names = [scaling[key] for key in ("rope_type", "type") if key in scaling]
    must = "scaling must name its rope_type once (or twice alike, as rope_type and type)"
    checks.require(
        bool(names) and all(name == names[0] for name in names), function, must, scaling=scaling
    )
    rope_type = names[0]
    checks.choice(function, "rope_type", rope_type, tuple(SCALING_CONSTANTS))
    required, optional = SCALING_CONSTANTS[rope_type]
    constants = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
    missing = tuple(key for key in required if key not in constants)
    must = f"scaling of the type {rope_type!r} must have every constant of it"
    checks.require(not missing, function, must, missing=missing)
    unknown = tuple(key for key in constants if key not in (*required, *optional))
    must = f"scaling of the type {rope_type!r} must have no other keys"
    hint = f"It may have {', '.join((*required, *optional)) or 'none'}."
    checks.require(not unknown, function, must, hint=hint, unknown=unknown)

    constants = {key: _check_constant(function, key, value) for key, value in constants.items()}
    mscales = tuple(key for key in constants if key.startswith("mscale"))
    must = "mscale and mscale_all_dim must come together"
    checks.require(len(mscales) != 1, function, must, given=mscales)
    full = {"beta_slow": 1.0, "beta_fast": 32.0, **constants}
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        pair = {key: full[key] for key in (low, high) if key in full}
        must = f"{low} must be below {high}"
        checks.require(not pair or pair[low] < pair[high], function, must, **pair)
    return rope_type, constants


def _check_constant(function: str, key: str, value: Any) -> float | int | bool:
    if key == "truncate":
        return checks.flag(function, key, value)
    if key == "original_max_position_embeddings":
        return checks.size(function, key, value)
    if key == "factor":
        return checks.number(function, key, value, minimum=1.0)
    return checks.number(function, key, value, minimum=0.0, strict=True)
