"""What a decoder costs: memory, floating-point operations and memory traffic, by its configuration.

Matrix products alone are counted, a multiplication with its addition as two operations: norms,
activations, the rotary turn and softmax are small beside them. Traffic is the least possible: every
weight, every cached key and value, and what enters and leaves a part, once each; what lies between
the products of one part stays on the chip. Letters as everywhere, and b for the bytes of a number.
"""

from typing import NamedTuple

from jaxblock.config import DecoderConfig


class Cost(NamedTuple):
    """One part of the model, over all layers and all tokens of a call.

    Attributes:
      part: its name.
      flops: operations of its matrix products.
      bytes: memory traffic.
    """

    part: str
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """flops / bytes: below what the chip does per byte that it can fetch, memory is the limit.

        Source: Williams, Waterman and Patterson, Roofline, 2009.
        """
        return self.flops / self.bytes


def prefill_costs(config: DecoderConfig, *, batch: int, length: int, itemsize: int) -> list[Cost]:
    """costs = those of `prefill` on tokens [batch length]: logits of the last token only

    Args:
      config: of the decoder.
      batch: B, rows.
      length: T, tokens of each.
      itemsize: b, bytes of a weight, an activation and a cached number.

    Returns: the parts in the order in which they run.
    """
    return _costs(config, batch=batch, queries=length, past=0, itemsize=itemsize)


def decode_costs(config: DecoderConfig, *, batch: int, length: int, itemsize: int) -> list[Cost]:
    """costs = those of one `decode_step`, for token number `length` of every row

    Args:
      config: of the decoder.
      batch: B, rows.
      length: S, tokens that the query could see, itself among them.
      itemsize: b, bytes of a weight, an activation and a cached number.

    Returns: the parts in the order in which they run.
    """
    return _costs(config, batch=batch, queries=1, past=length - 1, itemsize=itemsize)


def feed_forward_cost(config: DecoderConfig, *, tokens: int, itemsize: int) -> Cost:
    """flops = 6 T D F of one SwiGLU (three products of 2 T D F), times A among experts

    Args:
      config: of the decoder.
      tokens: T, over all rows.
      itemsize: b, bytes of a weight and of an activation.

    Returns: the cost in one layer, without the router. bytes = b (3 D F + 2 T D); among experts
      the weights count once for each expert that can be chosen, min(E, T A).
    """
    D, F, experts, active = config.hidden_size, config.feed_forward.intermediate_size, 1, 1
    if config.moe is not None:
        F, active = config.moe.moe_intermediate_size, config.moe.num_experts_per_tok
        experts = min(config.moe.num_experts, tokens * active)
    biases = 2 * F + D if config.feed_forward.bias else 0
    weights = experts * 3 * D * F + biases
    traffic = itemsize * (weights + 2 * tokens * D)
    return Cost("feed-forward", 6 * tokens * D * F * active, traffic)


def visible_pairs(queries: int, past: int, window: int | None) -> int:
    """pairs = sum over t = 1 .. queries of min(past + t, window)

    Args:
      queries: T, tokens of one row that ask.
      past: tokens of the row before them.
      window: how many tokens a query sees, itself among them; None: all before it.

    Returns: how many (query, key) pairs the causal mask lets through. A product that is masked
      afterwards computes all queries * (past + queries).
    """
    within = queries if window is None else min(max(window - past, 0), queries)
    beyond = 0 if window is None else (queries - within) * window
    return within * past + within * (within + 1) // 2 + beyond


def cache_bytes(config: DecoderConfig, *, batch: int, length: int, itemsize: int) -> int:
    """bytes = sum over layers of 2 B K H b min(length, window)

    Args:
      config: of the decoder.
      batch: B, rows.
      length: tokens of each.
      itemsize: b, bytes of a cached number.

    Returns: what the keys and values take up.
    """
    attention = config.attention
    windows = [config.layer_kinds[kind].window for kind in config.layers]
    tokens = sum(length if window is None else min(length, window) for window in windows)
    return 2 * batch * attention.num_key_value_heads * attention.head_dim * itemsize * tokens


def _costs(
    config: DecoderConfig, *, batch: int, queries: int, past: int, itemsize: int
) -> list[Cost]:
    b, tokens = itemsize, batch * queries
    V, D, L = config.vocab_size, config.hidden_size, config.num_hidden_layers
    attention, moe = config.attention, config.moe
    N, K, H = attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim
    kernels = D * H * (2 * N + 2 * K)  # q and o, k and v
    biases = (N + 2 * K) * H * attention.qkv_bias + D * attention.o_bias
    windows = [config.layer_kinds[kind].window for kind in config.layers]
    pairs = sum(visible_pairs(queries, past, window) for window in windows)
    # The first query reaches back furthest.
    keys = sum(
        past + queries if window is None else min(past + queries, window + queries - 1)
        for window in windows
    )
    cached = 2 * batch * K * H * b * keys
    feed_forward = feed_forward_cost(config, tokens=tokens, itemsize=b)
    costs = [
        Cost("embedding lookup", 0, b * 2 * tokens * D),
        Cost(
            "attention projections",
            L * 2 * tokens * kernels,
            L * b * (kernels + biases + tokens * (2 * D + (2 * N + 2 * K) * H)),
        ),
        Cost("attention", 4 * batch * N * H * pairs, cached + L * b * 2 * tokens * N * H),
    ]
    if moe is not None:
        E, A = moe.num_experts, moe.num_experts_per_tok
        traffic = L * (b * (D * E + tokens * D) + 4 * 2 * tokens * A)
        costs.append(Cost("router", L * 2 * tokens * D * E, traffic))
    costs.append(Cost("feed-forward", L * feed_forward.flops, L * feed_forward.bytes))
    # Logits are float32 whatever the table is.
    costs.append(Cost("logits", 2 * batch * D * V, b * (V * D + batch * D) + 4 * batch * V))
    return costs
