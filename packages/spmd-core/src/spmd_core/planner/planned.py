"""A plan: the memory, costs and collectives of its programs, as text and as plain values."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_core.counters import ProgramRecord
from spmd_core.debugging import communication
from spmd_core.planner.costs import Costs
from spmd_core.planner.memory_uses import Buffer, MemoryUse
from spmd_core.planner.topology import Topology

# The version of the result of `values`; raised if a field is removed or changes its meaning.
SCHEMA = 2
_NUM_BUFFERS = 10
# What the report names in place of an operation for buffers that no operation computes.
_MADE_BY = dict.fromkeys((MemoryUse.PARAMETERS, MemoryUse.OPTIMIZER, MemoryUse.INPUTS), "argument")


@dataclass(frozen=True)
class ProgramPlan:
    """One program of a plan, on one device.

    Attributes:
        name, source: as in `metrics.ProgramRecord`.
        executions: how often the planned code would have run it.
        is_step: whether it runs in the steps that compile nothing new.
        compile_s: seconds that tracing and compiling took here.
        parts: the bytes of each use at the peak. Machine code is included only if the plan
            generates it, and the compiler tells its size; the CPU's does not.
        buffers: the values in memory at the peak, the largest first.
        state_bytes: bytes of arguments, and of results that take over no argument's buffer: no
            schedule of the program takes less.
        collectives: the program's collectives.
        costs: FLOPs and bytes, and the bounds on time that follow.
    """

    name: str
    source: str
    executions: int
    is_step: bool
    compile_s: float
    parts: dict[MemoryUse, int]
    buffers: tuple[Buffer, ...]
    state_bytes: int
    collectives: communication.Collectives
    costs: Costs

    @property
    def peak_bytes(self) -> int:
        """The memory of one device that the program and all other arrays take at the peak."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class FoundShardings:
    """What automatic sharding has found for one program of a plan.

    Attributes:
        mesh: the axes and their sizes, such as `fsdp=4,tensor=2`.
        text: a table of the shardings with reasons, the candidates, and the marks as code.
    """

    mesh: str
    text: str


