"""DecoderConfig: one decoder, completely described."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxblock.config import hugging_face, meta
from jaxblock.config.families import FAMILIES
from jaxblock.config.groups import (
    AttentionConfig,
    FeedForwardConfig,
    LayerKind,
    LayerSegment,
    MoeConfig,
    NormConfig,
    SpecialTokens,
)
from jaxblock.config.reader import ConfigError, Source, config_error
from jaxblock.ops import checks

Shapes = dict[str, "tuple[int, ...] | Shapes"]


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder: everything that decides its parameters and its logits.

    Frozen and hashable, so it may be a static argument of `jax.jit`. Build it with `from_hf` or
    `from_meta`, change it with `dataclasses.replace`.

    Attributes:
      model_type: the family, by the name that transformers has for it.
      vocab_size: V, rows of the embedding.
      hidden_size: D.
      max_position_embeddings: the length it was made for, and no limit to what is computed; None
        where the file does not say.
      tie_word_embeddings: one table for lookup and logits.
      scale_embedding: rows looked up are multiplied by `embed_scale`.
      final_softcap: logits become softcap * tanh(logits / softcap).
      norm, attention, feed_forward: the parts of a layer.
      moe: the experts, in place of every feed-forward.
      layer_kinds: what differs between layers: each kind once, in the order of its first layer.
      layers: the index into `layer_kinds` of every layer.
      special_tokens: no part of the computation.
      num_valid: rows of the tables at or above it are padding: their logits are -inf, so no loss
        counts them and no sampling takes them. None: every row is a token. No file has a key for
        it; see `pad_vocabulary`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int | None
    tie_word_embeddings: bool
    scale_embedding: bool
    final_softcap: float | None
    norm: NormConfig
    attention: AttentionConfig
    feed_forward: FeedForwardConfig
    moe: MoeConfig | None
    layer_kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    special_tokens: SpecialTokens
    num_valid: int | None = None

    @classmethod
    def from_hf(cls, source: Source) -> "DecoderConfig":
        """config = the decoder that transformers builds from a `config.json`

        Args:
          source: a folder with a `config.json`, the file, or its contents as a mapping. Both
            spellings of the rotary keys are read: `rope_theta` with `rope_scaling`, and
            `rope_parameters`.

        Returns: the configuration. The family's default stands for an absent key; sizes,
          `rms_norm_eps` and `num_experts_per_tok` have none.

        Raises: ConfigError, with all findings, for a key that is neither understood nor known to be
          without effect, a missing constant, a value of the wrong kind, and keys that disagree.

        Source: transformers 5.24.0; the defaults stand in `jaxblock.config.families`.
        """
        return cls(**hugging_face.read(source))

    @classmethod
    def from_meta(
        cls,
        source: Source,
        *,
        tie_word_embeddings: bool | None = None,
        vocab_size: int | None = None,
        rope_scaling_factor: float | None = None,
        max_position_embeddings: int | None = None,
    ) -> "DecoderConfig":
        """config = the Llama that Meta's code builds from a `params.json`

        Args:
          source: a folder with a `params.json`, the file, or its contents as a mapping.
          tie_word_embeddings: required, because the file never says. True of Llama 3.2 1B and 3B.
          vocab_size: required where the file has -1 (Llama 1 and 2, by their tokenizer 32000).
          rope_scaling_factor: required where the file has `use_scaled_rope`, which names no factor:
            8 for Llama 3.1, 32 for Llama 3.2.
          max_position_embeddings: kept, and without effect.

        Returns: the configuration, of `model_type` "llama". Meta's files pair neighbouring channels
          of a head; this describes them permuted to halves.

        Raises: ConfigError, as `from_hf`.

        Source: meta-llama/llama, llama/model.py; meta-llama/llama-models, models/llama3/args.py and
          models/llama3/model.py.
        """
        arguments = {
            "tie_word_embeddings": tie_word_embeddings,
            "vocab_size": vocab_size,
            "rope_scaling_factor": rope_scaling_factor,
            "max_position_embeddings": max_position_embeddings,
        }
        return cls(**meta.read(source, arguments))

    def to_hf(self) -> dict[str, Any]:
        """entries = a `config.json` from which `from_hf` and transformers 5 build this decoder

        Returns: a new dict of JSON values, with `rope_parameters` and without a dtype.

        Raises: ConfigError if the family has no keys for it: a Llama with a window, for example.
        """
        function = "DecoderConfig.to_hf"
        if self.model_type not in FAMILIES:
            must = f"model_type must be one of {', '.join(FAMILIES)}"
            raise config_error(function, [f"{must}; got model_type={self.model_type!r}"])
        entries = hugging_face.write(self)
        try:
            back = DecoderConfig.from_hf(entries)
        except ConfigError as error:
            raise config_error(function, error.findings) from error
        names = [field.name for field in fields(self)]
        lost = [name for name in names if getattr(back, name) != getattr(self, name)]
        if lost:
            must = f"must be one that {self.model_type} has keys for"
            findings = [f"{name} {must}; got {name}={getattr(self, name)}" for name in lost]
            raise config_error(function, findings)
        return entries

    @property
    def num_hidden_layers(self) -> int:
        """L"""
        return len(self.layers)

    @property
    def embed_scale(self) -> float | None:
        """sqrt(D), the factor on rows looked up; None where there is none.

        Precision: transformers holds it in float32 and rounds it to the dtype of the table, then
          multiplies: 33.94 becomes 34 in bfloat16.
        """
        return self.hidden_size**0.5 if self.scale_embedding else None

    def num_parameters(self) -> int:
        """The elements of all arrays of the parameter tree: a tied table counts once."""
        return _num_elements(self.parameter_shapes())

    def parameter_shapes(self) -> Shapes:
        """The parameter tree with shapes for leaves, layers stacked on a leading axis L."""
        V, D, L = self.vocab_size, self.hidden_size, self.num_hidden_layers
        layers: Shapes = {
            "attention": self._attention_shapes(),
            "feed_forward": self._feed_forward_shapes(),
        }
        for branch in ("attention", "feed_forward"):
            if self.norm.pre_norm:
                layers[f"{branch}_norm"] = {"scale": (L, D)}
            if self.norm.post_norm:
                layers[f"{branch}_post_norm"] = {"scale": (L, D)}
        shapes: Shapes = {"embedding": (V, D), "layers": layers, "final_norm": {"scale": (D,)}}
        if not self.tie_word_embeddings:
            shapes["unembedding"] = (V, D)
        return shapes

    def _attention_shapes(self) -> Shapes:
        L, D, H = self.num_hidden_layers, self.hidden_size, self.attention.head_dim
        N, K = self.attention.num_attention_heads, self.attention.num_key_value_heads
        shapes: Shapes = {
            "q": (L, D, N, H),
            "k": (L, D, K, H),
            "v": (L, D, K, H),
            "o": (L, N, H, D),
        }
        if self.attention.qkv_bias:
            shapes |= {"q_bias": (L, N, H), "k_bias": (L, K, H), "v_bias": (L, K, H)}
        if self.attention.o_bias:
            shapes["o_bias"] = (L, D)
        if self.attention.qk_norm == "head":
            shapes |= {"q_norm": {"scale": (L, H)}, "k_norm": {"scale": (L, H)}}
        elif self.attention.qk_norm == "projection":
            shapes |= {"q_norm": {"scale": (L, N * H)}, "k_norm": {"scale": (L, K * H)}}
        return shapes

    def _feed_forward_shapes(self) -> Shapes:
        L, D = self.num_hidden_layers, self.hidden_size
        if self.moe is not None:
            E, F = self.moe.num_experts, self.moe.moe_intermediate_size
            return {"router": (L, D, E), "gate_up": (L, E, D, 2, F), "down": (L, E, F, D)}
        F = self.feed_forward.intermediate_size
        shapes: Shapes = {"gate_up": (L, D, 2, F), "down": (L, F, D)}
        if self.feed_forward.bias:
            shapes |= {"gate_up_bias": (L, 2, F), "down_bias": (L, D)}
        return shapes

    def segments(self) -> tuple[LayerSegment, ...]:
        """The layers cut into repeated patterns: to scan over each, with its pattern unrolled.

        Returns: segments that cover the layers in order, each the longest repetition that starts
          where the last one ended. One for Llama; thirteen times (sliding, full) for Gemma 2 2B;
          four times six layers and twice one for Gemma 3 1B.
        """
        segments = []
        start = 0
        while start < len(self.layers):
            segments.append(_longest_segment(self.layers, start))
            start += len(segments[-1].pattern) * segments[-1].repeats
        return tuple(segments)


def check_config(function: str, config: Any) -> None:
    """`config` must be a `DecoderConfig`, not the configuration of another library, nor a dict."""
    checks.require(
        isinstance(config, DecoderConfig),
        function,
        "config must be a DecoderConfig",
        kind=TypeError,
        hint="Build it with DecoderConfig.from_hf or DecoderConfig.from_meta.",
        config=type(config).__name__,
    )


def _num_elements(shapes: "tuple[int, ...] | Shapes") -> int:
    if isinstance(shapes, Mapping):
        return sum(map(_num_elements, shapes.values()))
    return math.prod(shapes)


def _longest_segment(layers: tuple[int, ...], start: int) -> LayerSegment:
    best = LayerSegment(start, layers[start : start + 1], 1)
    for length in range(1, (len(layers) - start) // 2 + 1):
        pattern = layers[start : start + length]
        repeats = 1
        while layers[(end := start + length * repeats) : end + length] == pattern:
            repeats += 1
        # Of equally long ones the shortest pattern wins, for it is unrolled.
        if repeats > 1 and length * repeats > len(best.pattern) * best.repeats:
            best = LayerSegment(start, pattern, repeats)
    return best
