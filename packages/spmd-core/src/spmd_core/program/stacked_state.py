"""Stacks among the inputs and results of a cut: layers' parameters, and what is updated with them.

A stack operation asks for the parameters of layers as one array. Where they are leaves, that array
is the program's input, and lies there from then on; it is made once, before the program starts.
So are stacks of state that an optimizer creates along with such parameters. A program that computes
new values for all rows of a stack returns them as one stack, which takes over the old one's memory.
"""

import operator
import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax

from spmd_core.graph.placement import Placement
from spmd_core.graph.stacks import (
    Row,
    Stack,
    StackEntry,
    StackStorage,
    any_made,
    stack_entry,
    stacked_sharding,
    stacked_spec,
    unstack_entry,
)
from spmd_core.graph.storage import Storage
from spmd_core.graph.subgraphs import StandIn
from spmd_core.graph.values import Spec, Value
from spmd_core.program import small_state
from spmd_core.program.initial_state import Beginning, State
from spmd_core.program.leaves import (
    array_of,
    convert,
    host_placement,
    marked_placement,
    move,
    row_placement,
    stack_placement,
)
from spmd_core.program.program_graph import stored_shape
from spmd_core.program.small_state import CapturedCall
from spmd_core.program.stacked_groups import Candidate, Iterations, groups_along, row_behind
from spmd_core.runtime import buffers


@dataclass(frozen=True)
class StackedState:
    """The stacks of a cut.

    Attributes:
        rows: for each leaf that is a row, its stack and its index.
        new: the stacks that are made before the program starts, each with the leaves that become
            its rows.
        results: what receives the results that are stacks, each with the stack that it replaces;
            None for a new one.
    """

    rows: Mapping[Value, tuple[Stack, int]] = field(default_factory=dict)
    new: Mapping[Stack, Sequence[Value]] = field(default_factory=dict)
    results: Mapping[StackStorage, Stack | None] = field(default_factory=dict)

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

    def held(self) -> set[Value]:
        """The stacks with a row that is still the value of its storage."""
        found = {stack.value for stack, _ in self.rows.values() if stack.is_held}
        for leaf, (stack, _) in self.rows.items():  # those of new stacks are no rows yet
            owner = None if leaf.owner is None else leaf.owner()
            if owner is not None and owner.value is leaf:
                found.add(stack.value)
        return found

    def value_before(self, result: Storage) -> Value | None:
        """The stack that a result replaces, as a leaf; None for a new one."""
        assert isinstance(result, StackStorage)
        stack = self.results[result]
        return None if stack is None else stack.value

    def stack_of(self, leaf: Value) -> Value:
        """The stack of a leaf that is a row; another leaf itself."""
        return self.rows[leaf][0].value if leaf in self.rows else leaf


