"""`read_step`: a recorded graph as the tensors and operations that a search splits.

The body of a loop is read once, in place of the loop: its operations run as often as the loop says.
What the loop carries is split as what it returns, and a row of a stack as the stack, which no
device splits by rows.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spmd_core.auto import region_rules, sorted_rules
from spmd_core.auto.step_graph import (
    JoinEntry,
    Operation,
    Place,
    StepGraph,
    Tensor,
    is_loop,
    mark_of,
    updated,
)
from spmd_core.graph.subgraphs import ControlEntry
from spmd_core.graph.values import Entry, Spec
from spmd_core.metrics.flops import entry_flops
from spmd_core.ops.kernels.traits import PERMUTED, SAME
from spmd_core.program import dim_rules
from spmd_core.program.dim_rules import DimRule
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.program.regions import manual_of
from spmd_core.sharding.sharding import Manual
from spmd_core.source_lines import Origin


def read_step(recorded: RecordedGraph) -> StepGraph:
    """The step of a recorded graph. Lowers each distinct operation once, about 6 ms each."""
    return _Reader(recorded).read()


class _Reader:
    """Collects the tensors and operations of a graph."""

    def __init__(self, recorded: RecordedGraph) -> None:
        self._recorded = recorded
        self._tensors: list[Tensor] = []
        self._operations: list[Operation] = []
        self._places: dict[int, Place] = {}
        self._rules: dict[Entry, DimRule] = {}
        self._sorted = sorted_rules.rules(recorded)

    def read(self) -> StepGraph:
        graph = self._recorded
        leaves = [
            self._new(leaf.spec, leaf=i, fixed=mark_of(leaf), manual=leaf.placement.manual)
            for i, leaf in enumerate(graph.leaves)
        ]
        results = [
            [self._new(spec, fixed=node.entry.sharding) for spec in node.entry.outs]
            for node in graph.nodes
        ]
        values = [t for of_node in results for t in of_node]

        def position(number: int) -> int:
            return values[number] if number >= 0 else leaves[-number - 1]

        for i, node in enumerate(graph.nodes):
            operands = tuple(map(position, node.inputs))
            self._node(node.entry, operands, results[i], (i,), 1, node.origin)
        outputs = tuple(position(output.value) for output in graph.outputs)
        return StepGraph(
            graph,
            tuple(self._tensors),
            tuple(self._operations),
            outputs,
            updated(graph),
            self._places,
        )

    def _new(self, spec: Spec, *, leaf: int | None = None, **facts: Any) -> int:
        self._tensors.append(Tensor(spec, leaf, **facts))
        return len(self._tensors) - 1

    def _node(
        self,
        entry: Entry,
        operands: Sequence[int],
        results: Sequence[int],
        place: Place,
        times: int,
        origin: Origin | None,
    ) -> None:
        """Adds the operations of a node.

        Args:
            entry: what it does.
            operands, results: the positions of its tensors.
            place: its position among the recorded nodes; in a loop's body, behind that of the loop.
            times: how often it runs in a step.
            origin: its line.
        """
        if is_loop(entry):
            self._loop(entry, operands, results, place, times, origin)
            return
        inside = manual_of(entry.name, entry.border, [self._tensors[t].manual for t in operands])
        for t in results:
            self._tensors[t] = replace(self._tensors[t], manual=inside)
        manual = inside if entry.border is None else entry.border.manual
        rule = self._sorted.get(place[0]) if len(place) == 1 else None
        if rule is None:
            rule = self._rule(entry, [self._tensors[t].spec for t in operands])
        self._add(entry, rule, (operands, results), place[0], times, manual, origin)

    def _rule(self, entry: Entry, operands: Sequence[Spec]) -> DimRule:
        if entry not in self._rules:
            if region_rules.is_in_region_alone(entry):
                find = region_rules.dims
            elif entry.traits.query is not None:
                find = dim_rules.dims_in_one_block
            else:
                find = dim_rules.dims
            self._rules[entry] = find(entry, operands)
        return self._rules[entry]

    def _add(
        self,
        entry: Entry,
        rule: DimRule,
        tensors: tuple[Sequence[int], Sequence[int]],
        node: int,
        times: int,
        manual: Manual | None = None,
        origin: Origin | None = None,
    ) -> None:
        operands, results = tensors
        flops = entry_flops(entry)
        for part, (read, made) in enumerate(_parts(rule)):
            self._operations.append(
                Operation(
                    node,
                    part,
                    entry,
                    rule,
                    tuple((operands[k], k) for k in read),
                    tuple((results[k], k) for k in made),
                    0 if part else flops,
                    times,
                    manual,
                    origin,
                )
            )

    def _loop(
        self,
        loop: ControlEntry,
        operands: Sequence[int],
        results: Sequence[int],
        place: Place,
        times: int,
        origin: Origin | None,
    ) -> None:
        """Adds the operations of a loop's body, and what joins them with the tensors around it."""
        (body,), steps = loop.subgraphs, loop.steps or 0
        arguments = [
            t if i >= loop.stacked.stop else self._in_body(spec, (*place, -i - 1))
            for i, (t, spec) in enumerate(zip(operands, body.parameters, strict=True))
        ]
        values: list[int] = []

        def position(number: int) -> int:
            return values[number] if number >= 0 else arguments[-number - 1]

        def join(make: Callable[..., JoinEntry], read: Sequence[int], made: Sequence[int]) -> None:
            entry = make(self._tensors[made[0]].spec.logical, steps)
            rule = _joined([[self._tensors[t].spec for t in each] for each in (read, made)])
            self._add(entry, rule, (read, made), place[0], times)

        for i in loop.stacked:
            join(_read_row, [operands[i]], [arguments[i]])
        for i, (entry, inputs) in enumerate(body.nodes):
            given = [position(n) for n in inputs]
            first = len(values)
            values += [
                self._in_body(spec, (*place, first + k), fixed=entry.sharding)
                for k, spec in enumerate(entry.outs)
            ]
            line = body.origins[i] if body.origins else origin
            self._node(entry, given, values[first:], (*place, i), times * steps, line)
        for i, number in enumerate(body.outputs):
            if i in loop.stacks:
                join(_stacks_rows, [position(number)], [results[i]])
            else:
                join(_carries, [operands[i], position(number)], [arguments[i], results[i]])

    def _in_body(self, spec: Spec, place: Place, **facts: Any) -> int:
        t = self._new(spec, **facts)
        self._places[t] = place
        return t


