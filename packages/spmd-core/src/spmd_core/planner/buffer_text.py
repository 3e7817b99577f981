"""Parses XLA's buffer assignment of a program: its allocations, and the live range of each value.

The input is the text that XLA writes with the option `xla_dump_to`, for TPU and CPU alike. jax's
`memory_analysis()` only has one sum, which includes a TPU's on-chip memories.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spmd_core.errors import PlanError

_ALLOCATION = re.compile(
    r"^allocation \d+: size (?P<size>\d+)(?:, color (?P<color>\d+))?(?P<kind>.*):$"
)
_PARAMETER = re.compile(
    r"\bparameter (?P<number>\d+)(?:, shape \|(?P<tuple>\()?[^|]*\|"
    r"(?: at ShapeIndex \{(?P<index>\d*)\})?)?"
)
# The "parameter number" of the pointer table of arguments that are passed as one tuple.
_TABLE = -1
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>\S+) @-?\d+> \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): "
    r"(?P<shape>.*)$"
)
_RANGE = re.compile(r"^    (?P<name>\S+?)(?P<index>\{[\d,]*\}):(?P<start>\d+)-(?P<end>\d+)$")
_LAYOUT = re.compile(r"\{[^{}]*\}$")
# XLA's number (color) for a device's main memory; TPUs have further memories on the chip.
_MAIN = 0


@dataclass(frozen=True)
class HloValue:
    """A value in an allocation: a result of an instruction.

    Attributes:
        name: the instruction, with the index into its result if that is a tuple.
        size: the number of bytes.
        offset: the offset in the allocation, in bytes.
        shape: XLA's, without the layout: "f32[64,1024]".
    """

    name: str
    size: int
    offset: int
    shape: str

    @property
    def instruction(self) -> str:
        """The name of the instruction."""
        return self.name.partition("{")[0]


@dataclass(frozen=True)
class Allocation:
    """A contiguous piece of a device's main memory.

    Attributes:
        size: the number of bytes.
        parameter: the number of the program's argument that it holds, also if the arguments are
            passed as one tuple; negative for the pointer table of that tuple; None if it holds no
            argument.
        is_output: whether it holds a result of the program.
        is_constant: whether it holds a constant.
        values: the values that it holds; temporaries may share it over time.
    """

    size: int
    parameter: int | None
    is_output: bool
    is_constant: bool
    values: tuple[HloValue, ...]


@dataclass(frozen=True)
class Buffers:
    """A program's main memory on one device.

    Attributes:
        allocations: all allocations, which do not overlap.
        ranges: for each value, the first and the last instruction at which it is live.
    """

    allocations: tuple[Allocation, ...]
    ranges: Mapping[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """The bytes of all allocations: the memory that the program reserves."""
        return sum(allocation.size for allocation in self.allocations)

    @property
    def argument_bytes(self) -> int:
        """The bytes of the program's arguments."""
        return sum(a.size for a in self.allocations if a.parameter is not None)

    @property
    def new_result_bytes(self) -> int:
        """The bytes of results that do not take over an argument's buffer."""
        return sum(a.size for a in self.allocations if a.parameter is None and a.is_output)

    @property
    def result_bytes(self) -> int:
        """The bytes of all results, without arguments that are returned unchanged."""
        return sum(a.size for a in self.allocations if a.is_output)

    @property
    def temporaries(self) -> tuple[Allocation, ...]:
        """The allocations that hold neither arguments, results nor constants."""
        return tuple(
            a
            for a in self.allocations
            if a.parameter is None and not a.is_output and not a.is_constant
        )

    def live_at_peak(self) -> tuple[HloValue, ...]:
        """The live temporaries when most temporary memory is in use, the largest first.

        Values at the same place, as after an update in place, are listed once.
        """
        events: list[tuple[int, int, HloValue]] = []
        for allocation in self.temporaries:
            for value in allocation.values:
                start, end = self.ranges.get(value.name, (0, -1))
                if start <= end:
                    events += [(start, 1, value), (end + 1, 0, value)]
        events.sort(key=lambda event: event[:2])
        alive: dict[tuple[int, int], dict[str, HloValue]] = {}
        total = best = at_best = 0

        def follow(starts: int, value: HloValue) -> int:
            """How many bytes more are live after an event."""
            there = alive.setdefault((value.offset, value.size), {})
            before = bool(there)
            if starts:
                there[value.name] = value
            else:
                there.pop(value.name, None)
            return (bool(there) - before) * value.size

        for i, (time, starts, value) in enumerate(events, 1):
            total += follow(starts, value)
            is_last = i == len(events) or events[i][0] != time
            if is_last and total > best:
                best, at_best = total, i
        # Once more, as to list what is live at each new peak takes too long in a long program.
        alive.clear()
        for _, starts, value in events[:at_best]:
            follow(starts, value)
        found = [next(iter(values.values())) for values in alive.values() if values]
        return tuple(sorted(found, key=lambda value: -value.size))


def read(folder: str | Path) -> Buffers:
    """The buffers of the program that was compiled last with this folder as `xla_dump_to`.

    Raises:
        PlanError: the compiler wrote no such file.
    """
    assignments = sorted(Path(folder).glob("*after_optimizations-buffer-assignment.txt"))
    if not assignments:
        raise PlanError(
            "a plan reads the buffer assignment that XLA writes for a program; XLA wrote none into "
            f"{folder}. Leave xla_dump_to out of spmd.config.compiler_options and of XLA_FLAGS."
        )
    ranges = assignments[-1].with_name(
        assignments[-1].name.replace("buffer-assignment", "live-range")
    )
    return Buffers(
        _allocations(assignments[-1].read_text().splitlines()),
        _ranges(ranges.read_text().splitlines()) if ranges.exists() else {},
    )


def _argument(kind: str) -> int | None:
    found = _PARAMETER.search(kind)
    if found is None:
        return None
    if found["index"]:
        return int(found["index"])
    return _TABLE if found["tuple"] else int(found["number"])


def _allocations(lines: Iterable[str]) -> tuple[Allocation, ...]:
    found: list[Allocation] = []
    current: tuple[re.Match[str], list[HloValue]] | None = None

    def close() -> None:
        if current is None:
            return
        header, values = current
        kind = header["kind"]
        if int(header["color"] or _MAIN) != _MAIN or "thread-local" in kind:
            return
        found.append(
            Allocation(
                int(header["size"]),
                _argument(kind),
                "maybe-live-out" in kind or "output shape" in kind,
                ", constant" in kind,
                tuple(values),
            )
        )

    for line in lines:
        header, value = _ALLOCATION.match(line), _VALUE.match(line)
        if header is not None:
            close()
            current = header, []
        elif value is not None and current is not None:
            shape = _LAYOUT.sub("", value["shape"])
            current[1].append(
                HloValue(value["name"], int(value["size"]), int(value["offset"]), shape)
            )
        elif current is not None and not line.startswith(" "):
            close()
            current = None
    close()
    return tuple(found)


def _ranges(lines: Iterable[str]) -> dict[str, tuple[int, int]]:
    found = {}
    for line in lines:
        match = _RANGE.match(line)
        if match is not None:
            index = "" if match["index"] == "{}" else match["index"]
            bounds = (int(match["start"]), int(match["end"]))
            found[match["name"] + index] = bounds
            found[match["name"] + match["index"]] = bounds
    return found
