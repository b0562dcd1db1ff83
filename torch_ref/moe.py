"""Mixture of experts: routing and the gated feed-forward of the chosen experts."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

from torch_ref.precision import arithmetic_dtype


def route_top_k(
    router_logits: Float[Tensor, "*B E"], *, num_active: int, renormalize: bool
) -> tuple[Float[Tensor, "*B A"], Integer[Tensor, "*B A"]]:
    """weights, experts = the A = num_active largest of softmax(router_logits over E)"""
    logits = router_logits.to(arithmetic_dtype(router_logits.dtype))
    # A stable sort leaves equal logits in the order of their experts; torch.topk promises none.
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[..., :num_active]
    weights = logits.softmax(dim=-1).gather(-1, experts)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.to(torch.int32)


def moe_swiglu(
    x: Float[Tensor, "*B D"],
    router: Float[Tensor, "D E"],
    gate_up: Float[Tensor, "E D 2 F"],
    down: Float[Tensor, "E F D"],
    *,
    num_active: int,
    renormalize: bool,
) -> Float[Tensor, "*B D"]:
    """y = sum over the chosen e of weight_e * swiglu(x, gate_up[e], down[e])

    Weights and choice: `route_top_k` of x · router.
    """
    wide = arithmetic_dtype(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    logits = rows.to(wide) @ router.to(x.dtype).to(wide)
    weights, experts = route_top_k(logits, num_active=num_active, renormalize=renormalize)
    y = torch.zeros_like(rows, dtype=wide)
    for expert in range(router.shape[-1]):
        token, place = (experts == expert).nonzero(as_tuple=True)
        gate_kernel, up_kernel = gate_up[expert].to(x.dtype).unbind(dim=1)
        gate, up = rows[token] @ gate_kernel, rows[token] @ up_kernel
        hidden = F.silu(gate.to(wide)) * up.to(wide)
        result = hidden.to(x.dtype) @ down[expert].to(x.dtype)
        y = y.index_add(0, token, weights[token, place, None] * result.to(wide))
    return y.to(x.dtype).reshape(x.shape)
