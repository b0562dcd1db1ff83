"""The rotary tables of a configuration: two spellings, one meaning.

Old: `rope_theta`, `rope_scaling`, `rope_local_base_freq`, `partial_rotary_factor`. New, since
transformers 5: `rope_parameters`, for gemma3_text one mapping for each layer type. Whatever is said
twice must agree. Source: transformers 5.24.0, src/transformers/modeling_rope_utils.py, and
convert_rope_params_to_dict in src/transformers/models/{gemma3,phi3}/configuration_*.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxblock.config.families import Family
from jaxblock.config.groups import LayerType, RopeScaling, RotaryConfig
from jaxblock.config.reader import REQUIRED, Reader, flag, mapping, number, one_of, size
from jaxblock.ops.rotary import SCALING_CONSTANTS

FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"

_positive = number()
_base = number(1.0)  # With a base of one or less the frequencies would not fall.
_CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "factor": number(1.0, strict=False),
    "original_max_position_embeddings": size,
    "low_freq_factor": _positive,
    "high_freq_factor": _positive,
    "attention_factor": _positive,
    "beta_fast": _positive,
    "beta_slow": _positive,
    "mscale": _positive,
    "mscale_all_dim": _positive,
    "truncate": flag,
}


class _Table:
    """What a file says about one rotary table, by the place where it says it."""

    def __init__(self, base: dict[str, float | None], share: dict[str, float | None]):
        self.bases = dict(base)
        self.shares = dict(share)
        self.scalings: dict[str, RopeScaling | None] = {}

    def add(
        self,
        place: str,
        entries: Mapping[str, Any],
        reader: Reader,
        family: Family,
        length: int | None,
    ) -> None:
        """Take what the mapping at `place` says."""
        inner = Reader(entries, reader.findings, prefix=f"{place}.")
        found = len(reader.findings)
        base = inner.take("rope_theta", _base, default=None)
        share = inner.take("partial_rotary_factor", _positive, default=None)
        scaling = read_scaling(inner, family.rope_types, length)
        inner.finish()
        if len(reader.findings) == found:
            self.bases[f"{place}.rope_theta"] = base
            self.shares[f"{place}.partial_rotary_factor"] = share
            self.scalings[place] = scaling

    def settle(self, reader: Reader, family: Family, head_dim: int, base: float) -> RotaryConfig:
        """Agree on one base, one share and one scaling; `base` is the family's."""
        scalings = list(self.scalings.values())
        must = "the scaling of the rotary table must be the same wherever it is given"
        reader.require(len(set(scalings)) <= 1, must, self.scalings)
        return RotaryConfig(
            theta=_same(reader, "the rotary base", self.bases) or base,
            rotary_dim=self._rotary_dim(reader, family, head_dim),
            scaling=scalings[0] if scalings else None,
        )

    def _rotary_dim(self, reader: Reader, family: Family, head_dim: int) -> int:
        share = _same(reader, "the rotary share of a head", self.shares) or 1.0
        given = {place: value for place, value in self.shares.items() if value is not None}
        if share == 1.0 or not reader.good("num_attention_heads", "hidden_size", "head_dim"):
            return head_dim
        if "partial_rotary_factor" not in family.defaults:
            reader.require(False, "every channel of a head must turn in this family", given)
            return head_dim
        rotary_dim = int(head_dim * share)
        must = "an even number of channels, at least 2 of a head's, must turn"
        fits = share < 1.0 and rotary_dim >= 2 and rotary_dim % 2 == 0
        reader.require(fits, must, {**given, "head_dim": head_dim})
        return rotary_dim


