"""Cross-entropy as a total and a count: of logits, of a projection in chunks, and its labels."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from torch_ref.embedding import unembed
from torch_ref.precision import arithmetic_dtype


def cross_entropy(
    logits: Float[Tensor, "*B V"],
    labels: Integer[Tensor, "*B"],
    *,
    ignore_index: int = -100,
    num_valid: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Float[Tensor, "*B"] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """total = sum of w * (logsumexp(z) - (1-s) z[label] - s mean(z) + z_loss logsumexp(z)^2)"""
    wide = arithmetic_dtype(logits.dtype)
    weights = torch.ones_like(labels, dtype=wide) if weights is None else weights.to(wide)
    weights = weights.masked_fill(labels == ignore_index, 0.0)
    counted = weights != 0
    rows, targets = logits.to(wide)[counted][:, :num_valid], labels[counted].long()
    losses = F.cross_entropy(
        rows,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    losses = losses + z_loss * rows.logsumexp(dim=-1) ** 2
    return (weights[counted] * losses).sum(), weights.sum()


def linear_cross_entropy(
    x: Float[Tensor, "*B D"],
    embedding: Float[Tensor, "V D"],
    labels: Integer[Tensor, "*B"],
    *,
    chunk_size: int,
    ignore_index: int = -100,
    num_valid: int | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Float[Tensor, "*B"] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """total, count = cross_entropy(unembed(x, embedding, softcap=softcap), labels), in chunks"""
    rows, targets = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    wide = arithmetic_dtype(x.dtype)
    factors = torch.ones_like(targets, dtype=wide) if weights is None else weights.reshape(-1)
    total = count = torch.zeros((), dtype=wide)
    for start in range(0, len(rows), chunk_size):
        chunk = slice(start, start + chunk_size)
        of_chunk = cross_entropy(
            unembed(rows[chunk], embedding, softcap=softcap),
            targets[chunk],
            ignore_index=ignore_index,
            num_valid=num_valid,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            weights=factors[chunk],
        )
        total, count = total + of_chunk[0], count + of_chunk[1]
    return total, count


def next_token_labels(
    tokens: Integer[Tensor, "*B T"],
    *,
    mask: Bool[Tensor, "*B T"] | None = None,
    ignore_index: int = -100,
) -> Integer[Tensor, "*B T"]:
    """labels[..., t] = tokens[..., t + 1],  ignore_index at the last and around masked places"""
    if mask is None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
    labels = torch.full_like(tokens, ignore_index, dtype=torch.int32)
    both_real = mask[..., :-1] & mask[..., 1:]
    labels[..., :-1] = torch.where(both_real, tokens[..., 1:], ignore_index)
    return labels
