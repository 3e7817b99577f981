"""Makes loops of the runs of a graph: one operation each, whose body is an iteration."""

from collections.abc import Sequence
from dataclasses import replace

from spmd_core.graph.placement import Placement
from spmd_core.graph.stacks import stack_entry, unstack_entry
from spmd_core.graph.subgraphs import Subgraph
from spmd_core.graph.values import Spec
from spmd_core.program.chosen_runs import Readers, is_last_carry
from spmd_core.program.ir import Graph, Input, Op, Position, Ref, Rewriter, Source
from spmd_core.program.kept_values import KeptValues
from spmd_core.program.program_graph import Leaf, Node, Output
from spmd_core.program.repeated_entries import REPEAT, RepeatedEntry, identity_of
from spmd_core.program.repeated_runs import Carried, Kept, Local, Operand, Rows, Run, Runs, Shared
from spmd_core.runtime.jax_sharding import replicated


class Loops:
    """The loops of a graph in a walk over it.

    Args:
        rewriter: makes the new graph.
        runs: the runs that become loops.
    """

    def __init__(self, rewriter: Rewriter, runs: Runs) -> None:
        self.rewriter, self.runs = rewriter, runs
        self.readers = Readers(rewriter.old, runs)
        self.kept = KeptValues(runs, self.readers)
        self.is_reversed: dict[Run, bool] = {}
        # What is stacked of a run, and stacks of other values, in the new graph.
        self.stacks: dict[tuple[Run, Local | Carried], Ref] = {}
        self._of_values: dict[tuple[Ref, ...], Ref] = {}
        # Values of the old graph that are rows of results, in the order of the rows.
        self.rows: list[tuple[Ref, ...]] = []

    @property
    def stacked_values(self) -> list[tuple[Ref, ...]]:
        """The values of the old graph that are stacked for loops."""
        return [*self._of_values]

    def constants(self, run: Run) -> set[int]:
        """The positions of operations that are computed once, before the loop."""
        return {name.position for name in self.kept.constant[run]}

    def is_kept(self, op: Op) -> bool:
        """Whether an operation of the old graph stays beside the loops."""
        where = self.runs.where(op)
        if where is None:
            return True
        run, iteration, position = where
        return iteration == run.low and self.kept.is_constant(run, position)

    def add(self, run: Run) -> None:
        """Adds the loop of a run, and the rows that are read apart."""
        backwards = sum(self._direction(x) for x in run.reads())
        self.is_reversed[run] = backwards < 0
        op = _Body(self, run).op()
        self.rewriter.ops.append(op)
        for result, name in zip(op.results[len(run.carried) :], self.kept.stacked[run]):
            self.stacks[run, name] = result
        self._replace_values(run, op)

    def _direction(self, operand: Operand) -> int:
        """1 if the rows of an operand are read from the first one on, -1 from the last one on."""
        if isinstance(operand, Kept):
            return -operand.step if self.is_reversed[operand.run] else operand.step
        return operand.step if isinstance(operand, Rows) else 0

    def _replace_values(self, run: Run, loop: Op) -> None:
        """Has others read the results of the loop."""
        last = {Local(x.position, x.result): result for x, result in zip(run.carried, loop.results)}
        for name, iterations in self.readers.apart[run].items():
            rows: Sequence[Ref] = ()
            is_constant = name.position in self.constants(run)
            for i in sorted(iterations):
                value = Ref(self.runs.op(run, i, name.position), name.result)
                if is_constant:
                    first = self.runs.op(run, run.low, name.position)
                    now = self.rewriter.now(Ref(first, name.result))
                elif is_last_carry(run, name, i):
                    now = last[name]
                else:
                    if not rows:
                        entry = unstack_entry(value.spec.logical, run.length)
                        stack = self.stacks[run, name]
                        rows = self.rewriter.add(entry, [stack], loop.source).results
                        self.rows.append(self._in_order(run, name))
                    now = rows[run.high - 1 - i if self.is_reversed[run] else i - run.low]
                if now != value:
                    self.rewriter.replace(value, now)

    def _in_order(self, run: Run, name: Local) -> tuple[Ref, ...]:
        """A value in all iterations, in the order of the rows."""
        ops = [self.runs.op(run, i, name.position) for i in range(run.low, run.high)]
        if self.is_reversed[run]:
            ops.reverse()
        return tuple(Ref(op, name.result) for op in ops)

    def stack_of(self, values: tuple[Ref, ...], source: Source) -> Ref:
        """Values of the old graph as a stack."""
        if values not in self._of_values:
            entry = stack_entry(values[0].spec.logical, len(values))
            rows = [self.rewriter.now(x) for x in values]
            self._of_values[values] = Ref(self.rewriter.add(entry, rows, source))
        return self._of_values[values]


