"""What a search has tried: candidates, what the compiler said of them, and which one is best."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from spmd_core.auto.candidates import Candidate
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import Shardings
from spmd_core.auto.solve import Solution
from spmd_core.planner.planned import ProgramPlan
from spmd_core.program.program import Program

# Of compiled programs whose modelled times differ by no more, relatively, the one of least memory
# is the best: no roofline is as exact.
_SAME = 0.005


@dataclass(frozen=True)
class Tried:
    """A candidate, and what its compiled program takes on one device.

    Attributes:
        candidate: the candidate.
        shardings: its shardings.
        program: what the compiler says; None if it was not compiled, or does not fit.
        seconds: the modelled time of the compiled program; None without one.
        propagated_s: the modelled time with the collectives that Shardy's propagation inserts; None
            if it did not run, or Shardy refused the program.
        expected_s: the modelled time that its compiled program is expected to have (`expected`);
            None if its collectives were not propagated.
        sent: the bytes that a device sends, by propagation, else by the model; 0 without either.
        kept_bytes: of parameters that a device gathers and keeps from forward to backward, by
            propagation; 0 without it.
        refusal: the compiler's words for a program that does not fit.
        measured_s: the seconds that the program took on the devices; None if it did not run.
    """

    candidate: Candidate
    shardings: Shardings
    program: ProgramPlan | None = None
    seconds: float | None = None
    propagated_s: float | None = None
    expected_s: float | None = None
    sent: float = 0.0
    kept_bytes: float = 0.0
    refusal: str = ""
    measured_s: float | None = None

    @property
    def bytes(self) -> float:
        """The modelled bytes of a device at the peak of memory."""
        return self.candidate.solution.bytes + self.kept_bytes


@dataclass
class Progress:
    """What a search has so far, for one that is interrupted.

    Attributes:
        made: the candidates, the best one by the model first.
        tried: those that were compiled.
        programs: their programs, if the devices are here and this was made with a dict; else None.
    """

    made: list[Tried] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    programs: dict[Shardings, Program] | None = None

    def best_first(self, *, memory: int | None, objective: str) -> list[Tried]:
        """As `decide` returns: the best that was compiled and fits, else the best by the model.

        Args:
            memory, objective: as for `decide`.

        Returns:
            The candidates, the best one first; nothing if there is none yet that may fit.
        """
        best = best_of(self.tried, memory, objective)
        compiled = {x.shardings for x in self.tried}
        left = [x for x in self.made if x.shardings not in compiled]
        if best is None:
            return [*left, *self.tried] if left else []
        return [best, *(x for x in self.tried if x is not best), *left]


def best_of(tried: Sequence[Tried], memory: int | None, objective: str) -> Tried | None:
    """The best of those that were compiled and fit; None if none does."""
    fitting = [
        x
        for x in tried
        if x.program is not None and (memory is None or x.program.peak_bytes <= memory)
    ]
    if objective != "memory":
        least = min((_seconds(x) for x in fitting), default=0.0)
        fitting = [x for x in fitting if _seconds(x) <= (1 + _SAME) * least]
    return min(fitting, key=lambda x: (_peak(x), _seconds(x)), default=None)


def _seconds(one: Tried) -> float:
    assert one.seconds is not None
    return one.seconds


def _peak(one: Tried) -> int:
    assert one.program is not None
    return one.program.peak_bytes


def hidden_work(solution: Solution, machine: Machine) -> float:
    """The seconds of work that count where a compiled program's roofline hides them.

    On a chip none: the roofline and the collectives are what shardings by hand are compared by, and
    work without products, such as an optimizer's update, is seen in the choice of the candidates
    that are compiled. Emulated devices are bound by the memory of all operations, of which the
    compiler's figures have that of arguments and results alone.
    """
    return 0.0 if machine.memory_bytes is not None else solution.work_s


def program_seconds(program: ProgramPlan, machine: Machine, work_s: float = 0.0) -> float:
    """The modelled time of a compiled program: its roofline, and then its collectives.

    Collectives are counted as if nothing overlapped them, since no schedule is known.

    Args:
        program: the program.
        machine: the devices.
        work_s: seconds that a device computes and moves its memory at least, by another model.
    """
    costs = program.costs
    compute = max(costs.compiler_flops / machine.flops, work_s)
    memory = costs.least_bytes / machine.memory_bytes_per_s
    times = sum(1 if c.executions is None else c.executions for c in program.collectives)
    links = {False: machine.links_bytes_per_s, True: machine.network_bytes_per_s}
    moving = sum(
        c.moved_bytes
        * (1 if c.executions is None else c.executions)
        * (machine.scatters if c.kind == "reduce-scatter" else 1.0)
        / links[c.is_between_slices]
        for c in program.collectives
    )
    return max(compute, memory) + moving + times * machine.latency_s
