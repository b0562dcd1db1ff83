"""A decoder's configuration in words."""

from jaxblock.config import DecoderConfig, LayerKind, RotaryConfig


def describe(config: DecoderConfig) -> dict[str, str]:
    """What the decoder is, part by part, in sentences for people."""
    lines = {
        "parameters": f"{config.num_parameters():,}",
        "layers": _layers(config),
        "embedding": _embedding(config),
        "attention": _attention(config),
    }
    rotaries = {kind.rotary for kind in config.layer_kinds}
    for kind in config.layer_kinds:
        name = "rotary" if len(rotaries) == 1 else f"rotary, {_span(kind).split()[0]}"
        lines[name] = _rotary(kind.rotary, config.attention.head_dim)
    lines["feed-forward"] = _feed_forward(config)
    lines["norms"] = _norms(config)
    lines["special tokens"] = _special_tokens(config)
    return lines


def _layers(config: DecoderConfig) -> str:
    words = f"{config.num_hidden_layers} of hidden size D = {config.hidden_size:,}"
    if config.max_position_embeddings is not None:
        words += f", made for {config.max_position_embeddings:,} tokens"
    spans = [_span(kind) for kind in config.layer_kinds]
    if len(spans) == 1:
        return f"{words}; every layer {spans[0]}"
    segments = []
    for segment in config.segments():
        pattern = ", ".join(_runs([spans[kind] for kind in segment.pattern]))
        many = segment.repeats > 1
        segments.append(f"{segment.repeats} times ({pattern})" if many else pattern)
    return f"{words}; {', then '.join(segments)}"


def _span(kind: LayerKind) -> str:
    return "full" if kind.window is None else f"sliding over {kind.window:,} tokens"


def _runs(words: list[str]) -> list[str]:
    """Neighbours that are the same become one word with their number."""
    runs: list[tuple[str, int]] = []
    for word in words:
        number = runs.pop()[1] if runs and runs[-1][0] == word else 0
        runs.append((word, number + 1))
    return [f"{number} {word}" for word, number in runs]


def _embedding(config: DecoderConfig) -> str:
    words = f"V = {config.vocab_size:,} rows"
    if config.num_valid is not None:
        words += f", of which {config.num_valid:,} are tokens and the rest padding"
    words += ", tied: one table for lookup and logits"
    if not config.tie_word_embeddings:
        words = words.replace("tied: one table", "untied: a table each")
    if config.embed_scale is not None:
        words += f"; rows looked up times sqrt(D) = {config.embed_scale:.4g}"
    if config.final_softcap is not None:
        words += f"; logits capped at {config.final_softcap:g}"
    return words


def _attention(config: DecoderConfig) -> str:
    attention = config.attention
    N, K = attention.num_attention_heads, attention.num_key_value_heads
    words = f"{N} query heads, {K} key/value heads"
    words += f" (each serves {N // K})" if K < N else ""
    words += f", head size {attention.head_dim}; scores times {attention.scale:.6g}"
    if attention.softcap is not None:
        words += f", capped at {attention.softcap:g}"
    if attention.qk_norm is not None:
        over = {"head": "each head", "projection": "the whole projection"}[attention.qk_norm]
        words += f"; RMSNorm of queries and keys over {over}"
    biases = {"q, k, v": attention.qkv_bias, "output": attention.o_bias}
    biased = " and ".join(name for name, present in biases.items() if present)
    return f"{words}; {f'bias on {biased}' if biased else 'no biases'}"


def _rotary(rotary: RotaryConfig, head_dim: int) -> str:
    part = "all" if rotary.rotary_dim == head_dim else f"the first {rotary.rotary_dim}"
    words = f"theta {rotary.theta:,.10g} on {part} of {head_dim} channels"
    if rotary.scaling is None:
        return f"{words}, not scaled"
    numbers = [f"{name} {value}" for name, value in rotary.scaling.items() if name != "rope_type"]
    return f"{words}, scaled as {rotary.scaling['rope_type']} ({', '.join(numbers)})"


def _feed_forward(config: DecoderConfig) -> str:
    feed_forward, moe = config.feed_forward, config.moe
    gated = {"silu": "SwiGLU", "gelu": "GeGLU (exact GELU)", "gelu_tanh": "GeGLU (tanh GELU)"}
    words = gated[feed_forward.activation]
    if moe is None:
        bias = "biases" if feed_forward.bias else "no biases"
        return f"{words}, intermediate size F = {feed_forward.intermediate_size:,}, {bias}"
    weights = "made to sum to one" if moe.norm_topk_prob else "as the softmax gave them"
    return (
        f"{moe.num_experts} experts, A = {moe.num_experts_per_tok} for each token, weights "
        f"{weights}; each a {words} of intermediate size F = {moe.moe_intermediate_size:,}"
    )


def _norms(config: DecoderConfig) -> str:
    norm = config.norm
    places = {"before": norm.pre_norm, "after": norm.post_norm}
    where = " and ".join(name for name, present in places.items() if present)
    scale = "scale" if norm.scale_offset == 0 else f"({norm.scale_offset:g} + scale)"
    order = {
        "before_scale": f"rounded before the product with {scale}",
        "after_scale": f"rounded once, after the product with {scale}",
    }
    return f"RMSNorm, eps {norm.eps:g}, {where} each branch; {order[norm.cast]}"


def _special_tokens(config: DecoderConfig) -> str:
    special = config.special_tokens
    ends = ", ".join(map(str, special.eos_token_ids))
    ids = {"begin": special.bos_token_id, "end": ends or None, "padding": special.pad_token_id}
    return ", ".join(f"{name} {'none' if token is None else token}" for name, token in ids.items())
