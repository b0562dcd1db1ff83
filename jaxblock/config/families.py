"""The families: what each computes without any key saying so, and takes for a key that is absent.

Every row is transformers 5.24.0, `src/transformers/models/<model_type>/` (gemma3_text: `gemma3`):
`defaults` from `configuration_*.py`, all else from `modeling_*.py`. A key of some families that is
not in a row's `defaults` is no key of that one. Sizes, the norms' eps and the experts per token
have no default, although the classes there have one: those are numbers of one checkpoint each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """One family of decoders; the defaults of this class are Llama's."""

    # The first of transformers' classes is the one written; the second has no head.
    architectures: tuple[str, str]
    # Absent keys. None for a size: it follows from others (K = N, H = D / N).
    defaults: Mapping[str, Any]
    # ...RMSNorm.forward, ...DecoderLayer.forward, and q_norm, k_norm of ...Attention.
    cast: Literal["after_scale", "before_scale"] = "before_scale"
    scale_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    # ...TextScaledWordEmbedding: looked-up rows times sqrt(D).
    scale_embedding: bool = False
    # The key that older files have for the activation: it must agree with the one that is read.
    old_activation_key: str | None = None
    # __post_init__ of GemmaConfig: "gelu" is the tanh form.
    gelu_means_tanh: bool = False
    # Biases on q, k, v and none on o, whatever the file says.
    fixed_qkv_bias: bool = False
    # The class takes null for num_key_value_heads, and __post_init__ makes N of it.
    null_key_value_heads: bool = True
    # validate_architecture: N must divide D even where head_dim is given.
    hidden_size_divides: bool = False
    # The key for the size of an expert, in families whose every layer has experts.
    expert_size_key: Literal["intermediate_size", "moe_intermediate_size"] | None = None
    # Layers up to a full one, that one included: the others slide.
    pattern: int | None = None
    # Phi3Config.validate_rope; none of the others restricts them.
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")


_GEMMA = {
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_theta": 10000.0,
}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        ("LlamaForCausalLM", "LlamaModel"),
        {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "num_key_value_heads": None,
            "head_dim": None,
            "rope_theta": 10000.0,
        },
        hidden_size_divides=True,
    ),
    "mistral": Family(
        ("MistralForCausalLM", "MistralModel"),
        {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "head_dim": None,
            "sliding_window": 4096,
            "rope_theta": 10000.0,
        },
        null_key_value_heads=False,
    ),
    "qwen2": Family(
        ("Qwen2ForCausalLM", "Qwen2Model"),
        {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "head_dim": None,
            **_QWEN_WINDOWS,
            "rope_theta": 10000.0,
        },
        fixed_qkv_bias=True,
    ),
    "qwen3": Family(
        ("Qwen3ForCausalLM", "Qwen3Model"),
        {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            **_QWEN_WINDOWS,
            "rope_theta": 10000.0,
        },
        qk_norm="head",
    ),
    "gemma": Family(
        ("GemmaForCausalLM", "GemmaModel"),
        {"hidden_act": "gelu_pytorch_tanh", **_GEMMA},
        cast="after_scale",
        scale_offset=1.0,
        scale_embedding=True,
        old_activation_key="hidden_activation",
        gelu_means_tanh=True,
        null_key_value_heads=False,
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM", "Gemma2Model"),
        {
            "hidden_activation": "gelu_pytorch_tanh",
            **_GEMMA,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        },
        cast="after_scale",
        scale_offset=1.0,
        post_norm=True,
        scale_embedding=True,
        old_activation_key="hidden_act",
        null_key_value_heads=False,
        hidden_size_divides=True,
        pattern=2,
    ),
    # Gemma3Attention holds attn_logit_softcapping and never applies it, so it is no key here.
    "gemma3_text": Family(
        ("Gemma3ForCausalLM", "Gemma3TextModel"),
        {
            "hidden_activation": "gelu_pytorch_tanh",
            **_GEMMA,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": None,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        cast="after_scale",
        scale_offset=1.0,
        post_norm=True,
        qk_norm="head",
        scale_embedding=True,
        old_activation_key="hidden_act",
        null_key_value_heads=False,
        hidden_size_divides=True,
        pattern=6,
    ),
    "phi3": Family(
        ("Phi3ForCausalLM", "Phi3Model"),
        {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "num_key_value_heads": None,
            "head_dim": None,
            "sliding_window": None,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        rope_types=("default",),
    ),
    "olmo2": Family(
        ("Olmo2ForCausalLM", "Olmo2Model"),
        {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "num_key_value_heads": None,
            "head_dim": None,
            "rope_theta": 10000.0,
        },
        cast="after_scale",
        pre_norm=False,
        post_norm=True,
        qk_norm="projection",
    ),
    # Weights of the chosen experts are always divided by their sum: MixtralTopKRouter.
    "mixtral": Family(
        ("MixtralForCausalLM", "MixtralModel"),
        {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "head_dim": None,
            "sliding_window": None,
            "rope_theta": 1000000.0,
        },
        null_key_value_heads=False,
        expert_size_key="intermediate_size",
    ),
    # The window holds on every layer: Qwen3MoeModel reads no max_window_layers.
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        {
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "head_dim": None,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
            "use_sliding_window": False,
            "sliding_window": 4096,
            "rope_theta": 10000.0,
        },
        qk_norm="head",
        null_key_value_heads=False,
        expert_size_key="moe_intermediate_size",
    ),
}
