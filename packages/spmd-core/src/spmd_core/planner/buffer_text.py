"""A parser for XLA's text of a program's buffers: what lies in memory, and from when to when.

Input is the text that XLA writes with the option `xla_dump_to`, for TPU and CPU alike; output are
plain values. `memory_analysis()` of jax tells less: one sum, in which a TPU's on-chip memories
count, too.
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
# The table of a tuple of arguments, which is none of them.
_TABLE = -1
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>\S+) @-?\d+> \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): "
    r"(?P<shape>.*)$"
)
_RANGE = re.compile(r"^    (?P<name>\S+?)(?P<index>\{[\d,]*\}):(?P<start>\d+)-(?P<end>\d+)$")
_LAYOUT = re.compile(r"\{[^{}]*\}$")
# XLA's number for a device's main memory; TPUs have further ones on the chip.
_MAIN = 0


@dataclass(frozen=True)
class HloValue:
    """What an instruction puts into an allocation.

    Attributes:
        name: the instruction, with the index into its result if that is a tuple.
        size: bytes.
        offset: in the allocation, in bytes.
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
    """A piece of a device's main memory.

    Attributes:
        size: bytes.
        parameter: which argument of the program lies in it, also where they are one tuple; negative
            for the table of that tuple; None for others.
        is_output: whether a result of the program lies in it.
        is_constant: whether a constant does.
        values: what lies in it; the values of temporaries share it over time.
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
        allocations: all of them; none is shared with another.
        ranges: by value, the first and the last instruction at which it is alive.
    """

    allocations: tuple[Allocation, ...]
    ranges: Mapping[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all allocations: what the program needs at once."""
        return sum(allocation.size for allocation in self.allocations)

    @property
    def argument_bytes(self) -> int:
        """Bytes of the program's arguments."""
        return sum(a.size for a in self.allocations if a.parameter is not None)

    @property
    def new_result_bytes(self) -> int:
        """Bytes of the results that take no argument's place."""
        return sum(a.size for a in self.allocations if a.parameter is None and a.is_output)

    @property
    def result_bytes(self) -> int:
        """Bytes of all results, but the arguments that are results as they are."""
        return sum(a.size for a in self.allocations if a.is_output)

    @property
    def temporaries(self) -> tuple[Allocation, ...]:
        """The allocations of neither parameters, results nor constants."""
        return tuple(
            a
            for a in self.allocations
            if a.parameter is None and not a.is_output and not a.is_constant
        )

    def live_at_peak(self) -> tuple[HloValue, ...]:
        """The values in temporary memory when most of it is in use, the largest first.

        A value that lies where another does, as an update in place, counts once.
        """
        events: list[tuple[int, int, HloValue]] = []
        for allocation in self.temporaries:
            for value in allocation.values:
                start, end = self.ranges.get(value.name, (0, -1))
                if start <= end:
                    events += [(start, 1, value), (end + 1, 0, value)]
        events.sort(key=lambda event: event[:2])
        alive: dict[tuple[int, int], dict[str, HloValue]] = {}
        total = best = 0
        found: list[HloValue] = []
        for i, (time, starts, value) in enumerate(events):
            place = (value.offset, value.size)
            there = alive.setdefault(place, {})
            if starts:
                total += 0 if there else value.size
                there[value.name] = value
            else:
                there.pop(value.name, None)
                total -= 0 if there else value.size
            is_last = i + 1 == len(events) or events[i + 1][0] != time
            if is_last and total > best:
                best = total
                found = [next(iter(values.values())) for values in alive.values() if values]
        return tuple(sorted(found, key=lambda value: -value.size))


def read(folder: str | Path) -> Buffers:
    """The buffers of the program that was compiled last with this folder as `xla_dump_to`.

    Raises:
        PlanError: the compiler wrote no such text.
    """
    assignments = sorted(Path(folder).glob("*after_optimizations-buffer-assignment.txt"))
    if not assignments:
        raise PlanError(
            "a plan reads what the compiler writes of a program's memory; XLA wrote nothing into "
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
