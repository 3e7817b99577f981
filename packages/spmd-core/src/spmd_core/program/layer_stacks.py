"""Which inputs of a new program are to lie in stacks, so that its layers become loops.

A loop over layers reads rows of stacks (`passes/folded_layers`). A program whose layers could
become loops, if only their parameters lay in stacks, is planned again with stacks of these
parameters (`stacked_state`). Later programs find them there. The same search tells which values are
rows of what loops compute, such as the gradients of the layers' parameters.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from spmd_core.graph.values import Value
from spmd_core.program.ir import Graph, Input, Ref
from spmd_core.program.passes.folded_layers import are_small, with_loops
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.program.stacked_groups import Iterations

Groups = tuple[tuple[int, ...], ...]

_MOST_KNOWN = 256
# The groups of earlier searches, by the key of the program without their stacks.
# Guarded by: the graph lock. Cleared by: never, a bounded cache.
_known: OrderedDict[object, Groups] = OrderedDict()
# By the operations of a program: values that loops compute, as the positions of their operations
# and of the results, in the order of the rows.
# Guarded by: the graph lock. Cleared by: never, a bounded cache.
_rows: OrderedDict[object, tuple[tuple[tuple[int, int], ...], ...]] = OrderedDict()


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
        first = nodes.index(recorded[0]) if recorded else 0
        _rows.setdefault(
            _operations(recorded),
            tuple(tuple((_position(x) - first, x.result) for x in rows) for rows in found.rows),
        )
        for cache in (_known, _rows):
            if len(cache) > _MOST_KNOWN:
                cache.popitem(last=False)
    _known.move_to_end(key)
    chosen = ([leaves[i] for i in group] for group in _known[key])
    return [group for group in chosen if can_be_stacked(group)]


def iterations(recorded: Sequence[Value]) -> Iterations:
    """The values that loops will compute, as far as a search has found any in such a program."""
    operations = _operations(recorded)
    known = _rows.get(operations, ())
    if known:
        _rows.move_to_end(operations)
    return {
        (recorded[position], result): (number, index, len(rows))
        for number, rows in enumerate(known)
        for index, (position, result) in enumerate(rows)
    }


def _operations(recorded: Sequence[Value]) -> Hashable:
    return tuple([node.entry for node in recorded])


def _position(value: Ref) -> int:
    assert value.op is not None
    return value.op.source.position


def _number(value: Ref) -> int:
    assert isinstance(value.producer, Input)
    return value.producer.number
