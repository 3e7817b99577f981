"""From a recorded graph to a program: lowers and compiles, again with other settings if need be."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from spmd_core import counters
from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage
from spmd_core.program import ir, tensor_names
from spmd_core.program.lower import Lowered, lower
from spmd_core.program.program import Program, explained, new_record
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.program.target import Target, Whole
from spmd_core.runtime import abstract, devices, interrupts
from spmd_core.runtime.jax_sharding import replicated

_SKIPPED_PASSES = "xla_disable_hlo_passes"
_PASSES_WITHOUT_BARRIERS = ("cse_barrier_expander", "small-while-loop-hoisting")
_COSTS = {
    Whole.INDICES: "may move more bytes. Give a table and what is looked up in it marks that split "
    "their last dim over the same axes.",
    Whole.EVERYTHING: "takes the memory and the time of one device. Mark its tensors otherwise, or "
    "call spmd.sync() between its operations to find the one.",
}


def compile_lowered(lowered: Lowered) -> Program:
    """Compiles ahead of time.

    Raises:
        JaxRuntimeError: XLA refuses it, for instance as it does not fit.
    """
    interrupts.raise_deferred()
    start = time.perf_counter()
    options = compile_options(lowered.graph)
    with (
        jax.enable_x64(True),
        _metadata_in_disk_cache_key(lowered.graph),
        counters.timed(counters.Activity.COMPILING),
    ):
        compiled = lowered.stage.compile(compiler_options=options)
    compile_s = time.perf_counter() - start
    record = new_record(lowered.graph, lowered.name)
    record.trace_s, record.compile_s = lowered.trace_s, compile_s
    _analyse(compiled, record)
    growth, placements = lowered.graph.growth, lowered.out_placements
    rooms = (None,) * len(placements) if growth is None else growth.rooms
    placed = tuple(
        (placement or Placement.of(chosen, None)).with_room(room)
        for placement, chosen, room in zip(placements, compiled.output_shardings[0], rooms)
    )
    return Program(lowered, compiled, placed, record, options.get("xla_dump_to"))


def build(
    graph: RecordedGraph,
    name: str,
    *,
    compiler: Callable[[Lowered], Program] = compile_lowered,
    names: Callable[[], Mapping[Storage, str]] = tensor_names.names,
) -> Program:
    """The program of a recorded graph.

    A program that the partitioner makes invalid is lowered again with more kept whole. So is one
    with results that the partitioner splits unevenly, which jax does not read: with these
    replicated.

    Args:
        graph: what it computes.
        name: the program's.
        compiler: compiles what is lowered; it raises what jax does.
        names: returns the names of tensors, for an error of memory.

    Raises:
        DeviceMemoryError: it does not fit.
        ProgramError: it cannot be compiled otherwise.
    """
    levels, refusal = iter(Whole), None
    whole = next(levels)
    while True:
        recorded = ir.Graph.of(graph)
        target = Target.of(recorded, whole=whole)
        try:
            program = compiler(lower(recorded, target, name))
        except jax.errors.JaxRuntimeError as error:
            refusal = refusal or error
            is_invalid = "[hlo verifier]" in str(error) and len(graph.device_ids) > 1
            more = next(levels, None) if is_invalid else None
            if more is None:
                raise explained(refusal, graph, new_record(graph, name), names) from refusal
            whole = more
            continue
        even = _with_even_results(program)
        if even is graph:
            break
        graph, refusal = even, None
    if whole is not Whole.NOTHING:
        counters.count(f"programs_with_whole_{whole.name.lower()}")
        warnings.warn(
            f"XLA's partitioner made program {name} ({len(graph.nodes)} ops on "
            f"{len(graph.device_ids)} devices) invalid. It was compiled with {whole.value} "
            f"whole on each device, which {_COSTS[whole]}",
            RuntimeWarning,
            stacklevel=2,
        )
    counters.record_program(program.record)
    return program


def _with_even_results(program: Program) -> RecordedGraph:
    """The program's graph, with the results replicated that the partitioner splits unevenly."""
    graph, outputs = program.graph, list(program.graph.outputs)
    for i, (output, chosen) in enumerate(zip(graph.outputs, program.out_placements)):
        if output.placement is None and chosen.manual is None:
            try:
                chosen.device_sharding.shard_shape(chosen.room or output.spec.shape)
            except ValueError:
                everywhere = Placement.of(replicated(graph.device_ids), None)
                outputs[i] = replace(output, placement=everywhere)
    return graph if outputs == [*graph.outputs] else replace(graph, outputs=tuple(outputs))


def compile_options(graph: RecordedGraph) -> dict[str, Any]:
    """XLA's options for a program."""
    options: dict[str, Any] = {
        name: value if isinstance(value, bool) else str(value) for name, value in graph.options
    }
    if devices.platform() == "cpu":
        # The CPU's compiler would drop what keeps a block apart from the tensor that it is written
        # into (ops/kernels/blocks.py). It then has no code for barriers in loops of less than a
        # kilobyte, which it would write as one function.
        passes = (options.get(_SKIPPED_PASSES), *_PASSES_WITHOUT_BARRIERS)
        options[_SKIPPED_PASSES] = ",".join(str(name) for name in passes if name)
        # The CPU's default order starts operations early that later ones read, such as the gathers
        # of all parameters: for GPT-2 on 8 devices that takes a quarter more memory, and no less
        # time.
        options.setdefault("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
    plan = abstract.run()
    if plan is not None:
        options |= plan.compile_options()
    return options


def _analyse(compiled: Any, record: counters.ProgramRecord) -> None:
    """Notes what the compiler tells of memory and cost."""
    memory = compiled.memory_analysis()
    if memory is not None:
        record.argument_bytes = memory.argument_size_in_bytes
        record.output_bytes = memory.output_size_in_bytes
        record.alias_bytes, record.temp_bytes = (
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
        )
        record.code_bytes = memory.generated_code_size_in_bytes
        record.peak_bytes = max(
            getattr(memory, "peak_memory_in_bytes", 0),
            record.argument_bytes + record.output_bytes - record.alias_bytes + record.temp_bytes,
        )
    cost = compiled.cost_analysis()
    record.flops = float((cost or {}).get("flops", 0.0)) * record.num_devices


@contextmanager
def _metadata_in_disk_cache_key(graph: RecordedGraph) -> Iterator[None]:
    """Inside, jax's disk cache tells programs apart by names and lines, if the graph has origins.

    By default these are not in jax's key: a program with origins could get the names and lines of
    another one.
    """
    flag = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[flag]
    if before or all(node.origin is None for node in graph.nodes):
        yield
        return
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, before)
