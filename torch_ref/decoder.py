"""The whole decoder over the parameter tree of `jaxblock`, layer after layer: the float64 judge.

`config` is a `jaxblock.DecoderConfig`, of which only attributes are read.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from torch_ref.attention import attention
from torch_ref.embedding import embed, unembed
from torch_ref.feed_forward import geglu, swiglu
from torch_ref.moe import moe_swiglu
from torch_ref.normalization import rms_norm
from torch_ref.rotary import apply_rotary, rotary_cos_sin, rotary_frequencies, rotary_magnitude

Params = Mapping[str, Any]


class Activations(NamedTuple):
    """What the decoder makes of its tokens, stage by stage."""

    embedding: Float[Tensor, "B T D"]
    blocks: Float[Tensor, "L B T D"]
    final_norm: Float[Tensor, "B T D"]
    logits: Float[Tensor, "B T V"]


def forward(
    params: Params,
    tokens: Integer[Tensor, "B T"],
    config: Any,
    *,
    positions: Integer[Tensor, "B T"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T V"]:
    """logits = unembed(final_norm(blocks(embed(tokens))))"""
    return activations(params, tokens, config, positions=positions, mask=mask).logits


def activations(
    params: Params,
    tokens: Integer[Tensor, "B T"],
    config: Any,
    *,
    positions: Integer[Tensor, "B T"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> Activations:
    """logits = unembed(final_norm(blocks(embed(tokens)))), with everything on the way"""
    if mask is None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
    order = (mask.cumsum(dim=1) - 1).clamp(min=0)
    positions = order if positions is None else positions
    embedding = embed(tokens.masked_fill(~mask, 0), params["embedding"])
    if config.embed_scale is not None:
        embedding = embedding * torch.tensor(config.embed_scale, dtype=embedding.dtype)
    x, blocks = embedding, []
    for index, kind in enumerate(config.layers):
        layer = _layer(params["layers"], index)
        x = _block(layer, x, config, config.layer_kinds[kind], order, positions, mask)
        blocks.append(x)
    final_norm = _norm(x, params["final_norm"]["scale"], config)
    table = params["embedding" if config.tie_word_embeddings else "unembedding"]
    logits = unembed(final_norm, table, softcap=config.final_softcap, num_valid=config.num_valid)
    return Activations(embedding, torch.stack(blocks), final_norm, logits)


def _layer(layers: Params, index: int) -> dict[str, Any]:
    return {
        name: _layer(leaf, index) if isinstance(leaf, Mapping) else leaf[index]
        for name, leaf in layers.items()
    }


def _block(
    layer: Params,
    x: Tensor,
    config: Any,
    kind: Any,
    order: Tensor,
    positions: Tensor,
    mask: Tensor,
) -> Tensor:
    for branch in ("attention", "feed_forward"):
        y = x
        if config.norm.pre_norm:
            y = _norm(y, layer[f"{branch}_norm"]["scale"], config)
        if branch == "attention":
            y = _attention(layer["attention"], y, config, kind, order, positions, mask)
        else:
            y = _feed_forward(layer["feed_forward"], y, config)
        if config.norm.post_norm:
            y = _norm(y, layer[f"{branch}_post_norm"]["scale"], config)
        x = x + y
    return x


def _attention(
    layer: Params,
    x: Tensor,
    config: Any,
    kind: Any,
    order: Tensor,
    positions: Tensor,
    mask: Tensor,
) -> Tensor:
    q, k, v = (torch.einsum("btd,dnh->btnh", x, layer[name].to(x.dtype)) for name in "qkv")
    if config.attention.qkv_bias:
        q, k, v = (
            y + layer[f"{name}_bias"].to(x.dtype) for name, y in zip("qkv", (q, k, v), strict=True)
        )
    if config.attention.qk_norm == "head":
        q, k = (
            _norm(y, layer[f"{name}_norm"]["scale"], config)
            for name, y in zip("qk", (q, k), strict=True)
        )
    elif config.attention.qk_norm == "projection":
        q, k = (
            _norm(y.flatten(-2), layer[f"{name}_norm"]["scale"], config).view_as(y)
            for name, y in zip("qk", (q, k), strict=True)
        )
    rotary = kind.rotary
    frequencies = rotary_frequencies(
        config.attention.head_dim,
        theta=rotary.theta,
        scaling=rotary.scaling,
        rotary_dim=rotary.rotary_dim,
    )
    # The frequencies are float32 numbers by definition; what is made of them is exact in float64.
    if x.dtype == torch.float64:
        frequencies = frequencies.double()
    magnitude = rotary_magnitude(rotary.scaling)
    cos, sin = rotary_cos_sin(positions, frequencies, magnitude=magnitude)
    q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    visible = mask[:, None, None, :].expand(-1, 1, x.shape[1], -1)
    if kind.window is not None:
        visible = visible & (order[:, None, :, None] - order[:, None, None, :] < kind.window)
    y = attention(
        q,
        k,
        v,
        scale=config.attention.scale,
        softcap=config.attention.softcap,
        mask=visible,
    )
    y = torch.einsum("btnh,nhd->btd", y, layer["o"].to(x.dtype))
    return y + layer["o_bias"].to(x.dtype) if config.attention.o_bias else y


def _feed_forward(layer: Params, x: Tensor, config: Any) -> Tensor:
    if config.moe is not None:
        return moe_swiglu(
            x,
            **layer,
            num_active=config.moe.num_experts_per_tok,
            renormalize=config.moe.norm_topk_prob,
        )
    if config.feed_forward.activation == "silu":
        return swiglu(x, **layer)
    return geglu(x, **layer, approximate=config.feed_forward.activation == "gelu_tanh")


def _norm(x: Tensor, scale: Tensor, config: Any) -> Tensor:
    norm = config.norm
    return rms_norm(x, scale, eps=norm.eps, scale_offset=norm.scale_offset, cast=norm.cast)
