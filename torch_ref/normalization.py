"""RMSNorm with its rounding convention by name."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from torch_ref.precision import arithmetic_dtype


def rms_norm(
    x: Float[Tensor, "*B D"],
    scale: Float[Tensor, "D"],
    *,
    eps: float,
    scale_offset: float = 0.0,
    cast: Literal["after_scale", "before_scale"] = "after_scale",
) -> Float[Tensor, "*B D"]:
    """y = x / sqrt(mean(x^2 over D) + eps) * (scale + scale_offset)"""
    wide = x.to(arithmetic_dtype(x.dtype))
    normalized = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    factor = scale.to(wide.dtype) + scale_offset
    if cast == "before_scale":
        return normalized.to(x.dtype) * factor.to(x.dtype)
    return (normalized * factor).to(x.dtype)
