"""Attributes a planned program's memory to parameters, optimizer state, activations and so on."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from spmd_core.debugging import hlo_text
from spmd_core.ops.kernels.stacks import STACK, UNSTACK
from spmd_core.ops.kernels.traits import Elements
from spmd_core.planner.buffer_text import Buffers, HloValue
from spmd_core.program.program_graph import Node, RecordedGraph
from spmd_core.source_lines import Origin, Phase

_POSITION = re.compile(r"(?P<op>[\w.]+::[\w.<>]+)#(?P<position>\d+)/")
_MAX_SOURCES = 8  # how many operands to follow back to an instruction named after a torch operation


class MemoryUse(StrEnum):
    """The use of a part of a device's memory."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer state"
    INPUTS = "inputs"
    RESULTS = "results"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    TEMPORARIES = "temporaries"
    # Memory between temporaries that XLA's packing leaves unused at the peak.
    GAPS = "gaps between temporaries"
    CODE = "code"
    ELSEWHERE = "other programs' arrays"


@dataclass(frozen=True)
class Buffer:
    """A value in a device's memory at the peak.

    Attributes:
        part: its use.
        num_bytes: its bytes on one device.
        shape: its shape on one device in XLA's notation: "f32[64,1024]".
        op: the torch operation that computes it, such as "aten::mm"; empty if not known.
        origin: the user's source line and module; None if not known. For an argument, the line that
            created it, and the module of the parameter that it is, or whose optimizer state it is.
    """

    part: MemoryUse
    num_bytes: int
    shape: str
    op: str
    origin: Origin | None


@dataclass(frozen=True)
class Roles:
    """The roles of a program's operations and leaves in training.

    Attributes:
        leaves: the use of each leaf.
        after: the position of the first operation after the last backward pass; the number of all
            operations if there is no backward pass.
        gradients: the operations of a backward pass whose results are read after it.
    """

    leaves: tuple[MemoryUse, ...]
    after: int
    gradients: frozenset[int]

    def of_operation(self, position: int, phase: Phase | None) -> MemoryUse:
        """The use of an operation's result while it is a temporary."""
        if position in self.gradients:
            return MemoryUse.GRADIENTS
        if position < self.after and phase is Phase.FORWARD:
            return MemoryUse.ACTIVATIONS
        return MemoryUse.TEMPORARIES


def roles(graph: RecordedGraph, kept: Collection[int]) -> Roles:
    """The roles of a graph's operations and leaves.

    A leaf that persists between steps is a parameter if a forward or backward pass computes with
    it, and optimizer state if only later operations do. To take the rows of a stack and the like is
    not to compute: a step of a loop over layers begins with the rows of all stacks.

    Args:
        graph: the graph, with origins.
        kept: the positions of the leaves that the program updates, or that a later run reads again.
    """
    first_result = _first_results(graph.nodes)
    backward = [
        i for i, node in enumerate(graph.nodes) if node.origin and _is_backward(node.origin)
    ]
    after = backward[-1] + 1 if backward else len(graph.nodes)
    made_by = {
        first_result[i] + k: i for i, node in enumerate(graph.nodes) for k in range(_outs(node))
    }
    in_backward = set(backward)
    gradients = {
        made_by[number]
        for node in graph.nodes[after:]
        for number in node.inputs
        if number >= 0 and made_by[number] in in_backward
    }
    read_before = _leaves_computed_with(graph, after)
    # If a gradient is only passed on, the operation that computes it gives XLA's buffer its name.
    passing = [i for i in gradients if _hands_on(graph.nodes[i])]
    while passing:
        below = made_by.get(graph.nodes[passing.pop()].inputs[0])
        if below in in_backward and below not in gradients:
            gradients.add(below)
            if _hands_on(graph.nodes[below]):
                passing.append(below)
    leaves = tuple(
        MemoryUse.INPUTS
        if i not in kept
        else MemoryUse.PARAMETERS
        if i in read_before or not backward
        else MemoryUse.OPTIMIZER
        for i in range(len(graph.leaves))
    )
    return Roles(leaves, after, frozenset(gradients))


def _leaves_computed_with(graph: RecordedGraph, end: int) -> set[int]:
    """The leaves that operations before the one at `end` compute with, or that are returned."""
    moved: dict[int, set[int]] = {}  # for values whose elements are those of leaves, these
    found: set[int] = set()
    for first, node in zip(_first_results(graph.nodes), graph.nodes[:end]):
        read = {-x - 1 for x in node.inputs if x < 0}.union(
            *(moved.get(x, ()) for x in node.inputs)
        )
        if node.entry.traits.elements < Elements.NEW or node.entry.name in (STACK, UNSTACK):
            moved |= {first + k: read for k in range(_outs(node))}
        else:
            found |= read
    return found.union(*(moved.get(output.value, ()) for output in graph.outputs))


def _is_backward(origin: Origin) -> bool:
    return origin.phase is not Phase.FORWARD


def _hands_on(node: Node) -> bool:
    """Whether an operation only passes its operand on: marks, casts, reshapes and slices."""
    return node.entry.traits.elements <= Elements.RESHAPED


def _outs(node: Node) -> int:
    return len(node.entry.outs)


