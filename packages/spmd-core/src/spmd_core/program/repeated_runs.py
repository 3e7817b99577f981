"""Finds runs of operations that a graph repeats, such as its layers, and what an iteration reads.

A run is a part of the graph in which operations follow each other in periods. It may become a loop
if what each of its operations reads has one form in all iterations: the same value, a result of the
same iteration, one of the iteration before, or another row of a stack. Iterations at either end in
which that is not so are left out. `passes/folded_layers` makes loops of the runs.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from spmd_core.graph.repetition import Repetition, runs
from spmd_core.ops.host_memory import FROM_HOST, TO_HOST
from spmd_core.ops.kernels.stacks import STACK, UNSTACK
from spmd_core.program.ir import Graph, Input, Op, Ref
from spmd_core.program.repeated_entries import identity_of

# The least number of iterations.
LEAST = 4
_TOO_FEW = f"fewer than {LEAST} in a row read the same or rows of stacks"
# How many phases of a run are tried: positions in the period at which its iterations may begin.
_MOST_PHASES = 3
# Operations that no loop has: those between memories, and those between stacks and rows.
_APART = (TO_HOST, FROM_HOST, STACK, UNSTACK)


class Shared(NamedTuple):
    """What all iterations read: one value."""

    value: Ref


class Local(NamedTuple):
    """A result of the same iteration: of the operation at a position in the period."""

    position: int
    result: int


class Carried(NamedTuple):
    """A result of the iteration before; another value in the first one."""

    position: int
    result: int
    first: Ref


class Rows(NamedTuple):
    """The rows of a stack: the index in the first iteration, and 1 or -1 for the next one.

    The stack is the operand of an `spmd::unstack`; or it is not there yet, and is a tuple of the
    values that are to be its rows.
    """

    stack: "Ref | tuple[Ref, ...]"
    first: int
    step: int


class Kept(NamedTuple):
    """What the iterations of an earlier run compute or carry, from one of them on, in steps."""

    run: "Run"
    value: Local | Carried
    first: int
    step: int


Operand = Shared | Local | Carried | Rows | Kept


@dataclass(eq=False)
class Run:
    """A run of a graph.

    Attributes:
        repetition: where it is.
        start: the position of the graph's operation with which iteration 0 begins.
        low, high: the iterations that may become a loop, from the first one up to `high`.
        operands: what the operations of an iteration read.
        carried: what passes from an iteration to the next.
    """

    repetition: Repetition
    start: int
    low: int
    high: int
    operands: list[tuple[Operand, ...]] = field(default_factory=list)
    carried: dict[Carried, None] = field(default_factory=dict)

    @property
    def period(self) -> int:
        return self.repetition.period

    @property
    def length(self) -> int:
        """The number of iterations."""
        return self.high - self.low

    @property
    def num_saved(self) -> int:
        """How many operations a loop saves."""
        return (self.length - 1) * self.period

    def reads(self) -> Iterator[Operand]:
        """All that an iteration reads."""
        for operands in self.operands:
            yield from operands


class _Violation(Exception):
    """No range of iterations of a run has one form, for the reason that it says."""


class Runs:
    """The runs of a graph that may become loops, in order.

    Attributes:
        left: why runs are left as they are, by where they are.

    Args:
        graph: the graph.
        may_be_stacked: whether these values may become the rows of a stack that is not there yet.
    """

    def __init__(self, graph: Graph, may_be_stacked: Callable[[tuple[Ref, ...]], bool]) -> None:
        self.ops = graph.ops
        self.all: list[Run] = []
        self.left: dict[Repetition, str] = {}
        self._may_be_stacked = may_be_stacked
        self._candidates = _candidates(graph)  # with what passes at each position
        self._where: dict[Op, tuple[Run, int, int]] = {}
        self._carried: dict[Ref, list[tuple[Run, Carried, int]]] = {}
        # Of each value that is to be a row of a stack, the rows, and its index.
        self._rows: dict[Ref, tuple[tuple[Ref, ...], int]] = {}

    def op(self, run: Run, iteration: int, position: int) -> Op:
        """The operation of an iteration."""
        return self.ops[run.start + iteration * run.period + position]

    def where(self, op: Op) -> tuple[Run, int, int] | None:
        """The run, the iteration and the position in it of an operation; None if it is in none."""
        return self._where.get(op)

    def place(self, value: Ref) -> tuple[Run, int, Local] | None:
        """The run and iteration that compute a value, and its name there."""
        where = None if value.op is None else self._where.get(value.op)
        if where is None:
            return None
        run, iteration, position = where
        return run, iteration, Local(position, value.result)

    def analyse(self, bounds: dict[Repetition, tuple[int, int]]) -> list[Repetition]:
        """Analyses runs that do not overlap, and returns those that cannot become loops.

        Args:
            bounds: the positions in the graph to which a run is restricted; to none if it is empty.
        """
        self.all, failed, end = [], [], 0
        self._where, self._carried, self._rows = {}, {}, {}
        for repetition in self._chosen(bounds):
            assert end <= repetition.start
            run = self._analysed(repetition, bounds.get(repetition, (0, len(self.ops))))
            if run is None:
                failed.append(repetition)
                continue
            self._add(run)
            end = run.start + run.high * run.period
        return failed

    def _chosen(self, bounds: dict[Repetition, tuple[int, int]]) -> list[Repetition]:
        """Runs that do not overlap, those of short periods before others."""
        taken = bytearray(len(self.ops))
        chosen = []
        for repetition in self._candidates:
            if bounds.get(repetition) == (0, 0):
                continue
            part = slice(repetition.start, repetition.end)
            if not any(taken[part]):
                taken[part] = b"\1" * (part.stop - part.start)
                chosen.append(repetition)
        return sorted(chosen, key=lambda repetition: repetition.start)

    def _analysed(self, repetition: Repetition, bounds: tuple[int, int]) -> Run | None:
        for start in _phases(repetition, self._candidates[repetition]):
            period = repetition.period
            low = max(0, -(-(bounds[0] - start) // period))
            high = (min(repetition.end, bounds[1]) - start) // period
            run = Run(repetition, start, low, high)
            try:
                rows = self._find_operands(run)
            except _Violation as violation:
                self.left[repetition] = str(violation)
                continue
            self._rows |= rows
            return run
        return None

    def _add(self, run: Run) -> None:
        """Makes the values of a run known to later ones."""
        for i in range(run.low, run.high):
            for k in range(run.period):
                self._where[self.op(run, i, k)] = run, i, k
        for carried in run.carried:
            self._carried.setdefault(carried.first, []).append((run, carried, run.low))
            for i in range(run.low + 1, run.high):
                value = Ref(self.op(run, i - 1, carried.position), carried.result)
                self._carried.setdefault(value, []).append((run, carried, i))
        self.all.append(run)

    def _find_operands(self, run: Run) -> dict[Ref, tuple[tuple[Ref, ...], int]]:
        """Finds the operands of a run, and restricts its range until they have one form.

        Returns:
            The rows of new stacks, as in `_rows`.
        """
        position_of = {
            op: position
            for position, op in enumerate(
                self.ops[run.start : run.start + run.high * run.period], run.start
            )
        }
        while True:
            if run.length < LEAST:
                raise _Violation(_TOO_FEW)
            forms = _Forms(self, run, position_of)
            run.operands = [
                tuple(
                    forms.operand([self.op(run, i, k).operands[q] for i in forms.iterations])
                    for q in range(len(self.op(run, run.low, k).operands))
                )
                for k in range(run.period)
            ]
            if (forms.low, forms.high) == (run.low, run.high):
                run.carried = {x: None for x in run.reads() if isinstance(x, Carried)}
                if not run.carried:
                    raise _Violation("nothing passes from one to the next")
                return forms.rows
            run.low, run.high = forms.low, forms.high

    def named(self, value: Ref) -> list[tuple[Run, Local | Carried, int]]:
        """The names of a value in the runs so far, with the iteration that has it by this name."""
        found: list[tuple[Run, Local | Carried, int]] = []
        place = self.place(value)
        if place is not None:
            run, iteration, name = place
            found.append((run, name, iteration))
        return [*found, *self._carried.get(value, ())]

    def stack_of(
        self, values: tuple[Ref, ...], new: dict[Ref, tuple[tuple[Ref, ...], int]]
    ) -> Rows | None:
        """The rows that different values are, or may become; None if that cannot be.

        Args:
            values: one for each iteration.
            new: the rows of new stacks, where others are added.
        """
        places = [new.get(x) or self._rows.get(x) for x in values]
        if not any(places):
            if len({*values}) < len(values) or not self._may_be_stacked(values):
                return None
            new.update((x, (values, i)) for i, x in enumerate(values))
            return Rows(values, 0, 1)
        first, second = places[0], places[1]
        if first is None or second is None or abs(second[1] - first[1]) != 1:
            return None
        step = second[1] - first[1]
        for i, place in enumerate(places):
            if place is None or place[0] is not first[0] or place[1] != first[1] + i * step:
                return None
        return Rows(first[0], first[1], step)


class _Forms:
    """The forms of operands over the iterations of a run, of which some at the ends may be lost.

    Attributes:
        iterations: those that are looked at.
        low, high: those that have one form.
        rows: the rows of new stacks.
    """

    def __init__(self, runs: Runs, run: Run, position_of: dict[Op, int]) -> None:
        self.iterations = range(run.low, run.high)
        self.low, self.high = run.low, run.high
        self.rows: dict[Ref, tuple[tuple[Ref, ...], int]] = {}
        self._runs, self._run, self._position_of = runs, run, position_of
        self._middle = (run.low + run.high) // 2

    def operand(self, values: Sequence[Ref]) -> Operand:
        """The form of one operand, from its value in each iteration."""
        middle = self._middle - self.iterations.start
        value, following = values[middle], values[middle + 1]
        inner = self._inner(value, self._middle)
        if inner is not None:
            back, name = inner
            if back > 1:
                raise _Violation(f"one reads what the {back}th before it has computed")
            for i, x in zip(self.iterations, values):
                is_first = back == 1 and i == self.low
                found = self._inner(x, i)
                if found != inner if not is_first else found is not None and found[0] == 0:
                    self._leave_out(i)
            if not back:
                return name
            return Carried(name.position, name.result, values[self.low - self.iterations.start])
        if value == following:
            self._keep([x == value for x in values])
            return Shared(value)
        return self._rows_of_stack(values) or self._kept(values) or self._new_rows(values)

    def _inner(self, value: Ref, iteration: int) -> tuple[int, Local] | None:
        """How many iterations ago the run has computed a value, and its name there."""
        place = None if value.op is None else self._position_of.get(value.op)
        if place is None:
            return None
        own, position = divmod(place - self._run.start, self._run.period)
        if own < self.iterations.start:
            return None
        return iteration - own, Local(position, value.result)

    def _rows_of_stack(self, values: Sequence[Ref]) -> Rows | None:
        middle = self._middle - self.iterations.start
        op, other = values[middle].op, values[middle + 1].op
        if op is None or op is not other or op.entry.name != UNSTACK:
            return None
        index = values[middle].result
        step = values[middle + 1].result - index
        if abs(step) != 1:
            raise _Violation("they read the rows of a stack in another order")
        self._keep(
            [x.op is op and x.result == index + step * (i - middle) for i, x in enumerate(values)]
        )
        return Rows(op.operands[0], index + step * (self.low - self._middle), step)

    def _kept(self, values: Sequence[Ref]) -> Kept | None:
        """The values that an earlier run computes or carries, by a name that most of them have."""
        middle = self._middle - self.iterations.start
        best: tuple[list[bool], Kept] | None = None
        for run, name, at in self._runs.named(values[middle]):
            following = [
                i for r, n, i in self._runs.named(values[middle + 1]) if r is run and n == name
            ]
            for step in (1, -1):
                if at + step not in following:
                    continue
                have = [
                    (run, name, at + step * (i - middle)) in self._runs.named(x)
                    for i, x in enumerate(values)
                ]
                if best is None or _around(have, middle) > _around(best[0], middle):
                    best = have, Kept(run, name, at, step)
        if best is None:
            return None
        have, kept = best
        self._keep(have)
        return kept._replace(first=kept.first + kept.step * (self.low - self._middle))

    def _new_rows(self, values: Sequence[Ref]) -> Rows:
        start = self.iterations.start
        # The stack is made before the loop: none of its rows may be computed inside.
        self._keep([self._inner(x, i) is None for i, x in zip(self.iterations, values)])
        if self.high - self.low < LEAST:
            raise _Violation(_TOO_FEW)
        rows = self._runs.stack_of(tuple(values[self.low - start : self.high - start]), self.rows)
        if rows is None:
            raise _Violation(
                f"they read different values of {values[self._middle - start].spec!r} that cannot "
                "lie in one array: they are computed one by one, placed or marked differently, or "
                "some are the same"
            )
        return rows

    def _keep(self, have: Sequence[bool]) -> None:
        """Leaves out the iterations at both ends from which on some do not have the form."""
        for i, has in zip(self.iterations, have):
            if not has:
                self._leave_out(i)

    def _leave_out(self, iteration: int) -> None:
        if iteration < self._middle:
            self.low = max(self.low, iteration + 1)
        else:
            self.high = min(self.high, iteration)


def _around(have: Sequence[bool], middle: int) -> int:
    """How many neighbours of the middle have something without a gap."""
    low, high = middle, middle
    while low > 0 and have[low - 1]:
        low -= 1
    while high + 1 < len(have) and have[high + 1]:
        high += 1
    return high - low


def _candidates(graph: Graph) -> dict[Repetition, list[int]]:
    """The repetitions of a graph in which something passes from each iteration to the next.

    Others, such as the updates of parameters by an optimizer, are no loops: their operations are
    merged (`passes/stacked_operations`).
    """
    found = {x: _passing(graph.ops, x) for x in runs([*map(_identity, graph.ops)], LEAST)}
    return {repetition: passing for repetition, passing in found.items() if min(passing)}


def _identity(op: Op) -> Hashable:
    """What is equal for two operations that do the same to values of the same specs."""
    entry = op.entry
    is_local = any(op.manuals) or any(x.manual for x in op.operands)
    if is_local or entry.border is not None or entry.name in _APART:
        return op
    return identity_of(entry), tuple(x.spec.logical for x in op.operands)


def _passing(ops: Sequence[Op], repetition: Repetition) -> list[int]:
    """For each position in the period, the bytes that pass there between operations of the run.

    They are those in the middle of the run, before the operation at the position.
    """
    first, last = repetition.start, repetition.end
    made = {op: position for position, op in enumerate(ops[first:last])}
    last_read: dict[Ref, int] = {}
    for position, op in enumerate(ops[first:last]):
        last_read |= dict.fromkeys(op.operands, position)
    change = [0] * (last - first + 1)
    for value, read in last_read.items():
        if value.op in made:
            size = max(value.spec.num_bytes, 1)
            change[made[value.op] + 1] += size
            change[read + 1] -= size
    middle = (last - first) // repetition.period // 2 * repetition.period
    return [*accumulate(change)][middle : middle + repetition.period]


def _phases(repetition: Repetition, passing: Sequence[int]) -> list[int]:
    """The positions at which iteration 0 may begin, those where least passes before others."""
    length = repetition.end - repetition.start

    def cost(phase: int) -> tuple[int, int, int]:
        return passing[phase], -((length - phase) // repetition.period), phase

    best = sorted(range(repetition.period), key=cost)[:_MOST_PHASES]
    return [repetition.start + phase for phase in best]


def is_input(value: Ref) -> bool:
    """Whether a value is an input of the program."""
    return isinstance(value.producer, Input)
