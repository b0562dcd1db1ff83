"""The same bits in NumPy, JAX and PyTorch. PyTorch is imported only when a tensor is wanted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The float types that only extension packages give NumPy. PyTorch has them under the same names;
# it hands NumPy, and takes from it, their bits as integers.
EXTENSION_TYPES = {
    name: np.dtype(name)
    for name in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
}


def is_array(x: Any) -> bool:
    """Whether x is an array of NumPy, JAX or PyTorch; a number, NumPy's too, is none."""
    return isinstance(x, jax.Array | np.ndarray) or _is_torch(x)


def is_float(x: Any) -> bool:
    """Whether x holds real floating-point numbers, bfloat16 included."""
    return bool(jnp.issubdtype(to_numpy(x).dtype, jnp.floating))


def to_numpy(x: Any) -> np.ndarray:
    """x as a NumPy array with the same bits, where possible a view of its memory.

    bfloat16 and the float8 types are those of the package ml_dtypes.
    """
    if _is_torch(x):
        import torch

        x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
        name = str(x.dtype).removeprefix("torch.")
        if name in EXTENSION_TYPES:
            bits = torch.int16 if x.element_size() == 2 else torch.uint8
            return x.view(bits).numpy().view(EXTENSION_TYPES[name])
        return x.numpy()
    return np.asarray(x)


def to_jax(x: Any) -> jax.Array:
    """x as a JAX array with the same values, sharing no memory with x.

    Raises: ValueError without 64-bit types for float64 and complex128, which would be rounded, and
      for integers that do not fit into 32 bits.
    """
    array = to_numpy(x)
    result = jnp.array(array)
    if result.dtype != array.dtype and not (
        jnp.issubdtype(array.dtype, jnp.integer) and np.array_equal(np.asarray(result), array)
    ):
        raise ValueError(
            f"to_jax: {array.dtype} needs 64-bit types; got dtype={array.dtype}. "
            'Call jax.config.update("jax_enable_x64", True), or pass another dtype.'
        )
    return result


def to_torch(x: Any) -> Any:
    """x as a PyTorch tensor with the same bits, sharing no memory with x."""
    import torch

    if _is_torch(x):
        return x.detach().clone()
    array = np.array(x, order="C")
    if array.dtype.name in EXTENSION_TYPES:
        bits = np.int16 if array.dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def _is_torch(x: Any) -> bool:
    return hasattr(x, "__torch_function__") and hasattr(x, "detach")
