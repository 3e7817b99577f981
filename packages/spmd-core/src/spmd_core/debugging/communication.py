"""The collectives of a compiled program: bytes, mesh axes, torch operation and line of the user."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from spmd_core.debugging import hlo_collectives
from spmd_core.debugging.slices import SliceNumbers
from spmd_core.program.lower import Lowered
from spmd_core.program.program import Program
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.runtime.jax_sharding import jax_axis_names
from spmd_core.sharding.mesh import Mesh
from spmd_core.source_lines import Origin

# The names that `program.operation_names` gives operations; with source lines on, with a position.
_OPERATION = re.compile(r"(?P<op>[\w.]+::[\w.<>]+)(?:#(?P<node>\d+))?")


@dataclass(frozen=True)
class Cause:
    """A torch operation, such as `aten::mm`, and the line where the user called it.

    `origin` is None if the program was compiled without source lines.
    """

    op: str
    origin: Origin | None

    def __str__(self) -> str:
        if self.origin is None:
            return self.op
        module = f"{self.origin.module} " if self.origin.module else ""
        return f"{module}{self.op} at {self.origin}"


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `ragged-all-to-all`,
            `collective-permute` or `collective-broadcast`.
        result_bytes: bytes of the result on each device, at each execution. For an all-gather that
            is the gathered array, for a reduce-scatter the device's part.
        operand_bytes: bytes of the operands on each device.
        axes: the mesh axes along which devices take part; for a permute, those along which data
            travels. None if the groups match no mesh of the program.
        is_part: the groups are only a part of these axes.
        groups: the device ids of each group; for a permute the (source, target) pairs. None if
            XLA's text of them has an unknown form.
        executions: number of executions in one run of the program; None if it depends on data.
        causes: the torch operations that need the collective; several if XLA merged collectives.
        name: the name of the instruction in `debugging.hlo`.
        is_between_slices: whether the network between TPU slices carries it (DCN). A collective
            over several slices is compiled to parts inside of slices, and parts between them.
    """

    kind: str
    result_bytes: int
    operand_bytes: int
    axes: tuple[str, ...] | None
    is_part: bool
    groups: hlo_collectives.Groups | None
    executions: int | None
    causes: tuple[Cause, ...]
    name: str
    is_between_slices: bool = False

    @property
    def moved_bytes(self) -> float:
        """The bytes that each device sends at each execution, with the ring algorithm.

        With n devices in a group, of an array of b bytes: an all-gather, a reduce-scatter and an
        all-to-all send b·(n-1)/n, an all-reduce twice as much, a permute b. (Thakur, Rabenseifner,
        Gropp, "Optimization of collective communication operations in MPICH", 2005.)
        """
        if self.kind in ("collective-permute", "collective-broadcast") or not self.groups:
            return float(self.operand_bytes)
        size = len(self.groups[0])
        whole = self.result_bytes if self.kind == "all-gather" else self.operand_bytes
        return whole * (size - 1) / size * (2 if self.kind == "all-reduce" else 1)

    @property
    def line(self) -> str | None:
        """`file:line` of the first cause with a known line."""
        return next(
            (
                f"{cause.origin.file}:{cause.origin.line}"
                for cause in self.causes
                if cause.origin is not None
            ),
            None,
        )


class Collectives(tuple[Collective, ...]):
    """The collectives of one program, in the compiler's order; prints as a table.

    The table is sorted by bytes, the largest first, and ends with sums by kind and axes.

    Attributes:
        program: the program's name.
    """

    program: str

    @staticmethod
    def of(collectives: Iterable[Collective], program: str) -> "Collectives":
        """The collectives of the program `program`."""
        made = Collectives(collectives)
        made.program = program
        return made

    def where(self, *, kind: str | None = None, axis: str | None = None) -> "Collectives":
        """The collectives of this kind, along this mesh axis."""
        chosen = (
            c for c in self if kind in (None, c.kind) and (axis is None or axis in (c.axes or ()))
        )
        return Collectives.of(chosen, self.program)

    @property
    def result_bytes(self) -> int:
        """Bytes on each device in one run; a data-dependent number of executions counts once."""
        return sum(_total_bytes(c) for c in self)

    def __str__(self) -> str:
        if not self:
            return f"{self.program}: no collectives"
        rows = [("kind", "axes", "bytes per device", "times", "cause")]
        for c in sorted(self, key=_total_bytes, reverse=True):
            first, *others = [str(cause) for cause in c.causes] or ["not known"]
            rows.append(
                (
                    c.kind,
                    _axes_text(c),
                    f"{c.result_bytes:,}",
                    "?" if c.executions is None else str(c.executions),
                    first,
                )
            )
            rows += [("", "", "", "", other) for other in others]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{kind:<{widths[0]}}  "
            f"{axes:<{widths[1]}}  {size:>{widths[2]}}  {times:>{widths[3]}}  {cause}"
            for kind, axes, size, times, cause in rows
        ]
        sums: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for c in self:
            group = f"{c.kind} over {_axes_text(c)}"
            sums[group] += _total_bytes(c)
            counts[group] += 1
        lines += [
            "",
            *(f"{size:,} bytes in {counts[group]} x {group}" for group, size in sums.most_common()),
        ]
        total = (
            f"{self.program}: "
            f"{len(self)} collectives, {self.result_bytes:,} bytes of results per device"
        )
        if not any(cause.origin for c in self for cause in c.causes):
            total += (
                "\nFor the lines that cause them, "
                "record and compile with SPMD_SOURCE_LINES=1 or inside debugging.source_lines()."
            )
        return "\n".join([*lines, total])

    __repr__ = __str__


