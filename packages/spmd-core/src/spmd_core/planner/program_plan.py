"""Compiles one recorded program for a topology, and reads its memory, collectives and costs."""

import functools
import shutil
from collections.abc import Collection, Mapping

from spmd_core.debugging import communication
from spmd_core.graph.storage import Storage
from spmd_core.planner import buffer_text, memory_uses
from spmd_core.planner.costs import costs_of
from spmd_core.planner.memory_program import compile_buffers
from spmd_core.planner.memory_uses import MemoryUse
from spmd_core.planner.planned import ProgramPlan
from spmd_core.planner.topology import Topology
from spmd_core.program.compilation import build, compile_lowered
from spmd_core.program.program import Program
from spmd_core.program.program_graph import RecordedGraph


def program_plan(
    graph: RecordedGraph,
    name: str,
    topology: Topology,
    *,
    program: Program | None = None,
    kept: Collection[int] = (),
    names: Mapping[Storage, str],
    machine_code: bool = False,
    keep_texts: bool = False,
) -> ProgramPlan:
    """What a program takes on one device of a topology. Call it inside `abstract.planning`.

    Args:
        graph: the program.
        name: its name.
        topology: the devices.
        program: the program, if it is compiled already.
        kept: the positions of leaves that it updates, or that a later run reads again.
        names: the names of its tensors, for errors.
        machine_code: whether to generate machine code for TPUs and count its bytes.
        keep_texts: whether the compiler's texts stay, for an equal program of the same plan.

    Raises:
        DeviceMemoryError: the program does not fit.
    """
    if program is None:
        compiler = compile_lowered
        if topology.request is not None:
            compiler = functools.partial(
                compile_buffers, topology=topology, machine_code=machine_code
            )
        program = build(graph, name, compiler=compiler, names=lambda: names)
    record = program.record
    assert program.dump_folder is not None
    memory = buffer_text.read(program.dump_folder)
    hlo = program.compiled_text()
    if not keep_texts:
        shutil.rmtree(program.dump_folder)
    roles = memory_uses.roles(program.graph, kept)
    rows = memory_uses.at_peak(program.graph, roles, memory, hlo, program.lowered.num_packed)
    collectives = communication.of_text(hlo, program.lowered)
    parts = memory_uses.sums(rows)
    if machine_code:
        parts = {**parts, MemoryUse.CODE: record.code_bytes}
    return ProgramPlan(
        record.name,
        "",
        1,
        True,
        record.trace_s + record.compile_s,
        {part: n for part, n in parts.items() if n},
        rows,
        memory.argument_bytes + memory.new_result_bytes,
        collectives,
        costs_of(program.graph, hlo, memory, collectives, topology),
    )
