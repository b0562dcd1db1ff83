"""`config.json` of the transformers library, both ways.

Reading takes every key once, part by part of the model; what is left over at the end is a finding.
Source: transformers 5.24.0, src/transformers/models/<model_type>/configuration_*.py, modeling_*.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxblock.config.families import FAMILIES, Family
from jaxblock.config.groups import (
    Activation,
    AttentionConfig,
    FeedForwardConfig,
    LayerKind,
    MoeConfig,
    NormConfig,
    SpecialTokens,
)
from jaxblock.config.keys import WITHOUT_EFFECT, WITHOUT_EFFECT_AT
from jaxblock.config.reader import (
    MAX_LAYERS,
    REQUIRED,
    Reader,
    Source,
    config_error,
    flag,
    integer,
    load,
    names,
    number,
    one_of,
    size,
    token,
    tokens,
)
from jaxblock.config.rotary import FULL, SLIDING, read_rotary, write_rotary

if TYPE_CHECKING:
    from jaxblock.config.decoder_config import DecoderConfig

FUNCTION = "DecoderConfig.from_hf"
# src/transformers/activations.py has more names, for functions that nothing here computes.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
NAMES: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
}


def read(source: Source) -> dict[str, Any]:
    """Return the fields of a `DecoderConfig`; raise `ConfigError` with everything that is wrong."""
    findings: list[str] = []
    reader = Reader(load(FUNCTION, source, "config.json"), findings)
    model_type = reader.take("model_type", one_of({name: name for name in FAMILIES}))
    if findings:  # What the other keys mean depends on the family.
        raise config_error(FUNCTION, findings)
    family = FAMILIES[model_type]
    _check_architectures(reader, family)
    hidden_size = reader.take("hidden_size", size)
    attention = _read_attention(reader, family, hidden_size)
    feed_forward = _read_feed_forward(reader, family)
    fields = {
        "model_type": model_type,
        "vocab_size": reader.take("vocab_size", size),
        "hidden_size": hidden_size,
        "max_position_embeddings": reader.take("max_position_embeddings", size, default=None),
        "tie_word_embeddings": _own(reader, family, "tie_word_embeddings", flag),
        "scale_embedding": family.scale_embedding,
        "final_softcap": _own(reader, family, "final_logit_softcapping", number(), null=None),
        "norm": NormConfig(
            eps=reader.take("rms_norm_eps", number()),
            cast=family.cast,
            scale_offset=family.scale_offset,
            pre_norm=family.pre_norm,
            post_norm=family.post_norm,
        ),
        "attention": attention,
        "feed_forward": feed_forward,
        "moe": _read_moe(reader, family, feed_forward),
        **_read_layers(reader, family, attention.head_dim),
        "special_tokens": SpecialTokens(
            bos_token_id=reader.take("bos_token_id", token, default=None, null=None),
            eos_token_ids=reader.take("eos_token_id", tokens, default=(), null=()),
            pad_token_id=reader.take("pad_token_id", token, default=None, null=None),
        ),
    }
    reader.finish(WITHOUT_EFFECT, WITHOUT_EFFECT_AT)
    if findings:
        raise config_error(FUNCTION, findings)
    return fields


def _own(
    reader: Reader, family: Family, key: str, kind: Callable[[Any], Any], null: Any = REQUIRED
) -> Any:
    """Take `key` if the family has it. None otherwise, and `finish` judges it."""
    if key not in family.defaults:
        return None
    return reader.take(key, kind, default=family.defaults[key], null=null)


def _check_architectures(reader: Reader, family: Family) -> None:
    # Other heads, draft models and bidirectional variants keep the model type, change the class.
    classes = reader.take("architectures", names, default=(), null=())
    if reader.good("architectures"):
        must = f"architectures must be {' or '.join(family.architectures)}"
        fits = set(classes) <= set(family.architectures)
        reader.require(fits, must, {"architectures": classes})


def _read_attention(reader: Reader, family: Family, hidden_size: int) -> AttentionConfig:
    heads = reader.take("num_attention_heads", size)
    key_heads = _derived(reader, family, "num_key_value_heads", family.null_key_value_heads)
    head_dim = _derived(reader, family, "head_dim", "head_dim" in family.defaults)
    if reader.good("num_attention_heads", "num_key_value_heads"):
        key_heads = key_heads or heads
        must = "num_key_value_heads must divide num_attention_heads"
        got = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
        reader.require(heads % key_heads == 0, must, got)
    if reader.good("num_attention_heads", "hidden_size", "head_dim"):
        must = "num_attention_heads must divide hidden_size"
        got = {"hidden_size": hidden_size, "num_attention_heads": heads}
        free = head_dim is not None and not family.hidden_size_divides
        reader.require(free or hidden_size % heads == 0, must, got)
        head_dim = head_dim or hidden_size // heads
    if reader.good("num_attention_heads", "hidden_size", "head_dim"):
        must = "head_dim must be even, because its channels turn in pairs"
        reader.require(head_dim % 2 == 0, must, {"head_dim": head_dim})
    if "attention_bias" not in family.defaults and not family.fixed_qkv_bias:
        reader.neutral("attention_bias", (False,), "this family has none")
    bias = bool(_own(reader, family, "attention_bias", flag))
    return AttentionConfig(
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        query_pre_attn_scalar=_own(reader, family, "query_pre_attn_scalar", number()) or head_dim,
        softcap=_own(reader, family, "attn_logit_softcapping", number(), null=None),
        qkv_bias=bias or family.fixed_qkv_bias,
        o_bias=bias,
        qk_norm=family.qk_norm,
    )


def _derived(reader: Reader, family: Family, key: str, null: bool) -> Any:
    """Take a size that may follow from others: None then."""
    default = None if key in family.defaults else REQUIRED
    return reader.take(key, size, default=default, null=None if null else REQUIRED)


def _read_feed_forward(reader: Reader, family: Family) -> FeedForwardConfig:
    known: dict[str, Activation] = dict(ACTIVATIONS)
    if family.gelu_means_tanh:
        known["gelu"] = "gelu_tanh"
    key = "hidden_act" if "hidden_act" in family.defaults else "hidden_activation"
    kind: Callable[[Any], Activation] = one_of(known)
    activation = reader.take(key, kind, default=None) or known[family.defaults[key]]
    if family.old_activation_key:
        old = reader.take(family.old_activation_key, kind, default=None, null=None)
        must = f"{family.old_activation_key} must agree with {key}, which is the one in use"
        agree = old in (None, activation) or not reader.good(key)
        reader.require(agree, must, {family.old_activation_key: old, key: activation})
    return FeedForwardConfig(
        intermediate_size=reader.take("intermediate_size", size),
        activation=activation,
        bias=bool(_own(reader, family, "mlp_bias", flag)),
    )


def _read_moe(reader: Reader, family: Family, feed_forward: FeedForwardConfig) -> MoeConfig | None:
    if family.expert_size_key is None:
        return None
    if reader.good("hidden_act"):
        must = "hidden_act must be silu, because experts are SwiGLUs"
        activation = feed_forward.activation
        reader.require(activation == "silu", must, {"hidden_act": activation})
    num_experts = _read_num_experts(reader)
    active = reader.take("num_experts_per_tok", size)
    if num_experts is not None and reader.good("num_experts_per_tok"):
        must = "num_experts_per_tok must be at most the number of experts"
        got = {"num_experts_per_tok": active, "num_experts": num_experts}
        reader.require(active <= num_experts, must, got)
    if "decoder_sparse_step" in family.defaults:
        # The parameter tree stacks the layers, so none may have a dense feed-forward.
        reader.neutral("decoder_sparse_step", (1,), "every layer must have experts")
        reader.neutral("mlp_only_layers", ([], (), None), "every layer must have experts")
    expert_size = feed_forward.intermediate_size
    if family.expert_size_key != "intermediate_size":
        expert_size = reader.take(family.expert_size_key, size)
    norm_topk_prob = True
    if "norm_topk_prob" in family.defaults:
        norm_topk_prob = _own(reader, family, "norm_topk_prob", flag)
    return MoeConfig(
        num_experts=num_experts or 0,
        num_experts_per_tok=active,
        moe_intermediate_size=expert_size,
        norm_topk_prob=norm_topk_prob,
    )


def _read_num_experts(reader: Reader) -> int | None:
    # One number, two names: transformers 5 writes the first for both families.
    keys = ("num_local_experts", "num_experts")
    counts = {key: reader.take(key, size, default=None) for key in keys}
    given = {key: value for key, value in counts.items() if value is not None}
    if not given and reader.good(*keys):
        reader.find("num_experts", f"num_experts is missing: {REQUIRED.value}")
    reader.require(len(set(given.values())) <= 1, " and ".join(keys) + " must agree", given)
    return next(iter(given.values()), None)


def _read_layers(reader: Reader, family: Family, head_dim: int) -> dict[str, Any]:
    """Return `layer_kinds` and `layers`."""
    rotary = read_rotary(reader, family, head_dim)
    num_layers = reader.take("num_hidden_layers", integer(1, MAX_LAYERS))
    window = _own(reader, family, "sliding_window", size, null=None)
    if _own(reader, family, "use_sliding_window", flag) is False:
        window = None
    given = reader.take("layer_types", names, default=None, null=None)
    slides = _read_slides(reader, family, window, given is not None)
    layer_types = tuple(SLIDING if slides(layer) else FULL for layer in range(num_layers or 0))
    if given is not None and reader.good("num_hidden_layers"):
        must = f"layer_types must name {num_layers} layers, each {FULL} or {SLIDING}"
        fits = len(given) == num_layers and {FULL, SLIDING}.issuperset(given)
        if fits and family.pattern is None and "max_window_layers" not in family.defaults:
            must = "layer_types must be what sliding_window makes of every layer in this family"
            fits = given == layer_types
        reader.require(fits, must, {"layer_types": given})
        layer_types = tuple(SLIDING if name == SLIDING else FULL for name in given)
    if reader.good("layer_types", "sliding_window", "use_sliding_window"):
        must = "sliding layers must have a sliding_window in use"
        reader.require(
            window is not None or SLIDING not in layer_types, must, {"sliding_window": window}
        )
    # Kinds in the order of their first layers: one that no layer has is no part of the model.
    used = tuple(dict.fromkeys(layer_types))
    kinds = {FULL: LayerKind(None, rotary[FULL]), SLIDING: LayerKind(window, rotary[SLIDING])}
    return {
        "layer_kinds": tuple(kinds[name] for name in used),
        "layers": tuple(used.index(name) for name in layer_types),
    }


def _read_slides(
    reader: Reader, family: Family, window: int | None, layer_types_given: bool
) -> Callable[[int], bool]:
    """Which layers slide by the family's other keys, which count only where no types are given."""
    if family.pattern is not None:
        pattern = _own(reader, family, "sliding_window_pattern", size) or family.pattern
        if "sliding_window_pattern" in family.defaults:
            # transformers 5 writes this one, beside layer_types, and does not read it.
            written = reader.take("_sliding_window_pattern", size, default=pattern)
            must = "_sliding_window_pattern must be the pattern in use"
            agree = layer_types_given or written == pattern
            reader.require(agree, must, {"_sliding_window_pattern": written})
        return lambda layer: (layer + 1) % pattern != 0
    first = 0
    if "max_window_layers" in family.defaults:
        first = _own(reader, family, "max_window_layers", integer(0)) or 0
    elif "use_sliding_window" in family.defaults:
        # Files of qwen3_moe have the key; transformers 5 does not read it and slides everywhere.
        unread = reader.take("max_window_layers", integer(0), default=0)
        must = "max_window_layers must be 0 where a window is in use: it holds on every layer"
        reader.require(window is None or unread == 0, must, {"max_window_layers": unread})
    return lambda layer: window is not None and layer >= first