@dataclass(frozen=True)
class TopologyPlan:
    """The memory and costs of a function's programs on a topology. `print` shows a report.

    Attributes:
        topology: the devices.
        programs: the programs that were compiled, in the order of their first runs.
        left_out: those that were not compiled: programs of training steps that later ones do not
            repeat.
        num_steps: the number of steps that were recorded.
        refusals: the compiler's message for each program that does not fit the devices' memory.
        ended_by: why the plan ended early; empty if it did not.
        shardings: what was found for each program that automatic sharding searched.
    """

    topology: Topology
    programs: tuple[ProgramPlan, ...]
    left_out: tuple[ProgramRecord, ...] = ()
    num_steps: int = 0
    refusals: tuple[str, ...] = ()
    ended_by: str = ""
    shardings: tuple[FoundShardings, ...] = ()

    @property
    def largest(self) -> ProgramPlan | None:
        """The program that takes the most memory; None if there is none."""
        return max(self.programs, key=lambda program: program.peak_bytes, default=None)

    @property
    def step(self) -> ProgramPlan | None:
        """The largest program of the steps that compile nothing new; None if there is none."""
        chosen = [program for program in self.programs if program.is_step]
        return max(chosen, key=lambda program: program.peak_bytes, default=None)

    @property
    def peak_bytes(self) -> int | None:
        """The peak on one device; None if a program does not fit, and for an empty plan."""
        largest = self.largest
        return None if self.refusals or largest is None else largest.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether all programs fit the devices' memory; None for CPUs, which use the host's."""
        if self.refusals:
            return False
        capacity, peak = self.topology.hbm_bytes, self.peak_bytes
        return None if capacity is None or peak is None else peak <= capacity

    def __str__(self) -> str:
        return text(self)


class _Text:
    """The parts of a plan's report, in megabytes or gigabytes."""

    def __init__(self, plan: TopologyPlan) -> None:
        self._plan = plan
        largest = max((program.peak_bytes for program in plan.programs), default=0)
        self._unit, self._scale = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)

    def programs(self) -> list[str]:
        """A line for each program: number of runs, peak memory, and source line."""
        lines = [f"  {'program':<30}{'runs':>6}{'peak':>12}{'compiled in':>13}  needed at"]
        for program in self._plan.programs:
            mark = "*" if program.is_step else " "
            lines.append(
                f"{mark} {program.name:<30}{program.executions:>6}"
                f"{self._size(program.peak_bytes):>12}"
                f"{program.compile_s:>11.1f} s  {_short(program.source)}"
            )
        if any(program.is_step for program in self._plan.programs):
            lines.append("* runs in every further step")
        for record in self._plan.left_out:
            lines.append(
                f"- {record.name:<30}{record.executions:>6}{'-':>12}{'not compiled':>14}  "
                f"{_short(record.source)}"
            )
        if self._plan.left_out:
            lines.append("- runs in no further step; --all compiles it as well")
        return lines

    def memory(self, shown: ProgramPlan) -> list[str]:
        """Memory by use, with the least of any schedule, and the device's capacity."""
        rows: list[tuple[str, int, str]] = [
            (str(part), shown.parts[part], "") for part in MemoryUse if part in shown.parts
        ]
        ratio = shown.peak_bytes / shown.state_bytes if shown.state_bytes else math.inf
        may_count_code = (
            MemoryUse.CODE not in shown.parts and self._plan.topology.request is not None
        )
        rows += [
            (
                "together",
                shown.peak_bytes,
                "without machine code; --code makes it" if may_count_code else "",
            ),
            (
                "arguments and new results",
                shown.state_bytes,
                f"the least of any schedule; the peak is {ratio:.2f} times it",
            ),
        ]
        capacity, peak = self._plan.topology.hbm_bytes, self._plan.peak_bytes
        if capacity is not None and peak is not None:
            verdict = (
                f"fits, with {self._size(capacity - peak)} left"
                if peak <= capacity
                else f"DOES NOT FIT, by {self._size(peak - capacity)} too much"
            )
            rows.append(("capacity of a device", capacity, f"the largest program {verdict}"))
        return [
            f"Memory of a device at the peak of {shown.name} ({_short(shown.source)}):",
            *(f"  {name:<28}{self._size(n):>12}  {note}".rstrip() for name, n, note in rows),
        ]

    def buffers(self, buffers: Sequence[Buffer]) -> list[str]:
        """The largest buffers; equal ones, such as one for each layer, share a line."""
        groups: dict[tuple[Any, ...], list[Buffer]] = {}
        for b in buffers:
            if b.part is not MemoryUse.GAPS:
                line = None if b.origin is None else (b.origin.file, b.origin.line)
                groups.setdefault((b.part, b.shape, b.op, line), []).append(b)
        ordered = sorted(groups.values(), key=lambda rows: -sum(b.num_bytes for b in rows))
        lines = ["The largest buffers then:"]
        for rows in ordered[:_NUM_BUFFERS]:
            first = rows[0]
            lines.append(
                f"  {self._size(sum(b.num_bytes for b in rows)):>11}  "
                f"{len(rows):>4} x {first.shape:<24} {first.part}: "
                f"{first.op or _MADE_BY.get(first.part, 'the compiler')}"
            )
            if first.origin is not None:
                lines.append(f"{'':15}{_place(rows)}")
        return lines

    def collectives(self, program: ProgramPlan) -> list[str]:
        """The collectives, by kind, mesh axes and network."""
        found = _collective_sums(self._plan, program)
        if not found:
            return ["No collectives."]
        return [
            "Collectives of one run, with what a device sends (algorithm on a ring):",
            *(
                f"  {self._size(moved):>11}  {number:>4} x {kind} over {axes}"
                + (f", {network}" if network else "")
                for (kind, axes, network), (number, moved) in found.items()
            ),
        ]

    def costs(self, program: ProgramPlan) -> list[str]:
        """FLOPs, and the bounds on time that follow."""
        c = program.costs
        lines = [
            f"FLOPs of one run: {c.model_flops / 1e12:,.2f} T of the model over all devices, "
            f"{c.recomputed_flops / 1e12:,.2f} T recomputed;",
            f"the compiler counts {c.compiler_flops / 1e12:,.2f} T on each device, without custom "
            "kernels.",
        ]
        if c.bound_s is None:
            return [*lines, "No bound on time: emulated devices have no data sheet."]
        rows = [
            ("FLOPs at the chip's peak", c.compute_s),
            ("arguments and results through HBM once", c.memory_s),
            ("collectives over all ICI links", c.ici_s),
            ("collectives over DCN", c.dcn_s if c.dcn_bytes else None),
        ]
        mfu = "" if c.mfu_bound is None else f", so an MFU of at most {c.mfu_bound:.1%}"
        return [
            *lines,
            "Bounds on the time of one run, modelled by the data sheet; a real run takes more:",
            *(f"  {name:<42}{s * 1e3:>10.2f} ms" for name, s in rows if s is not None),
            f"  {'roofline (modelled)':<42}{c.bound_s * 1e3:>10.2f} ms{mfu}",
        ]

    def _size(self, num_bytes: float) -> str:
        return f"{num_bytes / self._scale:,.2f} {self._unit}"


