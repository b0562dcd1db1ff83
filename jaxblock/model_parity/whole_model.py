"""A whole model in PyTorch and in `jaxblock`: every stage, the logits, and what they go on with.

Both read the same tokens, each with the weights that its own reader found in the files, rounded to
one dtype. `torch_ref.decoder` in float64 computes the same from the rounded weights of `jaxblock`,
and two things are asked:

1. PyTorch's error must be within what rounding explains. If it is not, PyTorch runs something else
   than the reference and `jaxblock`: a weight that was read into the wrong place, another constant.
2. The error of `jaxblock` must be no more than PyTorch's, times a factor that is written below.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor

import torch_ref.decoder
from jaxblock import decoder
from jaxblock.config import DecoderConfig
from jaxblock.generate import generate
from jaxblock.model_parity.both_models import MATMUL_PRECISION, BothModels, rounded
from jaxblock.parity import Comparison, Judgement, compare, judge
from jaxblock.parity.arrays import to_jax, to_numpy, to_torch
from jaxblock.parity.tolerance import error_limits

NEW_TOKENS = 64


class Factors(NamedTuple):
    """How many times PyTorch's error `jaxblock`'s may be: root mean square, and largest."""

    rms: float
    largest: float


# Nothing but rounding is behind these errors, so both frameworks' are alike; by how much they
# differ depends on the order in which each adds. Alone, the float32 products of XLA's CPU backend
# err up to 1.25 times as much as PyTorch's (root mean square); silu, exp and rsqrt add little.
LOGITS_FLOAT32 = Factors(1.3, 2.0)
# jaxblock rounds less often than PyTorch (neither logits nor cos and sin nor silu(gate)), so it
# should err no more. But all tokens look at the first, whose error is in theirs: a prompt is one
# draw of few. On 256 tokens of SmolLM2 in bfloat16, PyTorch's own error is 0.117 with one thread,
# and 0.127 with two.
LOGITS_16_BITS = Factors(1.1, 1.5)
# Trained models make the row of one token or two a hundred times larger than all others, by a few
# sums in one layer, whose rounding is then a single draw: over 47 such rows of SmolLM2 their errors
# were 0.35 to 3.0 times PyTorch's (10th and 90th centile) where that over all together was 1.26.
OTHER_STAGES = Factors(1.5, 4.0)

# The chance of a false alarm is 1e-6 at this many standard deviations.
DEVIATIONS = 4.75


@dataclass(frozen=True)
class Choice:
    """One token that each framework finds likeliest, by its place in the row.

    Attributes:
      place: how many tokens stand before it.
      jax, torch: the ids; not the same.
      gap: how much less likely than the likeliest the worse of the two is, in nats, by float64.
      tie: whether that is less than the error of PyTorch's logits, so that either may be chosen.
    """

    place: int
    jax: int
    torch: int
    gap: float
    tie: bool


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow the prompt if the likeliest is taken each time.

    Attributes:
      jax, torch: the ids.
      jax_text, torch_text: the same, decoded.
      parted: where they first differ, None if they do not.
      reasons: why that is not allowed, in words; empty if it is.
    """

    jax: tuple[int, ...]
    torch: tuple[int, ...]
    jax_text: str
    torch_text: str
    parted: Choice | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class WholeModel:
    """The comparison in one dtype.

    Attributes:
      dtype: of weights and activations.
      stages: embedding, the residual stream after each block, final norm, logits.
      choices: where the two logits of the prompt have another largest.
      num_tokens: T.
      continuation: what follows the prompt.
    """

    dtype: str
    stages: tuple[Judgement, ...]
    choices: tuple[Choice, ...]
    num_tokens: int
    continuation: Continuation

    @property
    def other_reasons(self) -> tuple[str, ...]:
        """Why the tokens that are chosen fail, in words."""
        choices = [
            f"{self.dtype}: the likeliest after {c.place} tokens is {c.jax} in jax, {c.torch} in "
            f"torch, and no near tie ({c.gap:.2g} nats)"
            for c in self.choices
            if not c.tie
        ]
        return (*choices, *(f"{self.dtype}: {r}" for r in self.continuation.reasons))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it failed, in the order of the computation; empty if it did not."""
        stages = [f"{self.dtype}, {s.name}: {reason}" for s in self.stages for reason in s.reasons]
        return (*stages, *self.other_reasons)

    @property
    def ok(self) -> bool:
        """Whether JAX passed."""
        return not self.reasons

    @property
    def first_divergence(self) -> str | None:
        """The first stage that failed."""
        return next((stage.name for stage in self.stages if not stage.ok), None)


def compare_whole(
    both: BothModels,
    tokens: Tensor,
    dtype: str,
    *,
    new_tokens: int = NEW_TOKENS,
    activations: Callable[..., decoder.Activations] = decoder.activations,
    generate: Callable[..., jax.Array] = generate,
) -> WholeModel:
    """Run both models with everything rounded to `dtype`, and judge them.

    Args:
      both: of `both_models.load`.
      tokens: the prompt [1 T].
      dtype: float32, bfloat16 or float16.
      new_tokens: how many tokens to go on for.
      activations, generate: what to test.
    """
    config = both.config
    with rounded(both, dtype) as params, jax.default_matmul_precision(MATMUL_PRECISION):
        ours = jax_stages(params, tokens, config, activations)
        theirs = torch_stages(both.model, tokens)
        reference = Reference(params, config)
        exact = reference.stages(tokens)
        stages = tuple(
            _judge(name, ours[name], theirs[name], exact[name], dtype, config) for name in exact
        )
        error = stages[-1].torch.max_abs_error
        choices = _choices(ours["logits"], theirs["logits"], exact["logits"], error)
        rows = [
            np.asarray(generate(params, to_jax(tokens), config, max_new_tokens=new_tokens)),
            to_numpy(torch_generate(both.model, tokens, new_tokens)),
        ]
        continuation = _continuation(both, tokens, dtype, rows, reference, error)
    return WholeModel(dtype, stages, choices, tokens.shape[1], continuation)


# The three runs -----------------------------------------------------------------------------------


def torch_stages(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """What transformers makes of the tokens, stage by stage."""
    stages: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module, inputs, output):
            stages[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    def keep_input(module, inputs, keywords):
        stages["embedding"] = (inputs[0] if inputs else keywords["hidden_states"]).clone()

    layers = model.model.layers
    # The input of the first block, because some families scale the rows after looking them up.
    handles = [layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_hook(keep(f"block {index}")))
    handles.append(model.model.norm.register_forward_hook(keep("final norm")))
    try:
        with torch.no_grad():
            stages["logits"] = model(tokens, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return stages


def jax_stages(
    params: dict[str, Any],
    tokens: Tensor,
    config: DecoderConfig,
    activations: Callable[..., decoder.Activations] = decoder.activations,
) -> dict[str, jax.Array]:
    """The same through the jitted `jaxblock.decoder.activations`."""
    jitted = jax.jit(activations, static_argnames="config")
    return _by_name(jitted(params, to_jax(tokens), config))


class Reference:
    """The same by `torch_ref` in float64, from parameters that were rounded already."""

    def __init__(self, params: dict[str, Any], config: DecoderConfig):
        self._params = jax.tree.map(lambda leaf: to_torch(leaf).double(), params)
        self._config = config

    def stages(self, tokens: Tensor) -> dict[str, Tensor]:
        """Stage by stage."""
        with torch.no_grad():
            return _by_name(torch_ref.decoder.activations(self._params, tokens, self._config))


def torch_generate(model: Any, tokens: Tensor, new_tokens: int) -> Tensor:
    """Greedy, with transformers' cache; an end-of-text token ends nothing."""
    mask = torch.ones_like(tokens)
    row: Tensor = model.generate(
        tokens, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens
    )
    return row