@functools.lru_cache(maxsize=4096)
def _read_row(row: Spec, count: int) -> JoinEntry:
    """A row of a stack, which an iteration reads where it is."""
    return JoinEntry("spmd::row_of_iteration", _never, (row,), traits=PERMUTED)


@functools.lru_cache(maxsize=4096)
def _stacks_rows(stack: Spec, count: int) -> JoinEntry:
    """A stack of what the iterations return."""
    return JoinEntry("spmd::rows_of_iterations", _never, (stack,))


@functools.lru_cache(maxsize=4096)
def _carries(carried: Spec, count: int) -> JoinEntry:
    """What an iteration gets and what the loop returns, of what comes first and what it returns."""
    return JoinEntry("spmd::carried", _never, (carried, carried), traits=SAME)


def _never(*_: Any) -> Any:
    """The kernel of what stands for a part of a loop, which nobody lowers."""
    raise AssertionError("a search reads this, and lowers the loop")


def _joined(tensors: Sequence[Sequence[Spec]]) -> DimRule:
    """The rule of tensors of equal last dims; a stack's first dim is split by no device."""
    shapes = [x.shape for side in tensors for x in side]
    row = min(shapes, key=len)
    sizes: list[int] = []
    factors: list[tuple[int, ...]] = []
    for n in row:
        factors.append((len(sizes),) if n > 1 else ())
        sizes += [n] if n > 1 else []
    rows: tuple[int, ...] = ()
    count = next((shape[0] for shape in shapes if len(shape) > len(row)), 1)
    if count > 1:
        rows = (len(sizes),)
        sizes.append(count)
    operands, results = (
        tuple((*([rows] if len(x.shape) > len(row) else []), *factors) for x in side)
        for side in tensors
    )
    nothing: tuple[frozenset[int], ...] = (frozenset(),) * len(results)
    return DimRule(
        tuple(sizes), operands, results, tuple({} for _ in results), nothing,
        frozenset(), frozenset(rows),
    )  # fmt: skip


def _parts(rule: DimRule) -> list[tuple[list[int], list[int]]]:
    """The operands and results that have dims in common, for each part of an operation."""
    part_of: dict[int, int] = {}  # of a factor

    def root(factor: int) -> int:
        while part_of.setdefault(factor, factor) != factor:
            factor = part_of[factor]
        return factor

    for dims in (*rule.operands, *rule.results):
        first, *others = [f for dim in dims for f in dim] or [-1]
        for other in others:
            part_of[root(other)] = root(first)
    parts: dict[int, tuple[list[int], list[int]]] = {}
    for side, tensors in enumerate((rule.operands, rule.results)):
        for i, dims in enumerate(tensors):
            factors = [f for dim in dims for f in dim]
            # Tensors of one element have no dims, and belong to no part.
            key = root(factors[0]) if factors else -1
            parts.setdefault(key, ([], []))[side].append(i)
    return list(parts.values())
