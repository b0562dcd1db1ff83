"""The loss of next tokens, and a train step by optax."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, Integer

from jaxblock import ops
from jaxblock.config import DecoderConfig
from jaxblock.decoder import final_hidden, forward, projection_table
from jaxblock.ops import checks
from jaxblock.ops.remat import Remat
from jaxblock.parameters import Params

if TYPE_CHECKING:  # Whoever trains imports it; `import jaxblock` stays light without.
    import optax


# Tokens whose logits are held at once: 100 MB in float32 for a vocabulary of 49152.
CHUNK_SIZE = 512


class TrainState(NamedTuple):
    """What a train step turns into the next: donate it, and it is updated in place.

    Attributes:
      params: the parameter tree.
      opt_state: the optimizer's.
      step: how many steps were taken.
    """

    params: Params
    opt_state: Any
    step: Int32[Array, ""]


class Metrics(NamedTuple):
    """What is known after a step: mean loss in nats a token, tokens counted, gradient norm."""

    loss: Float[Array, ""]
    num_tokens: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def init_train_state(params: Params, optimizer: "optax.GradientTransformation") -> TrainState:
    """state = params, the optimizer's initial state, step 0

    Args:
      params: the parameter tree. The moments of optax's optimizers have its dtypes: in bfloat16 a
        second moment stops growing after a few dozen steps (optax's `mu_dtype` widens the first
        only). So keep the parameters in float32 and let `dtype` of the step be bfloat16.
      optimizer: of optax.

    Returns: `TrainState`.

    Raises: whatever the optimizer does.
    """
    with jax.numpy_dtype_promotion("standard"):
        return TrainState(params, optimizer.init(params), jnp.asarray(0, jnp.int32))


def next_token_loss(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: DecoderConfig,
    *,
    mask: Bool[Array, "B T"] | None = None,
    dtype: DTypeLike | None = None,
    remat: Remat = "matmul_outputs",
    chunk_size: int | None = CHUNK_SIZE,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """total, count = cross_entropy(forward(tokens), next_token_labels(tokens))

    Args:
      params, tokens, config, mask, dtype, remat: as `forward`. Every real token that another real
        one follows is counted.
      chunk_size: tokens whose logits are held at once, by `linear_cross_entropy`, which has no
        forward mode. None holds all, and has all that `cross_entropy` has.

    Returns: total nats and the number of tokens counted. Sums, so that the mean over several
      batches is that of all tokens: add totals (or their gradients), and divide by all counts.

    Raises: as `forward`.

    Precision: float32 (float64 for float64 parameters), rows of padding left out.
    """
    labels = ops.next_token_labels(tokens, mask=mask)
    if chunk_size is None:
        logits = forward(params, tokens, config, mask=mask, dtype=dtype, remat=remat)
        return ops.cross_entropy(logits, labels, num_valid=config.num_valid)
    x = final_hidden(params, tokens, config, mask=mask, dtype=dtype, remat=remat)
    return ops.linear_cross_entropy(
        x,
        projection_table(params),
        labels,
        chunk_size=chunk_size,
        num_valid=config.num_valid,
        softcap=config.final_softcap,
    )


def train_step(
    state: TrainState,
    tokens: Integer[Array, "B T"],
    config: DecoderConfig,
    optimizer: "optax.GradientTransformation",
    *,
    mask: Bool[Array, "B T"] | None = None,
    dtype: DTypeLike | None = None,
    remat: Remat = "matmul_outputs",
    chunk_size: int | None = CHUNK_SIZE,
) -> tuple[TrainState, Metrics]:
    """params = params + optimizer(gradient of total / count)

    Args:
      state: of `init_train_state` or of the last step. Jit this function with its donation:
        jax.jit(train_step, static_argnames=("config", "optimizer", "dtype", "remat"),
        donate_argnames="state").
      tokens, config: as `next_token_loss`.
      optimizer: of optax; the one that the state was made with.
      mask, dtype, remat, chunk_size: as `next_token_loss`.

    Returns: the next state, and `Metrics`.

    Raises: as `forward`; ValueError if the optimizer's state is not that of these parameters, as
      after the vocabulary grew.

    Precision: gradients have the dtypes of the parameters; see `init_train_state` about moments.
    """
    import optax

    _check_opt_state(state, optimizer)

    def total(params):
        return next_token_loss(
            params, tokens, config, mask=mask, dtype=dtype, remat=remat, chunk_size=chunk_size
        )

    (nats, count), gradients = jax.value_and_grad(total, has_aux=True)(state.params)
    # Without a token to learn from everything stays, where 0 / 0 would spoil it.
    share = 1.0 / jnp.maximum(count, 1.0)
    gradients = jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), gradients)
    # optax multiplies arrays by integers of other dtypes, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = Metrics(nats * share, count, optax.tree.norm(gradients))
    return TrainState(params, opt_state, state.step + 1), metrics


def _check_opt_state(state: TrainState, optimizer: "optax.GradientTransformation") -> None:
    def describe(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (jnp.shape(leaf), str(jnp.result_type(leaf))), tree)

    with jax.numpy_dtype_promotion("standard"):
        expected = describe(jax.eval_shape(optimizer.init, state.params))
    got = describe(state.opt_state)
    checks.require(
        got == expected,
        "train_step",
        "state.opt_state must be the optimizer's state of these parameters",
        hint="Make it anew: init_train_state(params, optimizer).",
        opt_state=_difference(got, expected),
    )


def _difference(got: Any, expected: Any) -> str:
    """The first leaf that differs."""
    is_leaf = lambda node: isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], str)  # noqa: E731
    ours = jax.tree_util.tree_leaves_with_path(got, is_leaf=is_leaf)
    theirs = jax.tree_util.tree_leaves_with_path(expected, is_leaf=is_leaf)
    for (path, one), (other_path, other) in zip(ours, theirs, strict=False):
        if (path, one) != (other_path, other):
            return f"{jax.tree_util.keystr(path)} {one}, not {other}"
    return f"{len(ours)} leaves, not {len(theirs)}"