def find(
    live: Sequence[Storage],
    nodes: Sequence[Value],
    leaves: Sequence[Value],
    state: State,
    groups: Sequence[Sequence[Value]] = (),
    iterations: Iterations = MappingProxyType({}),
    call: CapturedCall | None = None,
    *,
    stacks_small: bool = True,
) -> StackedState:
    """Finds the stacks of a cut. Changes nothing but the leaves of `state`, which may become rows.

    Args:
        live: the storages that the cut computes.
        nodes: the operations that they need.
        leaves: what these read.
        state: what begins in the cut.
        groups: leaves that may become the rows of stacks, besides those for which a stack operation
            asks.
        iterations: values that a loop will compute, of which the gradients may be stacks.
        call: of a captured step, whose small state is stacked, and whose results that replace
            nothing are no stacks; None for any other cut.
        stacks_small: whether that small state is.
    """
    begun = small_state.begun(nodes, state, call) if call is not None and stacks_small else []
    if not groups and not begun and not iterations and not any_made():
        return StackedState()
    rows: dict[Value, tuple[Stack, int]] = {}
    for leaf in leaves:
        if leaf.data.__class__ is Row:
            rows[leaf] = leaf.data.stack, leaf.data.index
    before = {s: s.committed or state.first.get(s) for s in live}
    asked = [node.inputs for node in nodes if node.entry.__class__ is StackEntry]
    stacks = dict.fromkeys(stack for stack, _ in rows.values())
    known = {stack: _result(stack, before, rows) for stack in stacks}
    if call is None:
        # The program takes them out of their stacks, as the next one finds them: it is the same.
        updated = {*before.values()}.difference(*asked)
        rows = {x: row for x, row in rows.items() if known[row[0]] or x not in updated}
    new: dict[Stack, Sequence[Value]] = {}
    for group in (*asked, *groups):
        if can_be_stacked(group, new):
            stack = _stack(group, None)
            new[stack] = group
            rows |= {leaf: (stack, i) for i, leaf in enumerate(group)}
    if rows and state.inputs:
        rows |= _begun(nodes, state, rows, iterations, () if call is None else call.apart)
    for group in begun:
        rest = [leaf for leaf in group if leaf not in rows]
        if len(rest) >= small_state.FEWEST:
            rows |= _begin(rest, rest[0].data)
    if call is not None:  # in the order in which later calls find them
        position = {leaf: i for i, leaf in enumerate(leaves)}
        rows = dict(sorted(rows.items(), key=lambda row: position.get(row[0], len(leaves))))
    results: dict[StackStorage, Stack | None] = {}
    # In the order of their inputs, as later cuts have these, whichever stacks are new.
    in_order = (rows[leaf][0] for leaf in leaves if leaf in rows)
    for stack in dict.fromkeys([*in_order, *(stack for stack, _ in rows.values())]):
        result = known[stack] if stack in known else _result(stack, before, rows)
        if result is not None:
            results[result] = stack
    if call is None:
        born = [s for s in live if before[s] is None]
        results |= dict.fromkeys(_unstacked_results(born, iterations))
    return StackedState(rows, new, results)


def more_groups(
    live: Sequence[Storage],
    nodes: Sequence[Value],
    stacked: StackedState,
    iterations: Iterations = MappingProxyType({}),
    apart: Collection[Storage] = (),
) -> list[Sequence[Value]]:
    """Leaves that are updated along with rows, as those of a loaded optimizer: they may be stacked.

    This search goes over the whole cut, so it is for new programs; later cuts find rows.

    Args:
        live: the storages that the cut computes.
        nodes: the operations that they need.
        stacked: what `find` found.
        iterations: values that a loop will compute.
        apart: storages that stay as they are.
    """
    candidates = []
    for storage in live:
        leaf = None if storage in apart else storage.committed
        if leaf is not None and leaf.data is not None and leaf not in stacked.rows:
            form = (leaf.spec.logical, leaf.placement, storage.sharding)
            candidates.append(Candidate(leaf, leaf, form))
    found = groups_along(stacked.rows, iterations, nodes, candidates)
    return [group.leaves for group in found if can_be_stacked(group.leaves)]


def _begun(
    nodes: Sequence[Value],
    state: State,
    rows: Mapping[Value, tuple[Stack, int]],
    iterations: Iterations,
    apart: Collection[Storage],
) -> dict[Value, tuple[Stack, int]]:
    """Stacks the leaves of state that begins along with the rows of stacks.

    Returns:
        For each leaf that is a row now, its stack and its index.
    """
    candidates = {}
    for value, leaf in state.inputs.items():
        if leaf.owner is not None and leaf.owner() in apart:
            continue
        beginning: Beginning = leaf.data
        number = None if beginning.number is None else repr(beginning.number.item())
        form = (number, beginning.dtypes, leaf.spec.logical, leaf.placement)
        candidates[leaf] = Candidate(value, leaf, form, beginning.source)
    found: dict[Value, tuple[Stack, int]] = {}
    for group in groups_along(rows, iterations, nodes, candidates.values()):
        beginning = group.leaves[0].data
        if beginning.source is not None:
            beginning = replace(beginning, source=group.along.value)
        found |= _begin(group.leaves, beginning)
    return found


