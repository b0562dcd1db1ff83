"""The decoder as pure functions over one parameter tree: whole sequences, and token by token.

`forward` reads whole sequences. `prefill` reads a prompt into a cache and `decode_step` goes on
from there, a token at a time. All three run the same blocks; they differ in what a token is shown.

Ragged batches: `mask` [B T] is true where a token is real. Padding may stand left, right or in
between and hold any id: each row comes out as if it were alone, and positions count real tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from jaxblock import ops
from jaxblock.block import (
    Angles,
    Params,
    attend_to_rows,
    decoder_block,
    norm,
    rotary_angles,
)
from jaxblock.cache import Cache, held, read, slots_of, write
from jaxblock.config import DecoderConfig
from jaxblock.ops import checks, cpu
from jaxblock.ops.remat import BLOCK_OUTPUT, PARAMETER, POLICIES, Remat, named
from jaxblock.ops.sharding import along, axes, laid_out, like
from jaxblock.parameters import check_params
from jaxblock.sequence import token_order, within


class Activations(NamedTuple):
    """What the decoder makes of its tokens, stage by stage: for comparing two implementations."""

    embedding: Float[Array, "B T D"]
    blocks: Float[Array, "L B T D"] | None
    final_norm: Float[Array, "B T D"]
    logits: Float[Array, "B T V"] | None


def forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: DecoderConfig,
    *,
    positions: Integer[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    dtype: DTypeLike | None = None,
    remat: Remat = "matmul_outputs",
) -> Float[Array, "B T V"]:
    """logits = unembed(final_norm(blocks(embed(tokens))))

    Args:
      params: the parameter tree, `config.parameter_shapes()`.
      tokens: ids in [0, V).
      config: the decoder; static under `jit`: jax.jit(forward, static_argnames="config").
      positions: of each token, for the rotary embedding alone; what a token sees is decided by
        its place in the row. None counts the real tokens of each row from 0.
      mask: true where a token is real; None means everywhere. A place that is not may hold any id,
        is seen by no token, and its logits mean nothing.
      dtype: of the activations; None means that of the embedding. With float32 parameters and
        bfloat16 here, products run in bfloat16 and gradients come back in float32.
      remat: what the backward pass keeps of each layer: "none": whatever it needs;
        "matmul_outputs": the results of its products, computing norms, rotary embedding, softmax
        and activation again; "block_inputs": what goes into the layer, computing all of it again.
        The gradients are the same but for rounding. Static under `jit`.

    Returns: logits in nats, float32 (float64 for float64 parameters); -inf for rows of padding
      (`config.num_valid`).

    Raises: ValueError or TypeError for a tree that is not this config's, naming the path, and for
      arguments that do not fit; IndexError for a known id outside [0, V), or of a row of
      padding. A traced one makes NaN of its row of the batch, and of no other.

    Precision: that of `rms_norm`, `attention`, `swiglu`, `moe_swiglu` and `unembed`; the residual
      stream is rounded to the dtype of the activations after every sum.

    Differs from torch: 16-bit logits are not rounded back to 16 bits; cos and sin are not rounded
      to 16 bits before they turn queries and keys.

    Source: Touvron et al., LLaMA, 2023, section 2; each family: transformers 5.24.0,
      src/transformers/models/<model_type>/modeling_*.py.
    """
    params, tokens, positions, mask = _check("forward", params, tokens, config, positions, mask)
    checks.choice("forward", "remat", remat, tuple(POLICIES))
    return _forward(params, tokens, positions, mask, config=config, dtype=dtype, remat=remat).logits


def activations(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: DecoderConfig,
    *,
    positions: Integer[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    dtype: DTypeLike | None = None,
) -> Activations:
    """logits = unembed(final_norm(blocks(embed(tokens)))), with everything on the way

    Args:
      params, tokens, config, positions, mask, dtype: as `forward`.

    Returns: `Activations`: the embedding, the residual stream after each block, the final norm's
      output, and the logits.

    Raises: as `forward`.
    """
    params, tokens, positions, mask = _check("activations", params, tokens, config, positions, mask)
    return _forward(params, tokens, positions, mask, config=config, dtype=dtype, keep_blocks=True)


def final_hidden(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: DecoderConfig,
    *,
    mask: Bool[Array, "B T"] | None = None,
    dtype: DTypeLike | None = None,
    remat: Remat = "matmul_outputs",
) -> Float[Array, "B T D"]:
    """What `forward` projects to logits; its arguments are those of `forward`."""
    params, tokens, _, mask = _check("forward", params, tokens, config, None, mask)
    checks.choice("forward", "remat", remat, tuple(POLICIES))
    return _forward(
        params, tokens, None, mask, config=config, dtype=dtype, remat=remat, project=False
    ).final_norm


def prefill(
    params: Params,
    tokens: Integer[Array, "B T"],
    cache: Cache,
    config: DecoderConfig,
    *,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """logits, cache = those of each row's last real token, and the cache with the row in it

    Args:
      params, tokens: as `forward`.
      cache: of `init_cache`, or as an earlier call returned it: a prompt may come in pieces.
      config: as `forward`.
      mask: true where a token is real; None means everywhere.

    Returns: logits as `unembed` gives them, and the new cache. A row without a real token has
      logits of NaN, and its part of the cache stays.

    Raises: as `forward`; ValueError if a row does not fit into the cache and that can be known.
      Where it cannot (traced), nothing is overwritten and the row's logits are NaN from then on.

    Precision: as `forward`; only the last token of each row is projected to logits.
    """
    params, tokens, _, mask = _check("prefill", params, tokens, config, None, mask)
    _check_cache("prefill", cache, config, tokens, mask)
    return _extend(params, tokens, cache, mask, config=config)


def decode_step(
    params: Params, tokens: Integer[Array, "B"], cache: Cache, config: DecoderConfig
) -> tuple[Float[Array, "B V"], Cache]:
    """logits, cache = those after one more token in each row

    Args:
      params: as `forward`.
      tokens: the next id of each row.
      cache: of `prefill`. Jit this function and donate the cache, and it is updated in place:
        jax.jit(decode_step, static_argnames="config", donate_argnames="cache").
      config: as `forward`.

    Returns: logits as `unembed` gives them, and the new cache.

    Raises: as `prefill`. The write position is an array, so one compilation serves every step.

    Precision: as `forward`.
    """
    array = checks.integers("decode_step", "tokens", tokens)
    checks.require(array.ndim == 1, "decode_step", "tokens must be [B]", tokens=array)
    params, tokens, _, _ = _check("decode_step", params, tokens[:, None], config, None, None)
    _check_cache("decode_step", cache, config, tokens, None)
    return _extend(params, tokens, cache, None, config=config)


def _layout_of_activations(params, tokens, positions, mask):
    hidden: Any = along(*axes(tokens), None)
    blocks: Any = along(None, *axes(tokens), None)
    logits: Any = along(*axes(tokens), (projection_table(params), 0))
    return Activations(hidden, blocks, hidden, logits)


def _layout_of_extension(params, tokens, cache, mask):
    return along((tokens, 0), (projection_table(params), 0)), jax.tree.map(like, cache)


# Each is jitted, so that a call outside `jit` is one compiled program; inside one it is inlined.
@laid_out(_layout_of_activations)
@partial(
    jax.jit, static_argnames=("config", "dtype", "remat", "keep_blocks", "project"), inline=True
)
def _forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array | None,
    mask: jax.Array | None,
    *,
    config: DecoderConfig,
    dtype: DTypeLike | None,
    remat: Remat = "matmul_outputs",
    keep_blocks: bool = False,
    project: bool = True,
) -> Activations:
    order = token_order(tokens.shape, mask)
    angles = _angles(order if positions is None else positions, config)

    def run_layer(layer, x, state, kind, index):
        attend = attend_to_rows(config, config.layer_kinds[kind], order, mask)
        return decoder_block(layer, x, config, angles=angles[kind], attend=attend)

    embedding = _embed(params, tokens, config, dtype)
    x, _, blocks = _run_layers(
        params["layers"], embedding, None, config, run_layer, keep=keep_blocks, remat=remat
    )
    final_norm = norm(x, params["final_norm"]["scale"], config)
    logits = _logits(params, final_norm, config) if project else None
    return Activations(embedding, blocks, final_norm, logits)


@laid_out(_layout_of_extension)
@partial(jax.jit, static_argnames="config", inline=True)
def _extend(
    params: Params,
    tokens: jax.Array,
    cache: Cache,
    mask: jax.Array | None,
    *,
    config: DecoderConfig,
) -> tuple[jax.Array, Cache]:
    real = jnp.ones(tokens.shape, jnp.bool_) if mask is None else mask
    order = cache.lengths[:, None] + token_order(tokens.shape, mask)
    lengths = cache.lengths + jnp.sum(real, axis=1, dtype=jnp.int32)
    angles = _angles(order, config)

    def run_layer(layer, x, stacks, kind, index):
        size = cache.slots(kind)
        slots = slots_of(order, real, lengths, cache, kind)

        def attend(q, k, v):
            keys, values = stacks
            old = keys[kind], values[kind]
            new = write(old, index, k, v, slots, cache.dtype)
            if tokens.shape[1] == 1 or size == cache.capacity:
                k, v = (rows.astype(q.dtype) for rows in read(new, index, cache.dtype))
                tokens_held = held(lengths, size)
            else:
                # Of a ring, later tokens of this piece overwrite what earlier ones must see.
                k, v = (
                    jnp.concatenate([before.astype(q.dtype), rows], axis=1)
                    for before, rows in zip(read(old, index, cache.dtype), (k, v), strict=True)
                )
                piece = jnp.where(real, order, -1)
                tokens_held = jnp.concatenate([held(cache.lengths, size), piece], axis=1)
            visible = (tokens_held >= 0)[:, None, None, :]
            visible &= within(order, tokens_held, config.layer_kinds[kind].window, causal=True)
            y = ops.attention(
                q,
                k,
                v,
                scale=config.attention.scale,
                causal=False,
                softcap=config.attention.softcap,
                mask=visible,
            )
            replaced = tuple(
                (*stack[:kind], one, *stack[kind + 1 :])
                for stack, one in zip(stacks, new, strict=True)
            )
            return y, replaced

        return decoder_block(layer, x, config, angles=angles[kind], attend=attend)

    x = _embed(params, tokens, config, None)
    # The stacks are carried, not scanned over, so that XLA updates them in place.
    stacks = (cache.keys, cache.values)
    x, (keys, values), _ = _run_layers(params["layers"], x, stacks, config, run_layer)
    last = tokens.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)
    logits = _logits(params, norm(x[:, 0], params["final_norm"]["scale"], config), config)
    undefined = (lengths > cache.capacity) | ~jnp.any(real, axis=1)
    logits = jnp.where(undefined[:, None], jnp.nan, logits)
    return logits, replace(cache, keys=keys, values=values, lengths=lengths)


def _run_layers(
    layers: Params,
    x: jax.Array,
    state: Any,
    config: DecoderConfig,
    run_layer: Callable[..., tuple[jax.Array, Any]],
    *,
    keep: bool = False,
    remat: Remat = "matmul_outputs",
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Run the layers in order: a scan over each segment, with its pattern of kinds unrolled.

    Args:
      layers: their parameters, stacked.
      x, state: what goes through them.
      config: the decoder.
      run_layer: gets the layer's parameters, x, the state, the index of its kind, and its own index
        among the layers of this kind.
      keep: return x after every layer, stacked.
      remat: what the backward pass keeps.
    """
    kept = []
    before = [0] * len(config.layer_kinds)  # Layers of each kind in earlier segments.
    for segment in config.segments():
        pattern, start = segment.pattern, segment.start
        stop = start + len(pattern) * segment.repeats

        def run_pattern(carry, scanned, pattern=pattern, start=start, before=tuple(before)):
            x, state = carry
            repeat, scanned_layers = scanned
            found = _look_up(layers, start + repeat * len(pattern), len(pattern))
            group = jax.tree.map(_with_gradient, found, scanned_layers)
            outputs = []
            for place, (layer, kind) in enumerate(zip(group, pattern, strict=True)):
                earlier = before[kind] + pattern[:place].count(kind)
                index = repeat * pattern.count(kind) + earlier
                x, state = run_layer(layer, x, state, kind, index)
                x = named(x, BLOCK_OUTPUT)
                outputs.append(x)
            return (x, state), jnp.stack(outputs) if keep else None

        # One stack of layers for each place of the pattern. Not one with an axis for the places:
        # XLA's CPU backend then copies all parameters into another layout at each call.
        stacks = [
            jax.tree.map(
                lambda leaf, place=place: cpu.in_loops(leaf[place : stop : len(pattern)]),  # noqa: B023
                layers,
            )
            for place in range(start, start + len(pattern))
        ]
        run_pattern = jax.checkpoint(run_pattern, policy=POLICIES[remat], prevent_cse=False)
        numbers = jnp.arange(segment.repeats, dtype=jnp.int32)
        (x, state), outputs = lax.scan(run_pattern, (x, state), (numbers, stacks))
        if keep:
            kept.append(outputs.reshape(-1, *x.shape))
        for kind in range(len(before)):
            before[kind] += pattern.count(kind) * segment.repeats
    return x, state, jnp.concatenate(kept) if keep else None


