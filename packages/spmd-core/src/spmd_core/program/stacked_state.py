"""Stacks among the inputs and results of a cut: layers' parameters, and what is updated with them.

A stack operation asks for the parameters of layers as one array. Where they are leaves, that array
is the program's input, and lies there from then on; it is made once, before the program starts.
So are stacks of state that an optimizer creates along with such parameters. A program that computes
new values for all rows of a stack returns them as one stack, which takes over the old one's memory.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from spmd_core.graph.placement import Placement
from spmd_core.graph.stacks import (
    Row,
    Stack,
    StackEntry,
    StackStorage,
    UnstackEntry,
    any_made,
    stack_entry,
    stacked_sharding,
    stacked_spec,
    unstack_entry,
)
from spmd_core.graph.storage import Storage
from spmd_core.graph.subgraphs import StandIn
from spmd_core.graph.values import OpResult, Spec, Value
from spmd_core.program.initial_state import Beginning, State
from spmd_core.program.leaves import convert, marked_placement, move, row_placement, stack_placement
from spmd_core.program.program_graph import stored_shape
from spmd_core.runtime import buffers

# How many operations an operand is followed back to the row that it comes from, as a gradient is
# marked, clipped and cast; and how many updates of state are looked at.
_MOST_STEPS = 16


@dataclass(frozen=True)
class StackedState:
    """The stacks of a cut.

    Attributes:
        rows: for each leaf that is a row, its stack and its index.
        new: the stacks that are made before the program starts, each with the leaves that become
            its rows.
        results: what receives the results that are stacks, each with the stack that it replaces.
    """

    rows: Mapping[Value, tuple[Stack, int]] = field(default_factory=dict)
    new: Mapping[Stack, Sequence[Value]] = field(default_factory=dict)
    results: Mapping[StackStorage, Stack] = field(default_factory=dict)

    @property
    def sources(self) -> list[Value]:
        """The leaves of which new stacks are made."""
        return [row for rows in self.new.values() for row in rows]

    def unstacked(self, leaves: Sequence[Value]) -> dict[Stack, Value]:
        """For each stack among these leaves, the operation whose results are its rows."""
        found: dict[Stack, Value] = {}
        for leaf in leaves:
            stack = self.rows[leaf][0] if leaf in self.rows else None
            if stack is not None and stack not in found:
                entry = unstack_entry(stack.row, len(stack.owners))
                found[stack] = Value(entry, (stack.value,), ())
        return found

    def stack_of(self, leaf: Value) -> Value:
        """The stack of a leaf that is a row; another leaf itself."""
        return self.rows[leaf][0].value if leaf in self.rows else leaf


def find(
    live: Sequence[Storage], nodes: Sequence[Value], leaves: Sequence[Value], state: State
) -> StackedState:
    """Finds the stacks of a cut. Changes nothing but the leaves of `state`, which may become rows.

    Args:
        live: the storages that the cut computes.
        nodes: the operations that they need.
        leaves: what these read.
        state: what begins in the cut.
    """
    if not any_made():
        return StackedState()
    rows: dict[Value, tuple[Stack, int]] = {}
    for leaf in leaves:
        if leaf.data.__class__ is Row:
            rows[leaf] = leaf.data.stack, leaf.data.index
    new: dict[Stack, Sequence[Value]] = {}
    for node in nodes:
        if node.entry.__class__ is StackEntry and _can_be_stacked(node.inputs, new):
            stack = _stack(node.inputs, None)
            new[stack] = node.inputs
            rows |= {leaf: (stack, i) for i, leaf in enumerate(node.inputs)}
    if not rows:
        return StackedState()
    if state.inputs:
        rows |= _begun(nodes, state, rows)
    before = {s: s.committed or state.first.get(s) for s in live}
    results: dict[StackStorage, Stack] = {}
    for stack in dict.fromkeys(stack for stack, _ in rows.values()):
        result = _result(stack, before, rows)
        if result is not None:
            results[result] = stack
    return StackedState(rows, new, results)


def _can_be_stacked(leaves: Sequence[Value], new: Mapping[Stack, Sequence[Value]]) -> bool:
    """Whether the data of these values may become rows of a new stack.

    Not if they are rows of another one, unless that lost a row: two programs that stack the same
    layers otherwise would copy them in turns.
    """
    taken = {row for rows in new.values() for row in rows}
    if any(
        x.data is None or x in taken or x.data.__class__ is StandIn or isinstance(x.data, Beginning)
        for x in leaves
    ):
        return False
    if len({*leaves}) < len(leaves):
        return False
    others = {x.data.stack for x in leaves if x.data.__class__ is Row}
    if any(stack.is_whole for stack in others):
        return False
    first = leaves[0]
    placement = first.placement
    return (
        all(x.placement is placement and x.spec.logical is first.spec.logical for x in leaves)
        and placement.manual is None
        and placement.room is None
    )


def _stack(rows: Sequence[Value], data: Any) -> Stack:
    """A stack of leaves of one spec and placement, which does not change them."""
    first = rows[0]
    leaf = Value.leaf(
        stacked_spec(first.spec, len(rows)), data, stack_placement(first.placement), None
    )
    return Stack(leaf, first.spec.logical, tuple(row.owner for row in rows))


def _result(
    stack: Stack,
    before: Mapping[Storage, Value | None],
    rows: Mapping[Value, tuple[Stack, int]],
) -> StackStorage | None:
    """What receives the new values of a stack's rows as a stack; None if not all have new ones.

    Args:
        stack: the stack.
        before: for each storage that the cut computes, the value that is replaced.
        rows: for each leaf that is a row, its stack and its index.
    """
    storages: list[Storage] = []
    for i, storage in enumerate(stack.storages()):
        value = None if storage is None else before.get(storage)
        if storage is None or value is None or rows.get(value, (None, 0)) != (stack, i):
            return None
        if storage.spec.logical is not stack.row:
            return None
        storages.append(storage)
    sharding = storages[0].sharding
    if any(s.sharding is not sharding for s in storages) or len({*storages}) < len(storages):
        return None
    if sharding is None and stack.value.placement.sharding is not None:
        return None
    node = Value(stack_entry(stack.row, len(storages)), [s.value for s in storages], ())
    return StackStorage.of(storages, node, None if sharding is None else stacked_sharding(sharding))


def make(found: StackedState, targets: Mapping[Value, Placement]) -> None:
    """Makes the arrays of new stacks from the data of their rows. Does not wait.

    Args:
        found: the stacks of a cut.
        targets: the placement of each of the program's inputs.
    """
    for stack, rows in found.new.items():
        leaf = stack.value
        mark = leaf.placement.sharding
        target = targets[leaf] if mark is None else marked_placement(mark)
        shape = stored_shape(leaf.spec, target)
        of_rows = row_placement(target, rows[0].placement.sharding)
        if all(row.placement.jax_sharding is None for row in rows):
            data = [row.data for row in rows]
            array = buffers.upload_rows(data, target.device_sharding, shape)
        else:
            arrays = [convert(row, of_rows) for row in rows]
            array = buffers.stacked(arrays, target.device_sharding, shape)
        leaf.data, leaf.placement = array, target
        for i, row in enumerate(rows):
            row.data, row.placement = Row(stack, i), of_rows


def settle(result: StackStorage, array: jax.Array, placement: Placement, checked: Any) -> None:
    """Gives storages their new values, which were pending: the rows of a result.

    Args:
        result: what receives the result.
        array: the result.
        placement: where it lies.
        checked: `Value.checked` of the new values; None for none.
    """
    rows = [storage.value for storage in result.rows]
    _settle(result.rows, rows, result.value, array, placement, checked)


def store(
    storages: Sequence[Storage], array: jax.Array, placement: Placement, checked: Any
) -> Stack:
    """Gives storages new values: the rows of a stack.

    Args:
        storages: of one spec and mark.
        array: the stack.
        placement: where it lies.
        checked: `Value.checked` of the new values; None for none.
    """
    spec = stacked_spec(storages[0].spec, len(storages))
    rows = [Value.leaf(s.spec, None, placement, None) for s in storages]
    whole = Value.leaf(spec, None, placement, None)
    return _settle(storages, rows, whole, array, placement, checked)


def _settle(
    storages: Sequence[Storage],
    rows: Sequence[Value],
    whole: Value,
    array: jax.Array,
    placement: Placement,
    checked: Any,
) -> Stack:
    whole.settle(array, placement, None)
    sharding = storages[0].sharding
    mark = None if sharding is None else marked_placement(stacked_sharding(sharding))
    if mark is not None and placement is not mark:
        move(whole, mark)
    owners = tuple(map(weakref.ref, storages))
    stack = Stack(whole, storages[0].spec.logical, owners)
    of_rows = row_placement(whole.placement, sharding)
    for i, (storage, value) in enumerate(zip(storages, rows)):
        value.settle(Row(stack, i), of_rows, None)
        storage.write(value)
    if checked is not None:
        for value in (whole, *rows):
            value.checked = checked
    return stack


def _begun(
    nodes: Sequence[Value], state: State, rows: Mapping[Value, tuple[Stack, int]]
) -> dict[Value, tuple[Stack, int]]:
    """Stacks the leaves of state that begins along with the rows of stacks.

    Returns:
        For each leaf that is a row now, its stack and its index.
    """
    readers: dict[Value, list[Value]] = {}
    for node in nodes:
        for x in node.inputs:
            readers.setdefault(x, []).append(node)
    groups: dict[Any, dict[int, Value]] = {}
    sizes: dict[Any, int] = {}
    for value, leaf in {leaf: (v, leaf) for v, leaf in state.inputs.items()}.values():
        beginning: Beginning = leaf.data
        along = _along(value, beginning, readers, rows)
        if along is None:
            continue
        source, index, count, use = along
        number = None if beginning.number is None else beginning.number.item()
        form = (repr(number), beginning.dtypes, leaf.spec.logical, leaf.placement, use)
        for repeated in range(len(state.inputs)):
            key = (source, form, repeated)
            group = groups.setdefault(key, {})
            sizes[key] = count
            if index not in group:
                group[index] = leaf
                break
    found: dict[Value, tuple[Stack, int]] = {}
    for key, group in groups.items():
        if len(group) == sizes[key]:
            leaves = [group[i] for i in range(len(group))]
            beginning = leaves[0].data
            if beginning.source is not None:
                beginning = replace(beginning, source=key[0].value)
            stack = _stack(leaves, beginning)
            for i, leaf in enumerate(leaves):
                leaf.data = Row(stack, i)
                found[leaf] = stack, i
    return found


def _along(
    value: Value,
    beginning: Beginning,
    readers: Mapping[Value, Sequence[Value]],
    rows: Mapping[Value, tuple[Stack, int]],
) -> tuple[Any, int, int, Any] | None:
    """The row along with which state is updated or from which it is copied, if there is one.

    Returns:
        What the row belongs to; its index; the number of rows; and how the state is used.
    """
    if beginning.source is not None:
        if beginning.source not in rows:
            return None
        stack, index = rows[beginning.source]
        return stack, index, len(stack.owners), "copy"
    uses: list[Any] = []
    for _ in range(_MOST_STEPS):
        update = None
        for node in readers.get(value, ()):
            place, partners = _partners(node, value)
            uses.append((node.entry.name, place))
            for other in partners:
                row = _row(other, rows)
                if row is not None:
                    return *row, tuple(uses)
            if node.entry.replaces and update is None:
                update = node
        if update is None or len(update.entry.outs) > 1:
            return None
        value = update
    return None


def _partners(node: Value, operand: Value) -> tuple[int, Sequence[Value]]:
    """The position of an operand among the arguments, and the operands that belong to it.

    An operation on lists, such as a fused optimizer's, goes over their tensors one by one.
    """
    position = list(node.inputs).index(operand)
    lists = [a for a in (node.entry.arguments or {}).values() if isinstance(a, (list, tuple))]
    lengths = [len(a) for a in lists if a and isinstance(a[0], Spec)]
    if not lengths or lengths[0] < 2:
        return position, [x for i, x in enumerate(node.inputs) if i != position]
    place, index = divmod(position, lengths[0])
    return place, node.inputs[index : lengths[0] * len(lengths) : lengths[0]]


def _row(value: Value, rows: Mapping[Value, tuple[Stack, int]]) -> tuple[Any, int, int] | None:
    """The row that a value is computed from; its stack, its index, and the number of rows."""
    waiting, seen = [value], 0
    while waiting and seen < _MOST_STEPS:
        value = waiting.pop(0)
        seen += 1
        if value in rows:
            stack, index = rows[value]
            return stack, index, len(stack.owners)
        if isinstance(value, OpResult) and value.parent is not None:
            if isinstance(value.parent.entry, UnstackEntry):
                return value.parent, value.index, len(value.parent.entry.outs)
            waiting += value.parent.inputs
        else:
            waiting += value.inputs
    return None
