"""Rotary position embedding: frequencies and their scaling, angles, and the turning of heads."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from torch_ref.precision import arithmetic_dtype


def rotary_frequencies(
    head_dim: int,
    *,
    theta: float,
    scaling: Mapping[str, str | float | int | bool] | None = None,
    rotary_dim: int | None = None,
) -> Float[Tensor, "M"]:
    """frequencies_i = theta^(-2i / rotary_dim) for i < M = rotary_dim / 2, then scaled"""
    rotary_dim = rotary_dim or head_dim
    constants: Mapping[str, Any] = scaling or {}
    index = torch.arange(rotary_dim // 2, dtype=torch.float64)
    plain = theta ** (-2 * index / rotary_dim)
    rope_type = _rope_type(constants)
    if rope_type == "default":
        return plain.float()
    slowed = plain / constants["factor"]
    if rope_type == "linear":
        return slowed.float()

    length = constants["original_max_position_embeddings"]
    if rope_type == "llama3":
        low, high = constants["low_freq_factor"], constants["high_freq_factor"]
        turns = length * plain / (2 * math.pi)
        kept = (turns - low) / (high - low)
    else:  # yarn
        first, last = (
            # Solved for i: length * theta^(-2i / rotary_dim) = 2 pi turns.
            rotary_dim / 2 * math.log(length / (2 * math.pi * turns), theta)
            for turns in (constants.get("beta_fast", 32.0), constants.get("beta_slow", 1.0))
        )
        if constants.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        width = last - first if last != first else 0.001
        kept = 1 - (index - first) / width
    kept = kept.clamp(0.0, 1.0)
    return (kept * plain + (1 - kept) * slowed).float()


def rotary_magnitude(scaling: Mapping[str, str | float | int | bool] | None) -> float:
    """magnitude = m(mscale) / m(mscale_all_dim),  m(a) = 1 + a ln(factor) / 10  (yarn; else 1.0)"""
    constants: Mapping[str, Any] = scaling or {}
    if _rope_type(constants) != "yarn":
        return 1.0
    if "attention_factor" in constants:
        return float(constants["attention_factor"])
    log_factor = math.log(constants["factor"])
    if "mscale" not in constants:
        return 0.1 * log_factor + 1.0
    numerator = 0.1 * constants["mscale"] * log_factor + 1.0
    return numerator / (0.1 * constants["mscale_all_dim"] * log_factor + 1.0)


def rotary_cos_sin(
    positions: Integer[Tensor, "*B T"] | Float[Tensor, "*B T"],
    frequencies: Float[Tensor, "M"],
    *,
    magnitude: float = 1.0,
) -> tuple[Float[Tensor, "*B T M"], Float[Tensor, "*B T M"]]:
    """cos, sin = magnitude * (cos(a), sin(a)),  a = positions * frequencies"""
    angles = positions.to(frequencies.dtype)[..., None] * frequencies
    return magnitude * angles.cos(), magnitude * angles.sin()


def apply_rotary(
    x: Float[Tensor, "*B T N H"],
    cos: Float[Tensor, "*B T M"],
    sin: Float[Tensor, "*B T M"],
    *,
    pairing: Literal["half", "interleaved"] = "half",
) -> Float[Tensor, "*B T N H"]:
    """y_a = x_a * cos - x_b * sin,  y_b = x_b * cos + x_a * sin  for pairs (a, b)"""
    pairs = cos.shape[-1]
    channels = torch.arange(2 * pairs)
    if pairing == "half":
        a, b = channels[:pairs], channels[pairs:]
    else:
        a, b = channels[0::2], channels[1::2]
    wide = arithmetic_dtype(x.dtype)
    # The same angles for every head.
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    x_a, x_b = x[..., a].to(wide), x[..., b].to(wide)
    y = x.clone()
    y[..., a] = (x_a * cos - x_b * sin).to(x.dtype)
    y[..., b] = (x_b * cos + x_a * sin).to(x.dtype)
    return y


def _rope_type(constants: Mapping[str, Any]) -> Any:
    return constants.get("rope_type", constants.get("type", "default"))
