"""Which inputs of a new program are to lie in stacks, so that its layers become loops.

A loop over layers reads rows of stacks (`passes/folded_layers`). A program whose layers could
become loops, if only their parameters lay in stacks, is planned again with stacks of these
parameters (`stacked_state`). Later programs find them there. The same search tells which values are
rows of what loops compute, such as the gradients of the layers' parameters.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from spmd_core import counters
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Entry, Value
from spmd_core.program.ir import Graph, Input, Ref
from spmd_core.program.passes.folded_layers import are_small, with_loops
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.program.stacked_groups import Iterations

Groups = tuple[tuple[int, ...], ...]

_MOST_KNOWN = 256
# Leaves whose stack is made so often, each time after so few other programs at most, are left as
# they are: something takes it apart all the time, and each time copies what lies in it.
_MOST_MADE, _SOON = 8, 16
# The groups of earlier searches, by the key of the program without their stacks.
# Guarded by: the graph lock. Cleared by: never, a bounded cache.
_known: OrderedDict[object, Groups] = OrderedDict()
# How often stacks were made whose first rows are the values of these storages, and the count of
# executions at the last time.
# Guarded by: the graph lock. Cleared by: the end of a storage.
_made: "weakref.WeakKeyDictionary[Storage, tuple[int, int]]" = weakref.WeakKeyDictionary()
# By the operations of a program, where its loops compute any: values that loops compute, as the
# positions of their operations and of the results, in the order of the rows.
# Guarded by: the graph lock. Cleared by: never, a bounded cache.
_rows: OrderedDict[tuple[Entry, ...], tuple[tuple[tuple[int, int], ...], ...]] = OrderedDict()


def groups(
    key: object,
    make_graph: Callable[[], RecordedGraph],
    leaves: Sequence[Value],
    nodes: Sequence[Value],
    recorded: Sequence[Value],
    can_be_stacked: Callable[[Sequence[Value]], bool],
) -> list[Sequence[Value]]:
    """The leaves that are to be rows, one group for each stack.

    Args:
        key: of the program.
        make_graph: makes its graph.
        leaves: its inputs.
        nodes: its operations.
        recorded: these without those between stacks and their rows.
        can_be_stacked: whether leaves may become the rows of a stack.
    """

    def may_be_stacked(values: tuple[Ref, ...]) -> bool:
        if all(isinstance(x.producer, Input) for x in values):
            return can_be_stacked([leaves[_number(x)] for x in values]) or are_small(values)
        return are_small(values)

    if key not in _known:
        graph = make_graph()
        found = with_loops(Graph.of(graph), may_be_stacked)
        _known[key] = tuple(
            tuple(map(_number, rows))
            for rows in found.stacked
            if all(isinstance(x.producer, Input) for x in rows)
        )
        if found.rows:
            first = nodes.index(recorded[0])
            _rows.setdefault(
                _operations(recorded),
                tuple(tuple((_position(x) - first, x.result) for x in rows) for rows in found.rows),
            )
        for cache in (_known, _rows):
            if len(cache) > _MOST_KNOWN:
                cache.popitem(last=False)
    _known.move_to_end(key)
    chosen = ([leaves[i] for i in group] for group in _known[key])
    return [x for x in chosen if can_be_stacked(x) and not _is_taken_apart(x)]


def note_made(groups: Iterable[Sequence[Value]]) -> None:
    """Notes that the stacks of these leaves are made for a program that starts now."""
    now = counters.counter("executions")
    for storage in filter(None, map(_first_owner, groups)):
        times, last = _made.get(storage, (0, now))
        _made[storage] = (times + 1 if 0 <= now - last <= _SOON else 1, now)


def _is_taken_apart(group: Sequence[Value]) -> bool:
    """Whether a stack of these leaves would be made in vain: others take it apart all the time."""
    owner = _first_owner(group)
    return owner is not None and _made.get(owner, (0, 0))[0] >= _MOST_MADE


def _first_owner(group: Sequence[Value]) -> Storage | None:
    owner = group[0].owner
    return None if owner is None else owner()


def iterations(recorded: Sequence[Value]) -> Iterations:
    """The values that loops will compute, as far as a search has found any in such a program."""
    # Most cuts have no loops, and are spared the hash of their operations.
    if not any(len(operations) == len(recorded) for operations in _rows):
        return {}
    operations = _operations(recorded)
    known = _rows.get(operations, ())
    if known:
        _rows.move_to_end(operations)
    return {
        (recorded[position], result): (number, index, len(rows))
        for number, rows in enumerate(known)
        for index, (position, result) in enumerate(rows)
    }


def _operations(recorded: Sequence[Value]) -> tuple[Entry, ...]:
    return tuple([node.entry for node in recorded])


def _position(value: Ref) -> int:
    assert value.op is not None
    return value.op.source.position


def _number(value: Ref) -> int:
    assert isinstance(value.producer, Input)
    return value.producer.number
