"""Chooses the runs of a graph that are worth a loop.

A loop stacks what is read of its iterations elsewhere, so that something must have use for the
stacks: another loop, such as that of the gradients, which goes over the same layers in the other
direction; or, as for the gradients of parameters, what reads the rows of a stack anyway.
"""

from collections.abc import Callable, Iterable

from spmd_core.graph.repetition import Repetition
from spmd_core.program.ir import Graph, Ref
from spmd_core.program.repeated_runs import LEAST, Carried, Kept, Local, Rows, Run, Runs

# The least number of operations that loops which belong together must save.
MIN_SAVED = 48
# Of what an iteration reads of stacks and carries, how many times as many bytes its results may
# have that are read one by one.
_MOST_READ_APART = 2
_NOWHERE = (0, 0)


def chosen(
    graph: Graph, may_be_stacked: Callable[[tuple[Ref, ...]], bool], *, least: int | None = None
) -> Runs:
    """The runs of a graph that may become loops and are worth it.

    Args:
        graph: the graph.
        may_be_stacked: as for `Runs`.
        least: the least number of operations to save; by default `MIN_SAVED`.
    """
    least = MIN_SAVED if least is None else least
    runs = Runs(graph, may_be_stacked)
    bounds: dict[Repetition, tuple[int, int]] = {}
    while True:
        left_out = runs.analyse(bounds)
        if not left_out:
            readers = Readers(graph, runs)
            narrowed = False
            for run in runs.all:
                part = _common_rows(run, runs)
                if len(part) == run.length:
                    part = _common_part(run, runs)
                    if not readers.reads_outside(run, part):
                        part = range(run.low, run.high)
                if LEAST <= len(part) < run.length:
                    bounds[run.repetition] = (
                        run.start + part.start * run.period,
                        run.start + part.stop * run.period,
                    )
                    narrowed = True
                elif _has_no_use(run, runs, readers):
                    left_out.append(run.repetition)
                    runs.left[run.repetition] = "most of what they compute is read one by one"
            if narrowed:
                continue
        if not left_out:
            for group in _groups(runs.all):
                saved = sum(run.num_saved for run in group)
                if saved < least:
                    left_out += [run.repetition for run in group]
                    why = f"loops would save {saved} operations, fewer than {least}"
                    runs.left |= dict.fromkeys((run.repetition for run in group), why)
        if not left_out:
            return runs
        bounds |= dict.fromkeys(left_out, _NOWHERE)


class Readers:
    """Which values of runs are read apart: by what is in no run, or by a run in another form.

    Attributes:
        apart: for each run, the iterations of which each of its values is read apart, by name.
    """

    def __init__(self, graph: Graph, runs: Runs) -> None:
        self.apart: dict[Run, dict[Local, set[int]]] = {run: {} for run in runs.all}
        for op in graph.ops:
            where = runs.where(op)
            for position, value in enumerate(op.operands):
                if where is None:
                    self._note(runs, value)
                    continue
                reader, iteration, place = where
                operand = reader.operands[place][position]
                is_first = isinstance(operand, Carried) and iteration == reader.low
                if is_first or not isinstance(operand, (Local, Carried, Kept)):
                    self._note(runs, value)
        for value in (*graph.outputs, *graph.checked):
            self._note(runs, value)

    def _note(self, runs: Runs, value: Ref) -> None:
        found = runs.place(value)
        if found is not None:
            run, iteration, name = found
            self.apart[run].setdefault(name, set()).add(iteration)

    def bytes_apart(self, run: Run, runs: Runs) -> int:
        """The bytes of an iteration's values that are read apart, but for what is carried out."""
        return sum(
            _value(runs, run, name).spec.num_bytes
            for name, iterations in self.apart[run].items()
            if any(not is_last_carry(run, name, i) for i in iterations)
        )

    def reads_outside(self, run: Run, part: range) -> bool:
        """Whether something reads apart what iterations outside of a part compute."""
        return any(
            i not in part and not is_last_carry(run, name, i)
            for name, iterations in self.apart[run].items()
            for i in iterations
        )


def is_last_carry(run: Run, name: Local, iteration: int) -> bool:
    """Whether a value of an iteration is a result of the loop: carried out of the last one."""
    is_carried = any((x.position, x.result) == name for x in run.carried)
    return is_carried and iteration == run.high - 1


def _value(runs: Runs, run: Run, name: Local) -> Ref:
    return Ref(runs.op(run, run.low, name.position), name.result)


def _has_no_use(run: Run, runs: Runs, readers: Readers) -> bool:
    """Whether more is read apart than an iteration takes from stacks and carries."""
    carried = sum(x.first.spec.num_bytes for x in run.carried)
    stacks = {x.stack for x in run.reads() if isinstance(x, Rows)}
    taken = carried + sum(map(_row_bytes, stacks))
    return readers.bytes_apart(run, runs) > _MOST_READ_APART * taken


def _row_bytes(stack: Ref | tuple[Ref, ...]) -> int:
    """The bytes of a row of a stack, which may be a tuple of the values that are to be its rows."""
    if isinstance(stack, Ref):
        return stack.spec.num_bytes // max(stack.spec.shape[0], 1)
    return stack[0].spec.num_bytes


def _common_rows(run: Run, runs: Runs) -> range:
    """The iterations whose rows of stacks that are not there yet are read by all loops over these.

    The gradients of parameters that are stacked are then stacks of as many rows.
    """
    part = range(run.low, run.high)
    mine = {x.stack: x for x in run.reads() if isinstance(x, Rows)}
    for other in runs.all:
        for rows in other.reads():
            own = mine.get(rows.stack) if isinstance(rows, Rows) else None
            if own is None or isinstance(own.stack, Ref) or not isinstance(rows, Rows):
                continue
            ends = [
                run.low + (row - own.first) * own.step
                for row in (rows.first, rows.first + rows.step * (other.length - 1))
            ]
            part = range(max(part.start, min(ends)), min(part.stop, max(ends) + 1))
    return part


def _common_part(run: Run, runs: Runs) -> range:
    """The iterations that all loops read that go over those of a run; all, if there are none."""
    low, high = run.low, run.high
    for later in runs.all:
        for operand in later.reads():
            if isinstance(operand, Kept) and operand.run is run:
                ends = operand.first, operand.first + operand.step * (later.length - 1)
                low, high = max(low, min(ends)), min(high, max(ends) + 1)
    return range(low, high) if low < high else range(run.low, run.high)


def why_none(runs: Runs) -> str:
    """Why there is no loop, for the run that would have saved most."""
    if not runs.left:
        return f"nothing is repeated {LEAST} times in a row."
    repetition = max(runs.left, key=lambda x: x.end - x.start - x.period)
    count = (repetition.end - repetition.start) // repetition.period
    name = runs.ops[repetition.start].entry.name
    what = f"{count} x {repetition.period} operations from a {name} on are repeated"
    return f"{what}, but {runs.left[repetition]}."


def _groups(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs, those together of which one reads what another one has kept."""
    group_of: dict[Run, list[Run]] = {}
    for run in runs:
        group = group_of[run] = [run]
        for other in {x.run for x in run.reads() if isinstance(x, Kept)}:
            joined = group_of[other]
            if joined is not group:
                group += joined
                group_of |= dict.fromkeys(joined, group)
    return list({id(group): group for group in group_of.values()}.values())
