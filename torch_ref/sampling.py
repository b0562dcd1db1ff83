"""The next token from logits: the largest, or drawn from all, the top k, or the top p."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from torch_ref.precision import arithmetic_dtype

Keys = torch.Generator | Sequence[torch.Generator]


def greedy(logits: Float[Tensor, "*B V"], *, num_valid: int | None = None) -> Int32[Tensor, "*B"]:
    """token = the lowest id whose logit is the largest"""
    logits = logits[..., :num_valid]
    return torch.where(_defined(logits), logits.argmax(dim=-1), -1).int()


def sample(
    logits: Float[Tensor, "*B V"],
    key: Keys,
    *,
    temperature: float = 1.0,
    num_valid: int | None = None,
) -> Int32[Tensor, "*B"]:
    """token = i with the probability softmax(logits / temperature)[i]"""
    return _draw(_scaled(logits, temperature, num_valid), key)


def top_k(
    logits: Float[Tensor, "*B V"],
    key: Keys,
    *,
    k: int,
    temperature: float = 1.0,
    num_valid: int | None = None,
) -> Int32[Tensor, "*B"]:
    """token = i among the k largest logits, with the probability softmax(those / temperature)[i]"""
    return _draw(_keep_top_k(_scaled(logits, temperature, num_valid), k), key)


def top_p(
    logits: Float[Tensor, "*B V"],
    key: Keys,
    *,
    p: float,
    temperature: float = 1.0,
    num_valid: int | None = None,
) -> Int32[Tensor, "*B"]:
    """token = i of the fewest that reach p, with the probability softmax(those / temperature)[i]"""
    return _draw(_keep_top_p(_scaled(logits, temperature, num_valid), p), key)


def _scaled(logits: Tensor, temperature: float, num_valid: int | None) -> Tensor:
    return logits[..., :num_valid].to(arithmetic_dtype(logits.dtype)) / temperature


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest at -inf; of equal ones the lowest ids are kept."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.masked_fill(order.argsort(dim=-1) >= k, -torch.inf)


def _keep_top_p(logits: Tensor, p: float) -> Tensor:
    """All but the fewest that reach p at -inf: kept are those before which p is not reached."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    probabilities = logits.softmax(dim=-1).gather(-1, order)
    larger_ones = probabilities.cumsum(dim=-1) - probabilities
    kept = (larger_ones < p) | (p == 1)
    return logits.masked_fill(~kept.gather(-1, order.argsort(dim=-1)), -torch.inf)


def _draw(logits: Tensor, key: Keys) -> Tensor:
    """One token a row; -1 where there is none to choose."""
    rows = logits.reshape(-1, logits.shape[-1])
    defined = _defined(rows)
    probabilities = torch.where(defined[:, None], rows, 0.0).softmax(dim=-1)
    generators = [key] * len(rows) if isinstance(key, torch.Generator) else key
    drawn = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(probabilities, generators, strict=True)
    ]
    tokens = torch.where(defined, torch.cat(drawn), -1)
    return tokens.reshape(logits.shape[:-1]).int()


def _defined(logits: Tensor) -> Tensor:
    """Whether a row has a token to choose: no NaN, and a logit above -inf."""
    return ~logits.isnan().any(dim=-1) & (logits > -torch.inf).any(dim=-1)