class _Body:
    """An iteration of a run, as a graph, and the operation that runs it.

    Args:
        loops: those of the graph.
        run: the run.
    """

    def __init__(self, loops: Loops, run: Run) -> None:
        self._loops, self._run, self._runs = loops, run, loops.runs
        self._now = loops.rewriter.now
        self._recorded = loops.rewriter.old.recorded
        self._unknown = Placement.of(replicated(self._recorded.device_ids), None)
        # The iterations, counted from the first one, in the order of the rows that they make.
        self._order = range(run.length)
        if loops.is_reversed[run]:
            self._order = self._order[::-1]
        # The inputs: the carry; rows, by stack and index (`RepeatedEntry.of`); and others.
        self._carry = {x: self._input(x.first.spec) for x in run.carried}
        self._rows: dict[tuple[Ref, tuple[int, int]], Input] = {}
        self._others: dict[Ref, Input] = {}
        self._ops: list[Op] = []
        self._positions: list[int] = []
        self._scalars: list[Position] = []
        self._kinds: list[type] = []
        self._own: dict[int, Op] = {}
        # Operations of earlier runs that are computed again: by run, position, and what is read.
        self._again: dict[tuple[Run, int, int, int], Op] = {}

    def op(self) -> Op:
        """The operation."""
        run = self._run
        last = self._runs.op(run, run.high - 1, run.period - 1)
        self._source = last.source._replace(name=REPEAT)
        names = [Local(x.position, x.result) for x in run.carried]
        stacked = [*self._loops.kept.stacked[run]]
        for k in self._needed([*names, *stacked]):
            ops = [self._runs.op(run, run.low + i, k) for i in self._order]
            first = self._runs.op(run, run.low, k)
            self._own[k] = self._add(first, [self._value(x) for x in run.operands[k]], ops)
        graph = self._graph([self._value(name) for name in (*names, *stacked)])
        operands = [
            *(self._now(x.first) for x in run.carried),
            *(stack for stack, _ in self._rows),
            *self._others,
        ]
        entry = self._entry(graph)
        scalars = tuple(self._scalars)
        return Op(entry, operands, self._source, scalars=scalars, bodies=(graph,))

    def _needed(self, names: Sequence[Local | Carried]) -> list[int]:
        """The positions of the operations that compute these values in each iteration."""
        found: set[int] = set()
        pending = [name.position for name in names if isinstance(name, Local)]
        while pending:
            position = pending.pop()
            if position not in found and self._before(position) is None:
                found.add(position)
                operands = self._run.operands[position]
                pending += [x.position for x in operands if isinstance(x, Local)]
        return sorted(found)

    def _before(self, position: int) -> Op | None:
        """The operation of the old graph that is computed once for all iterations, if it is."""
        if position not in self._loops.constants(self._run):
            return None
        return self._runs.op(self._run, self._run.low, position)

    # Values of an iteration.

    def _value(self, operand: Operand) -> Ref:
        """What an operation of the run reads."""
        if isinstance(operand, Local):
            before = self._before(operand.position)
            if before is not None:
                return self._other(Ref(before, operand.result))
            return Ref(self._own[operand.position], operand.result)
        if isinstance(operand, Carried):
            return Ref(self._carry[operand])
        if isinstance(operand, Kept):
            return self._kept(operand)
        if isinstance(operand, Rows):
            return self._row(operand)
        return self._other(operand.value)

    def _other(self, value: Ref) -> Ref:
        now = self._now(value)
        if now not in self._others:
            self._others[now] = self._input(value.spec)
        return Ref(self._others[now])

    def _row(self, rows: Rows) -> Ref:
        stack = rows.stack
        now = (
            self._now(stack)
            if isinstance(stack, Ref)
            else self._loops.stack_of(stack, self._source)
        )
        return self._row_of(now, rows.first, rows.step)

    def _row_of(self, stack: Ref, first: int, step: int) -> Ref:
        """The row that iteration i reads: first + step * i."""
        index = (first, step)
        if self._loops.is_reversed[self._run]:
            index = (first + step * (self._run.length - 1), -step)
        if (stack, index) not in self._rows:
            spec = Spec.contiguous(stack.spec.shape[1:], stack.spec.dtype)
            self._rows[stack, index] = self._input(spec)
        return Ref(self._rows[stack, index])

    def _kept(self, kept: Kept) -> Ref:
        """What an earlier run has kept, or what is computed again from that."""
        run, name = kept.run, kept.value
        stack = self._loops.stacks.get((run, name))
        if stack is not None:
            first, step = kept.first - run.low, kept.step
            if self._loops.is_reversed[run]:
                first, step = run.length - 1 - first, -step
            return self._row_of(stack, first, step)
        assert isinstance(name, Local)
        k = name.position
        if k in self._loops.constants(run):
            return self._other(Ref(self._runs.op(run, run.low, k), name.result))
        key = (run, k, kept.first, kept.step)
        if key not in self._again:
            operands = [self._of_earlier(x, kept) for x in run.operands[k]]
            ops = [self._runs.op(run, kept.first + kept.step * i, k) for i in self._order]
            first_op = self._runs.op(run, kept.first, k)
            self._again[key] = self._add(first_op, operands, ops)
        return Ref(self._again[key], name.result)

    def _of_earlier(self, operand: Operand, kept: Kept) -> Ref:
        """What an operation of an earlier run reads in the iterations of which a value is kept."""
        run, skipped = kept.run, kept.first - kept.run.low
        if isinstance(operand, (Local, Carried)):
            return self._kept(Kept(run, operand, kept.first, kept.step))
        if isinstance(operand, Shared):
            return self._other(operand.value)
        first, step = operand.first + operand.step * skipped, operand.step * kept.step
        return self._value(operand._replace(first=first, step=step))

    # Operations and inputs.

    def _input(self, spec: Spec) -> Input:
        return Input(Leaf(spec.logical, self._unknown), 0)

    def _add(self, first: Op, operands: Sequence[Ref], ops: Sequence[Op]) -> Op:
        """Adds an operation.

        Args:
            first: the operation in the first iteration.
            operands: what it reads in the body.
            ops: the operation in each iteration, in the order of the rows.
        """
        kinds = iter(first.entry.number_kinds)
        scalars: list[Position] = []
        for positions in zip(*(op.scalars for op in ops)):
            kind = next(kinds)
            if isinstance(positions[0], tuple):  # of a loop inside, one for each of its iterations
                each = [*zip(*positions)]
                scalars.append(tuple(range(len(self._kinds), len(self._kinds) + len(each))))
                self._scalars += each
                self._kinds += [kind] * len(each)
            else:
                scalars.append(len(self._kinds))
                self._scalars.append(positions)
                self._kinds.append(kind)
        source = Source(first.source.name, len(self._ops), first.source.origin)
        op = Op(first.entry, operands, source, scalars=tuple(scalars), bodies=first.bodies)
        self._ops.append(op)
        self._positions.append(first.source.position)
        return op

    def _graph(self, results: list[Ref]) -> Graph:
        """The body, behind the last operation."""
        inputs = (*self._carry.values(), *self._rows.values(), *self._others.values())
        numbers: dict[Ref, int] = {}
        for i, x in enumerate(inputs):
            x.number = i
            numbers[Ref(x)] = -i - 1
        nodes: list[Node] = []
        count = 0
        for op in self._ops:
            nodes.append(Node(op.entry, tuple(numbers[x] for x in op.operands), op.source.origin))
            numbers |= {x: count + x.result for x in op.results}
            count += len(op.results)
        recorded = replace(
            self._recorded,
            leaves=tuple(x.leaf for x in inputs),
            nodes=tuple(nodes),
            outputs=tuple(Output(numbers[x], x.spec.logical, None) for x in results),
            donated=(),
        )
        return Graph(recorded, inputs, tuple(self._ops), tuple(results))

    def _entry(self, graph: Graph) -> RepeatedEntry:
        recorded = graph.recorded
        parameters = tuple(leaf.spec for leaf in recorded.leaves)
        outputs = tuple(output.value for output in recorded.outputs)
        nodes = tuple((node.entry, node.inputs) for node in recorded.nodes)
        origins = tuple(node.origin for node in recorded.nodes)
        alike = tuple((identity_of(entry), inputs) for entry, inputs in nodes)
        return RepeatedEntry.of(
            Subgraph(parameters, nodes, outputs, origins if any(origins) else ()),
            (parameters, alike, outputs),
            self._positions,
            num_carry=len(self._carry),
            rows=tuple(index for _, index in self._rows),
            length=self._run.length,
            reverse=self._loops.is_reversed[self._run],
            number_kinds=tuple(self._kinds),
        )
