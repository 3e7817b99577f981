"""A compiled program's memory and collectives: what a step takes on a device, and sends."""

from collections import defaultdict
from dataclasses import dataclass

from spmd_core import counters
from spmd_core.arguments import checked, require_kind
from spmd_core.counters import ProgramRecord
from spmd_core.debugging import communication
from spmd_core.debugging.programs import kept
from spmd_core.errors import SpmdError
from spmd_core.runtime.devices import allocator_stats


@checked(since=0)
def step_program(*, since: int = 0) -> ProgramRecord | None:
    """The program of a training step: of the large programs, the one that ran most often.

    Where the first step is a program of its own, it runs once; the program of an evaluation is
    small, though it may run often. None if nothing was compiled.

    Args:
        since: only programs compiled after `counter("compiles")` had that value.
    """
    found = counters.programs(since=since)
    largest = max((program.num_ops for program in found), default=0)
    return max(
        (program for program in found if program.num_ops > largest / 2),
        key=lambda program: program.executions,
        default=None,
    )


def given(program: ProgramRecord | None, what: str) -> ProgramRecord:
    """The program, or the step's for None.

    Raises:
        TypeError: not the record of a program.
        SpmdError: none was compiled.
    """
    if program is not None:
        require_kind("program", program, ProgramRecord, write="one of metrics.programs(), or None")
    found = step_program() if program is None else program
    if found is None:
        raise SpmdError(
            f"{what} describes a compiled program; none was compiled yet. Call it after sync()."
        )
    return found


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one device, in bytes.

    Attributes:
        program: the program's name.
        peak_bytes: the most that the program holds at once, by the compiler's analysis.
        argument_bytes: of that, its inputs: parameters, optimizer state, data.
        output_bytes: its results; `alias_bytes` of them are in the memory of donated arguments.
        alias_bytes: see `output_bytes`.
        temp_bytes: activations and other temporaries.
        device_peak_bytes: the most that a device of this process had in use since its start, over
            all programs, by its allocator; None if the platform keeps no statistics (CPU).
        device_limit_bytes: what the allocator may use; None likewise.
    """

    program: str
    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    device_peak_bytes: int | None
    device_limit_bytes: int | None

    def __str__(self) -> str:
        new = self.output_bytes - self.alias_bytes
        lines = [
            f"{self.program}: {_mib(self.peak_bytes)} at peak on a device, by the compiler "
            f"({_mib(self.argument_bytes)} arguments, {_mib(self.temp_bytes)} temporary, "
            f"{_mib(new)} new results)"
        ]
        if self.device_peak_bytes is None:
            lines.append("the platform does not count what a device has in use")
        else:
            limit = (
                "" if self.device_limit_bytes is None else f" of {_mib(self.device_limit_bytes)}"
            )
            lines.append(f"{_mib(self.device_peak_bytes)}{limit} at peak since the start, measured")
        return "\n".join(lines)


def memory_use(program: ProgramRecord | None = None) -> MemoryUse:
    """The peak memory of a device: from the compiled program, and from the device if it counts.

    Does not wait.

    Args:
        program: one of `programs()`; None: the step's, as `step_program` finds it.

    Raises:
        SpmdError: nothing was compiled yet.
    """
    chosen = given(program, "memory_use")
    stats = allocator_stats()
    peaks, limits = (
        [row[name] for row in stats if name in row] for name in ("peak_bytes_in_use", "bytes_limit")
    )
    return MemoryUse(
        chosen.name,
        chosen.peak_bytes,
        chosen.argument_bytes,
        chosen.output_bytes,
        chosen.alias_bytes,
        chosen.temp_bytes,
        device_peak_bytes=max(peaks, default=None),
        device_limit_bytes=min(limits, default=None),
    )


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind along the same mesh axes, in one run of a program.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, ... (`debugging.Collective`).
        axes: the mesh axes; empty if the groups of devices match no mesh of the program.
        number: how many collectives the program has.
        result_bytes: bytes of their results on a device.
        moved_bytes: bytes that a device sends with the ring algorithm.
        is_exact: False if how often one of them runs depends on data; it then counts once.
    """

    kind: str
    axes: tuple[str, ...]
    number: int
    result_bytes: int
    moved_bytes: float
    is_exact: bool

    def __str__(self) -> str:
        more = "" if self.is_exact else " or more"
        return (
            f"{self.number} x {self.kind} over {', '.join(self.axes) or '?'}: "
            f"{_mib(self.moved_bytes)}{more} sent by a device"
        )


def traffic(program: ProgramRecord | None = None) -> tuple[Traffic, ...]:
    """The collectives of a program by kind and mesh axes, those that send most first.

    `debugging.collectives(program=...)` lists each of them with its cause. Does not wait.

    Args:
        program: one of `programs()`; None: the step's, as `step_program` finds it.

    Raises:
        SpmdError: nothing was compiled yet, or the program is not kept any more.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[communication.Collective]] = defaultdict(list)
    for c in communication.of_program(kept(given(program, "traffic"), "traffic")):
        groups[c.kind, c.axes or ()].append(c)
    found = [
        Traffic(
            kind,
            axes,
            number=len(group),
            result_bytes=sum(c.result_bytes * (c.executions or 1) for c in group),
            moved_bytes=sum(c.moved_bytes * (c.executions or 1) for c in group),
            is_exact=all(c.executions is not None for c in group),
        )
        for (kind, axes), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda t: -t.moved_bytes))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"
