"""Finds rows that are sorted by group, multiplied group by group, and put back in their order.

So work the experts of a mixture of experts: the tokens are sorted by expert, gathered in that
order, multiplied by the matrix of their expert (`_grouped_mm`), and gathered back by the inverse
permutation. The order of rows of one group among each other decides nothing then but the order in
which gradients are summed. Here each reader of each value in that order is followed, in forward and
backward: it must treat rows alike (`alike_rows`), read or write at the sorted positions, multiply
by groups, or put the rows back. Then the rows may lie in another order, such as sorted within each
part of the rows alone.

Groups must be known to be integers from 0 on, and offsets to be the sums of a histogram of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from spmd_core.graph.values import Entry
from spmd_core.ops.barrier import BARRIER
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.alike_rows import NotAlikeError, Order, orders
from spmd_core.program.index_ranges import bounds_of
from spmd_core.program.ir import Graph, Op, Ref
from spmd_core.program.split_dims import GROUPED

_SORTS = ("aten::sort", "aten::sort.stable")
_READS = ("aten::index.Tensor", "aten::_unsafe_index.Tensor")
_WRITES = ("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put")
# Whole numbers below this are the same in each of these dtypes.
_MOST_GROUPS = 2**24
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


# The orders of an operation's results, by those of its operands.
_Known = dict[tuple[Entry, tuple[Order, ...]], list[Order]]


class Role(Enum):
    """What an operation does with sorted rows, if it does not treat rows alike."""

    SORT = auto()  # groups to sorted groups and their positions; positions to their inverse
    READ = auto()  # rows at positions within the same part of the rows
    WRITE = auto()  # the same for writes
    ROWS = auto()  # each row times the matrix of its group
    COLUMNS = auto()  # the same of transposed rows: the matrix of its group times each column
    SUMS = auto()  # for each group a product over its rows


@dataclass
class SortedRows:
    """Rows that are sorted by group.

    Attributes:
        groups: the group of each row, before the sort.
        roles: the operations that are to be computed within each part of the rows.
        num_parts: a number of parts is possible if it divides each of these numbers.
    """

    groups: Ref
    roles: dict[Op, Role] = field(default_factory=dict)
    num_parts: set[int] = field(default_factory=set)

    @property
    def num_rows(self) -> int:
        return self.groups.spec.shape[0]

    @property
    def num_groups(self) -> int:
        return max(
            op.operands[2].spec.shape[0]
            for op, role in self.roles.items()
            if role in (Role.ROWS, Role.COLUMNS, Role.SUMS)
        )


def sorted_rows(graph: Graph) -> list[SortedRows]:
    """The rows of a graph that are sorted by group, where their order may be another one."""
    if not any(op.entry.name == GROUPED for op in graph.ops):
        return []
    by_groups: dict[Ref, list[Op]] = {}
    for op in graph.ops:
        if _is_sort(op) and op.manual is None:
            groups = _root(op.operands[0])
            bounds = bounds_of(groups)
            if bounds is not None and bounds[0] >= 0 and bounds[1] < _MOST_GROUPS:
                by_groups.setdefault(groups, []).append(op)
    found = []
    known: _Known = {}
    for sorts in by_groups.values():
        try:
            walk = _Walk(graph, sorts, known)
        except NotAlikeError:
            continue
        if not {Role.ROWS, Role.COLUMNS, Role.SUMS}.isdisjoint(walk.found.roles.values()):
            found.append(walk.found)
    return found


def _is_sort(op: Op) -> bool:
    arguments = op.entry.arguments or {}
    return (
        op.entry.name in _SORTS
        and len(op.entry.spec.shape) == 1
        and not arguments.get("descending", False)
        and op.operands[0].spec.dtype in (torch.int32, torch.int64)
    )


def _root(value: Ref) -> Ref:
    """The value that was marked, waited for or copied as this one."""
    while (op := value.op) is not None:
        if op.entry.name == BARRIER:
            value = op.operands[value.result]
            continue
        is_copy = op.entry.name == "aten::copy"  # it may repeat elements, too
        source = op.source_of_elements(Elements.REPEATED if is_copy else Elements.SAME)
        if source is None or source.spec.logical != value.spec.logical:
            break
        value = source
    return value


class _Walk:
    """Follows the values in the order of some sorts of the same groups through a graph.

    Args:
        graph: the graph.
        sorts: the operations that sort.
        known: the orders of results that were found, for operations that layers have alike.

    Raises:
        NotAlikeError: a value is read by what needs this order.
    """

    def __init__(self, graph: Graph, sorts: Sequence[Op], known: _Known) -> None:
        self._known = known
        self.found = SortedRows(sorts[0].operands[0])
        self._groups = _root(sorts[0].operands[0])
        self._highest = (bounds_of(self._groups) or (0, _MOST_GROUPS))[1]
        # The dim that has the rows, of each value that is in the order of the sort.
        self._dims: dict[Ref, int] = {}
        # Positions of sorted rows before the sort, divided by these numbers.
        self._positions: dict[Ref, int] = {}
        # Where each row lies after the sort.
        self._inverses: set[Ref] = set()
        # Sorted groups. Histograms of groups and their sums, with the number of bins.
        self._sorted_groups: set[Ref] = set()
        self._counts: dict[Ref, int] = {}
        self._offsets: dict[Ref, int] = {}
        for op in graph.ops:
            if op in sorts:
                self._sort(op)
            elif op.entry.name == BARRIER:
                for value, result in zip(op.operands, op.results):
                    self._pass_on(value, result)
            else:
                self._follow(op)
        for value in (*graph.outputs, *graph.checked):
            if value in self._dims or value in self._inverses:
                raise NotAlikeError("a result")

    def _sort(self, op: Op) -> None:
        groups, positions = op.results
        self._dims |= {groups: 0, positions: 0}
        self._sorted_groups.add(groups)
        self._positions[positions] = 1
        self._note(op, Role.SORT)

    def _note(self, op: Op, role: Role, *sizes: int) -> None:
        self.found.roles[op] = role
        self.found.num_parts |= {self.found.num_rows, *sizes}

    def _pass_on(self, value: Ref, result: Ref) -> None:
        """A result is equal to another value."""
        for known in (self._dims, self._positions, self._counts, self._offsets):
            if value in known:
                known[result] = known[value]
        for names in (self._inverses, self._sorted_groups):
            if value in names:
                names.add(result)

    def _follow(self, op: Op) -> None:
        self._follow_counts(op)
        name = op.entry.name
        is_ordered = [x in self._dims for x in op.operands]
        is_inverse = [x in self._inverses for x in op.operands]
        if name in _SORTS and is_ordered[0] and self._positions.get(op.operands[0]) == 1:
            self._invert(op)
        elif name in _READS and (is_ordered[-1] or is_inverse[-1] or is_ordered[0]):
            self._read(op)
        elif name in _WRITES and any((*is_ordered, *is_inverse)):
            self._write(op)
        elif name == GROUPED and any(is_ordered):
            self._multiply(op)
        elif any(is_inverse):
            if op.entry.sharding is None:
                raise NotAlikeError(op.entry.name)
            self._pass_on(op.operands[0], Ref(op))
        elif any(is_ordered) and name != "aten::histc":
            self._pass_through(op)

    def _follow_counts(self, op: Op) -> None:
        """Histograms of the groups, and their sums, which are the ends of groups."""
        name, arguments, result = op.entry.name, op.entry.arguments or {}, Ref(op)
        if name == "aten::histc" and self._has_groups(op.operands[0]):
            bins, low, high = (arguments.get(x, 0) for x in ("bins", "min", "max"))
            # With these bounds the bins are the numbers from 0 on.
            are_numbers = type(low) is type(high) is int and low == 0 < high
            # The last bin has both of its ends.
            if are_numbers and (high == bins - 1 or high == bins > self._highest):
                self._counts[result] = bins
        elif name == "aten::cumsum" and op.operands[0] in self._counts:
            if op.entry.spec.dtype in (torch.int32, torch.int64):
                self._offsets[result] = self._counts[op.operands[0]]
        elif (source := op.source_of_elements(Elements.SAME)) is not None:
            for known in (self._counts, self._offsets):
                if source in known and op.entry.spec.dtype in _EXACT:
                    known[result] = known[source]

    def _has_groups(self, value: Ref) -> bool:
        """Whether a value has the groups of all rows, in any order."""
        while True:
            if value in self._sorted_groups or value == self._groups:
                return True
            op = value.op
            if op is None or value.spec.dtype not in _EXACT:
                return False
            if op.entry.name == BARRIER:
                value = op.operands[value.result]
                continue
            source = op.source_of_elements(Elements.PERMUTED)
            if source is None:
                return False
            value = source

    def _invert(self, op: Op) -> None:
        if not _is_sort(op):
            raise NotAlikeError(op.entry.name)
        # The sorted positions are 0, 1, 2, ... in any case.
        self._inverses.add(op.results[1])
        self._note(op, Role.SORT)

    def _read(self, op: Op) -> None:
        x, positions = op.operands[0], op.operands[-1]
        if len(op.operands) != 2 or op.operands[1].spec.shape != (self.found.num_rows,):
            raise NotAlikeError(op.entry.name)
        indices = (op.entry.arguments or {})["indices"]
        if indices[0] is None:
            raise NotAlikeError(op.entry.name)
        if positions in self._inverses:
            if self._dims.get(x) != 0:
                raise NotAlikeError(op.entry.name)
            self._note(op, Role.READ)
        elif x not in self._dims and x not in self._inverses and positions in self._dims:
            self._dims[Ref(op)] = 0
            if self._is_within_parts(x, positions):
                self._note(op, Role.READ, x.spec.shape[0])
        else:
            raise NotAlikeError(op.entry.name)

    def _is_within_parts(self, x: Ref, positions: Ref) -> bool:
        """Whether the rows at these positions lie in the same part of a value as the positions."""
        divisor = self._positions.get(positions)
        return divisor is not None and x.spec.shape[0] * divisor == self.found.num_rows

    def _write(self, op: Op) -> None:
        arguments = op.entry.arguments or {}
        accumulates = arguments.get("accumulate", False)
        if len(op.operands) != 3 or arguments["indices"][0] is None:
            raise NotAlikeError(op.entry.name)
        base, positions, values = op.operands
        fits = positions.spec.shape == (self.found.num_rows,) == values.spec.shape[:1]
        if not fits or base in self._dims or base in self._inverses or values in self._inverses:
            raise NotAlikeError(op.entry.name)
        if positions in self._inverses:
            # Rows move to where they lie after the sort.
            if (
                values in self._dims
                or not _is_filled(base)
                or base.spec.shape[0] != values.spec.shape[0]
            ):
                raise NotAlikeError(op.entry.name)
            self._dims[Ref(op)] = 0
            self._note(op, Role.WRITE)
        elif positions not in self._dims:
            raise NotAlikeError(op.entry.name)
        elif self._dims.get(values) == 0:
            is_whole = self._is_within_parts(base, positions)
            if not accumulates and not (is_whole and self._positions[positions] == 1):
                raise NotAlikeError(op.entry.name)  # the last of several rows would remain
            if is_whole:
                self._note(op, Role.WRITE, base.spec.shape[0])
        elif self._positions.get(positions) == 1 and _counts_up(values) and not accumulates:
            self._inverses.add(Ref(op))
            self._note(op, Role.WRITE, base.spec.shape[0])
        else:
            raise NotAlikeError(op.entry.name)

    def _multiply(self, op: Op) -> None:
        offsets = op.operands[2] if len(op.operands) == 3 else None
        if offsets is None or self._offsets.get(offsets) != offsets.spec.shape[0]:
            raise NotAlikeError(op.entry.name)
        a, b = op.operands[:2]
        ranks, dims = (len(a.spec.shape), len(b.spec.shape)), (self._dims.get(a), self._dims.get(b))
        if ranks == (2, 3) and dims == (0, None):
            self._dims[Ref(op)] = 0
            self._note(op, Role.ROWS)
        elif ranks == (3, 2) and dims == (None, 1):
            self._dims[Ref(op)] = 1
            self._note(op, Role.COLUMNS)
        elif ranks == (2, 2) and dims == (1, 0):
            self._note(op, Role.SUMS)
        else:
            raise NotAlikeError(op.entry.name)

    def _pass_through(self, op: Op) -> None:
        """An operation that treats rows alike."""
        if op.manual is not None or op.bodies:
            raise NotAlikeError(op.entry.name)
        if op.entry.sharding is not None:
            self._pass_on(op.operands[0], Ref(op))
            return
        given = tuple(
            Order(self._dims.get(x), _uniform_dims(x) if x not in self._dims else frozenset())
            for x in op.operands
        )
        if (op.entry, given) not in self._known:
            found = orders(op.entry, [x.spec for x in op.operands], given)
            self._known[op.entry, given] = found
        for result, order in zip(op.results, self._known[op.entry, given], strict=True):
            if order.dim is not None:
                self._dims[result] = order.dim
        self._follow_positions(op)

    def _follow_positions(self, op: Op) -> None:
        """Positions that are cast or divided, and sorted groups that are cast."""
        x, result = op.operands[0], Ref(op)
        source = op.source_of_elements(Elements.SAME)
        if source is not None and result.spec.dtype in (torch.int32, torch.int64):
            if source in self._positions:
                self._positions[result] = self._positions[source]
        elif op.entry.name == "aten::floor_divide" and x in self._positions:
            divisor = (op.entry.arguments or {}).get("other")
            if type(divisor) is int and divisor > 0:
                self._positions[result] = self._positions[x] * divisor


def _is_filled(value: Ref) -> bool:
    """Whether all elements of a value are equal."""
    return value.op is not None and value.op.entry.traits.fill is not None


def _uniform_dims(value: Ref) -> frozenset[int]:
    return frozenset(range(len(value.spec.shape))) if _is_filled(value) else frozenset()


def _counts_up(value: Ref) -> bool:
    """Whether a value is 0, 1, 2, ..."""
    value = _root(value)
    op = value.op
    if op is None or not op.entry.name.startswith("aten::arange"):
        return False
    arguments = op.entry.arguments or {}
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    return type(start) is type(step) is int and (start, step) == (0, 1)