def read_rotary(reader: Reader, family: Family, head_dim: int) -> dict[LayerType, RotaryConfig]:
    """Take every rotary key; return the table of each layer type."""
    length = reader.take("original_max_position_embeddings", size, default=None)
    share = {"partial_rotary_factor": reader.take("partial_rotary_factor", _positive, default=None)}
    full = _Table({"rope_theta": reader.take("rope_theta", _base, default=None)}, share)
    full_base = family.defaults["rope_theta"]
    old = reader.take("rope_scaling", mapping, default=None, null=None)
    if old is not None:
        full.add("rope_scaling", old, reader, family, length)
    new = reader.take("rope_parameters", mapping, default=None, null=None) or {}

    if "rope_local_base_freq" not in family.defaults:
        if new:
            full.add("rope_parameters", new, reader, family, length)
        rotary = full.settle(reader, family, head_dim, full_base)
        return {FULL: rotary, SLIDING: rotary}

    base = {"rope_local_base_freq": reader.take("rope_local_base_freq", _base, default=None)}
    sliding = _Table(base, share)
    inner = Reader(new, reader.findings, prefix="rope_parameters.")
    for layer_type, table in ((FULL, full), (SLIDING, sliding)):
        entries = inner.take(layer_type, mapping, default=None, null=None)
        if entries is not None:
            table.add(f"rope_parameters.{layer_type}", entries, reader, family, length)
    inner.finish()  # Of what stands beside the layer types transformers reads nothing.
    return {
        FULL: full.settle(reader, family, head_dim, full_base),
        SLIDING: sliding.settle(reader, family, head_dim, family.defaults["rope_local_base_freq"]),
    }


def write_rotary(rotary: RotaryConfig, family: Family, head_dim: int) -> dict[str, Any]:
    """One mapping of `rope_parameters`."""
    entries: dict[str, Any] = {"rope_type": "default", **(rotary.scaling or {})}
    entries["rope_theta"] = rotary.theta
    if "partial_rotary_factor" in family.defaults:
        share = rotary.rotary_dim / head_dim
        # Readers round head_dim * share down: 30 of 44 would come back as 29.
        while int(head_dim * share) < rotary.rotary_dim:
            share = math.nextafter(share, 2.0)
        entries["partial_rotary_factor"] = share
    return entries


def read_scaling(
    reader: Reader, rope_types: tuple[str, ...], length: int | None = None
) -> RopeScaling | None:
    """Take the type of a scaling and its constants.

    `length`: the original length, where a file gives it outside.
    """
    kind = one_of({name: name for name in rope_types})
    spelled = {key: reader.take(key, kind, default=None) for key in ("rope_type", "type")}
    given = {name for name in spelled.values() if name is not None}
    reader.require(len(given) <= 1, "rope_type and type must agree", spelled)
    if not reader.good("rope_type", "type"):
        reader.abandon()  # Which constants belong to it is not known.
        return None
    rope_type = given.pop() if given else "default"

    constants: dict[str, Any] = {}
    for key in SCALING_CONSTANTS[rope_type].required:
        outside = length if key == "original_max_position_embeddings" else None
        default = REQUIRED if outside is None else outside
        constants[key] = reader.take(key, _CONSTANTS[key], default=default)
        if outside is not None and reader.good(key):
            must = f"{key} must be the one outside, {outside}"
            reader.require(constants[key] == outside, must, {key: constants[key]})
    for key in SCALING_CONSTANTS[rope_type].optional:
        value = reader.take(key, _CONSTANTS[key], default=None, null=None)
        if value is not None:
            constants[key] = value
    if reader.good(*_CONSTANTS):
        _check_pairs(reader, constants)
    return None if rope_type == "default" else RopeScaling(rope_type=rope_type, **constants)


def _check_pairs(reader: Reader, constants: dict[str, Any]) -> None:
    # transformers takes 1 and 32 for an absent beta, as the paper on YaRN does for Llama.
    full = {"beta_slow": 1.0, "beta_fast": 32.0, **constants}
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        pair = {key: full[key] for key in (low, high) if full.get(key) is not None}
        fits = len(pair) < 2 or pair[low] < pair[high]
        reader.require(fits, f"{low} must be below {high}", pair)
    # With one of the two transformers computes as with none; DeepSeek's own code does not.
    mscales = {key: value for key, value in constants.items() if key.startswith("mscale")}
    reader.require(len(mscales) != 1, "mscale and mscale_all_dim must come together", mscales)


def _same(reader: Reader, what: str, values: dict[str, float | None]) -> float | None:
    given = {place: value for place, value in values.items() if value is not None}
    must = f"{what} must be the same wherever it is given"
    reader.require(len(set(given.values())) <= 1, must, given)
    return next(iter(given.values()), None)
