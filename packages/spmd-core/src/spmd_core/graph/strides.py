"""Overlap and density of a strided tensor, from its shape and strides."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=8192)
def overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements share one memory location."""
    span, nested = 0, True
    for step, n in sorted(zip(strides, shape)):
        if n > 1:
            if step == 0:
                return True
            nested &= step > span
            span += (n - 1) * step
    # No elements meet if each stride exceeds the span of the dims with smaller strides. Otherwise,
    # only the offsets themselves tell.
    return (
        not nested
        and 0 not in shape
        and len(np.unique(_offsets(shape, strides))) != int(np.prod(shape))
    )


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
