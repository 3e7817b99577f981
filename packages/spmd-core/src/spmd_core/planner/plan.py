"""Plans a function: records it, compiles its programs for a topology, and runs none of them.

The process's devices are replaced by those of the topology (`runtime.devices.exchanged`), for which
libtpu compiles without a TPU. Arrays are then abstract (`runtime.abstract`): they have no elements,
and reading one is refused. Nothing else knows of plans. XLA writes the buffer assignment of each
program to a folder (`planner.buffer_text`), and the graph tells the use of each buffer
(`planner.program_plan`).
"""

import gc
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spmd_core import progress
from spmd_core.arguments import checked, require_callable, require_int, require_kind
from spmd_core.config import config
from spmd_core.errors import DeviceMemoryError, PlanError, PlanReadError
from spmd_core.graph import recorders
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import take_pending
from spmd_core.planner.memory_uses import MemoryUse
from spmd_core.planner.planned import FoundShardings, ProgramPlan, TopologyPlan
from spmd_core.planner.program_plan import program_plan
from spmd_core.planner.topology import Topology, find_topology
from spmd_core.program import execution
from spmd_core.program.planned_program import PlannedProgram
from spmd_core.runtime import abstract, devices
from spmd_core.runtime.abstract import AbstractArray
from spmd_core.source_lines import Phase
from spmd_core.steps import closures

# The number of steps that update state and compile nothing new after which a plan is complete. More
# than one, because a script may end each backward pass that it accumulates as a step.
_QUIET_STEPS = 3


def _without_search(
    topology: Topology, is_on: bool
) -> AbstractContextManager[list[FoundShardings]]:
    raise AssertionError("spmd_core registers the search when it is imported")


# Automatic sharding for the programs of a plan, on or until the function turns it on: a context
# manager, whose value has what was found for each program. Set by `auto.registration`.
# Guarded by: imports. Cleared by: never.
automatic: Callable[[Topology, bool], AbstractContextManager[list[FoundShardings]]] = (
    _without_search
)


class _CompleteError(BaseException):
    """Ends the function when its steps compile nothing new. No `except Exception` catches it."""


@dataclass
class _Seen:
    """A program that the function ran.

    Attributes:
        program: the program.
        kept: the positions of leaves that it updates, or that a later run reads again.
        elsewhere: the most bytes that other arrays take on a device while it runs.
        is_step: whether it runs in the steps that compile nothing new.
    """

    program: PlannedProgram
    kept: set[int] = field(default_factory=set)
    elsewhere: int = 0
    is_step: bool = False


@dataclass
class _Recorder:
    """Follows the programs and steps of a plan."""

    quiet_steps: int
    run: abstract.Run | None = None
    seen: dict[PlannedProgram, _Seen] = field(default_factory=dict)
    num_steps: int = 0
    num_quiet: int = 0
    is_complete: bool = False
    _is_new: bool = False
    _last_cut: int = -1
    _in_step: list[_Seen] = field(default_factory=list)
    _read_before: weakref.WeakSet[AbstractArray] = field(default_factory=weakref.WeakSet)

    def on_program(self, program: PlannedProgram, leaves: Sequence[AbstractArray]) -> None:
        assert self.run is not None
        cut = recorders.current().num_cuts
        if cut != self._last_cut:  # the programs of one have none of the user's code between them
            gc.collect()  # else arrays in reference cycles would count until the next collection
            self._last_cut = cut
        self._is_new = self._is_new or program not in self.seen
        seen = self.seen.setdefault(program, _Seen(program))
        seen.elsewhere = max(seen.elsewhere, self.run.live_bytes(besides=leaves))
        seen.kept.update(program.graph.donated)
        seen.kept.update(i for i, x in enumerate(leaves) if x in self._read_before)
        self._read_before = weakref.WeakSet(leaves)
        self._in_step.append(seen)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        yield
        if not self._in_step:
            return
        self.num_steps += 1
        if self._is_new:
            self.num_quiet = 0
            for seen in self.seen.values():
                seen.is_step = False
        elif any(seen.program.graph.donated for seen in self._in_step):
            self.num_quiet += 1
            for seen in self._in_step:
                seen.is_step = True
        self._is_new = False
        self._in_step.clear()
        if self.num_quiet >= self.quiet_steps:
            self.is_complete = True
            raise _CompleteError

    def before_read(self) -> None:
        """At a read, ends a plan that has seen a step that compiled nothing new."""
        if self.num_quiet:
            self.is_complete = True
            raise _CompleteError


