"""The groups of a decoder's configuration: frozen, hashable, with the names of the config files.

Letters as everywhere: D hidden_size, F intermediate_size, N query heads, K key/value heads,
H head_dim, E experts, A experts active per token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]
LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class NormConfig:
    """y = x / rms(x, eps) * (scale_offset + scale), for every norm of the model.

    Attributes:
      eps, cast, scale_offset: the arguments of `rms_norm`, for the norms of queries and keys too.
      pre_norm: a norm on what enters attention and feed-forward (all but OLMo-2).
      post_norm: a norm on what leaves them, before the residual sum (OLMo-2, Gemma 2 and 3).
    """

    eps: float
    cast: Literal["after_scale", "before_scale"]
    scale_offset: float
    pre_norm: bool
    post_norm: bool

    @property
    def initial_scale(self) -> float:
        """1 - scale_offset: with it the norm multiplies by one."""
        return 1.0 - self.scale_offset


class RopeScaling(Mapping[str, str | float | int | bool]):
    """The `scaling` of `rotary_frequencies` (`rope_type`, `factor`, ...): a mapping that hashes."""

    __slots__ = ("_entries",)

    def __init__(self, **entries: str | float | int | bool):
        self._entries = entries

    def __getitem__(self, key: str) -> str | float | int | bool:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return f"RopeScaling({', '.join(f'{key}={value!r}' for key, value in self.items())})"


@dataclass(frozen=True)
class RotaryConfig:
    """frequencies_i = theta^(-2i / rotary_dim), scaled as `scaling` says.

    Channels of a head from `rotary_dim` on are not turned.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class LayerKind:
    """What may differ between the layers of one model.

    Attributes:
      window: how many tokens a query sees, itself among them; None: all before it.
      rotary: the table that turns its queries and keys.
    """

    window: int | None
    rotary: RotaryConfig

    @property
    def layer_type(self) -> LayerType:
        """The name that transformers has for it."""
        return "full_attention" if self.window is None else "sliding_attention"


@dataclass(frozen=True)
class LayerSegment:
    """The layers from `start` on whose kinds are `pattern`, `repeats` times over."""

    start: int
    pattern: tuple[int, ...]
    repeats: int


@dataclass(frozen=True)
class AttentionConfig:
    """softmax(softcap(q k' / sqrt(query_pre_attn_scalar))) v

    Attributes:
      num_attention_heads, num_key_value_heads, head_dim: N, K and H.
      query_pre_attn_scalar: H, where the family has no other number for it.
      softcap: scores become softcap * tanh(scores / softcap).
      qkv_bias, o_bias: biases on the projections.
      qk_norm: a norm of queries and keys before they are turned, over the channels of one "head"
        (scales [H]) or of the whole "projection" (scales [N H] and [K H]).
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    query_pre_attn_scalar: float
    softcap: float | None
    qkv_bias: bool
    o_bias: bool
    qk_norm: Literal["head", "projection"] | None

    @property
    def scale(self) -> float:
        """1 / sqrt(query_pre_attn_scalar): the factor on the scores."""
        return self.query_pre_attn_scalar**-0.5


@dataclass(frozen=True)
class FeedForwardConfig:
    """down(activation(gate(x)) * up(x))

    Attributes:
      intermediate_size: F.
      activation: "gelu" is the exact form, "gelu_tanh" the one by tanh.
      bias: each of the three adds one (Llama's `mlp_bias`).
    """

    intermediate_size: int
    activation: Activation
    bias: bool


@dataclass(frozen=True)
class MoeConfig:
    """The experts of every layer, in place of its feed-forward.

    Attributes:
      num_experts, num_experts_per_tok: E and A.
      moe_intermediate_size: F of one expert.
      norm_topk_prob: the weights of the chosen experts are divided by their sum.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that no computation needs: kept for generation, and to be written back."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