def text(plan: TopologyPlan) -> str:
    """The report: programs, memory by use, largest buffers, collectives, bounds on time."""
    topology = plan.topology
    kind = "emulated CPU" if topology.chip is None else topology.chip.name
    lines = [
        f"Plan for {topology.name}: {len(topology.devices)} devices ({kind}). Nothing was run."
    ]
    for refusal in plan.refusals:
        lines += ["", "DOES NOT FIT, as the compiler found:", *_indented(refusal)]
    if plan.ended_by:
        lines += ["", "The plan ended early:", *_indented(plan.ended_by)]
    for found in plan.shardings:
        lines += ["", "Shardings that were found:", *_indented(found.text)]
    shown = plan.step or plan.largest
    if shown is None:
        return "\n".join([*lines, "", "No program was compiled."])
    report = _Text(plan)
    blocks = (
        report.programs(),
        report.memory(shown),
        report.buffers(shown.buffers),
        report.collectives(shown),
        report.costs(shown),
    )
    return "\n".join([*lines, *(line for block in blocks for line in ("", *block))])


def _place(rows: Sequence[Buffer]) -> str:
    """The origin of equal buffers: the user's source line, and the first of their modules."""
    origin = rows[0].origin
    assert origin is not None
    modules = list(dict.fromkeys(b.origin.module for b in rows if b.origin and b.origin.module))
    more = ", ..." if len(modules) > 1 else ""
    line = _short(f"{origin.file}:{origin.line}")
    return f"{line}, {modules[0]}{more}" if modules else line


def values(plan: TopologyPlan) -> dict[str, Any]:
    """The plan as numbers, strings, lists and dicts, per device if not stated otherwise."""
    topology = plan.topology
    return {
        "schema": SCHEMA,
        "topology": topology.name,
        "num_devices": len(topology.devices),
        "device_kind": topology.devices[0].device_kind,
        "capacity_bytes": topology.hbm_bytes,
        "peak_bytes": plan.peak_bytes,
        "fits": plan.fits,
        "refusals": list(plan.refusals),
        "ended_by": plan.ended_by,
        "num_steps": plan.num_steps,
        "found_mesh": plan.shardings[0].mesh if plan.shardings else "",
        "step": None if plan.step is None else _program_values(plan, plan.step),
        "programs": [_program_values(plan, program) for program in plan.programs],
        "left_out": [record.name for record in plan.left_out],
    }


def _program_values(plan: TopologyPlan, program: ProgramPlan) -> dict[str, Any]:
    costs = program.costs
    return {
        "name": program.name,
        "source": program.source,
        "executions": program.executions,
        "is_step": program.is_step,
        "compile_s": program.compile_s,
        "peak_bytes": program.peak_bytes,
        "state_bytes": program.state_bytes,
        "parts": {str(part): n for part, n in program.parts.items()},
        "buffers": [
            {
                "part": str(b.part),
                "bytes": b.num_bytes,
                "shape": b.shape,
                "op": b.op,
                "module": "" if b.origin is None else b.origin.module,
                "line": "" if b.origin is None else f"{b.origin.file}:{b.origin.line}",
            }
            for b in program.buffers[:50]
        ],
        "collectives": [
            {"kind": kind, "axes": axes, "over": over, "number": number, "moved_bytes": moved}
            for (kind, axes, over), (number, moved) in _collective_sums(plan, program).items()
        ],
        "costs": {name: getattr(costs, name) for name in costs.__dataclass_fields__},
    }


def _collective_sums(
    plan: TopologyPlan, program: ProgramPlan
) -> dict[tuple[str, str, str], tuple[int, float]]:
    """The number of collectives, and the bytes a device sends, by kind, mesh axes and network."""
    numbers: Counter[tuple[str, str, str]] = Counter()
    moved: Counter[tuple[str, str, str]] = Counter()
    for c in program.collectives:
        network = "DCN" if c.is_between_slices else "ICI"
        network = network if plan.topology.chip is not None else ""
        key = (c.kind, ",".join(c.axes or ()) or "?", network)
        times = 1 if c.executions is None else c.executions
        numbers[key] += times
        moved[key] += int(c.moved_bytes * times)
    return {key: (numbers[key], moved[key]) for key, _ in moved.most_common()}


def _short(line: str) -> str:
    """The source line, with its path relative to site-packages or to the current folder."""
    path, _, number = line.rpartition(":")
    _, installed, inside = path.rpartition(f"{os.sep}site-packages{os.sep}")
    if installed:
        return f"{inside}:{number}"
    try:
        return f"{Path(path).relative_to(Path.cwd())}:{number}"
    except ValueError:
        return line


def _indented(message: str) -> list[str]:
    return [f"  {line}" for line in message.splitlines()]
