"""Sorts rows by group within each device's part of them, not over all devices.

A mixture of experts sorts its tokens by expert, gathers them in that order, and multiplies each by
its expert's matrix. If the mesh splits the tokens, XLA's partitioner sorts over all devices, and
gathers all tokens on each. But the order of the rows of one group among each other decides nothing,
and neither does where a group's rows lie, as long as the product knows. So where that holds for all
readers (`sorted_rows`), each part of the rows is sorted alone, with ends of groups of its own, and
the gathers, the products and the way back stay on the device (`sorted_blocks`). The values are the
same, but for the order in which sums over rows are added up.

Each device needs the matrices of all groups then. Matrices that the axes of the rows split by group
stay where they are if they are larger than the rows: such a program moves the rows to the experts.
"""

from spmd_core.graph.values import Entry
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.ir import Graph, Op, Ref, Rewriter
from spmd_core.program.sorted_blocks import (
    RowParts,
    ends_of_groups,
    in_parts,
    sum_of_parts,
)
from spmd_core.program.sorted_rows import Role, SortedRows, sorted_rows
from spmd_core.program.target import Replicated, Target
from spmd_core.sharding.sharding import Sharding


def local_sorts(graph: Graph, target: Target) -> Graph:
    """The graph whose rows are sorted within each device's part of them.

    A program for growing sizes stays as it is: its operations were evaluated one by one.
    """
    is_plain = graph.recorded.growth is None and target.replicated_part is Replicated.NOTHING
    if not target.is_split or not is_plain:
        return graph
    found = [(rows, parts) for rows in sorted_rows(graph) if (parts := _parts(rows, target))]
    return _Rewriting(graph, found).graph() if found else graph


def _parts(rows: SortedRows, target: Target) -> RowParts | None:
    """The parts in which rows are to be sorted; None if they are to stay as they are."""
    for split in target.data_splits:
        axes = tuple(axis for axis in split.batch if split.mesh.mesh_shape[axis] > 1)
        parts = RowParts(split.mesh, axes)
        if parts.num == 1 or split.mesh.ids != target.device_ids:
            continue
        is_even = all(size % parts.num == 0 for size in rows.num_parts)
        return parts if is_even and not _moves_to_experts(rows, parts) else None
    return None


def _moves_to_experts(rows: SortedRows, parts: RowParts) -> bool:
    """Whether matrices are split by group over the axes of the rows, and larger than the rows."""
    by_group = of_rows = 0
    for op, role in rows.roles.items():
        if role not in (Role.ROWS, Role.COLUMNS):
            continue
        matrices, x = op.operands[:2] if role is Role.COLUMNS else op.operands[1::-1]
        if _is_split_by_group(matrices, parts):
            by_group += matrices.spec.num_bytes
            of_rows += x.spec.num_bytes + op.entry.spec.num_bytes
    return by_group > of_rows


def _is_split_by_group(matrices: Ref, parts: RowParts) -> bool:
    sharding = _sharding(matrices)
    return sharding is not None and bool(
        sharding.mesh == parts.mesh and set(sharding.dims[0]) & set(parts.axes)
    )


def _sharding(matrices: Ref) -> Sharding | None:
    """The mark of matrices, each of which may be transposed, or of what they are converted from."""
    value = matrices
    while (op := value.op) is not None:
        if op.entry.sharding is not None:
            return op.entry.sharding
        source = op.source_of_elements(Elements.PERMUTED)
        if source is None or source.spec.shape[:1] != value.spec.shape[:1]:
            return None
        value = source
    assert not isinstance(value.producer, Op)
    return value.producer.leaf.placement.sharding


def _transposed_twice(op: Op) -> Ref | None:
    """The value that an operation transposes back; None if it does not."""
    inner = op.operands[0].op if op.operands else None
    if inner is None or not op.entry.name == inner.entry.name == "aten::transpose.int":
        return None
    swapped = [{(x.entry.arguments or {})[d] for d in ("dim0", "dim1")} for x in (op, inner)]
    return inner.operands[0] if swapped[0] == swapped[1] else None


class _Rewriting:
    """Computes operations on sorted rows within parts.

    Args:
        graph: the graph.
        found: rows that are sorted, and their parts.
    """

    def __init__(self, graph: Graph, found: list[tuple[SortedRows, RowParts]]) -> None:
        self._rewriter = Rewriter(graph)
        # Equal operations have one entry, so that repeated layers are found to be alike.
        self._entries: dict[object, Entry] = {}
        self._ends: dict[int, Ref] = {}
        places = {op: i for i, (rows, _) in enumerate(found) for op in rows.roles}
        for op in graph.ops:
            if op in places:
                self._rewrite(op, places[op], *found[places[op]])
            elif (total := _transposed_twice(op)) is not None and total.op in places:
                # `batch_sums` finds sums right before the marks of gradients.
                self._rewriter.replace(Ref(op), self._rewriter.now(total))
            else:
                self._rewriter.keep(op)

    def graph(self) -> Graph:
        return self._rewriter.graph()

    def _interned(self, entry: Entry) -> Entry:
        return self._entries.setdefault(entry.key, entry)

    def _rewrite(self, op: Op, place: int, rows: SortedRows, parts: RowParts) -> None:
        role, now = rows.roles[op], self._rewriter.now
        operands = [now(x) for x in op.operands]
        if role in (Role.ROWS, Role.COLUMNS, Role.SUMS):
            operands[2] = self._ends_of(op, place, rows, parts)
        entry = self._interned(in_parts(op.entry, role, parts))
        made = self._rewriter.add(entry, operands, op.source, manuals=(None,) * len(entry.outs))
        if role is Role.SUMS:
            total = self._interned(sum_of_parts(op.entry.spec))
            made = self._rewriter.add(total, made.results, op.source, manuals=(None,))
        for old, new in zip(op.results, made.results):
            self._rewriter.replace(old, new)

    def _ends_of(self, op: Op, place: int, rows: SortedRows, parts: RowParts) -> Ref:
        if place not in self._ends:
            groups, offsets = self._rewriter.now(rows.groups), op.operands[2].spec
            entry = ends_of_groups(rows.num_rows, offsets.shape[0], offsets, parts)
            made = self._rewriter.add(self._interned(entry), [groups], op.source, manuals=(None,))
            self._ends[place] = Ref(made)
        return self._ends[place]
