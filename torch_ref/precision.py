"""The arithmetic dtype."""

import torch


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
