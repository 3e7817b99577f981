"""Finds the operations on the rows of stacks that do to each row the same.

The walk over a graph gives each value that is a row of a stack its index: the results of
`spmd::unstack`, the operands of `spmd::stack`, and the results of operations on rows. Operations
that read rows of one index, of the same stacks, and for the rest the same values are a group. A
group with an operation for each row may become one operation on the stacks, and its results are
then the rows of one.

That never makes a cycle. Follow the dependences of the rewritten graph backwards, and keep one
index: what a group reads is a value that each of its operations reads, or a stack of which its
operation of that index reads the row of that index, or a stack that was recorded before all of its
operations. So a cycle would be one of the recorded graph as well.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from spmd_core.graph.values import Entry
from spmd_core.ops.kernels.stacks import STACK, UNSTACK
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.ir import Graph, Op, Ref
from spmd_core.program.list_items import Items, result_of_item
from spmd_core.program.mark_names import MARK_SUM


@dataclass(eq=False, slots=True)
class StackedValue:
    """A stack of rows.

    Attributes:
        count: the number of rows.
        value: the stack, as a value of the graph; None for a result of a group.
        group: the group whose result it is; None for a value of the graph.
        result: the position among the results of that group.
    """

    count: int
    value: Ref | None = None
    group: "Group | None" = None
    result: int = 0

    @property
    def exists(self) -> bool:
        """Whether the rewritten graph has it as one value."""
        return self.group is None or self.group.is_merged


@dataclass(eq=False, slots=True)
class Group:
    """Operations that do the same to different rows.

    Attributes:
        entry: the operation on a row.
        operands: for each operand the stack whose row it is, or the value that all read; None for
            an input of the program with one element, of which each may read another one.
        last: the operation that was recorded last.
        ops: the operation for each row; None where there is none so far.
        results: the results, as stacks.
        num_ops: the number of operations.
        is_merged: whether they become one operation.
    """

    entry: Entry
    operands: "tuple[StackedValue | Ref | None, ...]"
    last: Op
    ops: list[Op | None]
    results: tuple[StackedValue, ...] = ()
    num_ops: int = 0
    is_merged: bool = False


class RowOf(NamedTuple):
    """A row of a stack."""

    stack: StackedValue
    number: int


# How often the operations are looked at: one time more for each operation on only some rows of a
# chain of them, in which each may keep the next from being found.
_MOST_WALKS = 3

_Key = tuple[Entry | StackedValue | Ref | None, ...]


@dataclass
class Groups:
    """The rows and the groups of a graph.

    Attributes:
        ops: the operations of the graph in order, some of them taken apart (`list_items`).
        rows: for each value that is a row, its stack and its index.
        stacks: for each result of `spmd::stack` whose operands are all rows of one stack, in their
            order, that stack.
        sources: for each `spmd::unstack` that stays, what it takes the rows of.
        members: for each operation in a group, the group and the index.
        all: the groups; each comes after those whose results it reads.
    """

    ops: list[Op] = field(default_factory=list)
    rows: dict[Ref, RowOf] = field(default_factory=dict)
    stacks: dict[Ref, StackedValue] = field(default_factory=dict)
    sources: dict[Op, StackedValue] = field(default_factory=dict)
    members: dict[Op, tuple[Group, int]] = field(default_factory=dict)
    all: list[Group] = field(default_factory=list)
    # Values that are others: results of operations that were taken apart, and of `spmd::unstack` of
    # what `spmd::stack` made.
    _same: dict[Ref, Ref] = field(default_factory=dict)
    # The first operation that takes the rows of each stack.
    _unstacked: dict[Ref, Op] = field(default_factory=dict)
    # For each key the groups, one for each time that the same is done to a row; and how often that
    # was, by key and index.
    _found: dict[_Key, list[Group]] = field(default_factory=dict)
    _times: Counter[tuple[_Key, int]] = field(default_factory=Counter)
    _may_be_merged: dict[Entry, bool] = field(default_factory=dict)
    _items: Items = field(default_factory=Items)
    # Operations that are known to be in no group.
    _apart: frozenset[Op] = frozenset()

    @staticmethod
    def of(graph: Graph) -> "Groups":
        """The groups of a graph."""
        groups = Groups()
        for _ in range(_MOST_WALKS):
            for op in graph.ops:
                groups._add(op)
            incomplete = groups._find_complete()
            if not incomplete:
                break
            # Their results are no rows: what reads them may do the same to rows of other stacks.
            groups = Groups(_apart=groups._apart.union(incomplete), _items=groups._items)
        else:
            for op in graph.ops:
                groups._add(op)
            groups._find_complete()
        groups._choose([*graph.outputs, *graph.checked])
        return groups

    def place_of(self, value: Ref) -> "Ref | StackedValue | RowOf":
        """Where the rewritten graph has a value of the graph: as it is, as a stack, or as a row."""
        value = self._same.get(value, value)
        stack = self.stacks.get(value)
        if stack is not None and stack.exists:
            return stack
        op = value.op
        if op is None:
            return value
        source = self.sources.get(op)
        if source is not None:
            return RowOf(source, value.result)
        group, index = self.members.get(op, (None, 0))
        if group is not None and group.is_merged:
            return RowOf(group.results[value.result], index)
        return value

    @property
    def are_any(self) -> bool:
        """Whether there is anything to rewrite."""
        return bool(self._same or self.stacks) or any(group.is_merged for group in self.all)

    def _add(self, op: Op) -> None:
        name = op.entry.name
        if name == UNSTACK:
            self._add_unstack(op)
        elif name == STACK:
            self.ops.append(op)
            self._add_stack(op)
        elif op.entry.traits.by_item and any(
            self._same.get(x, x) in self.rows for x in op.operands
        ):
            items = self._items.of(op)
            self._same.update(result_of_item(op, items))
            for item in items:
                self._add(item)
        else:
            self.ops.append(op)
            self._add_to_group(op)

    def _add_unstack(self, op: Op) -> None:
        stack = self._same.get(op.operands[0], op.operands[0])
        if stack.op is not None and stack.op.entry.name == STACK:
            self._same.update(zip(op.results, (self._same.get(x, x) for x in stack.op.operands)))
        elif (first := self._unstacked.get(stack)) is not None:
            self._same.update(zip(op.results, first.results))
        else:
            made = self.sources[op] = StackedValue(len(op.entry.outs), stack)
            self._unstacked[stack] = op
            self.rows.update((x, RowOf(made, i)) for i, x in enumerate(op.results))

    def _add_stack(self, op: Op) -> None:
        operands = [self._same.get(x, x) for x in op.operands]
        places = [self.rows.get(x) for x in operands]
        stacks = {place.stack for place in places if place is not None}
        if len(stacks) == 1 and None not in places:
            (stack,) = stacks
            if [place.number for place in places if place is not None] == [*range(stack.count)]:
                self.stacks[Ref(op)] = stack
        # Later operations may read these values as rows of the new stack. Rows of one stack in
        # another order stay that.
        elif len({*operands}) == len(operands):
            made = StackedValue(len(operands), Ref(op))
            self.rows.update((x, RowOf(made, i)) for i, x in enumerate(operands))

    def _add_to_group(self, op: Op) -> None:
        index, count = -1, 0
        read: list[StackedValue | Ref | None] = []
        for operand in op.operands:
            value = self._same.get(operand, operand)
            place = self.rows.get(value)
            if place is None:
                read.append(None if _is_number(value) else value)
                continue
            stack, own = place
            if index >= 0 and (index, count) != (own, stack.count):
                return
            index, count = own, stack.count
            read.append(stack)
        if index < 0 or any(op.manuals) or op in self._apart or not self._may_be(op.entry):
            return
        key = (op.entry, *read)
        known = self._found.setdefault(key, [])
        self._times[key, index] += 1
        times = self._times[key, index]
        if times > len(known):
            group = Group(op.entry, tuple(read), op, [None] * count)
            group.results = tuple(
                StackedValue(count, group=group, result=i) for i in range(len(op.entry.outs))
            )
            known.append(group)
            self.all.append(group)
        group = known[times - 1]
        group.ops[index] = op
        group.num_ops += 1
        group.last = op
        self.members[op] = (group, index)
        for result, stack in zip(op.results, group.results):
            self.rows[result] = RowOf(stack, index)

    def _may_be(self, entry: Entry) -> bool:
        found = self._may_be_merged.get(entry)
        if found is None:
            found = self._may_be_merged[entry] = may_be_stacked(entry)
        return found

    def _find_complete(self) -> list[Op]:
        """Finds the groups that may become one operation.

        Returns:
            The operations of groups that have one for some rows only.
        """
        apart: list[Op] = []
        for group in self.all:
            if all(x.exists for x in group.operands if isinstance(x, StackedValue)):
                group.is_merged = group.num_ops == len(group.ops)
                if not group.is_merged:
                    apart += [op for op in group.ops if op is not None]
        return apart

    def _choose(self, outputs: list[Ref]) -> None:
        """Decides which of these groups become one operation."""
        # A layer that runs apart from the others reads its own rows. If nothing else reads the
        # results of casts, of marks that gather, and of products, they stay apart as well: for all
        # layers at once, they would take as much memory as all layers.
        producers = (self._same.get(x, x).op for x in outputs)
        wanted: set[Group | None] = {self.members[op][0] for op in producers if op in self.members}
        wanted |= {stack.group for stack in self.stacks.values()}
        for group in reversed(self.all):
            if group.is_merged and group not in wanted and _may_stay_apart(group.entry):
                group.is_merged = False
            if group.is_merged:
                wanted |= {x.group for x in group.operands if isinstance(x, StackedValue)}


# The gradient of a coordinate jumps where it meets an element of the grid, so that a last bit of
# what is computed in another order decides it.
_ALONE = ("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")


def may_be_stacked(entry: Entry) -> bool:
    """Whether an operation on rows may become one on stacks: a pure function of arrays of torch's.

    Not so for what draws random numbers, checks indices, moves values between memories or into
    manual regions, or runs subgraphs. Lookups, convolutions and attentions have layouts that passes
    find for a single one, and a slice at a position that is a number would become a gather.
    """
    traits = entry.traits
    if entry.__class__ is not Entry or entry.random or entry.border is not None or entry.indices:
        return False
    if entry.sharding is not None:
        # The first dims of what is marked along axes are those of the data, such as the sequence.
        is_of_data = entry.name == MARK_SUM or (entry.along is not None and entry.spec.shape[1:])
        return not is_of_data
    if traits.rows is not None or traits.images or traits.query is not None or traits.has_seeds:
        return False
    if not entry.name.startswith(("aten::", "write.aten::")) or traits.by_item:
        return False
    if entry.name.split(".")[0] in _ALONE:
        return False
    return not (entry.number_kinds and ".moving" in entry.name)


def _may_stay_apart(entry: Entry) -> bool:
    passes_on = entry.sharding is not None or entry.traits.elements <= Elements.REPEATED
    return bool(entry.spec.shape) and (passes_on or entry.traits.is_product)


def _is_number(value: Ref) -> bool:
    """Whether a value is an input of the program with one element, such as a learning rate."""
    return value.op is None and not value.spec.shape and value.manual is None
