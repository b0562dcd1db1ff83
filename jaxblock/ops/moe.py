"""Mixture of experts: routing and the gated feed-forward of the chosen experts."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Integer

from jaxblock.ops import checks
from jaxblock.ops.precision import arithmetic_dtype, matmul
from jaxblock.ops.sharding import along, axes, laid_out, like

GATE_UP_PRODUCT = "moe_gate_up_product"


def route_top_k(
    router_logits: Float[Array, "*B E"], *, num_active: int, renormalize: bool
) -> tuple[Float[Array, "*B A"], Integer[Array, "*B A"]]:
    """weights, experts = the A = num_active largest of softmax(router_logits over E)

    Args:
      router_logits: one number for each expert, in nats.
      num_active: A, at least 1 and at most E. No default: models differ.
      renormalize: whether the weights are divided by their sum (Mixtral; `norm_topk_prob` of
        Qwen3-MoE). No default either.

    Returns: weights, float32 (float64 for float64 logits), and the indices of their experts, int32,
      the largest first. Of equal logits the lower index wins.

    Raises: ValueError or TypeError for a num_active outside [1, E], logits without an axis or of
      integers.

    Precision: softmax and division in float32 (float64 for float64). The choice is made among the
      logits: two whose probabilities underflow or round alike keep their order.

    Differs from torch: torch.topk leaves the order of equal numbers open.

    Source: Jiang et al., Mixtral of Experts, 2024, section 2.1; huggingface/transformers
      models/mixtral/modeling_mixtral.py and models/qwen3_moe/modeling_qwen3_moe.py.
    """
    function = "route_top_k"
    (router_logits,) = checks.floating(function, router_logits=router_logits)
    checks.require(
        router_logits.ndim >= 1,
        function,
        "router_logits must have at least one axis",
        router_logits=router_logits,
    )
    num_active = _check_num_active(function, num_active, router_logits.shape[-1])
    renormalize = checks.flag(function, "renormalize", renormalize)
    return _route(router_logits, num_active=num_active, renormalize=renormalize)


def moe_swiglu(
    x: Float[Array, "*B D"],
    router: Float[Array, "D E"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    *,
    num_active: int,
    renormalize: bool,
) -> Float[Array, "*B D"]:
    """y = sum over the chosen e of weight_e * swiglu(x, gate_up[e], down[e])

    Weights and choice: `route_top_k` of x · router.

    Args:
      x: activations.
      router: the projection to one logit for each expert.
      gate_up: as in `swiglu`, one for each expert.
      down: the projections back.
      num_active: experts a token goes to, at least 1 and at most E.
      renormalize: whether their weights are divided by their sum.

    Returns: the shape and dtype of x. There is no capacity: every token gets all its experts, also
      if all want the same.

    Raises: ValueError or TypeError for shapes that do not fit, an empty axis, integer inputs, a
      num_active outside [1, E].

    Precision: products with 16-bit operands accumulate in float32, in the gradients too. Router
      logits, weights, silu, products of elements and the sum over experts are float32; rounded to
      16 bits are the gate/up product, the hidden values times their weight, and y, once each.
      The backward pass keeps x, the routing and the gate/up product. A row of NaN reaches no other
      row, only gradients of weights. Under `vmap` the products of the experts run one example after
      the other: leading axes are faster. Reverse mode, and forward over reverse; not forward alone.

    Differs from torch: transformers rounds router logits and each expert's result to 16 bits, for
      Qwen3-MoE the weights too, and adds up in 16 bits.

    Source: Jiang et al., Mixtral of Experts, 2024, section 2.1; rows sorted by expert: Gale et al.,
      MegaBlocks, 2022.
    """
    function = "moe_swiglu"
    x, router, gate_up, down = checks.floating(
        function, x=x, router=router, gate_up=gate_up, down=down
    )
    checks.require(x.ndim >= 1, function, "x must have at least one axis", x=x)
    checks.require(
        router.ndim == 2 and router.shape[0] == x.shape[-1],
        function,
        "router must have the shape [D E] with D the last axis of x",
        hint="torch keeps kernels as [out, in]: turn them.",
        x=x,
        router=router,
    )
    hidden_size, num_experts = router.shape
    checks.require(
        gate_up.ndim == 4 and gate_up.shape[:3] == (num_experts, hidden_size, 2),
        function,
        "gate_up must have the shape [E D 2 F] with D and E those of router",
        hint="Build it with pack_gate_up(gate, up).",
        router=router,
        gate_up=gate_up,
    )
    checks.require(
        down.shape == (num_experts, gate_up.shape[3], hidden_size),
        function,
        "down must have the shape [E F D] with E, F and D those of gate_up",
        hint="torch keeps kernels as [out, in]: turn them.",
        gate_up=gate_up,
        down=down,
    )
    num_active = _check_num_active(function, num_active, num_experts)
    renormalize = checks.flag(function, "renormalize", renormalize)
    return _compute_moe_swiglu(
        x, router, gate_up, down, num_active=num_active, renormalize=renormalize
    )


def _check_num_active(function: str, num_active: int, num_experts: int) -> int:
    num_active = checks.size(function, "num_active", num_active)
    must = "num_active must not exceed E, the number of experts"
    checks.require(num_active <= num_experts, function, must, num_active=num_active, E=num_experts)
    return num_active


# Jitted, so that a call outside `jit` is one compiled program and gives the bits of one inside it.
@laid_out(lambda logits: (along(*axes(logits, but=1), None),) * 2)
@partial(jax.jit, static_argnames=("num_active", "renormalize"), inline=True)
def _route(
    router_logits: jax.Array, *, num_active: int, renormalize: bool
) -> tuple[jax.Array, jax.Array]:
    logits = router_logits.astype(arithmetic_dtype(router_logits.dtype))
    # top_k holds 0 for larger than -0.
    _, experts = lax.top_k(lax.stop_gradient(jnp.where(logits == 0, 0, logits)), num_active)
    weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), experts, axis=-1)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


@laid_out(lambda x, *parameters: like(x))
@partial(jax.jit, static_argnames=("num_active", "renormalize"), inline=True)
def _compute_moe_swiglu(
    x: jax.Array,
    router: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    num_active: int,
    renormalize: bool,
) -> jax.Array:
    wide = arithmetic_dtype(x.dtype)
    num_experts, hidden_size, _, intermediate_size = gate_up.shape
    tokens = x.reshape(-1, hidden_size)
    logits = matmul(tokens, router, out_dtype=wide)
    weights, experts = _route(logits, num_active=num_active, renormalize=renormalize)

    # One row for each token and each of its experts [R], sorted by expert; equal ones keep their
    # order, so that the sums of a weight gradient have one.
    order = jnp.argsort(experts.reshape(-1), stable=True)
    rows_in_order = jnp.arange(order.size, dtype=order.dtype)
    place_of_row = jnp.zeros_like(order).at[order].set(rows_in_order, unique_indices=True)
    group_sizes = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.int32)

    # The policy leaves the backward pass with x, the routing and the gate/up product; the rows and
    # the elementwise values cost less to compute again than to store.
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(GATE_UP_PRODUCT))
    def run_experts(tokens, weights, gate_up, down):
        # Wide, so that the gradients of a token's rows are summed before they are rounded.
        copies = jnp.broadcast_to(
            tokens.astype(wide)[:, None, :], (tokens.shape[0], num_active, hidden_size)
        )
        rows = _permute(copies.reshape(-1, hidden_size), order)
        kernel = gate_up.reshape(num_experts, hidden_size, 2 * intermediate_size)
        product = _grouped_matmul(rows, kernel, group_sizes, x.dtype).astype(x.dtype)
        product = checkpoint_name(product, GATE_UP_PRODUCT).astype(wide)
        gate, up = product[:, :intermediate_size], product[:, intermediate_size:]
        # Weighted before the product, not after it: its gradient then needs no result of it.
        row_weights = _permute(weights.reshape(-1, 1), order)
        hidden = jax.nn.silu(gate) * up * row_weights
        results = _permute(_grouped_matmul(hidden, down, group_sizes, x.dtype), place_of_row)
        return jnp.sum(results.reshape(copies.shape), axis=1).astype(x.dtype)

    return run_experts(tokens, weights, gate_up, down).reshape(x.shape)


def _permute(rows: jax.Array, order: jax.Array) -> jax.Array:
    return rows.at[order].get(mode="promise_in_bounds", unique_indices=True)


def _ragged_product(
    a_axis: int, b_axis: int, groups: list[int]
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    dimensions = lax.RaggedDotDimensionNumbers((((a_axis,), (b_axis,)), ((), ())), [0], groups)

    def product(a: jax.Array, b: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(
            a, b, group_sizes, dimensions, preferred_element_type=arithmetic_dtype(a.dtype)
        )

    # JAX maps a ragged product over all of its operands only: neither over some nor over none.
    mapped: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = sequential_vmap(product)
    return mapped


# Rows [R ...] are sorted by expert: y[r] = rows[r] · weight[expert of r] and its two gradients.
_product = _ragged_product(1, 1, [0])
_rows_gradient = _ragged_product(1, 2, [0])
_weight_gradient = _ragged_product(0, 0, [])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(
    rows: jax.Array, weight: jax.Array, group_sizes: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """The product and its gradients with operands in `dtype`, unrounded."""
    return _product(rows.astype(dtype), weight.astype(dtype), group_sizes)


def _grouped_matmul_forward(rows, weight, group_sizes, dtype):
    y = _product(rows.astype(dtype), weight.astype(dtype), group_sizes)
    return y, (rows, weight, group_sizes)


def _grouped_matmul_backward(dtype, saved, dy):
    rows, weight, group_sizes = saved
    dy = dy.astype(dtype)
    drows = _rows_gradient(dy, weight.astype(dtype), group_sizes)
    dweight = _weight_gradient(rows.astype(dtype), dy, group_sizes)
    return drows.astype(rows.dtype), dweight.astype(weight.dtype), None


_grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)
