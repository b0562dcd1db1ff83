"""Tokens and text as they come: the decode loop one token at a time, and the text of each."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Integer, PRNGKeyArray

from jaxblock import ops
from jaxblock.cache import Cache, init_cache
from jaxblock.config import DecoderConfig
from jaxblock.decoder import decode_step, prefill
from jaxblock.parameters import Params

Sampler = Callable[..., jax.Array]


class Programs(NamedTuple):
    """The two compiled programs of a stream, for prompts of one length."""

    first: Callable[..., tuple[jax.Array, Cache]]
    following: Callable[..., tuple[jax.Array, Cache]]


def compile_stream(
    params: Params,
    tokens: Integer[Array, "1 T"],
    config: DecoderConfig,
    *,
    max_new_tokens: int,
    sampler: Sampler = ops.greedy,
    key: PRNGKeyArray | None = None,
) -> Programs:
    """programs = prefill with the first token, and decode_step with the next one

    Args:
      params, tokens, config, max_new_tokens, sampler, key: as `generate`, for one row.

    Returns: the programs for `stream_tokens`, compiled ahead: nothing of that falls into its time.
    """
    capacity = tokens.shape[1] + max_new_tokens - 1
    first = jax.jit(partial(_first, config=config, capacity=capacity, sampler=sampler))
    following = jax.jit(partial(_following, config=config, sampler=sampler), donate_argnums=2)
    token, cache = jax.eval_shape(first, params, tokens, key)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return Programs(
        first.lower(params, tokens, key).compile(),
        following.lower(params, token, cache, key, step).compile(),
    )


def stream_tokens(
    programs: Programs,
    params: Params,
    tokens: Integer[Array, "1 T"],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    key: PRNGKeyArray | None = None,
) -> Iterator[int]:
    """token t = generate(params, tokens, config, ...)[0, T + t], each as soon as it is known

    Args:
      programs: of `compile_stream` with the same arguments.
      params, tokens, max_new_tokens, stop_tokens, key: as `generate`, for one row.

    Yields: the new tokens up to and with a stop token; -1 where the logits were NaN, and none after
      it.
    """
    token, cache = programs.first(params, tokens, key)
    for step in range(1, max_new_tokens + 1):
        upcoming = token
        if step < max_new_tokens:
            # Under way while the caller does something with this one.
            upcoming, cache = programs.following(params, token, cache, key, jnp.int32(step))
        known = int(token[0])
        yield known
        if known < 0 or known in stop_tokens:
            return
        token = upcoming


def _first(
    params: Params,
    tokens: jax.Array,
    key: jax.Array | None,
    *,
    config: DecoderConfig,
    capacity: int,
    sampler: Sampler,
) -> tuple[Int32[Array, "1"], Cache]:
    cache = init_cache(config, 1, capacity, dtype=params["embedding"].dtype)
    logits, cache = prefill(params, tokens, cache, config)
    return _choose(logits, key, 0, sampler), cache


def _following(
    params: Params,
    token: jax.Array,
    cache: Cache,
    key: jax.Array | None,
    step: jax.Array,
    *,
    config: DecoderConfig,
    sampler: Sampler,
) -> tuple[Int32[Array, "1"], Cache]:
    logits, cache = decode_step(params, token, cache, config)
    return _choose(logits, key, step, sampler), cache


def _choose(logits: jax.Array, key: Any, step: int | jax.Array, sampler: Sampler) -> jax.Array:
    if key is None:
        return sampler(logits)
    # The keys of `generate`: of the row, then of the step.
    row = jax.random.fold_in(key, 0)
    return sampler(logits, jax.random.fold_in(row, step)[None])


class Decodes(Protocol):
    """What `TextStream` needs of a tokenizer: `decode` of the `tokenizers` library."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""
        ...


class TextStream:
    """The text that each new token adds to the text before it.

    A token alone has no text: a character may be spread over several, and a space before a word is
    dropped at the start of a text. So a few tokens before it are decoded along, and what they give
    by themselves is cut off; nothing comes out until the last character is whole.
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._context = list(prompt)
        self._new: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while it is in the middle of a character."""
        self._new.append(token)
        text = self._text()
        if not text or text.endswith("\ufffd"):
            return ""
        # The tokens just shown suffice as context for the next.
        self._context, self._new = self._new, []
        return text

    def end(self) -> str:
        """What is left: a character that was never completed, as replacement characters."""
        return self._text() if self._new else ""

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._new)[len(before) :]
