"""One [V, D] table: lookup, projection to logits, and its growth."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

from torch_ref.precision import arithmetic_dtype


def embed(tokens: Integer[Tensor, "*B"], embedding: Float[Tensor, "V D"]) -> Float[Tensor, "*B D"]:
    """y[..., :] = embedding[tokens[...], :]"""
    return F.embedding(tokens, embedding)


def unembed(
    x: Float[Tensor, "*B D"],
    embedding: Float[Tensor, "V D"],
    *,
    softcap: float | None = None,
    num_valid: int | None = None,
) -> Float[Tensor, "*B V"]:
    """logits = x · embedding^T,  then softcap * tanh(logits / softcap) if there is a cap"""
    wide = arithmetic_dtype(x.dtype)
    logits = F.linear(x.to(wide), embedding.to(x.dtype).to(wide))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if num_valid is not None:
        padding = torch.arange(embedding.shape[0], device=x.device) >= num_valid
        logits = logits.masked_fill(padding, -torch.inf)
    return logits


def resize_embedding(
    embedding: Float[Tensor, "V D"],
    vocab_size: int,
    *,
    fill: Literal["mean", "normal", "zeros"] = "mean",
    allow_shrink: bool = False,
    key: torch.Generator | None = None,
) -> Float[Tensor, "W D"]:
    """new[:min(V, W)] = embedding[:min(V, W)],  new[V:] as `fill` says  (W = vocab_size)"""
    old_size, hidden_size = embedding.shape
    if vocab_size <= old_size:
        if vocab_size < old_size and not allow_shrink:
            raise ValueError(f"resize_embedding: {vocab_size=} is below V={old_size}")
        return embedding[:vocab_size]
    wide = embedding.to(arithmetic_dtype(embedding.dtype))
    shape = (vocab_size - old_size, hidden_size)
    if fill == "mean":
        rows = wide.mean(dim=0).expand(shape)
    elif fill == "normal":
        rows = wide.pow(2).mean().sqrt() * torch.randn(shape, generator=key, dtype=wide.dtype)
    else:
        rows = torch.zeros(shape, dtype=wide.dtype)
    return torch.cat([embedding, rows.to(embedding.dtype)])
