"""Scaled dot-product attention with grouped heads, causal, windowed, masked and capped."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torch_ref.precision import arithmetic_dtype


def attention(
    q: Float[Tensor, "B T N H"],
    k: Float[Tensor, "B S K H"],
    v: Float[Tensor, "B S K H"],
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    mask: Bool[Tensor, "#B #N #T #S"] | None = None,
) -> Float[Tensor, "B T N H"]:
    """y = softmax(cap(scale * q · k^T) where visible) · v,  cap(x) = softcap * tanh(x / softcap)"""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    wide = arithmetic_dtype(q.dtype)
    scores = scale * torch.einsum("btnh,bsnh->bnts", q.to(wide), k.to(wide))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    # Queries stand at the end of the keys: the last query is at the position of the last key.
    T, S = scores.shape[-2:]
    age = torch.arange(S - T, S).unsqueeze(1) - torch.arange(S)
    visible = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        visible &= age >= 0
    if window is not None:
        visible &= age < window
    if mask is not None:
        visible &= mask

    # A row that sees nothing: softmax gives NaN, forward and backward, so it gets zeros instead.
    empty = ~visible.any(dim=-1, keepdim=True)
    weights = scores.masked_fill(~visible & ~empty, float("-inf")).softmax(dim=-1)
    weights = weights.masked_fill(empty, 0.0).to(q.dtype)
    return torch.einsum("bnts,bsnh->btnh", weights, v)
