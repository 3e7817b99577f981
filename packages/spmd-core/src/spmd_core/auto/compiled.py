"""Compiles the programs of candidates for a topology: for absent TPUs up to two at a time."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack

import jax

from spmd_core.errors import DeviceMemoryError
from spmd_core.graph.storage import Storage
from spmd_core.planner.memory_program import Compilation
from spmd_core.planner.planned import ProgramPlan
from spmd_core.planner.program_plan import program_plan
from spmd_core.planner.topology import Topology
from spmd_core.program.compilation import build, building
from spmd_core.program.lower import Lowered
from spmd_core.program.program import Program
from spmd_core.program.program_graph import RecordedGraph

# libtpu compiles most of the time in one thread (of 12.9 CPU-seconds of GPT-2 124M's step at most
# 2.1 ran beside others), so two compilations use two cores. Each takes the memory of a process, so
# large ones run one by one.
_AT_A_TIME = 2
_POLL_S = 0.02


def compiled(
    graphs: Sequence[Callable[[], RecordedGraph]],
    topology: Topology,
    *,
    names: Mapping[Storage, str],
    starting: Callable[[int], None],
    wanted: Callable[[int], bool] = lambda number: True,
    keep: Callable[[int, Program], None] | None = None,
) -> Generator[tuple[int, ProgramPlan | DeviceMemoryError], None, None]:
    """What each program takes on one device, as it is known. Call it inside `abstract.planning`.

    The graphs are lowered here, one after another. For absent TPUs processes of their own compile
    them, at most two at a time, and large ones one by one; they end if the iterator does, by an
    interruption or otherwise.

    Args:
        graphs: give the programs.
        topology: the devices.
        names: the names of tensors, for errors.
        starting: called with the number of the program that is lowered next.
        wanted: whether the program of a number is still wanted, after those that were yielded.
        keep: gets the number and the program of each for devices that are here; None to drop them.

    Yields:
        The number of a program, and its figures, or the error that it does not fit.
    """
    if topology.request is None:
        yield from _here(graphs, topology, names, starting, wanted, keep)
        return
    waiting = (i for i in range(len(graphs)) if wanted(i))
    with ExitStack() as ends:
        running: list[_Running] = []
        while True:
            while _has_room(running) and (i := next(waiting, None)) is not None:
                starting(i)
                running.append(_Running(i, graphs[i](), topology, names, ends))
            if not running:
                return
            one = next((x for x in running if x.is_done()), None)
            if one is None:
                time.sleep(_POLL_S)
                continue
            found = one.figures()
            if found is not None:
                running.remove(one)
                yield one.number, found


def _here(
    graphs: Sequence[Callable[[], RecordedGraph]],
    topology: Topology,
    names: Mapping[Storage, str],
    starting: Callable[[int], None],
    wanted: Callable[[int], bool],
    keep: Callable[[int, Program], None] | None,
) -> Iterator[tuple[int, ProgramPlan | DeviceMemoryError]]:
    """`compiled` for devices of this process, whose compiler uses all cores by itself."""
    for i, make in enumerate(graphs):
        if not wanted(i):
            continue
        starting(i)
        graph, program = make(), None
        try:
            if keep is not None:
                program = build(graph, _name(i), names=lambda: names)
                keep(i, program)
            found = program_plan(graph, _name(i), topology, program=program, names=names)
        except DeviceMemoryError as error:
            yield i, error
        else:
            yield i, found


class _Running:
    """A program that is being compiled for absent TPUs.

    Args:
        number: its number.
        graph: what it computes.
        topology: the TPUs.
        names: the names of tensors, for errors.
        ends: ends its process.
    """

    def __init__(
        self,
        number: int,
        graph: RecordedGraph,
        topology: Topology,
        names: Mapping[Storage, str],
        ends: ExitStack,
    ) -> None:
        self.number = number
        self._graph, self._topology, self._names, self._ends = graph, topology, names, ends
        self._making: Generator[Lowered, Program, Program] = building(
            graph, _name(number), names=lambda: names
        )
        self._start(next(self._making))

    @property
    def is_large(self) -> bool:
        """Whether the compiler takes gigabytes of the host's memory."""
        return self._compilation.is_large

    def is_done(self) -> bool:
        """Whether `figures` need not wait for the compiler."""
        return self._compilation.is_done()

    def figures(self) -> ProgramPlan | DeviceMemoryError | None:
        """What the program takes, or the error; None if it was lowered again and compiles on."""
        try:
            try:
                program = self._compilation.result()
            except jax.errors.JaxRuntimeError as error:
                self._start(self._making.throw(error))
            else:
                self._start(self._making.send(program))
        except DeviceMemoryError as error:
            return error
        except StopIteration as end:
            # An equal program of the plan in progress, such as the one that is chosen, is read
            # from the same texts.
            return program_plan(
                self._graph,
                _name(self.number),
                self._topology,
                program=end.value,
                names=self._names,
                keep_texts=True,
            )
        return None

    def _start(self, lowered: Lowered) -> None:
        self._compilation = Compilation(lowered, self._topology, machine_code=False)
        self._ends.callback(self._compilation.end)


def _has_room(running: Sequence[_Running]) -> bool:
    """Whether another compilation may run beside these, which are programs of one step."""
    return len(running) < _AT_A_TIME and not any(x.is_large for x in running)


def _name(number: int) -> str:
    return f"auto_{number + 1}"
