"""What XLA's CPU backend needs in another form to be fast, small and exact; for no other backend.

Its fast kernels (YNNPACK, `__ynn_fusion` in the compiled text) take bfloat16 operands with a
float32 result as one product of two matrices, of which the left one is summed over its last axis.
Whatever else it is given is converted to float32, or copied into another layout, at each call.
Measured with jax 0.10.2 on two cores; GFLOP/s of a product of 1024 x 1024 x 5632 in bfloat16.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Half of a sum of this length is added up in the same parts, of 512 terms, as the whole.
LONG_SUM = 2048

# Numbers of a result that stays in the caches until another is added to it: 4 MB.
CACHED = 2**20

# Rows of a large total that are added to at once.
BLOCK = 2048

# Numbers of a product that is only made for the next one. With what is computed from it, it has to
# stay below the 32 MB from which on the C library asks the system for new memory at every call.
PIECE = 2**22

# The parts of a sum, of which XLA takes up to 15 into one loop; those that a product of one row has
# at least; and the size, in numbers, from which on that is worth the longer program.
PARTS = 8
FEW_PARTS = 4
MANY = 2**16

# Numbers of an array from which on it pays to find or turn it in a branch of its own, which takes
# 20 ms to compile. The gradient of a tiny decoder has 17 (bfloat16: 40) such places, a quarter of
# its time to the first result.
LARGE = 2**14


# Products -----------------------------------------------------------------------------------------


def contract_float32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x[*B D] · weight[D *F]; the sum of two products where that is more exact and costs little."""
    # One term after the other errs 1.15 to 1.25 times as much as PyTorch does. At the logits of a
    # trained decoder of 30 layers (SmolLM2, D = 576, three prompts of 256 tokens) it is 1.59, 1.29
    # and 1.30 times; with two sums 1.12, 1.08 and 1.15. As a batch of two, for as slices the weight
    # would be copied. A large result, such as gate/up of 2048 tokens, is left as one sum: to write
    # and add two would take a quarter of the time.
    D, F = weight.shape[0], math.prod(weight.shape[1:])
    if D % 2 or D >= LONG_SUM or x.size // D * F > CACHED:
        return contract_matrices(x, weight)
    summed = (((2,), (1,)), ((1,), (0,)))
    halves = lax.dot_general(x.reshape(-1, 2, D // 2), weight.reshape(2, D // 2, -1), summed)
    return (halves[0] + halves[1]).reshape(*x.shape[:-1], *weight.shape[1:])


def contract_matrices(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x[*B D] · weight[D *F], as one product of two matrices."""
    # With weight as [D 2 F], weight, gradient and result would each be copied into another layout.
    y = lax.dot_general(
        x.reshape(-1, x.shape[-1]),
        weight.reshape(weight.shape[0], -1),
        (((1,), (0,)), ((), ())),
    )
    return y.reshape(*x.shape[:-1], *weight.shape[1:])


def contract_16bit(
    a: jax.Array, b: jax.Array, a_axes: tuple[int, ...], b_axes: tuple[int, ...]
) -> jax.Array:
    """a · b summed over the axes given, which come first or last in each, as float32."""
    a, a_free, a_axis = _as_matrix(a, a_axes)
    b, b_free, b_axis = _as_matrix(b, b_axes)
    if a_axis == 0:
        a = _turned(a)  # For a weight's gradient, which is summed over the tokens.
    rows = a.shape[0]
    if rows == 1 and _parts(b.shape, b_axis) >= FEW_PARTS:
        return _one_row(a[0], b, b_axis).reshape(*a_free, *b_free)
    if rows == 1:
        a = jnp.concatenate([a, a])  # The kernel is slower with one row than with two.
    return _product_16bit(a, b, b_axis)[:rows].reshape(*a_free, *b_free)


def _product_16bit(a, b, b_axis):
    # b as it lies: a transpose would be a copy at every call.
    summed = (((a.ndim - 1,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, summed, preferred_element_type=jnp.dtype(jnp.float32))


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _one_row(a: jax.Array, b: jax.Array, b_axis: int) -> jax.Array:
    """a[D] · b, of which a decode step consists."""

    # There is no fast kernel for one row, and the one for two spends its time on converting b: on a
    # Zen 3 with b [4096, 14336] 22 ms, and as a sum in parts 5.7 ms, the speed of the memory.
    def sum_of_products(a, b):
        # The barrier ties b to a: a loop of steps would begin by converting what stays the same.
        a, b = lax.optimization_barrier((jnp.expand_dims(a, 1 - b_axis), b))
        products = a.astype(jnp.float32) * b.astype(jnp.float32)
        return _sum_in_parts(products, b_axis).reshape(-1)

    # By itself: a look-up of b in a stack of layers would become part of the sums, which are not
    # vectorised then. 64 tokens of SmolLM2 would take 5.3 s; they take 2.5 s.
    @jax.custom_batching.custom_vmap
    def alone(a, b):
        return _alone(sum_of_products, a, b)

    # Under `vmap` it is more than one row, and the parts would be large.
    @alone.def_vmap
    def matrix_product(size, batched, a, b):
        axes = [0 if is_batched else None for is_batched in batched]
        return jax.vmap(partial(_product_16bit, b_axis=b_axis), axes)(a, b), True

    return alone(a, b)


@_one_row.defjvp
def _one_row_jvp(b_axis, primals, tangents):
    (a, b), (da, db) = primals, tangents
    tangent = _product_16bit(da, b, b_axis) + _product_16bit(a, db, b_axis)
    return _one_row(a, b, b_axis), tangent


def _as_matrix(array, axes):
    """The array as [summed, free] or [free, summed], its free sizes, and its summed axis."""
    free = tuple(size for axis, size in enumerate(array.shape) if axis not in axes)
    length = math.prod(array.shape[axis] for axis in axes)
    if axes[:1] == (0,) and free:
        return array.reshape(length, -1), free, 0
    return array.reshape(-1, length), free, 1


def _turned(a):
    """The transpose, which XLA does not fold into the product that follows."""
    # Folded back, it is a product over the first axis: 145 GFLOP/s; so, 360; with a barrier or by
    # way of integers it is folded all the same, and in both branches it is moved out of them.
    return a.T if a.size < LARGE else _alone(jnp.transpose, a)


def add_outer_sum(total: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """total[D F] + sum over T of x[T D] * y[T F], for 16-bit x and y and a float32 total."""

    # A block of rows at a time: the whole sum would be another array of the size of the total.
    # Eight times 128 tokens on a total of 49152 x 576 take 330 ms, and 370 ms without blocks.
    def add_block(start, total, size):
        block = contract_16bit(lax.dynamic_slice_in_dim(x, start, size, axis=1), y, (0,), (0,))
        old = lax.dynamic_slice_in_dim(total, start, size)
        return lax.dynamic_update_slice_in_dim(total, old + block, start, axis=0)

    blocks, rest = divmod(total.shape[0], BLOCK)
    if blocks:
        add = partial(add_block, size=BLOCK)
        total = lax.fori_loop(0, blocks, lambda i, total: add(i * BLOCK, total), total)
    return add_block(blocks * BLOCK, total, rest) if rest else total


def num_pieces(x: jax.Array, weight: jax.Array) -> int:
    """Of how many pieces x[*B D] is, so that the product of one with weight[D *F] is no larger than
    PIECE."""
    if jax.device_count() > 1:
        return 1  # A loop over rows that are cut over devices would gather them.
    rows = math.prod(x.shape[:-1])
    return max(1, -(-rows * math.prod(weight.shape[1:]) // PIECE))


def in_pieces(
    function: Callable[..., jax.Array], x: jax.Array, weight: jax.Array, *others: Any
) -> jax.Array:
    """function(x, weight, *others), in which each row of the result, [*B D] as x, depends on the
    same row of x alone; a piece of the rows at a time.

    SwiGLU of [2048, 576] with F = 1536, float32: 142 ms at once, and 104 ms so.
    """
    rows = x.reshape(-1, x.shape[-1])
    size = -(-rows.shape[0] // num_pieces(x, weight))
    pieces = -(-rows.shape[0] // size)

    def add_piece(i, result):
        # The last one begins where it still has all its rows; some are computed twice.
        start = jnp.minimum(i * size, rows.shape[0] - size)
        piece = function(lax.dynamic_slice_in_dim(rows, start, size), weight, *others)
        return lax.dynamic_update_slice_in_dim(result, piece, start, axis=0)

    return lax.fori_loop(0, pieces, add_piece, jnp.zeros_like(rows)).reshape(x.shape)


# Sums ---------------------------------------------------------------------------------------------

# A reduction is a kernel of YNNPACK too, for which whatever is summed is first written out,
# converted and broadcast, as float32: 24 ms for the gradients of a bfloat16 RMSNorm of
# [4096, 1024], most of them for the pages of 67 MB of new memory. As a sum of slices it is one loop
# that computes what it sums, and the little that is left is summed as a product with ones: 1.6 ms.
# The functions below have that form on CPU, in their gradients too, and the plain one elsewhere.


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def sum_last(x: jax.Array, simple: bool = False) -> jax.Array:
    """The sum over the last axis, which stays, with length 1.

    With `simple`, x is little more than a parameter: there the kernel computes what it sums, if
    nothing else is made of it, that is if no gradient is asked for.
    """
    return jnp.sum(x, axis=-1, keepdims=True) if simple else _sum_in_parts(x)


@sum_last.defjvp
def _sum_last_jvp(simple, primals, tangents):
    (x,), (dx,) = primals, tangents
    # In reverse the sum of dx is a broadcast, which is fine as it is.
    return _sum_in_parts(x), jnp.sum(dx, axis=-1, keepdims=True)


def _sum_in_parts(x, axis=-1):
    """The sum over the last axis, or over the first of two."""
    parts = _parts(x.shape, axis)
    if parts == 1:
        return jnp.sum(x, axis=axis, keepdims=True)
    total = reduce(lax.add, jnp.split(x, parts, axis=axis))
    if axis == 0:
        return _product(jnp.ones((1, total.shape[0]), x.dtype), total)
    return _product(total, jnp.ones((total.shape[-1], 1), x.dtype))


def max_last(x: jax.Array) -> jax.Array:
    """The largest over the last axis, which stays, with length 1; it has no gradient.

    Of a row with a NaN it may be another number: XLA's own kernel for long rows leaves NaN out.
    """
    x = lax.stop_gradient(x)
    parts = _parts(x.shape, -1)
    if parts > 1:
        x = in_memory(reduce(lax.max, jnp.split(x, parts, axis=-1)))
    return jnp.max(x, axis=-1, keepdims=True)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x, [D] or [*B 1], in the shape [*B D], its gradient summed as above."""
    return jnp.broadcast_to(x, shape)


@spread.defjvp
def _spread_jvp(shape, primals, tangents):
    (x,), (dx,) = primals, tangents
    return spread(x, shape), _spread_in_parts(dx, shape)


def _spread_in_parts(x, shape):
    """The same, in a form whose transpose is slices, their sum and a product."""
    rows, D = math.prod(shape[:-1]), shape[-1]
    by_channel = x.ndim == 1
    parts = _parts((rows, D), 0 if by_channel else 1)
    if parts == 1:
        return jnp.broadcast_to(x, shape)
    if by_channel:
        part = _product(jnp.ones((rows // parts, 1), x.dtype), x.reshape(1, D))
        whole = jnp.concatenate([part] * parts, axis=0)
    else:
        part = _product(x.reshape(rows, 1), jnp.ones((1, D // parts), x.dtype))
        whole = jnp.concatenate([part] * parts, axis=1)
    return whole.reshape(shape)


def _product(a, b):
    # A sum, whatever precision was asked for of products.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _parts(shape, axis):
    if jax.default_backend() != "cpu" or math.prod(shape) < MANY:
        return 1
    return max(parts for parts in range(1, PARTS + 1) if shape[axis] % parts == 0)


# Loops --------------------------------------------------------------------------------------------

# Slices and updates of bfloat16 are computed by way of float32, so what a loop over layers keeps
# for the backward pass is twice as large there. Those of float16 are not, and unlike integers
# float16 arrays have gradients. So such values are kept as float16 arrays of the same bits, with
# which nothing may be computed. Thirty arrays of [256, 5760]: stacked in 102 ms, and in 32 ms so.


@jax.custom_vjp
def disguise(x: jax.Array) -> jax.Array:
    """bfloat16 as float16 of the same bits, and its gradient likewise."""
    return lax.bitcast_convert_type(x, jnp.float16)


@jax.custom_vjp
def undisguise(x: jax.Array) -> jax.Array:
    """What `disguise` was given."""
    return lax.bitcast_convert_type(x, jnp.bfloat16)


disguise.defvjp(lambda x: (disguise(x), None), lambda _, dx: (undisguise(dx),))
undisguise.defvjp(
    lambda x: (_found(lax.bitcast_convert_type(x, jnp.bfloat16)), None),
    lambda _, dx: (disguise(dx),),
)


def in_loops(x: jax.Array) -> jax.Array:
    """x in the form in which it had better go through loops, on the backend that is traced for."""
    return disguise(x) if x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else x


def out_of_loops(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `in_loops` was given, of this dtype."""
    return _kept(x) if x.dtype == dtype else undisguise(x)


@jax.custom_jvp
def _kept(x):
    return x


_kept.defjvp(lambda x, dx: (_found(*x), *dx))


def _found(x):
    return x if x.size < LARGE else in_memory(x)


def in_memory(x: jax.Array) -> jax.Array:
    """x, computed once and by itself."""
    # What is found in a stack, by the index of a loop, would be looked up for every number that is
    # computed from it, by code that is not vectorised for that: for the gradients of the gated
    # product of [1024, 2, 1536] 6.1 ms, and 1.3 ms so. XLA drops a barrier before it fuses loops.
    if jax.default_backend() != "cpu" or x.size == 0:
        return x
    return _alone(lambda x: x, x)


def look_up(stack: jax.Array, index: jax.Array) -> jax.Array:
    """stack[index]; it has no gradient."""

    def find(index, stack):
        return lax.dynamic_index_in_dim(stack, index, keepdims=False)

    large = math.prod(stack.shape[1:]) >= LARGE
    if jax.default_backend() != "cpu" or stack.dtype != jnp.bfloat16 or not large:
        return find(index, stack)

    # As integers, which are moved as they are, and by itself, as `in_memory`: `forward` of 256
    # tokens of SmolLM2 takes 0.83 s so, and 0.88 s without.
    def find_bits(index, stack):
        bits = find(index, lax.bitcast_convert_type(stack, jnp.uint16))
        return lax.bitcast_convert_type(bits, stack.dtype)

    return _alone(find_bits, index, stack)


def _alone(function, *operands):
    """function(*operands), with which XLA fuses nothing: a branch, and the other is never taken."""
    result = jax.eval_shape(function, *operands)
    never = lambda *_: jnp.zeros(result.shape, result.dtype)  # noqa: E731
    return lax.cond(_is_true(operands[0]), function, never, *operands)


def _is_true(x):
    """True, which XLA does not know, because it depends on x."""
    first = x[(0,) * x.ndim]
    bits = lax.bitcast_convert_type(
        first, {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    )
    return lax.population_count(bits) <= 8 * x.dtype.itemsize