def write(config: "DecoderConfig") -> dict[str, Any]:
    """Return the `config.json` of `config`."""
    family = FAMILIES[config.model_type]
    attention, feed_forward, moe = config.attention, config.feed_forward, config.moe
    layer_types = [config.layer_kinds[kind].layer_type for kind in config.layers]
    kinds = {kind.layer_type: kind for kind in config.layer_kinds}
    window = kinds[SLIDING].window if SLIDING in kinds else None
    eos = config.special_tokens.eos_token_ids
    entries: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": feed_forward.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": config.norm.eps,
        # Written even where there is none: an absent id is the class's own, which may have no row.
        "bos_token_id": config.special_tokens.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else eos[0] if eos else None,
        "pad_token_id": config.special_tokens.pad_token_id,
    }
    if config.max_position_embeddings is not None:
        entries["max_position_embeddings"] = config.max_position_embeddings
    if moe is not None and family.expert_size_key is not None:
        entries["num_local_experts"] = moe.num_experts
        entries["num_experts_per_tok"] = moe.num_experts_per_tok
        entries[family.expert_size_key] = moe.moe_intermediate_size
    rotary = {
        name: write_rotary(kind.rotary, family, attention.head_dim) for name, kind in kinds.items()
    }
    by_layer_type = "rope_local_base_freq" in family.defaults
    entries["rope_parameters"] = rotary if by_layer_type else next(iter(rotary.values()), None)
    scalar = attention.query_pre_attn_scalar
    own = {
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": NAMES[feed_forward.activation],
        "hidden_activation": NAMES[feed_forward.activation],
        "attention_bias": attention.o_bias,
        "mlp_bias": feed_forward.bias,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": config.final_softcap,
        "norm_topk_prob": moe.norm_topk_prob if moe is not None else None,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": [*layer_types, SLIDING].index(SLIDING),
    }
    if family.pattern is not None and window is None:
        # transformers makes the mask of sliding layers whether there are any or not.
        own["sliding_window"] = family.defaults["sliding_window"]
    entries |= {key: value for key, value in own.items() if key in family.defaults}
    if family.pattern is not None or "max_window_layers" in family.defaults:
        entries["layer_types"] = layer_types
    return entries
