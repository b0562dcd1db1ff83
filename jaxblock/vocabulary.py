"""More or fewer rows in the tables of a whole decoder: its configuration and parameters at once."""

from dataclasses import replace
from typing import Any, Literal

import jax
from jaxtyping import PRNGKeyArray

from jaxblock.config import DecoderConfig
from jaxblock.ops import checks, resize_embedding
from jaxblock.parameters import Params, check_params

TABLES = ("embedding", "unembedding")


def resize_vocabulary(
    config: DecoderConfig,
    params: Params,
    vocab_size: int,
    *,
    fill: Literal["mean", "normal", "zeros"] = "mean",
    allow_shrink: bool = False,
    key: PRNGKeyArray | None = None,
) -> tuple[DecoderConfig, Params]:
    """table = resize_embedding(table, vocab_size)  for `embedding` and, untied, `unembedding`

    Args:
      config: of the decoder; its vocabulary must not be padded.
      params: the parameter tree. It is left as it is.
      vocab_size: rows of the new tables, at least 1.
      fill: new rows, as in `resize_embedding`: "mean", "normal" or "zeros", each table's from its
        own rows.
      allow_shrink: must be True for rows to be cut off.
      key: a PRNG key; for "normal" only. Two tables draw from two keys made of it.

    Returns: the configuration with the new vocab_size, and a new tree that shares every other leaf.
      Tied stays one leaf. Old rows keep their bits, and old tokens their logits.

    Raises: ValueError for a tree that does not fit the configuration, a smaller vocab_size without
      allow_shrink or with a special token beyond it, an unknown fill, a missing or superfluous key.

    Differs from torch: transformers' resize_token_embeddings draws new rows from a normal
      distribution about the mean of the old ones unless told otherwise. Optimizer state of the old
      shape does not fit the new tree: start it anew.
    """
    function = "resize_vocabulary"
    tables = _tables(function, config, params)
    vocab_size = checks.size(function, "vocab_size", vocab_size)
    checks.require(
        config.num_valid is None,
        function,
        "the vocabulary must not be padded",
        hint="Undo it with unpad_vocabulary.",
        num_valid=config.num_valid,
    )
    if vocab_size < config.vocab_size:
        _check_special_tokens(function, config, vocab_size)
    keys = {} if key is None else dict(zip(TABLES, jax.random.split(key), strict=True))
    resized = {
        name: resize_embedding(
            table, vocab_size, fill=fill, allow_shrink=allow_shrink, key=keys.get(name)
        )
        for name, table in tables.items()
    }
    return replace(config, vocab_size=vocab_size), {**params, **resized}


def pad_vocabulary(
    config: DecoderConfig, params: Params, multiple_of: int
) -> tuple[DecoderConfig, Params]:
    """rows = ceil(V / multiple_of) * multiple_of, those from V on zero and never counted or chosen

    Args:
      config: of the decoder. If its vocabulary is padded already, that padding goes first.
      params: the parameter tree. It is left as it is.
      multiple_of: what the rows shall be a multiple of: the devices that a table is cut for, or a
        tile of the hardware.

    Returns: the configuration with `vocab_size` rows, of which `num_valid` are tokens, and a new
      tree that shares every other leaf. `forward` gives the other rows the logit -inf: they have no
      part in a loss, no gradient reaches them, and no sampler takes them. Where V is a multiple
      already nothing changes.

    Raises: ValueError for a tree that does not fit the configuration, multiple_of below 1.
    """
    function = "pad_vocabulary"
    multiple_of = checks.size(function, "multiple_of", multiple_of)
    config, params = _unpad(function, config, params)
    num_valid = config.vocab_size
    rows = -(-num_valid // multiple_of) * multiple_of
    if rows == num_valid:
        return config, params
    tables = _tables(function, config, params)
    padded = {name: resize_embedding(table, rows, fill="zeros") for name, table in tables.items()}
    return replace(config, vocab_size=rows, num_valid=num_valid), {**params, **padded}


def unpad_vocabulary(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """table = table[:num_valid], the inverse of `pad_vocabulary`

    Args:
      config: of the decoder; one without padding comes back as it is.
      params: the parameter tree. It is left as it is.

    Returns: the configuration without `num_valid`, and a new tree that shares every other leaf.

    Raises: ValueError for a tree that does not fit the configuration.
    """
    return _unpad("unpad_vocabulary", config, params)


def _unpad(function: str, config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    tables = _tables(function, config, params)
    num_valid = config.num_valid
    if num_valid is None:
        return config, dict(params)
    cut = {
        name: resize_embedding(table, num_valid, allow_shrink=True)
        for name, table in tables.items()
    }
    return replace(config, vocab_size=num_valid, num_valid=None), {**params, **cut}


def _tables(function: str, config: DecoderConfig, params: Params) -> dict[str, Any]:
    """The tables of the tree, which must be the one of the configuration."""
    check_params(function, params, config)
    return {name: params[name] for name in TABLES if name in params}


def _check_special_tokens(function: str, config: DecoderConfig, vocab_size: int) -> None:
    special = config.special_tokens
    ids = (special.bos_token_id, special.pad_token_id, *special.eos_token_ids)
    beyond = tuple(sorted({token for token in ids if token is not None and token >= vocab_size}))
    checks.require(
        not beyond,
        function,
        "a smaller vocabulary must keep the special tokens",
        hint="Change config.special_tokens first, with dataclasses.replace.",
        vocab_size=vocab_size,
        special_tokens=beyond,
    )
