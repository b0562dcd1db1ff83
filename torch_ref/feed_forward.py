"""The gated feed-forward: its size, its fused weights, SwiGLU and GEGLU."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from torch_ref.precision import arithmetic_dtype


def intermediate_size(
    hidden_size: int, *, multiple_of: int, ffn_dim_multiplier: float | None = None
) -> int:
    """F = multiple_of * ceil(int(ffn_dim_multiplier * int(2/3 * 4 * hidden_size)) / multiple_of)"""
    channels = int(2 * (4 * hidden_size) / 3)
    if ffn_dim_multiplier is not None:
        channels = int(ffn_dim_multiplier * channels)
    return multiple_of * ((channels + multiple_of - 1) // multiple_of)


def pack_gate_up(
    gate: Float[Tensor, "*L D F"], up: Float[Tensor, "*L D F"]
) -> Float[Tensor, "*L D 2 F"]:
    """gate_up[..., 0, :] = gate, gate_up[..., 1, :] = up"""
    return torch.stack([gate, up], dim=-2)


def unpack_gate_up(
    fused: Float[Tensor, "*L M"],
    *,
    layout: Literal["gate_up", "up_gate", "interleaved", "blocks"],
    block_size: int | None = None,
) -> tuple[Float[Tensor, "*L F"], Float[Tensor, "*L F"]]:
    """gate, up = the two halves of the last axis (M = 2F), taken apart as `layout` says"""
    if layout == "interleaved":
        return fused[..., 0::2], fused[..., 1::2]
    if layout == "blocks":
        blocks = fused.split(block_size, dim=-1)
        return torch.cat(blocks[0::2], dim=-1), torch.cat(blocks[1::2], dim=-1)
    first, second = fused.chunk(2, dim=-1)
    return (first, second) if layout == "gate_up" else (second, first)


def swiglu(
    x: Float[Tensor, "*B D"],
    gate_up: Float[Tensor, "D 2 F"],
    down: Float[Tensor, "F D"],
    *,
    gate_up_bias: Float[Tensor, "2 F"] | None = None,
    down_bias: Float[Tensor, "D"] | None = None,
) -> Float[Tensor, "*B D"]:
    """y = (silu(x · gate_up[:, 0]) * (x · gate_up[:, 1])) · down,  silu(z) = z / (1 + exp(-z))"""
    gate, up = _gate_and_up(x, gate_up, gate_up_bias)
    hidden = F.silu(gate) * up
    return _project(hidden.to(x.dtype), down, down_bias)


def geglu(
    x: Float[Tensor, "*B D"],
    gate_up: Float[Tensor, "D 2 F"],
    down: Float[Tensor, "F D"],
    *,
    approximate: bool = True,
    gate_up_bias: Float[Tensor, "2 F"] | None = None,
    down_bias: Float[Tensor, "D"] | None = None,
) -> Float[Tensor, "*B D"]:
    """y = (gelu(x · gate_up[:, 0]) * (x · gate_up[:, 1])) · down"""
    gate, up = _gate_and_up(x, gate_up, gate_up_bias)
    hidden = F.gelu(gate, approximate="tanh" if approximate else "none") * up
    return _project(hidden.to(x.dtype), down, down_bias)


def _gate_and_up(x: Tensor, gate_up: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = arithmetic_dtype(x.dtype)
    gate, up = (
        _project(x, gate_up[:, half], None if bias is None else bias[half]) for half in (0, 1)
    )
    return gate.to(wide), up.to(wide)


def _project(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, kernel.to(x.dtype).mT, None if bias is None else bias.to(x.dtype))
