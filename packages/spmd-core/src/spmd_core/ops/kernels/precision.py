"""The dtype and precision that lowerings compute in, and the dims that they reduce, as in torch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SIXTEEN_BITS = (np.dtype(np.float16), np.dtype(jnp.bfloat16))


def opmath(dtype: np.dtype) -> np.dtype:
    """The dtype in which torch computes values of `dtype` before it rounds them once.

    float32 for the 16-bit floats, else `dtype`.
    """
    return np.dtype(np.float32) if dtype in _SIXTEEN_BITS else np.dtype(dtype)


def widened(x: Any) -> Any:
    """The array in torch's compute dtype; None stays None."""
    return None if x is None else x.astype(opmath(x.dtype))


def is_sixteen_bit(dtype: np.dtype) -> bool:
    """Whether `dtype` is float16 or bfloat16."""
    return dtype in _SIXTEEN_BITS


def is_inexact(dtype: np.dtype) -> bool:
    """Whether `dtype` is a float or a complex dtype (numpy does not know bfloat16)."""
    return jnp.issubdtype(dtype, np.inexact)


def matmul_precision(dtype: np.dtype) -> jax.lax.Precision | None:
    """HIGHEST for float32 and wider floats; None for 16-bit floats and integers.

    torch multiplies float32 in full precision; XLA on GPUs and TPUs does not by default.
    """
    return None if dtype in _SIXTEEN_BITS or not is_inexact(dtype) else jax.lax.Precision.HIGHEST


def reduced_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims that a reduction names, as non-negative ints.

    None or an empty list means all dims. For a 0-dim tensor the result is empty.
    """
    if dim is None or ndim == 0:
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % ndim for d in dims) if dims else tuple(range(ndim))
