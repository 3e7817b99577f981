"""Programs, pending or compiled, as text: StableHLO, HLO, operations, collectives."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from spmd_core.arguments import checked
from spmd_core.config import config
from spmd_core.counters import ProgramRecord
from spmd_core.debugging import communication
from spmd_core.debugging.communication import Collectives as Collectives
from spmd_core.errors import SpmdError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage, pending, read
from spmd_core.graph.values import Entry, Spec
from spmd_core.program import compile_cache, pipeline, planning
from spmd_core.program.ir import Graph
from spmd_core.program.lower import Lowered, lower
from spmd_core.program.program import Program
from spmd_core.program.target import Target
from spmd_core.source_lines import Origin
from spmd_core.tensor.sharded_tensor import device_tensor


def stablehlo(*tensors: torch.Tensor, program: Program | ProgramRecord | None = None) -> str:
    """The StableHLO, with `sdy` shardings, of the program that computes pending tensors.

    Traces the program; neither compiles nor runs it. With source lines on, the locations name the
    user's lines and modules.

    Args:
        tensors: pending tensors on device `xla`; none: everything that is pending.
        program: instead of tensors, a compiled program: one of `metrics.programs()`.

    Raises:
        SpmdError: nothing is pending, a tensor is not pending, or the program is not kept any more.
        DeviceMismatchError: a tensor is not on device `xla`.

    Example:
        >>> print(stablehlo(torch.ones(4, device="cpu").to("xla") + 1).splitlines()[0][:30])
        module @jit_spmd_1ops_1in attr
    """
    with lock:
        lowered = _lowered(tensors, program, "stablehlo")
        return lowered.stage.as_text(
            debug_info=any(node.origin is not None for node in lowered.graph.nodes)
        )


def hlo(
    *tensors: torch.Tensor,
    program: Program | ProgramRecord | None = None,
    stage: Literal["before", "after"] = "after",
) -> str:
    """XLA's HLO of the program that computes pending tensors.

    `stage="after"` compiles the program and does not run it; a later `sync()` that needs the same
    program finds it compiled. `metadata` names each torch operation; with source lines on, also
    its module and the user's line.

    Args:
        tensors: pending tensors on device `xla`; none: everything that is pending.
        program: instead of tensors, a compiled program.
        stage: `before` partitioning, or `after` it: the optimised module that each device runs.

    Raises:
        ValueError: `stage` has another value.
        SpmdError, DeviceMismatchError: as `stablehlo`.
    """
    if stage not in ("before", "after"):
        raise ValueError(
            f"hlo shows the module 'before' or 'after' partitioning; got stage={stage!r}. "
            "Pass one of the two."
        )
    with lock:
        if stage == "after":
            found = _kept(program, "hlo") or _planned(tensors, "hlo").program()
            return found.compiled_text()
        computation = _lowered(tensors, program, "hlo").stage.compiler_ir("hlo")
        assert computation is not None
        text: str = computation.get_hlo_module().to_string()
        return text


def collectives(
    *tensors: torch.Tensor, program: Program | ProgramRecord | None = None
) -> Collectives:
    """The collectives of a program: a tuple of `Collective` that prints as a table.

    Args:
        tensors: pending tensors, whose program is compiled and not run.
        program: instead of tensors, a compiled program; without either, the program that ran last.

    Raises:
        SpmdError: no program was compiled yet, a tensor is not pending, or the program is not kept
            any more.
        DeviceMismatchError: a tensor is not on device `xla`.

    Example:
        >>> from spmd_core import Mesh, mark_sharding
        >>> x = mark_sharding(
        ...     torch.ones(16, 8, device="cpu").to("xla"),
        ...     Mesh(range(8), (8,), ("data",)),
        ...     ("data",),
        ... )
        >>> for c in collectives(x.sum()):
        ...     print(c.kind, c.axes, c.result_bytes, c.causes[0].op)
        all-reduce ('data',) 4 aten::sum
    """
    with lock:
        found = (
            _planned(tensors, "collectives").program()
            if tensors
            else _kept(program, "collectives") or compile_cache.newest()
        )
    if found is None:
        raise SpmdError(
            "collectives reads a compiled program; none was compiled yet. "
            "Call it after sync(), or with pending tensors: collectives(loss)."
        )
    return communication.of_program(found)


def passes(*tensors: torch.Tensor, program: Program | ProgramRecord | None = None) -> str:
    """The operations of pending tensors as they are recorded, and after each pass over them.

    Only passes that change something are shown (`program/pipeline.py` lists all). Nothing is
    compiled. The environment variable SPMD_DUMP_PASSES names a folder to which each program writes
    the same.

    Args:
        tensors: pending tensors on device `xla`; none: everything that is pending.
        program: instead of tensors, a compiled program.

    Raises:
        SpmdError, DeviceMismatchError: as `stablehlo`.

    Example:
        >>> x = torch.ones(4, device="cpu").to("xla")
        >>> print(passes((x * x).amax()))
        recorded:
        input 0: float32[4]
        %0 = aten::mul.Tensor(input 0, input 0) -> float32[4]
        %1 = aten::amax(%0) -> float32[]
        return %1
        <BLANKLINE>
        exact_values:
        input 0: float32[4]
        %0 = aten::mul.Tensor(input 0, input 0) -> float32[4]
        %1 = spmd::store(%0) -> float32[4] of aten::mul.Tensor
        %2 = aten::amax(%1) -> float32[]
        return %2
        <BLANKLINE>
    """
    with lock:
        found = _kept(program, "passes")
        graph = Graph.of(found.graph if found else _planned(tensors, "passes").graph())
    stages = pipeline.stages(graph, Target.of(graph))
    return "\n".join(f"{name}:\n{each.text()}" for name, each in stages)


def operations(*tensors: torch.Tensor, program: Program | ProgramRecord | None = None) -> str:
    """The operations recorded for pending tensors, one on each line, with source lines if known.

    Args:
        tensors: pending tensors on device `xla`; none: everything that is pending.
        program: instead of tensors, a compiled program.

    Raises:
        SpmdError, DeviceMismatchError: as `stablehlo`.

    Example:
        >>> print(operations(torch.ones(4, device="cpu").to("xla") + 1))
        input 0: float32[4]
        0: aten::add.Tensor(input 0) -> float32[4]
    """
    with lock:
        found = _kept(program, "operations")
        graph = found.graph if found else _planned(tensors, "operations").graph()
    nodes = [(node.entry, node.inputs, node.origin) for node in graph.nodes]
    return "\n".join(_operation_lines([leaf.spec for leaf in graph.leaves], nodes))


def _operation_lines(
    inputs: Sequence[Spec], nodes: Sequence[tuple[Entry, Sequence[int], Origin | None]]
) -> Iterator[str]:
    """A line for each input and each operation; behind a loop those of what it runs, indented."""
    for i, spec in enumerate(inputs):
        yield f"input {i}: {spec!r}"
    first = 0
    for entry, numbers, origin in nodes:
        operands = ", ".join(f"input {-i - 1}" if i < 0 else str(i) for i in numbers)
        where = "" if origin is None else f"  # {origin}"
        yield f"{first}: {entry.name}({operands}) -> {', '.join(map(repr, entry.outs))}{where}"
        first += len(entry.outs)
        for subgraph in entry.subgraphs:
            origins = subgraph.origins or (None,) * len(subgraph.nodes)
            inner = [(*node, each) for node, each in zip(subgraph.nodes, origins)]
            lines = [*_operation_lines(subgraph.parameters, inner)]
            yield from (f"    {line}" for line in lines)


def graph_hash(*tensors: torch.Tensor) -> bytes:
    """The SHA-256 of `stablehlo`: equal for equal pending programs, in any process.

    Args and errors are those of `stablehlo`.
    """
    return hashlib.sha256(stablehlo(*tensors).encode()).digest()


@checked()
@contextmanager
def source_lines(enabled: bool = True) -> Iterator[None]:
    """Inside, recorded operations keep the user's line and module, and compiled programs name them.

    Off by default: it costs tens of microseconds for each operation, and programs with source lines
    are compiled separately. `SPMD_SOURCE_LINES=1` turns it on for the whole process.
    """
    before, config.record_source_lines = config.record_source_lines, enabled
    try:
        yield
    finally:
        config.record_source_lines = before


def kept(program: ProgramRecord, what: str) -> Program:
    """The program of a record, for the function `what`.

    Raises:
        SpmdError: the program is not kept any more.
    """
    for found in compile_cache.programs():
        if found.record is program:
            return found
    raise SpmdError(
        f"{what} reads a program that is kept; got {program.name}, which was dropped, as "
        f"spmd.config.max_programs is {config.max_programs}. Raise it, or ask right after the "
        "program ran."
    )


def _kept(program: Program | ProgramRecord | None, what: str) -> Program | None:
    return kept(program, what) if isinstance(program, ProgramRecord) else program


def _lowered(
    tensors: Sequence[torch.Tensor], program: Program | ProgramRecord | None, what: str
) -> Lowered:
    """A compiled program as it was lowered, or the one that a `sync()` of the tensors would run."""
    if program is not None:
        return (kept(program, what) if isinstance(program, ProgramRecord) else program).lowered
    planned = _planned(tensors, what)
    graph = Graph.of(planned.graph())
    return lower(graph, Target.of(graph), planned.name)


def _planned(tensors: Sequence[torch.Tensor], what: str) -> planning.CutPlan:
    """The program that a `sync()` of these tensors would run."""
    if tensors:
        return planning.plan([_pending(t, what) for t in tensors])
    live = pending()
    if not live:
        raise SpmdError(
            f"{what} shows the program of what is pending; nothing is. "
            f"Call it before sync(), or give it a program: {what}(program=...)."
        )
    return planning.plan(live)


def _pending(t: torch.Tensor, what: str) -> Storage:
    handle = device_tensor(t, what)._handle
    if not isinstance(handle, Storage):
        return Storage(read(handle), Spec.contiguous(handle.spec.shape, handle.spec.dtype))
    if handle.value.data is not None:
        raise SpmdError(
            f"{what} takes tensors that are pending; "
            f"got one of shape {tuple(t.shape)} that is computed. Call it before sync() or a read."
        )
    return handle