def _look_up(layers: Params, first: jax.Array, count: int) -> list[Params]:
    """The parameters of `count` layers, from the index `first` on."""
    # XLA's CPU backend moves floats of 16 bits by way of float32. The barrier ties the stack to the
    # index; without it all parameters are converted before the loop, at every call: 3.0 ms a layer
    # for a product of [2, 576] x [576, 1536] that takes 0.5 ms so.
    layers, first = lax.optimization_barrier((lax.stop_gradient(layers), first))
    return [
        jax.tree.map(
            lambda leaf, place=place: named(cpu.look_up(leaf, first + place), PARAMETER),
            layers,
        )
        for place in range(count)
    ]


def _with_gradient(found: jax.Array, scanned: jax.Array) -> jax.Array:
    """What was looked up, with its gradient sent to what is scanned over, which is equal.

    So a scan adds up no stacks: it makes the gradients layer by layer.
    """
    return (_linked if found.dtype == scanned.dtype else _linked_in_disguise)(found, scanned)


@jax.custom_jvp
def _linked(found, scanned):
    return found


_linked.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


@jax.custom_vjp
def _linked_in_disguise(found, scanned):
    return found


_linked_in_disguise.defvjp(
    lambda found, scanned: (found, None), lambda _, gradient: (None, cpu.in_loops(gradient))
)


