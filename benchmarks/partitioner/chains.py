"""Random programs of several operations with marks anywhere: what single operations cannot show.

A chain begins with two to four tensors of float64. Each step (`chain_steps`) reads values of
earlier ones. Some values are marked. The last results are compared, and the gradient of their
weighted sum. As in `programs`, a chain is drawn from a number.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import spmd_core as spmd
from benchmarks.partitioner import chain_steps  # noqa: F401  (adds the makers)
from benchmarks.partitioner.chain_draws import DTYPE, Draw, Step
from benchmarks.partitioner.programs import MESHES, Skip, Spec, weights

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 12, 16)
LARGEST_LEAF = 600  # elements
MOST_STEPS = 12
READ = 3  # results


@dataclass(frozen=True)
class Chain:
    """One program.

    Attributes:
        seed: of the values of the leaves.
        leaves: their shapes.
        steps: the operations.
        marks: numbers of values and their partition specs.
        read: the numbers of the results.
        has_gradient: whether the leaves' gradients are results, too.
    """

    seed: int
    leaves: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    marks: tuple[tuple[int, Spec], ...]
    read: tuple[int, ...]
    has_gradient: bool = True

    def needed(self) -> set[int]:
        """The values that the results need."""
        found = set(self.read)
        for number in range(len(self.leaves) + len(self.steps) - 1, len(self.leaves) - 1, -1):
            if number in found:
                found.update(self.steps[number - len(self.leaves)].inputs)
        return found

    def __str__(self) -> str:
        needed, marks = self.needed(), dict(self.marks)
        words = [
            f"{i}: leaf {shape}" + (f" marked {marks[i]}" if i in marks else "")
            for i, shape in enumerate(self.leaves)
            if i in needed
        ]
        for i, step in enumerate(self.steps, len(self.leaves)):
            if i in needed:
                words.append(
                    f"{i}: {step.name} of {', '.join(map(str, step.inputs))}, {step.shape}"
                    + (f" marked {marks[i]}" if i in marks else "")
                )
        return f"{'; '.join(words)}; {'gradient of ' * self.has_gradient}{self.read}"

    def simpler(self) -> Iterator["Chain"]:
        """The same with one thing less."""
        if self.has_gradient:
            yield replace(self, has_gradient=False)
        for i in self.read if len(self.read) > 1 else ():
            yield replace(self, read=tuple(j for j in self.read if j != i))
        for i in self.read:
            for j in self.steps[i - len(self.leaves)].inputs:
                if j >= len(self.leaves) and len(self.read) == 1:
                    yield replace(self, read=(j,))
        for mark in self.marks:
            yield replace(self, marks=tuple(m for m in self.marks if m is not mark))


class Chains:
    """Draws chains and runs them; `examination.examine` does the rest."""

    name = "chain"

    def draw(self, mesh: int, seed: int) -> Chain:
        """The chain with this number."""
        rng = random.Random(f"chain {mesh} {seed}")
        names = MESHES[mesh][2]
        common = [rng.choice(SIZES) for _ in range(3)]
        shapes = []
        for _ in range(rng.randint(2, 4)):
            shape = [rng.choice([*common, 1, rng.choice(SIZES)]) for _ in range(rng.randint(1, 4))]
            while math.prod(shape) > LARGEST_LEAF:
                shape[rng.randrange(len(shape))] = rng.choice((1, 2, 3))
            shapes.append(tuple(shape))
        marks = {
            i: draw_spec(rng, len(s), names) for i, s in enumerate(shapes) if rng.random() < 0.7
        }
        drawn = Draw(rng, _leaves(seed, shapes, "cpu"))
        steps: list[Step] = []
        count = rng.randint(3, MOST_STEPS)
        for _ in range(20 * count):
            step = drawn.step()
            if step is None:
                continue
            steps.append(step)
            if rng.random() < 0.3:
                marks[len(shapes) + len(steps) - 1] = draw_spec(rng, len(step.shape), names)
            if len(steps) == count:
                break
        numbers = range(len(shapes), len(shapes) + len(steps))
        return Chain(seed, tuple(shapes), tuple(steps), tuple(marks.items()), (*numbers[-READ:],))

    def run(self, chain: Chain, mesh: spmd.Mesh | None) -> list[Any]:
        """The chain's results, recorded on the device; on the CPU without a mesh."""
        needed, marks = chain.needed(), dict(chain.marks)

        def marked(number: int, value: torch.Tensor) -> torch.Tensor:
            if mesh is None or number not in marks or not value.dim():
                return value
            return spmd.mark_sharding(value, mesh, marks[number])

        device = "cpu" if mesh is None else "xla"
        leaves = _leaves(chain.seed, chain.leaves, device)
        values: list[Any] = [
            marked(i, leaf).requires_grad_(chain.has_gradient) for i, leaf in enumerate(leaves)
        ]
        for number, step in enumerate(chain.steps, len(leaves)):
            if number in needed:
                values.append(marked(number, step.compute(*(values[i] for i in step.inputs))))
            else:
                values.append(None)
        results = [values[i] for i in chain.read]
        if not chain.has_gradient:
            return results
        if not any(r.requires_grad for r in results):
            raise Skip
        total = sum((r * weights(r)).sum() for r in results if r.requires_grad)
        gradients = torch.autograd.grad(total, values[: len(leaves)], allow_unused=True)
        return [*(r.detach() for r in results), *gradients]

    def is_as_good(self, chain: Chain, got: list[Any], expected: list[Any]) -> bool:
        """False: float64 leaves no room for rounding."""
        return False


def _leaves(seed: int, shapes: Sequence[tuple[int, ...]], device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=DTYPE, generator=generator).to(device) for s in shapes]


def draw_spec(rng: random.Random, ndim: int, names: Sequence[str]) -> Spec:
    """A partition spec with each axis on a random dim, or on none."""
    axes: list[list[str]] = [[] for _ in range(ndim)]
    for name in rng.sample(list(names), len(names)):
        if ndim and rng.random() < 0.75:
            rng.choice(axes).append(name)
    return tuple(tuple(a) if len(a) > 1 else a[0] if a else None for a in axes)
