"""The jitted decode loop."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Integer, PRNGKeyArray

from jaxblock import ops
from jaxblock.cache import init_cache
from jaxblock.config import DecoderConfig
from jaxblock.decoder import check_tokens, decode_step, prefill
from jaxblock.ops import checks
from jaxblock.ops.sharding import along, laid_out
from jaxblock.parameters import Params, check_params

Sampler = Callable[..., jax.Array]


class _Partial:
    """A `functools.partial` that equals its like, so that making it anew compiles nothing anew."""

    def __init__(self, made: "partial[jax.Array]"):
        self._parts = made.func, made.args, tuple(sorted(made.keywords.items()))

    def __call__(self, *args: Any) -> jax.Array:
        function, given, keywords = self._parts
        return function(*given, *args, **dict(keywords))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Partial) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)


def generate(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: DecoderConfig,
    *,
    max_new_tokens: int,
    mask: Bool[Array, "B T"] | None = None,
    stop_tokens: Sequence[int] = (),
    pad_token: int = 0,
    sampler: Sampler = ops.greedy,
    key: PRNGKeyArray | None = None,
) -> Integer[Array, "B T+max_new_tokens"]:
    """tokens[:, t + 1] = sampler(logits after tokens[:, : t + 1])

    Args:
      params: as `forward`.
      tokens: the prompts.
      config: as `forward`.
      max_new_tokens: the most tokens added to a row, at least 1.
      mask: true where a token of the prompts is real: padding left or right. The new tokens of
        every row start in column T.
      stop_tokens: ids that end a row; the one that did stays in it. `config.special_tokens` has
        the file's own, `eos_token_ids`. The loop ends when every row has.
      pad_token: fills a row after its end.
      sampler: from logits [B V], and keys [B] if there is a key, to ids [B]: `greedy`, or
        functools.partial(top_p, p=0.9) for example.
      key: one key, or one for each row [B]; for samplers that draw. A row's draws depend on its own
        key, its own place in the batch if there is one key for all, and its own tokens.

    Returns: the prompts as they came, followed by the new tokens, int32.

    Raises: as `forward`; ValueError if a row has no real token, for a key without a sampler that
      draws, and for stop tokens or a pad token outside [0, V).

    Precision: as `forward`. A row whose logits are NaN goes on with ids of -1.

    Differs from torch: transformers returns as many columns as the longest row needs; here the
      shape does not depend on what is generated.
    """
    check_params("generate", params, config)
    max_new_tokens = checks.size("generate", "max_new_tokens", max_new_tokens)
    prompts = checks.integers("generate", "tokens", tokens).astype(jnp.int32)
    read, mask = check_tokens("generate", tokens, mask, config)
    for name, ids in (("stop_tokens", tuple(stop_tokens)), ("pad_token", (pad_token,))):
        must = f"{name} must lie in [0, {config.vocab_size})"
        fits = all(0 <= token < config.vocab_size for token in ids)
        got: dict[str, Any] = {name: ids}
        checks.require(fits, "generate", must, **got)
    draws = sampler is not ops.greedy
    must = "a sampler that draws needs a key, and greedy takes none"
    hint = "Pass key=jax.random.key(seed)." if draws else "Pass sampler=partial(top_p, p=0.9)."
    given = "none" if key is None else "one"
    checks.require(draws == (key is not None), "generate", must, hint=hint, key=given)
    if mask is not None and not isinstance(mask, jax.core.Tracer):
        real = bool(jnp.all(jnp.any(mask, axis=1)))
        checks.require(real, "generate", "every row must have a real token", mask=mask)
    new = _generate(
        params,
        read,
        mask,
        key,
        config=config,
        max_new_tokens=max_new_tokens,
        stop_tokens=tuple(int(token) for token in stop_tokens),
        pad_token=int(pad_token),
        sampler=_Partial(sampler) if isinstance(sampler, partial) else sampler,
    )
    return jnp.concatenate([prompts, new], axis=1)


@laid_out(lambda params, tokens, mask, key: along((tokens, 0), None))
@partial(
    jax.jit,
    static_argnames=("config", "max_new_tokens", "stop_tokens", "pad_token", "sampler"),
    inline=True,
)
def _generate(
    params: Params,
    tokens: jax.Array,
    mask: jax.Array | None,
    key: jax.Array | None,
    *,
    config: DecoderConfig,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    pad_token: int,
    sampler: Sampler,
) -> jax.Array:
    B, T = tokens.shape
    if key is not None and key.ndim == 0:
        key = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(B))

    def choose(logits, step, ended):
        if key is None:
            chosen = sampler(logits)
        else:
            chosen = sampler(logits, jax.vmap(jax.random.fold_in, (0, None))(key, step))
        chosen = jnp.where(ended, pad_token, chosen).astype(jnp.int32)
        if stop_tokens:
            ended |= jnp.any(chosen[:, None] == jnp.asarray([stop_tokens], jnp.int32), axis=1)
        return chosen, ended

    # The last token is never read back, so it needs no room.
    cache = init_cache(config, B, T + max_new_tokens - 1, dtype=params["embedding"].dtype)
    logits, cache = prefill(params, tokens, cache, config, mask=mask)
    chosen, ended = choose(logits, 0, jnp.zeros(B, jnp.bool_))
    out = jnp.full((B, max_new_tokens), pad_token, jnp.int32)

    def step(carry):
        step, out, chosen, ended, cache = carry
        logits, cache = decode_step(params, chosen, cache, config)
        chosen, ended = choose(logits, step, ended)
        out = lax.dynamic_update_slice(out, chosen[:, None], (0, step))
        return step + 1, out, chosen, ended, cache

    out = lax.dynamic_update_slice(out, chosen[:, None], (0, 0))
    start = jnp.asarray(1, jnp.int32), out, chosen, ended, cache
    unfinished = lambda carry: (carry[0] < max_new_tokens) & ~jnp.all(carry[3])  # noqa: E731
    return lax.while_loop(unfinished, step, start)[1]