def _embed(
    params: Params, tokens: jax.Array, config: DecoderConfig, dtype: DTypeLike | None
) -> jax.Array:
    x = ops.embed(tokens, params["embedding"])
    x = x if dtype is None else x.astype(dtype)
    if config.embed_scale is None:
        return x
    return x * jnp.asarray(config.embed_scale, x.dtype)


def projection_table(params: Params) -> jax.Array:
    """The table [V D] that projects to logits: a tree has one of its own unless it is tied."""
    table: jax.Array = params.get("unembedding", params["embedding"])
    return table


def _logits(params: Params, final_norm: jax.Array, config: DecoderConfig) -> jax.Array:
    table = projection_table(params)
    return ops.unembed(final_norm, table, softcap=config.final_softcap, num_valid=config.num_valid)


def _angles(positions: jax.Array, config: DecoderConfig) -> tuple[Angles, ...]:
    return tuple(rotary_angles(positions, kind, config) for kind in config.layer_kinds)


def _check(
    function: str,
    params: Any,
    tokens: Any,
    config: DecoderConfig,
    positions: Any,
    mask: Any,
) -> tuple[Params, jax.Array, jax.Array | None, jax.Array | None]:
    check_params(function, params, config)
    tokens, mask = check_tokens(function, tokens, mask, config)
    if positions is not None:
        positions = checks.integers(function, "positions", positions)
        must = "positions must have the shape [B T] of tokens"
        fits = positions.shape == tokens.shape
        checks.require(fits, function, must, positions=positions, tokens=tokens)
    return params, tokens, positions, mask


