"""Rotary tables that old files hold beside the weights: dropped, if they are what is computed."""

import re
from functools import cache

import ml_dtypes
import numpy as np

from jaxblock.checkpoint.source import Source
from jaxblock.config import DecoderConfig
from jaxblock.config.groups import RotaryConfig
from jaxblock.ops.rotary import rotary_frequencies

# Of older releases of transformers, by layer and for all; of Meta's Llama 1 and 2.
_NAMES = re.compile(
    r"(?:model\.)?layers\.(?P<layer>\d{1,9})\.self_attn\.rotary_emb\.inv_freq"
    r"|(?:model\.)?rotary_emb\.inv_freq"
    r"|rope\.freqs"
)

# Of each dtype the distance between numbers, relative and, near zero, absolute.
_ROUNDING = {
    np.dtype(kind): (
        float(ml_dtypes.finfo(kind).eps),
        float(ml_dtypes.finfo(kind).smallest_subnormal),
    )
    for kind in (np.float32, np.float16, ml_dtypes.bfloat16)
}


def drop_buffers(source: Source, findings: list[str]) -> None:
    """Take the tables out of `source.tensors`."""
    config = source.config
    head_dim = config.attention.head_dim
    dropped = []

    @cache
    def computed(rotary: RotaryConfig) -> np.ndarray:
        return np.asarray(
            rotary_frequencies(
                head_dim,
                theta=rotary.theta,
                scaling=rotary.scaling,
                rotary_dim=rotary.rotary_dim,
            )
        )

    for name in [name for name in source.tensors if _NAMES.fullmatch(name)]:
        tables = _tables(config, name)
        if tables is None:
            continue  # Of a layer that the model does not have: an unexpected tensor.
        stored = source.tensors.pop(name)
        # The shape first: nothing is computed at a size that only the configuration claims.
        fits = stored.dtype in _ROUNDING and all(
            stored.shape == (table.rotary_dim // 2,) for table in tables
        )
        if fits and all(_are_equal(stored.read(), computed(table)) for table in tables):
            dropped.append(name)
        else:
            findings.append(
                f"{name} must be the rotary table of the configuration, within rounding; got "
                f"another of {stored.dtype}{list(stored.shape)} in {stored.file}. Another "
                "rope_theta or scaling was used with these weights"
            )
    if dropped:
        more = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
        source.dropped.append(f"{dropped[0]}{more}, the rotary table that is computed")


def _tables(config: DecoderConfig, name: str) -> list[RotaryConfig] | None:
    match = _NAMES.fullmatch(name)
    layer = match and match["layer"]
    if layer is None:
        return [kind.rotary for kind in config.layer_kinds]
    if int(layer) >= config.num_hidden_layers:
        return None
    return [config.layer_kinds[config.layers[int(layer)]].rotary]


def _are_equal(stored: np.ndarray, computed: np.ndarray) -> bool:
    """Equal but for one rounding to the dtype and the few of computing in float32."""
    relative, least = _ROUNDING[stored.dtype]
    few = 8 * float(np.finfo(np.float32).eps)
    difference = np.abs(stored.astype(np.float64) - computed)
    return bool((difference <= (relative + few) * np.abs(computed) + least).all())
