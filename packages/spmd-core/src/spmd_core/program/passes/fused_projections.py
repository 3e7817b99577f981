"""Reorders the weight of a fused product, such as q, k and v, so that devices have their own heads.

GPT-2 computes queries, keys and values by one product, and slices its result into three sections.
If a mesh axis splits the columns of the weight, a device computes a part of one or two sections,
but needs a part of each; in backward, the gradients of the sections are concatenated in turn. XLA's
partitioner moves these activations between devices, more than once and in full shards, and
attention waits for them. This pass moves the columns of the weight instead, which nothing has to
wait for, and those of its gradient after the reduction. The product then has a device's part of all
sections side by side (device order, see `sections`), and slices and concatenations of sections move
nothing. The same is done if features are concatenated before a product whose weight is split by
rows.

A product treats all columns alike, so its values do not change. Sums over the columns, such as the
gradient of the product's input, are added up in another order, as each device has other columns. If
the weight on a device is larger than the activations that would not move, nothing changes.

GPT-2 0.5B over 4 x 2 TPU v4 in bfloat16, with 1,024 tokens on a device, sends 12% less in a step.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from spmd_core.program.ir import Graph, Op, Ref, Rewriter
from spmd_core.program.mark_names import is_plain_addition
from spmd_core.program.moved_dims import (
    MeshAxis,
    Moved,
    axes_of_mark,
    axes_of_weight,
    computed_by,
    is_product,
    num_on_device,
    read_by,
    result_dim,
    source_of_weight,
    step_before,
)
from spmd_core.program.partial_sums import ADDITION, REDUCTION
from spmd_core.program.sections import Sections
from spmd_core.program.target import Target

_SLICE, _CONCATENATION = "aten::slice.Tensor", "aten::cat"


def fused_projections(graph: Graph, target: Target) -> Graph:
    """The graph in which weights of fused products are reordered in place of their results."""
    finder = _Finder(graph, target)
    if not target.is_split or not finder.axes:
        return graph
    for value, dim, slices in _cuts(graph):
        finder.add_cut(value, dim, slices)
    for op in graph.ops:
        if op.entry.name == _CONCATENATION and op.manual is None:
            finder.add_join(op)
    return _Rewriting(graph, finder).graph() if finder.moved else graph


def _cuts(graph: Graph) -> Iterator[tuple[Ref, int, dict[Op, range]]]:
    """The values that are sliced along one dim, with the slices that read them."""
    found: dict[tuple[Ref, int], dict[Op, range]] = {}
    for op in graph.ops:
        if op.entry.name == _SLICE and op.manual is None:
            found.setdefault((op.operands[0], _dim(op)), {})[op] = _indices(op)
    for (value, dim), slices in found.items():
        yield value, dim, slices


def _indices(op: Op) -> range:
    """The indices that a slice takes along its dim."""
    given, length = op.entry.arguments or {}, op.operands[0].spec.shape[_dim(op)]
    return range(*slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(length))


def _dim(op: Op) -> int:
    """The dim along which an operation slices or concatenates."""
    dim: int = (op.entry.arguments or {}).get("dim", 0)
    return dim % len(op.operands[0].spec.shape)


class _Finder:
    """Finds the products whose weights are reordered.

    Attributes:
        axes: the axes that may split features, each with the number of parts into which it and the
            axes of the data split an activation.
        moved: the operations from these products to the slices or concatenations of sections.
        joins: the concatenations of sections.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        self.axes = _axes_of_features(graph, target)
        self._users = graph.users() if self.axes else {}
        self._positions = {op: i for i, op in enumerate(graph.ops)} if self.axes else {}
        self._outputs = {*graph.outputs, *graph.checked}
        self._known: dict[Sections, Sections] = {}
        self.moved: dict[Op, tuple[Sections, Moved]] = {}
        self.joins: dict[Op, Sections] = {}

    def add_cut(self, value: Ref, dim: int, slices: Mapping[Op, range]) -> None:
        """Adds a value that is sliced into sections, with the operations that compute it."""
        bounds = sorted({(x.start, x.stop) for x in slices.values()})
        starts, stops = zip(*bounds)
        is_whole = (0, *stops) == (*starts, value.spec.shape[dim])
        if not is_whole or any(x.step != 1 for x in slices.values()):
            return
        found = self._upwards(value, dim) if self._is_read_by(value, slices) else None
        sections = self._sections(found, [stop - start for start, stop in bounds], value)
        if found and sections is not None and value.op is not None:
            last = found[value.op]
            last = last._replace(stays=None, restored={**last.restored, value.result: dim})
            self.moved |= {op: (sections, moved) for op, moved in found.items()}
            self.moved[value.op] = (sections, last)

    def add_join(self, op: Op) -> None:
        """Adds a concatenation of sections, with the operations that read it."""
        rank = len(op.entry.spec.shape)
        if rank == 0 or any(len(x.spec.shape) != rank for x in op.operands):
            return
        dim = _dim(op)
        found = self._downwards(Ref(op), dim)
        sections = self._sections(found, [x.spec.shape[dim] for x in op.operands], Ref(op))
        if found and sections is not None:
            self.moved |= {each: (sections, moved) for each, moved in found.items()}
            self.joins[op] = sections

    def _upwards(self, value: Ref, dim: int) -> dict[Op, Moved] | None:
        """The operations from a product to a value; empty for a weight.

        None if the value is computed in another way.
        """
        reached: dict[Op, Moved] = {}
        pending = [(value, dim)]
        while pending:
            value, dim = pending.pop()
            op = value.op
            moved = None if op is None else computed_by(op, value.result, dim)
            if op is None or moved is None:
                if axes_of_weight(value, dim) is None:
                    return None
            elif reached.setdefault(op, moved) != moved:
                return None
            elif all(op.operands.count(op.operands[i]) == 1 for i in moved.operands):
                pending += [(op.operands[i], own) for i, own in moved.operands.items()]
            else:
                return None
        found: dict[Op, Moved] = {}
        for op in sorted(reached, key=self._positions.__getitem__):
            inside = [x for x in (op.operands[i] for i in reached[op].operands) if x.op in found]
            if not all(self._is_read_by(x, (op,)) for x in inside):
                return None
            if inside or is_product(op.entry):
                found[op] = reached[op]
        return found

    def _downwards(self, value: Ref, dim: int) -> dict[Op, Moved] | None:
        """The operations from a value to the products that read it; None if others read it."""
        found: dict[Op, Moved] = {}
        pending = [(value, dim)]
        while pending:
            value, dim = pending.pop()
            if value in self._outputs or value not in self._users:
                return None
            for op in self._users[value]:
                moved = read_by(op, value, dim)
                if moved is None or op in found:
                    return None
                found[op] = moved
                if moved.stays is not None:
                    own = result_dim(op, dim)
                    assert own is not None
                    pending.append((Ref(op), own))
        return found

    def _is_read_by(self, value: Ref, ops: Sequence[Op] | Mapping[Op, object]) -> bool:
        """Whether only these operations read a value."""
        return value not in self._outputs and all(op in ops for op in self._users.get(value, ()))

    def _sections(
        self, found: Mapping[Op, Moved] | None, sizes: Sequence[int], value: Ref
    ) -> Sections | None:
        """The sections, if one axis that splits no data splits each of them evenly.

        Args:
            found: the operations, none of which may have other sections.
            sizes: the sizes of the sections.
            value: the value that is sliced or concatenated.
        """
        if not found or not self.moved.keys().isdisjoint(found):
            return None
        weights: dict[Ref, int] = {}
        axes: set[MeshAxis] = set()
        for op, moved in found.items():
            for position, dim in moved.operands.items():
                x = op.operands[position]
                if x == value or x.op in found:
                    continue
                split = axes_of_weight(x, dim)
                if split is None or len(split) > 1:
                    return None
                axes.update(split)
                source, _ = source_of_weight(x, dim)
                weights[source] = num_on_device(source)
        if len(axes) != 1:
            return None
        (axis,) = axes
        num_parts = self.axes.get(axis)
        if num_parts is None or sum(weights.values()) * num_parts > value.spec.num_elements:
            return None
        for op, moved in found.items():
            # A mark that splits the result in another way takes precedence.
            if op.entry.along is None or axis[1] in op.entry.along:
                marked = [axes_of_mark(op, dim) for dim in moved.operands.values()]
                if op.entry.sharding is not None and marked != [(axis,)]:
                    return None
        made = Sections.of(*axis, sizes)
        return made and self._known.setdefault(made, made)


