"""Finds the indices in a graph that are to be checked: all but those known to lie in their dim.

Known are positions that an operation made (`argmax`, `topk`, `sort`, `arange`, `randint`), and what
an earlier operation of the same graph has checked: a backward writes where its forward has read,
and a checkpoint's recomputation reads again. Operations that only move or choose elements are seen
through.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.graph.values import Indices, Spec
from spmd_core.program.program_graph import Graph, Node


@dataclass(frozen=True)
class Check:
    """One check of a program.

    Attributes:
        position: of the operation among the graph's nodes.
        value: the number of the value with the indices, as in `Node.inputs`.
        accepted: which of them the operation accepts.
    """

    position: int
    value: int
    accepted: Indices


# The result has the elements of the first input, each at least once. Its indices are checked in
# that input, which may have fewer, and whose layout may be known.
_REARRANGED = frozenset(
    (
        *("aten::alias", "aten::clone", "aten::contiguous", "aten::detach", "aten::expand"),
        *("aten::flip", "aten::permute", "aten::repeat", "aten::reshape", "aten::roll"),
        *("aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims", "aten::t"),
        *("aten::transpose.int", "aten::unsqueeze", "aten::view", "aten::_reshape_alias"),
        *("aten::_unsafe_view", "spmd::checked_indices", "spmd::enter_region"),
    )
)
# The result has no other elements than the first input.
_OF_FIRST_INPUT = _REARRANGED | {
    *(
        "aten::as_strided",
        "aten::diagonal",
        "aten::embedding",
        "aten::gather",
        "aten::index.Tensor",
    ),
    *("aten::index_select", "aten::select.int", "aten::slice.Tensor", "aten::split.Tensor"),
    *("aten::take", "aten::unbind.int", "aten::unfold"),
}
# Their second result, or their only one, has positions in a dim of the first input.
_POSITIONS = frozenset(
    (
        *("aten::sort", "aten::sort.stable", "aten::topk", "aten::kthvalue", "aten::median.dim"),
        *("aten::nanmedian.dim", "aten::mode", "aten::max.dim", "aten::min.dim"),
        *("aten::cummax", "aten::cummin"),
    )
)
_BARRIER = "spmd::optimization_barrier"
# Operations that cast, with the position of what they cast. Between the wide dtypes they keep every
# index of a dim that a device can hold.
_CASTS = {"aten::_to_copy": 0, "aten::copy": 1}
_WIDE = (torch.int32, torch.int64)


def needed(graph: Graph) -> tuple[Check, ...]:
    """The checks that a program makes, in the order of its operations."""
    if not any(node.entry.indices for node in graph.nodes):
        return ()
    return _Search(graph).checks()


class _Search:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made = [(node, i) for node in graph.nodes for i in range(len(node.entry.outs))]
        self._accepted: dict[int, list[Indices]] = {}

    def checks(self) -> tuple[Check, ...]:
        found = []
        for position, node in enumerate(self._graph.nodes):
            for accepted in node.entry.indices:
                value = self._origin(node.inputs[accepted.input])
                if not self._is_known(value, accepted):
                    found.append(Check(position, value, accepted))
                    self._accepted.setdefault(value, []).append(accepted)
        return tuple(found)

    def _origin(self, value: int) -> int:
        """The value that an index was rearranged from; a mark tells a layout, so it ends there."""
        while value >= 0:
            node, index = self._made[value]
            if node.entry.name == _BARRIER:
                value = node.inputs[index]
            elif node.entry.name.removesuffix(".moving") in _REARRANGED:
                value = node.inputs[0]
            else:
                break
        return value

    def _is_known(self, value: int, accepted: Indices) -> bool:
        """Whether each element of a value is known to be accepted, or to have been reported."""
        while True:
            if any(_implies(known, accepted) for known in self._accepted.get(value, ())):
                return True
            if value < 0:
                return False
            node, index = self._made[value]
            bounds = _bounds(node, index)
            if bounds is not None:
                return accepted.low <= bounds[0] and bounds[1] <= accepted.high
            source = self._source(node, index)
            if source is None:
                return False
            value = source

    def _source(self, node: Node, index: int) -> int | None:
        """The value among whose elements are all of a result; None if none is known."""
        entry = node.entry
        if entry.name == _BARRIER:
            return node.inputs[index]
        name = entry.name.removesuffix(".moving")
        if name in _OF_FIRST_INPUT or entry.sharding is not None or entry.border is not None:
            return node.inputs[0]
        if name in _CASTS and entry.spec.dtype in _WIDE:
            source = node.inputs[_CASTS[name]]
            return source if self._dtype(source) in _WIDE else None
        return None

    def _dtype(self, value: int) -> torch.dtype:
        if value < 0:
            return self._graph.leaves[-value - 1].spec.dtype
        node, index = self._made[value]
        return node.entry.outs[index].dtype


def _implies(known: Indices, wanted: Indices) -> bool:
    """Whether what one rule accepts, the other one does."""
    return (
        wanted.low <= known.low
        and known.high <= wanted.high
        and (known.skip is None or known.skip == wanted.skip)
    )


def _bounds(node: Node, index: int) -> tuple[int, int] | None:
    """The lowest and the highest element that a result can have; None if that is not known."""
    entry = node.entry
    arguments = entry.arguments
    if arguments is None or entry.outs[index].dtype not in _WIDE:
        return None
    packet = entry.name.split(".")[0]
    if entry.name in _POSITIONS and index == 1:
        return _positions(arguments, arguments.get("dim", -1))
    if packet in ("aten::argmax", "aten::argmin"):
        return _positions(arguments, arguments.get("dim"))
    if packet == "aten::multinomial":
        return _positions(arguments, -1)
    if packet == "aten::randperm":
        return _between(0, arguments["n"])
    if packet == "aten::random":  # as torch's `randint` records it
        return _between(arguments.get("from", 0), arguments.get("to"))
    if packet == "aten::randint":
        return _between(arguments.get("low", 0), arguments["high"])
    if packet == "aten::arange":
        start, step = arguments.get("start", 0), arguments.get("step", 1)
        if not (type(start) is type(step) is int):
            return None
        last = start + step * max(entry.spec.num_elements - 1, 0)
        return min(start, last), max(start, last)
    return None


def _positions(arguments: Mapping[str, Any], dim: int | None) -> tuple[int, int]:
    spec = arguments["self"]
    assert isinstance(spec, Spec)
    shape = spec.shape or (1,)
    return 0, (spec.num_elements if dim is None else shape[dim]) - 1


def _between(low: Any, end: Any) -> tuple[int, int] | None:
    return (low, end - 1) if type(low) is type(end) is int else None
