"""A jax function whose layouts are tried, and what makes its operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# B, T, D: sizes that the axes of most meshes divide, and sizes that they do not.
SIZES = {"even": (8, 4, 12), "uneven": (5, 6, 7)}
Make = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class JaxCall:
    """A jax function whose layouts are tried.

    Attributes:
        function: of the operands; returns an array, or a tuple of arrays.
        operands: for B, T and D, what makes each operand.
        has_gradient: whether the gradients of floating-point operands are compared too.
        tolerance: of float64 values near 1.
    """

    function: Callable[..., Any]
    operands: Callable[[int, int, int], Sequence[Make]]
    has_gradient: bool = True
    tolerance: float = 1e-8

    def arrays(self, size: str) -> list[np.ndarray]:
        """The operands for a key of `SIZES`, float64 or int64, the same at each call."""
        generator = np.random.default_rng(0)
        return [make(generator) for make in self.operands(*SIZES[size])]


def floats(*shape: int) -> Make:
    return lambda generator: generator.standard_normal(shape)


def with_nan(*shape: int) -> Make:
    def make(generator: np.random.Generator) -> np.ndarray:
        x = generator.standard_normal(shape)
        x.flat[x.size // 7], x.flat[x.size // 3], x.flat[x.size // 2] = np.nan, np.inf, -np.inf
        return x

    return make


def ints(low: int, high: int, *shape: int) -> Make:
    return lambda generator: generator.integers(low, high, shape)


def given(*values: int) -> Make:
    return lambda generator: np.asarray(values)


def order(size: int, count: int) -> Make:
    """Distinct integers below `size`."""
    return lambda generator: generator.permutation(size)[:count]


def one(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, d)]


def matrix(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, d)]


def matrices(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, t)]


def nan(b: int, t: int, d: int) -> Sequence[Make]:
    return [with_nan(b, t, d)]


# Starts of slices: inside, and past both ends, where jax takes the first or the last elements.
STARTS = given(2, 99, -99, 0)


def started(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, d), STARTS]