def _by_name(stages: Any) -> dict[str, Any]:
    blocks = {f"block {index}": block for index, block in enumerate(stages.blocks)}
    return {
        "embedding": stages.embedding,
        **blocks,
        "final norm": stages.final_norm,
        "logits": stages.logits,
    }


# The judgement ------------------------------------------------------------------------------------


def _factors(stage: str, dtype: str, num_errors: int) -> Factors:
    """How much worse than PyTorch `jaxblock` may be at a stage.

    Of two root mean squares of n independent errors each, the ratio has the standard deviation
    1 / sqrt(n). It matters for prompts of a few tokens: 3 % for 50 of SmolLM2.
    """
    factors = OTHER_STAGES
    if stage == "logits":
        factors = LOGITS_FLOAT32 if dtype == "float32" else LOGITS_16_BITS
    return factors._replace(rms=factors.rms * (1 + DEVIATIONS / num_errors**0.5))


def _judge(
    stage: str,
    ours: jax.Array,
    theirs: Tensor,
    exact: Tensor,
    dtype: str,
    config: DecoderConfig,
) -> Judgement:
    jax_values, torch_values, exact_values = (to_numpy(x) for x in (ours, theirs, exact))
    if stage.startswith("block"):
        size = _powers_of_two(exact_values)
        jax_values, torch_values = (_shrink(x, size) for x in (jax_values, torch_values))
        exact_values = exact_values / size
    # Each token has D of them: the logits are as many projections of the same D as there are rows.
    factor = _factors(stage, dtype, exact_values.shape[1] * config.hidden_size)
    theirs_alone = compare(torch_values, exact_values)
    judgement = judge(
        stage,
        jax_values,
        torch_values,
        exact_values,
        # What this stage alone explains is allowed even where PyTorch's error happens to be small.
        reduction_length=1 if stage == "embedding" else config.hidden_size,
        roundings=0,
        factor=factor.rms,
        # `judge` has one factor for both; this makes the larger one of the largest error.
        torch_errors=(0.0, theirs_alone.max_abs_error * factor.largest / factor.rms),
        share_equal=1.0 if stage == "embedding" else None,
    )
    if jax_values.dtype != torch_values.dtype:
        # Bit for bit, our logits can be compared only after the rounding that PyTorch did.
        between = compare(jax_values.astype(torch_values.dtype), torch_values)
        judgement = dataclasses.replace(judgement, between=between)
    reasons = _beyond_rounding(stage, theirs_alone, exact_values, torch_values.dtype, config)
    return dataclasses.replace(judgement, reasons=judgement.reasons + reasons)


