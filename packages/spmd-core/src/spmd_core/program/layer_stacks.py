"""Which inputs of a new program are to lie in stacks, so that its layers become loops.

A loop over layers reads rows of stacks (`passes/folded_layers`). A program whose layers could
become loops, if only their parameters lay in stacks, is planned again with stacks of these
parameters (`stacked_state`). Later programs find them there.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from spmd_core.graph.values import Value
from spmd_core.program.ir import Graph, Input, Ref
from spmd_core.program.passes.folded_layers import are_small, with_loops
from spmd_core.program.program_graph import RecordedGraph

Groups = tuple[tuple[int, ...], ...]

_MOST_KNOWN = 256
# The groups of earlier searches, by the key of the program without their stacks.
# Guarded by: the graph lock. Cleared by: never, a bounded cache.
_known: OrderedDict[object, Groups] = OrderedDict()


def groups(
    key: object,
    make_graph: Callable[[], RecordedGraph],
    leaves: Sequence[Value],
    can_be_stacked: Callable[[Sequence[Value]], bool],
) -> list[Sequence[Value]]:
    """The leaves that are to be rows, one group for each stack.

    Args:
        key: of the program.
        make_graph: makes its graph.
        leaves: its inputs.
        can_be_stacked: whether leaves may become the rows of a stack.
    """

    def may_be_stacked(values: tuple[Ref, ...]) -> bool:
        if all(isinstance(x.producer, Input) for x in values):
            return can_be_stacked([leaves[_number(x)] for x in values]) or are_small(values)
        return are_small(values)

    if key not in _known:
        _, stacked = with_loops(Graph.of(make_graph()), may_be_stacked)
        _known[key] = tuple(
            tuple(map(_number, rows))
            for rows in stacked
            if all(isinstance(x.producer, Input) for x in rows)
        )
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    _known.move_to_end(key)
    found = ([leaves[i] for i in group] for group in _known[key])
    return [group for group in found if can_be_stacked(group)]


def _number(value: Ref) -> int:
    assert isinstance(value.producer, Input)
    return value.producer.number