def check_tokens(
    function: str, tokens: Any, mask: Any, config: DecoderConfig
) -> tuple[jax.Array, jax.Array | None]:
    """Return tokens [B T], with some id of the table wherever the mask is false, and the mask."""
    array = checks.integers(function, "tokens", tokens)
    checks.require(array.ndim == 2, function, "tokens must be [B T]", tokens=array)
    if mask is not None:
        mask = checks.booleans(function, "mask", mask)
        must = "mask must have the shape [B T] of tokens"
        checks.require(mask.shape == array.shape, function, must, mask=mask, tokens=array)
        # NumPy's ids stay NumPy's where they can: JAX would narrow 64 bits before they are checked.
        known = isinstance(tokens, np.ndarray) and not isinstance(mask, jax.core.Tracer)
        tokens = (
            np.where(np.asarray(mask), tokens, np.zeros_like(tokens))
            if known
            else jnp.where(mask, array, jnp.zeros_like(array))
        )
    num_tokens = config.num_valid or config.vocab_size
    return checks.ids(function, "tokens", tokens, num_tokens), mask


def _check_cache(
    function: str, cache: Any, config: DecoderConfig, tokens: jax.Array, mask: jax.Array | None
) -> None:
    checks.require(
        isinstance(cache, Cache),
        function,
        "cache must be one of init_cache or of an earlier call",
        kind=TypeError,
        cache=type(cache).__name__,
    )
    must = "cache must have a row for each of tokens"
    rows = cache.lengths.shape[0]
    checks.require(rows == tokens.shape[0], function, must, rows=rows, tokens=tokens)
    counts = [stack.shape[0] for stack in cache.keys]
    layers = [config.layers.count(kind) for kind in range(len(config.layer_kinds))]
    heads = config.attention.num_key_value_heads, config.attention.head_dim
    fits = counts == layers and all(stack.shape[2:4] == heads for stack in cache.keys)
    checks.require(fits, function, "cache must be one of this config", layers=counts)
    if isinstance(cache.lengths, jax.core.Tracer) or isinstance(mask, jax.core.Tracer):
        return
    # By NumPy: JAX would trace this inside a `jit` that both were closed over by.
    new = tokens.shape[1] if mask is None else np.asarray(mask).sum(axis=1)
    longest = int((np.asarray(cache.lengths) + new).max())
    checks.require(
        longest <= cache.capacity,
        function,
        "every row must fit into the cache",
        hint="Make room for prompt and new tokens: init_cache(config, batch_size, length).",
        tokens=longest,
        capacity=cache.capacity,
    )
