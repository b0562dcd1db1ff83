"""Meta's `params.json`. What it leaves to the code or the tokenizer is an argument here.

Source: meta-llama/llama, llama/model.py (Llama 1 and 2); meta-llama/llama-models,
models/llama3/args.py and models/llama3/model.py (Llama 3).
"""

from typing import Any

from jaxblock.config.groups import (
    AttentionConfig,
    FeedForwardConfig,
    LayerKind,
    NormConfig,
    RopeScaling,
    RotaryConfig,
    SpecialTokens,
)
from jaxblock.config.keys import META_WITHOUT_EFFECT, META_WITHOUT_EFFECT_AT
from jaxblock.config.reader import (
    MAX_LAYERS,
    Missing,
    Reader,
    Source,
    config_error,
    flag,
    integer,
    load,
    number,
    size,
)
from jaxblock.ops.feed_forward import intermediate_size

FUNCTION = "DecoderConfig.from_meta"


def read(source: Source, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `DecoderConfig`; raise `ConfigError` with everything that is wrong."""
    findings: list[str] = []
    reader = Reader(load(FUNCTION, source, "params.json"), findings)
    given = {name: value for name, value in arguments.items() if value is not None}
    argument = Reader(given, findings, prefix="the argument ")

    hidden_size = reader.take("dim", size)
    heads = reader.take("n_heads", size)
    key_heads = reader.take("n_kv_heads", size, default=None, null=None) or heads
    head_dim = 0
    if reader.good("n_heads", "n_kv_heads"):
        must = "n_kv_heads must divide n_heads"
        reader.require(heads % key_heads == 0, must, {"n_heads": heads, "n_kv_heads": key_heads})
    if reader.good("dim", "n_heads"):
        head_dim = hidden_size // heads
        must = "dim must be an even multiple of n_heads, because a head's channels turn in pairs"
        fits = hidden_size % heads == 0 and head_dim % 2 == 0
        reader.require(fits, must, {"dim": hidden_size, "n_heads": heads})
    num_layers = reader.take("n_layers", integer(1, MAX_LAYERS))
    fields = {
        "model_type": "llama",
        "vocab_size": _read_vocab_size(reader, argument),
        "hidden_size": hidden_size,
        "max_position_embeddings": argument.take("max_position_embeddings", size, default=None),
        "tie_word_embeddings": argument.take("tie_word_embeddings", flag, default=Missing.ARGUMENT),
        "scale_embedding": False,
        "final_softcap": None,
        "norm": NormConfig(
            eps=reader.take("norm_eps", number()),
            cast="before_scale",
            scale_offset=0.0,
            pre_norm=True,
            post_norm=False,
        ),
        "attention": AttentionConfig(
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head_dim,
            query_pre_attn_scalar=head_dim,
            softcap=None,
            qkv_bias=False,
            o_bias=False,
            qk_norm=None,
        ),
        "feed_forward": FeedForwardConfig(
            intermediate_size=_read_intermediate_size(reader, hidden_size),
            activation="silu",
            bias=False,
        ),
        "moe": None,
        "layer_kinds": (LayerKind(None, _read_rotary(reader, argument, head_dim)),),
        "layers": (0,) * (num_layers or 0),
        "special_tokens": SpecialTokens(),
    }
    reader.finish(META_WITHOUT_EFFECT, META_WITHOUT_EFFECT_AT)
    if findings:
        raise config_error(FUNCTION, findings)
    return fields


def _read_vocab_size(reader: Reader, argument: Reader) -> int:
    in_file = reader.take("vocab_size", integer(-1), default=-1)
    passed = argument.take("vocab_size", size, default=None)
    if in_file == -1 and passed is None and argument.good("vocab_size"):
        argument.find("vocab_size", "vocab_size is not in the file: pass it as an argument")
    elif reader.good("vocab_size") and argument.good("vocab_size"):
        must = "vocab_size must be at least 1, and the argument must agree with it"
        fits = in_file == -1 or (in_file >= 1 and passed in (None, in_file))
        reader.require(fits, must, {"vocab_size": in_file})
    return in_file if passed is None else passed


def _read_intermediate_size(reader: Reader, hidden_size: int) -> int:
    multiple_of = reader.take("multiple_of", size)
    multiplier = reader.take("ffn_dim_multiplier", number(), default=None, null=None)
    if not reader.good("dim", "multiple_of", "ffn_dim_multiplier"):
        return 0
    try:
        return intermediate_size(
            hidden_size, multiple_of=multiple_of, ffn_dim_multiplier=multiplier
        )
    except (ValueError, OverflowError) as error:
        must = f"dim and ffn_dim_multiplier must give a feed-forward size ({error})"
        reader.require(False, must, {"dim": hidden_size, "ffn_dim_multiplier": multiplier})
        return 0


def _read_rotary(reader: Reader, argument: Reader, head_dim: int) -> RotaryConfig:
    # Files without the key are Llama 1 and 2, whose code knows no other base.
    theta = reader.take("rope_theta", number(1.0), default=10000.0)
    scaled = reader.take("use_scaled_rope", flag, default=False)
    factor = argument.take(
        "rope_scaling_factor",
        number(1.0, strict=False),
        default=Missing.ARGUMENT if scaled else None,
    )
    if not scaled:
        must = "rope_scaling_factor must come with use_scaled_rope in the file"
        argument.require(factor is None, must, {"rope_scaling_factor": factor})
        return RotaryConfig(theta, head_dim)
    # apply_scaling in models/llama3/model.py. The factor there is 8, which is Llama 3.1's: that of
    # Llama 3.2 1B and 3B is 32, as their config.json says.
    scaling = RopeScaling(
        rope_type="llama3",
        factor=factor or 0.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return RotaryConfig(theta, head_dim, scaling)
