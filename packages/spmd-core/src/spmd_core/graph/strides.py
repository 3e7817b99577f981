"""Arithmetic of shapes and strides: overlap and density."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=8192)
def overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements lie at one place."""
    span, nested = 0, True
    for step, n in sorted(zip(strides, shape)):
        if n > 1:
            if step == 0:
                return True
            nested &= step > span
            span += (n - 1) * step
    # In the order of strides each step leaves behind what the smaller dims span; where not, the places themselves must tell.
    return (
        not nested
        and 0 not in shape
        and len(np.unique(_places(shape, strides))) != int(np.prod(shape))
    )


def _places(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    places = np.zeros((1,) * len(shape), np.int64)
    for d, (n, step) in enumerate(zip(shape, strides)):
        places = places + (np.arange(n) * step).reshape(
            [-1 if e == d else 1 for e in range(len(shape))]
        )
    return places


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without a gap and without sharing a place, in some order of the dims."""
    step = 1
    for stride, n in sorted(zip(strides, shape)):
        if n != 1:
            if stride != step:
                return False
            step *= n
    return True