def _total_bytes(c: Collective) -> int:
    return c.result_bytes * (1 if c.executions is None else c.executions)


def _axes_text(c: Collective) -> str:
    if c.axes is None:
        return "?" if c.groups is None else f"groups of {len(c.groups[0])}"
    return ", ".join(c.axes) + (" (part)" if c.is_part else "") or "none"


def of_program(program: Program) -> Collectives:
    """The collectives of a compiled program."""
    return of_text(program.compiled_text(), program.lowered)


def of_text(hlo: str, lowered: Lowered) -> Collectives:
    """The collectives of a program's optimised module, given as text."""
    graph, numbers = lowered.graph, SliceNumbers(lowered.devices)
    meshes = _meshes(graph)
    found = hlo_collectives.collectives(hlo, numbers.num_devices)
    return Collectives.of((_collective(c, graph, meshes, numbers) for c in found), lowered.name)


def _collective(
    c: hlo_collectives.CollectiveInstruction,
    graph: RecordedGraph,
    meshes: list[Mesh],
    numbers: SliceNumbers,
) -> Collective:
    if c.is_between_slices:
        positions = numbers.between(c.groups_text)
    else:
        positions = None if c.groups is None else numbers.inside(c.groups)
    ids = graph.device_ids
    groups = None if positions is None else tuple(tuple(ids[i] for i in g) for g in positions)
    axes, is_part = (
        (None, False)
        if groups is None
        else match_axes(groups, meshes, is_permute=c.kind == "collective-permute")
    )
    causes = tuple(
        dict.fromkeys(
            _cause(found, graph) for name in c.op_names for found in _OPERATION.finditer(name)
        )
    )
    return Collective(
        c.kind,
        c.result_bytes,
        c.operand_bytes,
        axes,
        is_part,
        groups,
        c.executions,
        causes,
        c.name,
        c.is_between_slices,
    )


def _cause(found: re.Match[str], graph: RecordedGraph) -> Cause:
    node = None if found["node"] is None else graph.nodes[int(found["node"])]
    return Cause(found["op"], None if node is None else node.origin)


def _meshes(graph: RecordedGraph) -> list[Mesh]:
    """The meshes of a program's marks and manual regions, the most frequent first."""
    marks = [leaf.placement.sharding for leaf in graph.leaves] + [
        output.sharding for output in graph.outputs
    ]
    marks += [node.entry.sharding for node in graph.nodes]
    found = Counter(mark.mesh for mark in marks if mark is not None)
    found.update(
        node.entry.border.manual.mesh for node in graph.nodes if node.entry.border is not None
    )
    found.update(
        leaf.placement.manual.mesh for leaf in graph.leaves if leaf.placement.manual is not None
    )
    return [mesh for mesh, _ in found.most_common()]


def match_axes(
    groups: hlo_collectives.Groups, meshes: list[Mesh], *, is_permute: bool = False
) -> tuple[tuple[str, ...] | None, bool]:
    """The mesh axes along which groups of device ids lie.

    The first mesh whose axes give exactly these groups wins; otherwise the first mesh of which
    the groups are parts.

    Args:
        groups: the device ids of each group.
        meshes: the candidates, in order of preference.
        is_permute: the groups are (source, target) pairs, which need not cover an axis.

    Returns:
        The names of the axes, or None if no mesh matches; and whether the groups are parts.

    Example:
        >>> mesh = Mesh(range(8), (4, 2), ("data", "model"))
        >>> (
        ...     match_axes(((0, 2, 4, 6), (1, 3, 5, 7)), [mesh]),
        ...     match_axes(((0, 2), (4, 6), (1, 3), (5, 7)), [mesh]),
        ... )
        ((('data',), False), (('data',), True))
    """
    parts: tuple[str, ...] | None = None
    for mesh in meshes:
        position = {device: i for i, device in enumerate(mesh.ids)}
        if any(device not in position for group in groups for device in group):
            continue
        grids = [
            np.array(np.unravel_index([position[d] for d in group], mesh.mesh_shape))
            for group in groups
        ]
        varies = np.any([np.ptp(grid, axis=1) > 0 for grid in grids], axis=0)
        size = int(np.prod([n for n, v in zip(mesh.mesh_shape, varies) if v]))
        names = tuple(str(name) for name, v in zip(jax_axis_names(mesh), varies) if v)
        if is_permute or all(len(group) == size for group in groups):
            return names, False
        parts = parts or names
    return parts, parts is not None
