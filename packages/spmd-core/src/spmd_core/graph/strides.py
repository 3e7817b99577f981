"""Overlap and density of a strided tensor, from its shape and strides.

Results have the strides that torch's CPU kernels give (`recording.cpu_kernels`), so `.view` of a
transposed tensor fails as in eager mode, and `as_strided` means the same elements. They are
metadata: the data itself is always stored in logical order.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=8192)
def overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements share one memory location."""
    if 0 in shape:
        return False
    span, nested = 0, True
    for step, n in sorted(zip(strides, shape)):
        if n > 1:
            if step == 0:
                return True
            nested &= step > span
            span += (n - 1) * step
    # No two elements coincide if each stride exceeds the span of the dims with smaller strides.
    # Otherwise the offsets must be compared.
    return not nested and len(np.unique(_offsets(shape, strides))) != int(np.prod(shape))


def _offsets(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """The offset of each element, in elements, as an int64 array of shape `shape`."""
    offsets = np.zeros((1,) * len(shape), np.int64)
    for d, (n, step) in enumerate(zip(shape, strides)):
        offsets = offsets + (np.arange(n) * step).reshape(
            [-1 if e == d else 1 for e in range(len(shape))]
        )
    return offsets


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements, in some order of the dims, fill their memory with no gap or overlap."""
    step = 1
    for stride, n in sorted(zip(strides, shape)):
        if n != 1:
            if stride != step:
                return False
            step *= n
    return True


def dense_strides(
    shape: tuple[int, ...], like_shape: tuple[int, ...], like_strides: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides that fill memory without gaps, in the order of another tensor's dims.

    Args:
        shape: of the tensor that gets the strides.
        like_shape: of the other tensor; as many dims.
        like_strides: its strides. Where one is 0, the result's is 0, too.
    """
    # Of dims with the same stride, those of size 1 come first, as they add nothing to it.
    order = sorted(range(len(shape)), key=lambda d: (like_strides[d], like_shape[d] != 1, -d))
    strides, step = [0] * len(shape), 1
    for d in order:
        if like_strides[d]:
            strides[d] = step
            step *= max(shape[d], 1)
    return tuple(strides)
