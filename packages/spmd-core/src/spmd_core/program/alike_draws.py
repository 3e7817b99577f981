"""Finds tensors that are drawn alike: one program, which runs once for each, computes them.

A model's parameters are drawn in one cut. A program that draws those of 24 layers has the same
generator a hundred times, and the compiler takes a tenth of a second for each. A program for one
tensor is compiled once for all that have its shape, dtype, distribution and mark, and needs no
memory beside its result.
"""

from collections.abc import Hashable, Iterator, Sequence

from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.program.planning import collect

# Below so many tensors, further programs take as long to compile as the operations of one.
_FEWEST = 8
# The operations of one tensor: its memory, a draw, what scales and clips it, and its marks.
_MOST_OPERATIONS = 12


def alike_draws(live: Sequence[Storage]) -> Iterator[list[Storage]]:
    """The pending storages to compute by programs of their own, each list by one.

    Each is a chain of operations that begins without an input, draws random numbers, and has one
    operand at most in each operation. What other pending operations read, such as the noise of a
    step, stays in their program.
    """
    alike: dict[Hashable, list[Storage]] = {}
    for storage in live:
        chain = _chain(storage.value)
        if chain:
            alike.setdefault((storage.sharding, *chain), []).append(storage)
    groups = [storages for storages in alike.values() if len(storages) >= _FEWEST]
    if not groups:
        return
    apart = {storage for storages in groups for storage in storages}
    nodes, _ = collect([storage for storage in live if storage not in apart])
    read = {x for node in nodes for x in node.inputs}
    for storages in groups:
        free = [storage for storage in storages if storage.value not in read]
        if len(free) >= _FEWEST:
            yield free


def _chain(value: Value) -> list[Hashable]:
    """The operations that make a value, the last one first; none if it is not computed apart."""
    chain: list[Hashable] = []
    draws = False
    while len(chain) < _MOST_OPERATIONS:
        if value.data is not None or value.parent is not None or len(value.inputs) > 1:
            return []
        entry = value.entry
        chain.append(entry)
        draws |= entry.random
        if not value.inputs:
            return chain if draws else []
        (value,) = value.inputs
    return []
