"""Merges what is done alike to all rows of stacks into one operation on the stacks.

A loop over layers keeps each parameter of all layers as one array, a stack. Optimizers know nothing
of it: they update each layer's parameter by operations of its own, on rows of the stacks. With this
pass, one operation updates that parameter of all layers (`alike_operations` finds what is alike),
so that the program of a step does not grow with the number of layers. Results that are stacked
again are not taken apart, so that no step copies a stack.
"""

from collections import deque
from collections.abc import Iterator

from spmd_core.graph.stacks import stack_entry
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops.kernels.stacks import STACK, UNSTACK
from spmd_core.program import stacked_entries
from spmd_core.program.alike_operations import Group, Groups, RowOf, StackedValue
from spmd_core.program.ir import Graph, Op, Position, Ref, Rewriter, Source
from spmd_core.program.target import Target

# One operation of the new graph: a group, or an operation that stays.
_Unit = Group | Op


def stacked_operations(graph: Graph, target: Target) -> Graph:
    """The graph with operations on stacks; unchanged if it has no stacks."""
    if not any(op.entry.name in (STACK, UNSTACK) for op in graph.ops):
        return graph
    groups = Groups.of(graph)
    return _Rewriting(graph, groups).graph() if groups.are_any else graph


class _Rewriting:
    """Makes the new graph."""

    def __init__(self, graph: Graph, groups: Groups) -> None:
        self._graph, self._groups = graph, groups
        self._rewriter = Rewriter(graph)
        self._entries: dict[tuple[object, ...], Entry] = {}
        self._made: dict[Group, tuple[Ref, ...]] = {}  # results of groups
        # Of each stack, the rows that are read one by one, and where the new graph has them.
        self._read: dict[StackedValue, set[int]] = {}
        self._rows: dict[StackedValue, dict[int, Ref]] = {}

    def graph(self) -> Graph:
        """The new graph."""
        returned = (*self._graph.outputs, *self._graph.checked)
        for value in returned:
            self._note(value)
        source = self._graph.ops[-1].source
        for unit in self._ordered():
            if isinstance(unit, Group):
                self._add_group(unit)
            elif _is_vector(unit):
                self._add_vector(unit)
            else:
                self._rewriter.keep(unit, [self._value(x, unit.source) for x in unit.operands])
        for value in returned:
            self._rewriter.replace(value, self._value(value, source))
        return self._rewriter.graph()

    # The order of operations.

    def _ordered(self) -> Iterator[_Unit]:
        """The operations of the new graph, in the order of recording as far as that is possible.

        A group comes where its last operation was. What reads a row of its results, and was
        recorded before that, comes after it.
        """
        units = [*self._units()]
        num_missing: dict[_Unit, int] = {}
        readers: dict[_Unit, list[_Unit]] = {}
        for unit in units:
            num_missing[unit] = 0
            for value in self._operands(unit):
                source = self._unit_of(value)
                if source is not None:
                    num_missing[unit] += 1
                    readers.setdefault(source, []).append(unit)
        passed: set[_Unit] = set()
        for unit in units:
            passed.add(unit)
            ready = deque([] if num_missing[unit] else [unit])
            while ready:
                now = ready.popleft()
                yield now
                for reader in readers.get(now, ()):
                    num_missing[reader] -= 1
                    if not num_missing[reader] and reader in passed:
                        ready.append(reader)

    def _units(self) -> Iterator[_Unit]:
        for op in self._groups.ops:
            group, _ = self._groups.members.get(op, (None, 0))
            if group is not None and group.is_merged:
                if op is group.last:
                    yield group
            elif not isinstance(self._groups.place_of(Ref(op)), StackedValue):
                yield op

    def _operands(self, unit: _Unit) -> Iterator[Ref | StackedValue]:
        """What an operation of the new graph reads. Notes the rows that it reads one by one."""
        by_row = isinstance(unit, Group) or not _is_vector(unit)
        for operand in unit.operands:
            if operand is not None:
                yield operand
            if by_row and isinstance(operand, Ref):
                self._note(operand)

    def _note(self, value: Ref) -> None:
        found = self._groups.place_of(value)
        if isinstance(found, RowOf):
            self._read.setdefault(found.stack, set()).add(found.number)

    def _unit_of(self, value: Ref | StackedValue) -> _Unit | None:
        """What computes a value; None for an input of the program."""
        if isinstance(value, Ref):
            found = self._groups.place_of(value)
            if isinstance(found, Ref):
                return found.op
            value = found.stack if isinstance(found, RowOf) else found
        return value.group if value.value is None else self._unit_of(value.value)

    # Values and operations.

    def _value(self, value: Ref, source: Source) -> Ref:
        """A value of the new graph, for an operation of this source."""
        found = self._groups.place_of(value)
        if isinstance(found, Ref):
            return self._rewriter.now(found)
        if isinstance(found, StackedValue):
            return self._stack(found, source)
        stack, index = found
        if stack not in self._rows:
            read = sorted(self._read[stack])
            whole = self._stack(stack, source)
            entry = stacked_entries.rows(_row_spec(whole), stack.count, read)
            made = self._rewriter.add(entry, [whole], source)
            self._rows[stack] = dict(zip(read, made.results))
        return self._rows[stack][index]

    def _stack(self, stack: StackedValue, source: Source) -> Ref:
        if stack.group is not None:
            return self._made[stack.group][stack.result]
        assert stack.value is not None
        return self._value(stack.value, source)

    def _add_group(self, group: Group) -> None:
        source, count = group.last.source, len(group.ops)
        values: list[Ref] = []
        are_stacks: list[bool] = []
        for position, operand in enumerate(group.operands):
            are_stacks.append(not isinstance(operand, Ref))
            if isinstance(operand, StackedValue):
                values.append(self._stack(operand, source))
            elif isinstance(operand, Ref):
                values.append(self._value(operand, source))
            else:
                own = [op.operands[position] for op in group.ops if op is not None]
                are_stacks[-1] = len({*own}) > 1
                values.append(self._numbers(own, source) if are_stacks[-1] else own[0])
        scalars: list[Position] = []
        for positions in zip(*(op.scalars for op in group.ops if op is not None)):
            scalars.append(positions[0] if len({*positions}) == 1 else positions)
        have_rows = tuple(isinstance(x, tuple) for x in scalars)
        key = (group.entry, count, *are_stacks, *have_rows)
        if key not in self._entries:
            self._entries[key] = stacked_entries.stacked(
                group.entry, count, operands=tuple(are_stacks), numbers=have_rows
            )
        made = self._rewriter.add(self._entries[key], values, source, scalars=tuple(scalars))
        self._made[group] = made.results

    def _numbers(self, inputs: list[Ref], source: Source) -> Ref:
        """Inputs of one element as one array."""
        entry = stack_entry(inputs[0].spec, len(inputs))
        return Ref(self._rewriter.add(entry, inputs, source))

    def _add_vector(self, op: Op) -> None:
        """Adds a vector of scalars, some of which are rows: such as the norms of all gradients."""
        starts: dict[Ref | StackedValue, int] = {}
        operands: list[Ref] = []
        order: list[int] = []
        end = 0
        for operand in op.operands:
            found = self._groups.place_of(operand)
            stack, index = found if isinstance(found, RowOf) else (found, 0)
            if stack not in starts:
                starts[stack] = end
                end += stack.count if isinstance(stack, StackedValue) else 1
                operands.append(
                    self._stack(stack, op.source)
                    if isinstance(stack, StackedValue)
                    else self._value(stack, op.source)
                )
            order.append(starts[stack] + index)
        entry = stacked_entries.vector(op.entry.spec, order)
        made = self._rewriter.add(entry, operands, op.source)
        self._rewriter.replace(Ref(op), Ref(made))


def _is_vector(op: Op) -> bool:
    """Whether an operation makes a vector of scalars of its dtype."""
    return op.entry.name == "aten::stack" and all(
        x.spec.logical is Spec.contiguous((), op.entry.spec.dtype) for x in op.operands
    )


def _row_spec(stack: Ref) -> Spec:
    return Spec.contiguous(stack.spec.shape[1:], stack.spec.dtype)
