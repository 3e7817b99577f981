"""Time to the first step, split into recording, planning, tracing, compiling and waiting."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spmd_core import counters
from spmd_core.counters import Activity
from spmd_core.program import execution


@dataclass
class FirstStep:
    """Where the seconds of a block went; the five parts add up to `total_s`.

    Attributes:
        total_s: the block, until the devices have computed all of it.
        recording_s: Python outside of the other parts: the model's code, autograd, recording.
        planning_s: ends of steps and reads, without tracing and compiling: keys of programs,
            uploads, and starting the programs.
        tracing_s: lowering to StableHLO.
        compiling_s: XLA, or reading its cache on disk.
        waiting_s: waiting for the devices.
        num_programs: how many programs were compiled.
    """

    total_s: float = 0.0
    recording_s: float = 0.0
    planning_s: float = 0.0
    tracing_s: float = 0.0
    compiling_s: float = 0.0
    waiting_s: float = 0.0
    num_programs: int = 0

    def __str__(self) -> str:
        return (
            f"{self.total_s:.2f} s: recording {self.recording_s:.2f}, planning "
            f"{self.planning_s:.2f}, tracing {self.tracing_s:.2f}, compiling "
            f"{self.compiling_s:.2f}, waiting for the devices {self.waiting_s:.2f} "
            f"({self.num_programs} programs compiled)"
        )


@contextmanager
def time_first_step() -> Iterator[FirstStep]:
    """Splits the seconds of a block, such as a program's first training step.

    At its end, the block computes what is pending and waits for the devices. What was pending
    before is computed before the block is timed. Only the block's thread is timed. The figures are
    there after the block.

    Raises:
        RuntimeError: inside of such a block, or while another thread is in one.

    Example:
        >>> import torch
        >>> x = torch.ones(8, 8, device="xla")
        >>> with time_first_step() as first:
        ...     y = x @ x
        >>> first.num_programs, first.compiling_s < first.total_s
        (1, True)
    """
    result = FirstStep()
    execution.cut(wait=True)
    before = counters.counter("compiles")
    with counters.clock() as clock:
        yield result
        execution.cut(wait=True)
    (
        result.recording_s,
        result.planning_s,
        result.tracing_s,
        result.compiling_s,
        result.waiting_s,
    ) = (clock.seconds[activity] for activity in Activity)
    result.total_s = sum(clock.seconds.values())
    result.num_programs = counters.counter("compiles") - before
