"""Propagates how indices are split, from inputs and marks, so that each device checks its own.

As for images, a layout that was guessed wrong costs a resharding of the indices, and changes no
value. Indices whose layout is not known, such as a slice of a split dim, cost one more all-reduce
of a number.
"""

import math
from collections.abc import Callable, Sequence

from jax.sharding import NamedSharding

from spmd_core.graph.values import Spec
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program import regions
from spmd_core.program.index_flag import Split
from spmd_core.program.ir import Op, Ref
from spmd_core.program.target import Target

_MAX_DEPTH = 64


class IndexLayouts:
    """The layouts of the values of one graph."""

    def __init__(self, target: Target) -> None:
        self._target, self._mesh = target, target.mesh

    def split(self, value: Ref) -> Split:
        """How the array of a value is split."""
        if not self._mesh.exists:
            return ()
        if value.manual is not None:
            return self._named(regions.placement(value.manual).device_sharding)
        return self._split(value, _MAX_DEPTH)

    def _split(self, value: Ref, depth: int) -> Split:
        if not isinstance(op := value.producer, Op):
            split = self._named(op.leaf.placement.device_sharding)
            return self._of_shape(split, value.spec) if value.manual is None else ()
        if op.entry.sharding is not None and op.entry.along is None:
            return self._of_shape(self._named(self._target.named(op.entry.sharding)), value.spec)
        if depth == 0 or value.manual is not None:
            return ()
        return self._of_operation(op, value.spec, depth)

    def _of_operation(self, op: Op, spec: Spec, depth: int) -> Split:
        """The layout of an operation's result: that of the first input that determines it."""
        if op.entry.traits.elements is Elements.PERMUTED:  # the shape does not show the order
            return ()
        operands = [x for x in op.operands if x.manual is None]
        for x in operands:
            shape = x.spec.shape
            if shape == spec.shape or math.prod(shape) == math.prod(spec.shape) > 1:
                return reshaped(self._split(x, depth - 1), shape, spec.shape, self._size)
        for x in operands:
            shape = x.spec.shape
            if shape and len(shape) >= len(spec.shape):
                split = self._split(x, depth - 1)
                return tuple(axes if m == n else () for axes, m, n in zip(split, shape, spec.shape))
        return ()

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._mesh.mesh.shape[axis] for axis in axes)

    def _named(self, sharding: NamedSharding) -> Split:
        if not self._mesh.has(sharding):
            return ()
        entries = self._mesh(sharding).spec
        return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)

    def _of_shape(self, split: Split, spec: Spec) -> Split:
        """Without the axes of dims of one element, which are replicated."""
        return tuple(axes if n > 1 else () for axes, n in zip(split, spec.shape))


def reshaped(
    split: Split,
    before: Sequence[int],
    after: Sequence[int],
    size: Callable[[tuple[str, ...]], int],
) -> Split:
    """How the result of a reshape is split: a dim's axes go to the first dim that it becomes.

    Args:
        split: how the operand is split.
        before: the operand's shape.
        after: the result's shape.
        size: returns the number of positions along some axes.
    """
    if not any(split):
        return ()
    no_axes: tuple[str, ...] = ()
    own = [*split, *[no_axes] * (len(before) - len(split))]
    result = [no_axes] * len(after)
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
