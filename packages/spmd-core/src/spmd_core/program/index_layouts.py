"""Follows how the indices in a graph are split over devices, from leaves and marks on.

Each device then checks those that it has. As for images, a layout that was guessed wrong costs that
these are moved, and no value.
"""

import math
from collections.abc import Callable, Sequence

from jax.sharding import NamedSharding

from spmd_core.graph.values import Entry, Spec
from spmd_core.program import regions
from spmd_core.program.program_graph import Graph, Node
from spmd_core.runtime.jax_sharding import CommonMesh
from spmd_core.sharding.sharding import Manual

# For each dim the names of the axes that split it, the major one first; none if it is whole, or not
# known.
Split = tuple[tuple[str, ...], ...]
# They have the shape of other operations, and another order of elements.
_REORDERED = ("aten::permute", "aten::transpose", "aten::t", "aten::as_strided")
_MAX_DEPTH = 64


class IndexLayouts:
    """The layouts of the values of one graph.

    Args:
        graph: the recorded operations.
        common_mesh: the program's.
        to_named: the sharding of a mark.
        manual_of: the manual region that the value of a number is local to, or None.
    """

    def __init__(
        self,
        graph: Graph,
        common_mesh: CommonMesh,
        to_named: Callable[[Entry], NamedSharding],
        manual_of: Callable[[int], Manual | None],
    ) -> None:
        self._graph, self._mesh = graph, common_mesh
        self._to_named, self._manual_of = to_named, manual_of
        self._made = [(node, i) for node in graph.nodes for i in range(len(node.entry.outs))]

    def split(self, value: int) -> Split:
        """How the array of a value's number is split, as the program's function has it."""
        if not self._mesh.exists:
            return ()
        manual = self._manual_of(value)
        if manual is not None:
            return self._named(regions.placement(manual).device_sharding)
        return self._split(value, _MAX_DEPTH)

    def _split(self, value: int, depth: int) -> Split:
        if value < 0:
            leaf = self._graph.leaves[-value - 1]
            split = self._named(leaf.placement.device_sharding)
            return self._of_shape(split, leaf.spec) if leaf.placement.manual is None else ()
        node, index = self._made[value]
        spec = node.entry.outs[index]
        if node.entry.sharding is not None and node.entry.along is None:
            return self._of_shape(self._named(self._to_named(node.entry)), spec)
        if depth == 0 or self._manual_of(value) is not None:
            return ()
        return self._of_operation(node, spec, depth)

    def _of_operation(self, node: Node, spec: Spec, depth: int) -> Split:
        """The layout that an operation hands on from the first input whose shape tells it."""
        if node.entry.name.startswith(_REORDERED):
            return ()
        for number in node.inputs:
            if self._manual_of(number) is not None:
                continue
            shape = self._shape(number)
            if shape == spec.shape or math.prod(shape) == math.prod(spec.shape) > 1:
                return reshaped(self._split(number, depth - 1), shape, spec.shape, self._size)
        for number in node.inputs:
            shape = self._shape(number)
            if self._manual_of(number) is None and shape and len(shape) >= len(spec.shape):
                split = self._split(number, depth - 1)
                return tuple(axes if m == n else () for axes, m, n in zip(split, shape, spec.shape))
        return ()

    def _shape(self, number: int) -> tuple[int, ...]:
        if number < 0:
            return self._graph.leaves[-number - 1].spec.shape
        node, index = self._made[number]
        return node.entry.outs[index].shape

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._mesh.mesh.shape[axis] for axis in axes)

    def _named(self, sharding: NamedSharding) -> Split:
        if not self._mesh.has(sharding):
            return ()
        entries = self._mesh(sharding).spec
        return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)

    def _of_shape(self, split: Split, spec: Spec) -> Split:
        """Without the axes of dims of one element, which are whole."""
        return tuple(axes if n > 1 else () for axes, n in zip(split, spec.shape))


def reshaped(
    split: Split,
    before: Sequence[int],
    after: Sequence[int],
    size: Callable[[tuple[str, ...]], int],
) -> Split:
    """How the result of a reshape is split: a dim's axes go to the first dim that it becomes.

    Args:
        split: of the operand.
        before: its shape.
        after: the result's shape.
        size: the number of parts that axes make.
    """
    if not any(split):
        return ()
    whole: tuple[str, ...] = ()
    own = [*split, *[whole] * (len(before) - len(split))]
    result = [whole] * len(after)
    i = j = 0
    while i < len(before) and j < len(after):
        first, start = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(before):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                return ()
        split_dims = [d for d in range(first, i) if own[d]]
        target = next((d for d in range(start, j) if after[d] > 1), start)
        if len(split_dims) == 1 and all(before[d] == 1 for d in range(first, split_dims[0])):
            axes = own[split_dims[0]]
            is_even = before[split_dims[0]] % size(axes) == 0 and after[target] % size(axes) == 0
            if is_even or after[target] == before[split_dims[0]]:
                result[target] = axes
    return tuple(result)
