"""Draws the steps of a random chain, and computes them on the CPU to know what may follow.

A maker of an operation (`chain_steps`) draws what the operation reads and its other arguments, and
returns a function of the values.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.partitioner.programs import Skip

DTYPE = torch.float64
LARGEST = 4000  # elements of a value
Compute = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: of the maker that drew it.
        inputs: the numbers of the values that it reads; inputs of the chain come first, then steps.
        compute: the result, from these values.
        shape: of the result.
    """

    name: str
    inputs: tuple[int, ...]
    compute: Compute
    shape: tuple[int, ...]


class Draw:
    """Draws steps, and computes them on the CPU to know what may follow.

    Args:
        rng: where choices come from.
        values: the values of the leaves, to which those of the steps are added.
    """

    def __init__(self, rng: random.Random, values: list[torch.Tensor]) -> None:
        self.rng, self.values = rng, [v.requires_grad_() for v in values]
        self.inputs: list[int] = []

    def step(self) -> Step | None:
        """A step; None if the operation that was drawn has no input, or no useful result."""
        self.inputs = []
        name = self.rng.choice(list(MAKERS))
        try:
            compute = MAKERS[name](self)
            result = compute(*(self.values[i] for i in self.inputs))
        except (Skip, RuntimeError, IndexError, ValueError):
            return None
        if result.dtype != DTYPE or not 0 < result.numel() <= LARGEST:
            return None
        if not result.isfinite().all() or result.abs().max() > 1e4:
            return None
        self.values.append(result)
        return Step(name, tuple(self.inputs), compute, tuple(result.shape))

    def take(
        self,
        least: int = 0,
        most: int = 9,
        fits: Callable[[torch.Tensor], bool] = lambda t: True,
    ) -> torch.Tensor:
        """A value with so many dims, most likely a recent one; the step reads it."""
        found = [i for i, t in enumerate(self.values) if least <= t.dim() <= most and fits(t)]
        if not found:
            raise Skip
        self.inputs.append(found[-1 - min(int(self.rng.expovariate(0.5)), len(found) - 1)])
        return self.values[self.inputs[-1]]

    def dim(self, x: torch.Tensor) -> int:
        return self.rng.randrange(x.dim())

    def indices(self, high: int, *shape: int) -> torch.Tensor:
        """Random indices below `high`."""
        count = math.prod(shape)
        return torch.tensor([self.rng.randrange(high) for _ in range(count)]).reshape(shape)

    def weight(self, *shape: int) -> torch.Tensor:
        """Random numbers, such as a kernel of a convolution."""
        count = math.prod(shape)
        numbers = [self.rng.gauss(0, 0.3) for _ in range(count)]
        return torch.tensor(numbers, dtype=DTYPE).reshape(shape)


MAKERS: dict[str, Callable[[Draw], Compute]] = {}


def maker(function: Callable[[Draw], Compute]) -> Callable[[Draw], Compute]:
    """Adds the maker of an operation."""
    MAKERS[function.__name__.strip("_")] = function
    return function
