"""Starts a compiled program on leaves and scalar inputs."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from spmd_core import counters
from spmd_core.graph.values import Value
from spmd_core.program import index_checks
from spmd_core.program.planned_program import PlannedProgram
from spmd_core.program.program import Program
from spmd_core.runtime import interrupts

# A program's floats, its ints and bools, and its complex numbers.
Numbers: TypeAlias = tuple[list[float], list[int], list[complex]]


def by_kind(numbers: Sequence[Any]) -> Numbers:
    """A program's numbers: its floats, its ints and bools, and its complex numbers."""
    return (
        [x for x in numbers if x.__class__ is float],
        [int(x) for x in numbers if x.__class__ is int or x.__class__ is bool],
        [x for x in numbers if x.__class__ is complex],
    )


def start(
    program: Program | PlannedProgram,
    read: Sequence[Value],
    arrays: list[Any],
    numbers: Numbers,
    lines: Sequence[str],
) -> list[Any]:
    """Starts a program and returns its results, without waiting; call it under `lock`.

    Args:
        program: the program.
        read: the values that it reads.
        arrays: its inputs, laid out as it needs them.
        numbers: its scalar inputs (`by_kind`).
        lines: the user's line of each check of indices.

    Raises:
        DeviceMemoryError, ProgramError: it could not be started.
    """
    index_checks.note_reads(read)
    # Not any later: the data that was donated to the program would be lost.
    interrupts.raise_deferred()
    results = program.run(*numbers, arrays, lines)
    counters.count("executions")
    return results