@checked(num_slices=1, quiet_steps=1)
def plan(
    function: Callable[[], Any],
    *,
    topology: str | Topology,
    num_slices: int = 1,
    quiet_steps: int = _QUIET_STEPS,
    compile_all: bool = False,
    machine_code: bool = False,
    auto: bool = False,
) -> TopologyPlan:
    """What a training function takes on devices that need not exist.

    The function is called here and records its operations as usual, but no program runs, no data is
    transferred, and only what the function itself creates in host memory is allocated. It is ended
    when steps that update state, such as parameters, compile nothing new; a function without such
    steps runs to its end. Then the programs are compiled for the topology's devices. Functions
    given to `add_step_closure` are not called. The state of the random generator is restored.

    Args:
        function: creates its model, optimizer and data, and trains; `sync()` ends its steps.
        topology: "v4-16", "v5e-8", libtpu's "v4:2x2x2", "cpu-64" (see
            `planner.topology_names.parse`), or the result of `find_topology`.
        num_slices: the number of TPU slices, joined by the data center's network.
        quiet_steps: the number of steps that update state and compile nothing new after which the
            plan is complete.
        compile_all: whether to also compile the programs of earlier training steps, such as a first
            one that no later one repeats.
        machine_code: whether to generate machine code for TPUs and count its bytes. That takes
            several times as long, and several times as much of the host's memory. XLA's compiler
            for CPUs does not tell the size of its code.
        auto: whether shardings are found for what is not marked, as by `use_spmd(auto=True)`, which
            the function itself may call instead.

    Returns:
        The plan, with the compiler's message for each program that does not fit the memory.

    Raises:
        PlanError: there is no such topology, or libtpu is not installed.
        AutoShardingError: of what is found automatically, no sharding fits.
        PlanReadError: the function reads a value before any step was complete; the message has the
            line, and what to change.
    """
    if abstract.run() is not None:
        raise PlanError(
            "a plan cannot be made inside of a plan; got a second one. Make them one after another."
        )
    require_callable("function", function)
    require_kind("topology", topology, str, Topology, write="for instance topology='v4-8'")
    quiet_steps = require_int("quiet_steps", quiet_steps, least=1)
    num_slices = require_int("num_slices", num_slices, least=1)
    found = (
        topology
        if isinstance(topology, Topology)
        else find_topology(topology, num_slices=num_slices)
    )
    if devices.is_started():
        execution.cut(wait=True)  # pending tensors belong to the process's own devices
    folder = Path(tempfile.mkdtemp(prefix="spmd-plan-"))
    recorder = _Recorder(quiet_steps)
    recorder.run = run = abstract.Run(folder, recorder.on_program, recorder.before_read)
    ended_by = ""
    programs, left_out, refusals = [], [], []
    try:
        with (
            torch.random.fork_rng(devices=[]),
            _with_source_lines(),
            closures.set_aside(),
            abstract.planning(found.devices, run),
            automatic(found, auto) as shardings,
        ):
            execution.around_step.append(recorder.around_step)
            try:
                function()
            except _CompleteError:
                pass
            except PlanReadError as error:
                if not recorder.seen:
                    raise
                ended_by = str(error)
            except DeviceMemoryError as error:
                # This program was compiled while the function ran, because the compiler chooses
                # the placement of its results.
                refusals.append(str(error))
                ended_by = "a program does not fit whose results the compiler places; mark them"
            finally:
                execution.around_step.remove(recorder.around_step)
                with lock:
                    take_pending()
            is_complete = any(seen.is_step for seen in recorder.seen.values())
            for seen in recorder.seen.values():
                if is_complete and not compile_all and _is_superseded(seen):
                    left_out.append(seen.program.record)
                    continue
                try:
                    with progress.shown(f"compiling {seen.program.name} for {found.name}"):
                        programs.append(_compiled(seen, found, machine_code=machine_code))
                except DeviceMemoryError as error:
                    refusals.append(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return TopologyPlan(
        found,
        tuple(programs),
        tuple(left_out),
        recorder.num_steps,
        tuple(refusals),
        ended_by,
        tuple(shardings),
    )


def _is_superseded(seen: _Seen) -> bool:
    """Whether only training steps that later steps do not repeat ran this program."""
    return not seen.is_step and any(
        node.origin is not None and node.origin.phase is not Phase.FORWARD
        for node in seen.program.graph.nodes
    )


def _compiled(seen: _Seen, topology: Topology, *, machine_code: bool) -> ProgramPlan:
    """Compiles a program, and reads the compiler's output.

    Raises:
        DeviceMemoryError: the program does not fit.
    """
    planned = seen.program
    is_here = topology.request is None or planned.is_compiled
    found = program_plan(
        planned.graph,
        planned.name,
        topology,
        program=planned.compiled if is_here else None,
        kept=seen.kept,
        names=planned.names,
        machine_code=machine_code,
    )
    parts = {**found.parts, MemoryUse.ELSEWHERE: seen.elsewhere}
    return replace(
        found,
        source=planned.record.source,
        executions=planned.record.executions,
        is_step=seen.is_step,
        parts={part: n for part, n in parts.items() if n},
    )


@contextmanager
def _with_source_lines() -> Iterator[None]:
    before = config.record_source_lines
    config.record_source_lines = True
    try:
        yield
    finally:
        config.record_source_lines = before
