"""The dims of what happens at the borders of manual regions, and of the collectives in them.

A region computes on one device's blocks. So what enters it is split over its axes as its border
says, and inside nothing is split over them further; other axes may split dims as anywhere else.
"""

import itertools
from collections.abc import Sequence

from spmd_core.auto.step_graph import Operation
from spmd_core.graph.values import Entry, Spec
from spmd_core.program.dim_rules import DimRule

_COLLECTIVES = frozenset(
    f"spmd::{name}"
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
)


def is_in_region_alone(entry: Entry) -> bool:
    """Whether an operation crosses a border or is a collective: it cannot be lowered by itself."""
    return entry.border is not None or entry.name in _COLLECTIVES


def dims(entry: Entry, operands: Sequence[Spec]) -> DimRule:
    """The rule of such an operation, of one operand.

    A border keeps each dim, with the size of the whole tensor. A collective keeps those whose size
    it does not change.
    """
    ((given,), (made,)) = [x.shape for x in operands], [x.shape for x in entry.outs]
    numbers = itertools.count()
    sizes: list[int] = []
    sides: list[list[tuple[int, ...]]] = [[], []]
    for pair in zip(given, made, strict=True):
        is_kept = pair[0] == pair[1] or entry.border is not None
        common = next(numbers) if is_kept and max(pair) > 1 else None
        if common is not None:
            sizes.append(max(pair))
        for side, n in zip(sides, pair):
            if n <= 1 and common is None:
                side.append(())
            elif common is not None:
                side.append((common,))
            else:
                side.append((next(numbers),))
                sizes.append(n)
    changed = frozenset(f for a, b in zip(*sides) if a != b for f in (*a, *b))
    operand, result = (tuple(side) for side in sides)
    return DimRule(tuple(sizes), (operand,), (result,), ({},), (frozenset(),), frozenset(), changed)


def given(operation: Operation) -> dict[int, int | None]:
    """For axes of the mesh what the region says of an operation: the factor that each splits.

    None: it splits nothing.
    """
    if operation.manual is None:
        return {}
    found: dict[int, int | None] = dict.fromkeys(operation.manual.axes)
    if operation.entry.border is not None:
        for factors, axes in zip(operation.dims[0][1], operation.entry.border.sharding.dims):
            found.update((axis, factors[0]) for axis in axes if factors)
    return found