def _begin(leaves: Sequence[Value], beginning: Beginning) -> dict[Value, tuple[Stack, int]]:
    """Makes leaves of state the rows of a stack that begins so; each with its stack and index."""
    stack = _stack(leaves, beginning)
    for i, leaf in enumerate(leaves):
        leaf.data = Row(stack, i)
    return {leaf: (stack, i) for i, leaf in enumerate(leaves)}


def _unstacked_results(born: Iterable[Storage], iterations: Iterations) -> list[StackStorage]:
    """What receives results that are all computed from the rows of a stack, such as gradients.

    Args:
        born: storages without an earlier value.
        iterations: values that a loop will compute.
    """
    rows: dict[Hashable, dict[int, Storage]] = {}
    counts: dict[Hashable, int] = {}
    for storage in born:
        found = row_behind(storage.value, iterations)
        if found is None:
            continue
        along, index, count, names = found
        repeated = 0
        key: Hashable = (along, names, storage.spec.logical, repeated)
        while index in rows.get(key, ()):
            repeated += 1
            key = (along, names, storage.spec.logical, repeated)
        rows.setdefault(key, {})[index] = storage
        counts[key] = count
    made = []
    for key, by_index in rows.items():
        if len(by_index) == counts[key]:
            storages = [by_index[i] for i in range(len(by_index))]
            result = _stacked_result(storages, storages[0].spec.logical)
            if result is not None:
                made.append(result)
    return made


def can_be_stacked(
    leaves: Sequence[Value], new: Mapping[Stack, Sequence[Value]] = MappingProxyType({})
) -> bool:
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
    row, placement = leaves[0].spec.logical, _placement(leaves)
    on_host = host_placement(placement.sharding)
    return (
        all(x.spec.logical is row for x in leaves)
        and all(x.placement is placement or x.placement is on_host for x in leaves)
        and placement.manual is None
        and placement.room is None
    )


def _placement(rows: Sequence[Value]) -> Placement:
    """Where rows lie of which some may still be on the host."""
    return next(
        (x.placement for x in rows if x.placement.jax_sharding is not None), rows[0].placement
    )


def _stack(rows: Sequence[Value], data: Any) -> Stack:
    """A stack of leaves of one spec and placement, which does not change them."""
    first = rows[0]
    leaf = Value.leaf(
        stacked_spec(first.spec, len(rows)), data, stack_placement(_placement(rows)), None
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
        storages.append(storage)
    if storages[0].sharding is None and stack.value.placement.sharding is not None:
        return None
    return _stacked_result(storages, stack.row)


def _stacked_result(storages: Sequence[Storage], row: Spec) -> StackStorage | None:
    """What receives the values of these storages as a stack; None if they differ in form."""
    sharding = storages[0].sharding
    if any(s.sharding is not sharding or s.spec.logical is not row for s in storages):
        return None
    if len({*storages}) < len(storages):
        return None
    node = Value(stack_entry(row, len(storages)), [s.value for s in storages], ())
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


def take_out(leaves: Sequence[Value]) -> None:
    """Gives leaves that are rows of stacks arrays of their own, one stack after another."""
    of: dict[Stack, list[Value]] = {}
    for leaf in leaves:
        if leaf.data.__class__ is Row:
            of.setdefault(leaf.data.stack, []).append(leaf)
    for rows in of.values():
        for leaf in rows:
            leaf.data = array_of(leaf)


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


def restack(storages: Sequence[Storage], target: Placement) -> Stack:
    """Gives storages the same values as the rows of a new stack. Does not wait.

    Args:
        storages: of one spec and mark, with computed values.
        target: where the stack will lie.
    """
    values = [storage.value for storage in storages]
    of_rows = row_placement(target, storages[0].sharding)
    arrays = [convert(value, of_rows) for value in values]
    spec = stacked_spec(storages[0].spec, len(storages))
    array = buffers.stacked(arrays, target.device_sharding, stored_shape(spec, target))
    checks = (getattr(value, "checked", None) for value in values)
    newest = max(filter(None, checks), key=operator.itemgetter(0), default=None)
    return store(storages, array, target, newest)


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