def _first_results(nodes: Sequence[Node]) -> list[int]:
    first, count = [], 0
    for node in nodes:
        first.append(count)
        count += _outs(node)
    return first


def at_peak(
    graph: RecordedGraph, found: Roles, buffers: Buffers, hlo: str, num_number_arrays: int
) -> tuple[Buffer, ...]:
    """All values in a device's memory at the peak, the largest first.

    Their sum is the memory that the program reserves, without code.

    Args:
        graph: the program's graph.
        found: the roles of its operations and leaves.
        buffers: its buffer assignment.
        hlo: its optimised HLO as text, for the names of torch operations.
        num_number_arrays: the number of the program's parameters before its leaves.
    """
    operations = _Operations(graph, found, hlo)
    modules = _modules(graph, found)
    rows: list[Buffer] = []
    for allocation in buffers.allocations:
        if allocation.parameter is not None:
            leaf = allocation.parameter - num_number_arrays
            part = MemoryUse.INPUTS if leaf < 0 else found.leaves[leaf]
            origin = None if leaf < 0 else graph.leaves[leaf].origin
            if origin is not None:
                origin = origin._replace(module=modules.get(leaf, ""))
            shape = allocation.values[0].shape if allocation.values else ""
            rows.append(Buffer(part, allocation.size, shape, "", origin))
        elif allocation.is_output:
            largest = max(allocation.values, key=lambda value: value.size, default=None)
            if largest is None:
                rows.append(Buffer(MemoryUse.RESULTS, allocation.size, "", "", None))
            else:
                rows.append(operations.buffer(largest, allocation.size, MemoryUse.RESULTS))
        elif allocation.is_constant:
            rows.append(Buffer(MemoryUse.TEMPORARIES, allocation.size, "constant", "", None))
    alive = [operations.buffer(value, value.size) for value in buffers.live_at_peak()]
    gaps = sum(a.size for a in buffers.temporaries) - sum(row.num_bytes for row in alive)
    rows += alive
    if gaps > 0:
        rows.append(Buffer(MemoryUse.GAPS, gaps, "", "", None))
    return tuple(sorted(rows, key=lambda row: -row.num_bytes))


def _modules(graph: RecordedGraph, found: Roles) -> dict[int, str]:
    """The module that each leaf belongs to, as far as it is known.

    A parameter belongs to the first module that reads it. Optimizer state belongs to the module of
    the gradient that it is combined with first, maybe after an operation of its own, such as a
    decay. Operations on many tensors at once, such as fused optimizers, show nothing.
    """
    of_leaf: dict[int, str] = {}
    of_value: dict[int, str] = {}
    leaf_of_value: dict[int, int] = {}  # for values that are computed from a single leaf
    for first, node in zip(_first_results(graph.nodes), graph.nodes):
        module = node.origin.module if node.origin is not None else ""
        leaves = [-x - 1 if x < 0 else leaf_of_value.get(x) for x in node.inputs]
        if not module and _outs(node) == 1:
            known = (of_value.get(x) for x in node.inputs)
            module = next((name for name in known if name), "")
        for leaf in leaves:
            if module and leaf is not None:
                of_leaf.setdefault(leaf, module)
        for k in range(_outs(node)):
            of_value[first + k] = module
            if not module and len(leaves) == 1 and leaves[0] is not None:
                leaf_of_value[first + k] = leaves[0]
    return {
        leaf: module
        for leaf, module in of_leaf.items()
        if found.leaves[leaf] in (MemoryUse.PARAMETERS, MemoryUse.OPTIMIZER)
    }


def sums(rows: Sequence[Buffer]) -> dict[MemoryUse, int]:
    """The bytes of each use."""
    totals: Counter[MemoryUse] = Counter()
    for row in rows:
        totals[row.part] += row.num_bytes
    return dict(totals)


class _Operations:
    """The torch operations behind the instructions of a compiled program."""

    def __init__(self, graph: RecordedGraph, found: Roles, hlo: str) -> None:
        self._graph, self._found = graph, found
        computations, _ = hlo_text.parse(hlo)
        self._instructions = {
            name: instruction
            for computation in computations.values()
            for name, instruction in computation.items()
        }

    def buffer(self, value: HloValue, size: int, part: MemoryUse | None = None) -> Buffer:
        """A value with its operation, source line and use."""
        match = self._match(value.instruction)
        if match is None or int(match["position"]) >= len(self._graph.nodes):
            return Buffer(part or MemoryUse.TEMPORARIES, size, value.shape, "", None)
        position = int(match["position"])
        origin = self._graph.nodes[position].origin
        if part is None:
            part = self._found.of_operation(position, None if origin is None else origin.phase)
        return Buffer(part, size, value.shape, match["op"], origin)

    def _match(self, name: str) -> re.Match[str] | None:
        """The torch operation in an instruction's metadata; for a copy, that of its source."""
        for _ in range(_MAX_SOURCES):
            instruction = self._instructions.get(name)
            if instruction is None:
                return None
            match = _POSITION.search(instruction.op_name)
            if match is not None:
                return match
            if not instruction.operands:
                return None
            name = instruction.operands[0]
        return None
