"""A plan: what its programs take, as a text for people and as plain values for a file."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_core.debugging import communication
from spmd_core.planner.costs import Costs, crosses_slices
from spmd_core.planner.parts import Buffer, Part
from spmd_core.planner.topology import Topology

# Of the plain values of `values`; raised when a field changes its meaning or goes.
SCHEMA = 1
_NUM_BUFFERS = 10


@dataclass(frozen=True)
class PlannedProgram:
    """One program of a plan, on one device.

    Attributes:
        name, source: as in `metrics.ProgramRecord`.
        executions: how often the planned code would have run it.
        is_step: whether the steps that compiled nothing new run it.
        compile_s: seconds that tracing and compiling took here.
        parts: bytes by what they are for, when most memory is in use.
        buffers: what lies in memory then, the largest first.
        state_bytes: of arguments and of results that take no argument's place: no schedule of the
            program takes less.
        collectives: what moves between devices.
        costs: FLOPs and bytes, and the bounds on time that follow.
    """

    name: str
    source: str
    executions: int
    is_step: bool
    compile_s: float
    parts: dict[Part, int]
    buffers: tuple[Buffer, ...]
    state_bytes: int
    collectives: communication.Collectives
    costs: Costs

    @property
    def peak_bytes(self) -> int:
        """What the program and all other arrays take of a device's memory."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """What a function takes on the devices of a topology, by compilation. `print` shows a report.

    Attributes:
        topology: the devices.
        programs: in the order of their first runs.
        num_steps: steps that were recorded.
        refusal: the compiler's words, if a program does not fit the devices' memory; None if all
            fit.
        ended_by: why the plan ended before its steps compiled nothing new; empty if it did not.
    """

    topology: Topology
    programs: tuple[PlannedProgram, ...]
    num_steps: int
    refusal: str | None = None
    ended_by: str = ""

    @property
    def largest(self) -> PlannedProgram | None:
        """The program that takes the most memory; None if there is none."""
        return max(self.programs, key=lambda program: program.peak_bytes, default=None)

    @property
    def step(self) -> PlannedProgram | None:
        """The largest program of the steps that compiled nothing new; None if there is none."""
        chosen = [program for program in self.programs if program.is_step]
        return max(chosen, key=lambda program: program.peak_bytes, default=None)

    @property
    def peak_bytes(self) -> int | None:
        """Of one device; None if a program does not fit, and for an empty plan."""
        largest = self.largest
        return None if self.refusal is not None or largest is None else largest.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the devices have the memory; None for CPUs, whose memory is the host's."""
        if self.refusal is not None:
            return False
        capacity, peak = self.topology.hbm_bytes, self.peak_bytes
        return None if capacity is None or peak is None else peak <= capacity

    def __str__(self) -> str:
        return text(self)


def text(plan: Plan) -> str:
    """The report: what fits, memory by part, the largest buffers, collectives, bounds on time."""
    topology = plan.topology
    capacity = topology.hbm_bytes
    kind = "emulated CPU" if topology.chip is None else topology.chip.name
    lines = [
        f"Plan for {topology.name}: {len(topology.devices)} devices ({kind}). Nothing was run."
    ]
    if plan.refusal is not None:
        lines += ["", "DOES NOT FIT, as the compiler found:", *_indented(plan.refusal)]
    if plan.ended_by:
        lines += ["", "The plan ended early:", *_indented(plan.ended_by)]
    if not plan.programs:
        return "\n".join([*lines, "No program was compiled."])
    lines += ["", *_programs_table(plan)]
    shown = plan.step or plan.largest
    assert shown is not None
    lines += ["", f"Memory of a device at the peak of {shown.name} ({shown.source}):"]
    rows = [(str(part), shown.parts[part]) for part in Part if part in shown.parts]
    lines += [f"  {name:<28}{_gb(n):>12}" for name, n in rows]
    lines.append(f"  {'together':<28}{_gb(shown.peak_bytes):>12}")
    ratio = shown.peak_bytes / shown.state_bytes if shown.state_bytes else math.inf
    lines.append(
        f"  {'arguments and new results':<28}{_gb(shown.state_bytes):>12}  the least that any "
        f"schedule takes; the peak is {ratio:.2f} times that"
    )
    if capacity is not None and plan.peak_bytes is not None:
        left = capacity - plan.peak_bytes
        word = "fits, with" if left >= 0 else "DOES NOT FIT, by"
        lines.append(
            f"  {'capacity of a device':<28}{_gb(capacity):>12}  the largest program {word} "
            f"{_gb(abs(left))} {'left' if left >= 0 else 'too much'}"
        )
    lines += ["", "The largest buffers then:", *_buffer_lines(shown.buffers)]
    lines += ["", *_collective_lines(plan, shown)]
    lines += ["", *_cost_lines(plan, shown)]
    return "\n".join(lines)