def _powers_of_two(exact: np.ndarray) -> np.ndarray:
    """About the root mean square of each row of the residual stream [B T D].

    Every reader of the stream is a norm, which divides a row by its root mean square; so is the
    stream here. Trained models have one or two tokens with rows a hundred times the others', whose
    error, as it stands, would be the error of all. Powers of two round nothing.
    """
    rms = np.sqrt(np.mean(np.square(exact), axis=-1, keepdims=True))
    return np.exp2(np.round(np.log2(np.maximum(rms, np.finfo(np.float32).tiny))))


def _shrink(values: np.ndarray, size: np.ndarray) -> np.ndarray:
    return (values.astype(np.float64) / size).astype(values.dtype)


def _beyond_rounding(
    stage: str, error: Comparison, exact: np.ndarray, dtype: np.dtype, config: DecoderConfig
) -> tuple[str, ...]:
    """Whether PyTorch's own error is more than all sums and roundings behind a stage explain."""
    layers = config.num_hidden_layers
    if stage == "embedding":
        blocks = 0
    elif stage.startswith("block"):
        blocks = int(stage.removeprefix("block ")) + 1
    else:
        blocks = layers
    T, D, H = exact.shape[1], config.hidden_size, config.attention.head_dim
    F = config.moe.moe_intermediate_size if config.moe else config.feed_forward.intermediate_size
    # Norm; q, k, v; scores; values; o; norm; gate and up; down.
    a_block = D + D + H + T + config.attention.num_attention_heads * H + D + D + F
    finite = np.where(np.isfinite(exact), exact, 0.0)
    limit_rms, limit_max = error_limits(
        dtype,
        exact.size,
        typical=float(np.sqrt(np.mean(np.square(finite)))),
        largest=float(np.max(np.abs(finite))),
        # Before the final norm and the logits: a norm, a product.
        reduction_length=blocks * a_block + 2 * D,
        # In a block: two norms (2 each), q or k, turned (3), the weights of the values, their mean,
        # o, a sum; gate or up, silu, their product, down, a sum. After it: a norm, the logits.
        roundings=blocks * 17 + 3,
    )
    if error.rms_error <= limit_rms and error.max_abs_error <= limit_max:
        return ()
    return (
        f"PyTorch's own error, rms {error.rms_error:.2e} and largest {error.max_abs_error:.2e}, is "
        f"more than all roundings before it explain ({limit_rms:.2e} and {limit_max:.2e}): it does "
        "not compute what jaxblock and the reference do. Another weight, or another constant?",
    )


def _choices(ours: jax.Array, theirs: Tensor, exact: Tensor, error: float) -> tuple[Choice, ...]:
    """Where the likeliest tokens differ; `error` is the largest of PyTorch's logits."""
    jax_tokens, torch_tokens = (to_numpy(x)[0].argmax(-1) for x in (ours, theirs))
    return tuple(
        _choice(place + 1, to_numpy(exact)[0, place], jax_tokens[place], torch_tokens[place], error)
        for place in np.flatnonzero(jax_tokens != torch_tokens).tolist()
    )


def _choice(place: int, exact: np.ndarray, ours: int, theirs: int, error: float) -> Choice:
    # An id of -1 stands for logits of NaN.
    gap = float(exact.max() - min(exact[ours], exact[theirs])) if ours >= 0 else float("inf")
    return Choice(place, int(ours), int(theirs), gap, bool(gap <= error))


def _continuation(
    both: BothModels,
    tokens: Tensor,
    dtype: str,
    rows: Sequence[np.ndarray],
    reference: Reference,
    error: float,
) -> Continuation:
    T = tokens.shape[1]
    ours, theirs = (row[0, T:] for row in rows)
    # Where logits are NaN, jaxblock goes on with ids of -1.
    jax_text, torch_text = (both.tokenizer.decode(row[row >= 0]) for row in (ours, theirs))
    parted = None
    reasons: list[str] = []
    if differ := np.flatnonzero(ours != theirs).tolist():
        first = differ[0]
        read = torch.cat([tokens, to_torch(theirs[None, :first])], dim=1)
        exact = to_numpy(reference.stages(read)["logits"])[0, -1]
        parted = _choice(T + first, exact, ours[first], theirs[first], error)
        # In float32 a tie so near is no matter of rounding in practice: the text must be the same.
        if dtype == "float32" or not parted.tie:
            reasons.append(
                f"greedy token {first + 1} is {parted.jax} in jax, {parted.torch} in torch, "
                f"{parted.gap:.2g} nats apart"
            )
    jax_tokens, torch_tokens = tuple(ours.tolist()), tuple(theirs.tolist())
    return Continuation(jax_tokens, torch_tokens, jax_text, torch_text, parted, tuple(reasons))
