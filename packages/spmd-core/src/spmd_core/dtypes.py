"""The mapping between torch's and jax's dtypes, and views of host data in either."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import torch

_JAX_BY_TORCH: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(jnp.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(jnp.float8_e5m2),
}
_TORCH_BY_JAX = {jax_dtype: torch_dtype for torch_dtype, jax_dtype in _JAX_BY_TORCH.items()}
# numpy does not know these dtypes, so torch's data becomes numpy's through an integer dtype of the
# same width.
_BIT_PATTERN = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


@cache
def float8_saturates() -> bool:
    """Whether this torch rounds what a float8_e4m3fn cannot hold to its largest, not to NaN."""
    return not torch.tensor(1e4, device="cpu").to(torch.float8_e4m3fn).isnan().item()


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The numpy/jax dtype of a torch dtype.

    Raises:
        TypeError: the devices have no such dtype (quantised dtypes).
    """
    try:
        return _JAX_BY_TORCH[dtype]
    except KeyError:
        known = ", ".join(str(d).removeprefix("torch.") for d in _JAX_BY_TORCH)
        raise TypeError(
            f"a tensor on 'xla' must have one of the dtypes {known}; got {dtype}. "
            "Convert it first with .to(dtype)."
        ) from None


def to_torch(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of a jax dtype. Raises TypeError if torch has none (for instance int4)."""
    try:
        return _TORCH_BY_JAX[np.dtype(dtype)]
    except (KeyError, TypeError):  # numpy knows no random keys
        raise TypeError(
            f"an array that becomes a tensor has a dtype of torch; got {dtype}, for which torch "
            "has none. Convert the array before."
        ) from None


def numpy_view(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as a numpy array of the corresponding jax dtype, without a copy.

    The tensor must not require grad.
    """
    bits = _BIT_PATTERN.get(tensor.dtype)
    if bits is None:
        return tensor.numpy()
    return tensor.view(bits).numpy().view(to_jax(tensor.dtype))


def tensor_view(array: np.ndarray) -> torch.Tensor:
    """A numpy array of a jax dtype as a CPU tensor over the same memory.

    An array that is read-only, not C-contiguous or of the other byte order is copied first.
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    dtype = to_torch(array.dtype)
    # An array of one row counts as contiguous with any stride, and torch takes no negative one.
    is_reversed = any(stride < 0 for stride in array.strides)
    if not array.flags.writeable or not array.flags.c_contiguous or is_reversed:
        array = array.copy(order="C")
    bits = _BIT_PATTERN.get(dtype)
    if bits is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16 if bits is torch.int16 else np.uint8)).view(dtype)


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether saved values may be converted: with rounding at most, to the same kind of number.

    An integer that becomes a float is a quantised weight without its scale; so is a float of 8
    bits.
    """
    if source == target:
        return True
    if source.is_floating_point and target.is_floating_point:
        return min(source.itemsize, target.itemsize) > 1
    kinds = [
        (d.is_floating_point, d.is_complex, d is torch.bool, np.dtype(to_jax(d)))
        for d in (source, target)
    ]
    return kinds[0][:3] == kinds[1][:3] and np.can_cast(kinds[0][3], kinds[1][3], "safe")
