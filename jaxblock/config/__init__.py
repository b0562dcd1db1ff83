"""The configuration of a decoder, read strictly: `DecoderConfig`, its groups, `ConfigError`."""

from jaxblock.config.decoder_config import DecoderConfig
from jaxblock.config.groups import (
    AttentionConfig,
    FeedForwardConfig,
    LayerKind,
    LayerSegment,
    MoeConfig,
    NormConfig,
    RopeScaling,
    RotaryConfig,
    SpecialTokens,
)
from jaxblock.config.reader import ConfigError

__all__ = [
    "AttentionConfig",
    "ConfigError",
    "DecoderConfig",
    "FeedForwardConfig",
    "LayerKind",
    "LayerSegment",
    "MoeConfig",
    "NormConfig",
    "RopeScaling",
    "RotaryConfig",
    "SpecialTokens",
]