def values(plan: Plan) -> dict[str, Any]:
    """The plan as numbers, strings, lists and dicts; bytes and FLOPs of one device if not said."""
    topology = plan.topology
    return {
        "schema": SCHEMA,
        "topology": topology.name,
        "num_devices": len(topology.devices),
        "device_kind": topology.devices[0].device_kind,
        "capacity_bytes": topology.hbm_bytes,
        "peak_bytes": plan.peak_bytes,
        "fits": plan.fits,
        "refusal": plan.refusal,
        "ended_by": plan.ended_by,
        "num_steps": plan.num_steps,
        "step": None if plan.step is None else _program_values(plan, plan.step),
        "programs": [_program_values(plan, program) for program in plan.programs],
    }


def _program_values(plan: Plan, program: PlannedProgram) -> dict[str, Any]:
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
            for (kind, axes, over), (number, moved) in _sums(plan, program).items()
        ],
        "costs": {name: getattr(costs, name) for name in costs.__dataclass_fields__},
    }


def _programs_table(plan: Plan) -> list[str]:
    lines = [f"  {'program':<30}{'runs':>6}{'peak':>12}{'compiled in':>13}  needed at"]
    for program in plan.programs:
        mark = "*" if program.is_step else " "
        lines.append(
            f"{mark} {program.name:<30}{program.executions:>6}{_gb(program.peak_bytes):>12}"
            f"{program.compile_s:>11.1f} s  {_short(program.source)}"
        )
    if any(program.is_step for program in plan.programs):
        lines.append("* runs in every further step: a step that compiled nothing new ran it")
    return lines


def _buffer_lines(buffers: Sequence[Buffer]) -> list[str]:
    """The largest buffers; alike ones, such as one of each layer, in one line."""
    groups: dict[tuple[Any, ...], list[Buffer]] = {}
    for b in buffers:
        if b.part is Part.GAPS:
            continue
        line = None if b.origin is None else (b.origin.file, b.origin.line)
        groups.setdefault((b.part, b.shape, b.op, line), []).append(b)
    ordered = sorted(groups.values(), key=lambda rows: -sum(b.num_bytes for b in rows))
    lines = []
    for rows in ordered[:_NUM_BUFFERS]:
        first = rows[0]
        where = ""
        if first.origin is not None:
            modules = list(dict.fromkeys(b.origin.module for b in rows if b.origin is not None))
            module = modules[0] + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")
            where = f"{module} {_short(f'{first.origin.file}:{first.origin.line}')}"
        lines.append(
            f"  {_gb(sum(b.num_bytes for b in rows)):>10}  {len(rows):>4} x {first.shape:<24} "
            f"{first.part}, {first.op or 'no torch operation'} {where}".rstrip()
        )
    return lines


def _sums(plan: Plan, program: PlannedProgram) -> dict[tuple[str, str, str], tuple[int, float]]:
    """Number and bytes sent by a device, for each kind, mesh axes, and network."""
    numbers: Counter[tuple[str, str, str]] = Counter()
    moved: Counter[tuple[str, str, str]] = Counter()
    for c in program.collectives:
        network = "DCN" if crosses_slices(c, plan.topology) else "ICI"
        key = (c.kind, ",".join(c.axes or ()) or "?", network)
        times = 1 if c.executions is None else c.executions
        numbers[key] += times
        moved[key] += int(c.moved_bytes * times)
    return {key: (numbers[key], moved[key]) for key, _ in moved.most_common()}


def _collective_lines(plan: Plan, program: PlannedProgram) -> list[str]:
    sums = _sums(plan, program)
    if not sums:
        return ["No collectives."]
    lines = ["Collectives of one run, with what a device sends (algorithm on a ring):"]
    for (kind, axes, over), (number, moved) in sums.items():
        lines.append(f"  {_gb(moved):>10}  {number:>4} x {kind} over {axes}, {over}")
    return lines


def _cost_lines(plan: Plan, program: PlannedProgram) -> list[str]:
    c = program.costs
    lines = [
        f"FLOPs of one run: {c.model_flops / 1e12:,.2f} T of the model over all devices, "
        f"{c.recomputed_flops / 1e12:,.2f} T computed again; the compiler counts "
        f"{c.compiler_flops / 1e12:,.2f} T on each device, without custom kernels."
    ]
    if c.bound_s is None or plan.topology.chip is None:
        return [*lines, "No bound on time: emulated devices have no data sheet."]
    rows = [
        ("FLOPs at the chip's peak", c.compute_s),
        ("arguments and results through HBM once", c.memory_s),
        ("collectives over all ICI links", c.ici_s),
        ("collectives over DCN", c.dcn_s if c.dcn_bytes else None),
    ]
    lines.append(
        "Bounds on the time of one run, modelled by the data sheet; a real run takes more:"
    )
    lines += [
        f"  {name:<42}{seconds * 1e3:>10.2f} ms" for name, seconds in rows if seconds is not None
    ]
    mfu = "" if c.mfu_bound is None else f", so an MFU of at most {c.mfu_bound:.1%}"
    lines.append(f"  {'roofline (modelled)':<42}{c.bound_s * 1e3:>10.2f} ms{mfu}")
    return lines


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3f} GB"


def _short(line: str) -> str:
    """The line with the file's path from the current folder, where it is below it."""
    path, _, number = line.rpartition(":")
    try:
        return f"{Path(path).relative_to(Path.cwd())}:{number}"
    except ValueError:
        return line


def _indented(message: str) -> list[str]:
    return [f"  {line}" for line in message.splitlines()]