def _axes_of_features(graph: Graph, target: Target) -> dict[MeshAxis, int]:
    """The axes that split no data, each with the number of parts of an activation.

    A weight that an axis of the data splits is gathered before its use, and so left out.
    """
    placed = [x.leaf.placement.sharding for x in graph.inputs]
    shardings = {*placed, *(op.entry.sharding for op in graph.ops)} - {None}
    found: dict[MeshAxis, int] = {}
    for sharding in shardings:
        # A manual region must have all devices of its program, in the program's order.
        if sharding is None or sharding.mesh.ids != target.device_ids:
            continue
        mesh = sharding.mesh
        by_data = [(*x.batch, *x.sequence) for x in target.data_splits if x.mesh == mesh]
        num_parts = math.prod(mesh.mesh_shape[axis] for axis in (by_data or [()])[0])
        for axis in {axis for axes in sharding.dims for axis in axes}:
            size = mesh.mesh_shape[axis]
            if size > 1 and not any(axis in axes for axes in by_data):
                found[mesh, axis] = num_parts * size
    return found


class _Rewriting:
    """Reorders weights, and restores the original order of values where it is needed."""

    def __init__(self, graph: Graph, found: _Finder) -> None:
        self._old, self._found, self._rewriter = graph, found, Rewriter(graph)
        # Values of the old graph that the new one has in the order of devices: those that only
        # moved operations read; those that others do, with their dims; of these, the sections.
        self._inside: set[Ref] = set()
        self._ordered: dict[Ref, tuple[Sections, int]] = {}
        self._parts: dict[Ref, tuple[Ref, ...]] = {}
        self._weights: dict[tuple[Ref, int, Sections], Ref] = {}
        for op in graph.ops:
            self._rewrite(op)

    def graph(self) -> Graph:
        for value in (*self._old.outputs, *self._old.checked):
            self._restore(value, self._old.ops[-1])
        return self._rewriter.graph()

    def _rewrite(self, op: Op) -> None:
        moved = self._found.moved.get(op)
        if op in self._found.joins:
            self._join(op, self._found.joins[op])
        elif moved is not None:
            self._move(op, *moved)
        else:
            self._keep(op)

    def _join(self, op: Op, sections: Sections) -> None:
        parts = [self._restore(x, op) for x in op.operands]
        made = self._rewriter.add(sections.join(_dim(op), op.entry.spec), parts, op.source)
        self._rewriter.replace(Ref(op), Ref(made))
        self._inside.add(Ref(op))

    def _move(self, op: Op, sections: Sections, moved: Moved) -> None:
        operands = []
        for position, value in enumerate(op.operands):
            dim = moved.operands.get(position)
            if dim is None:
                operands.append(self._restore(value, op))
            elif value in self._inside:
                operands.append(self._rewriter.now(value))
            else:
                operands.append(self._weight(value, dim, sections, op))
        self._rewriter.keep(op, operands)
        if moved.stays is not None:
            self._inside.add(Ref(op, moved.stays))
        self._ordered.update((Ref(op, i), (sections, dim)) for i, dim in moved.restored.items())

    def _weight(self, value: Ref, dim: int, sections: Sections, reader: Op) -> Ref:
        """A weight in device order."""
        copies: list[tuple[Op, Ref, int]] = []
        while (value, dim, sections) not in self._weights:
            step, op = step_before(value, dim), value.op
            if step is None or op is None:
                now = self._restore(value, reader)
                made = self._rewriter.add(sections.order(dim, value.spec), [now], reader.source)
                self._weights[value, dim, sections] = Ref(made)
            else:
                copies.append((op, value, dim))
                value, dim = step
        now = self._weights[value, dim, sections]
        for op, value, dim in reversed(copies):
            now = Ref(self._rewriter.add(op.entry, [now], op.source, scalars=op.scalars))
            self._weights[value, dim, sections] = now
        return now

    def _keep(self, op: Op) -> None:
        if self._ordered.keys().isdisjoint(op.operands):
            self._rewriter.keep(op)
            return
        if op.entry.name == _SLICE and self._cut(op):
            return
        carried = self._carried(op)
        if carried is None:
            for value in op.operands:
                self._restore(value, op)
        else:
            self._ordered[Ref(op)] = carried
        self._rewriter.keep(op)

    def _cut(self, op: Op) -> bool:
        """Whether a slice is a section of a value in device order, which it then reads."""
        (value,) = op.operands
        sections, dim = self._ordered.get(value, (None, None))
        if sections is None or dim != _dim(op) or _indices(op) not in sections.indices:
            return False
        if value not in self._parts:
            entry, now = sections.cut(dim, value.spec), self._rewriter.now(value)
            self._parts[value] = self._rewriter.add(entry, [now], op.source).results
        number = sections.indices.index(_indices(op))
        self._rewriter.replace(Ref(op), self._parts[value][number])
        return True

    def _carried(self, op: Op) -> tuple[Sections, int] | None:
        """The sections of a result that is read in device order, with their dim.

        Gradients are added up, reduced and marked before they are reordered.
        """
        known = {self._ordered.get(x) for x in op.operands}
        first = known.pop() if len(known) == 1 else None
        if first is None:
            return None
        sections, dim = first
        shapes = {x.spec.shape for x in (*op.operands, Ref(op))}
        if op.entry.name == ADDITION or (is_plain_addition(op.entry) and len(shapes) == 1):
            return first
        if op.entry.name == REDUCTION:
            return sections, dim - 1
        own = None if op.is_inserted else result_dim(op, dim)
        return None if own is None else (sections, own)

    def _restore(self, value: Ref, reader: Op) -> Ref:
        """A value in the original order, for an operation that reads it."""
        assert value not in self._inside, f"{reader.entry.name} reads columns in another order"
        if value in self._ordered:
            sections, dim = self._ordered.pop(value)
            now = self._rewriter.now(value)
            made = self._rewriter.add(sections.restore(dim, value.spec), [now], reader.source)
            self._rewriter.replace(value, Ref(made))
        return self._rewriter.now(value)
