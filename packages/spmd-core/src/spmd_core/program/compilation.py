"""Lowers and compiles a recorded graph, again with more of it replicated if XLA fails."""

import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import jax

from spmd_core import counters
from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage
from spmd_core.graph.subgraphs import ControlEntry
from spmd_core.graph.values import Entry
from spmd_core.program import ir, tensor_names
from spmd_core.program.lower import Lowered, lower
from spmd_core.program.program import Program, explained, new_record
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.program.target import Replicated, Target
from spmd_core.runtime import abstract, compile_turns, devices, disk_cache, interrupts
from spmd_core.runtime.jax_sharding import replicated

# Yields what is to be compiled, gets its program, or jax's error, and returns the program.
Making: TypeAlias = Generator[Lowered, Program, Program]

_SKIPPED_PASSES = "xla_disable_hlo_passes"
_PASSES_WITHOUT_BARRIERS = ("cse_barrier_expander", "small-while-loop-hoisting")
_PASS_THAT_CONVERTS_STACKS = "bfloat16-propagation"
_METADATA_IN_KEY = "jax_compilation_cache_include_metadata_in_key"
# The flag as it was, followed by an element for each compilation that needs it.
# Guarded by: its own lock. Cleared by: the end of each compilation.
_with_metadata: list[bool] = []
_metadata_lock = threading.Lock()
_COSTS = {
    Replicated.INDICES: "may move more bytes. Mark a table and what is looked up in it so that "
    "both split their last dim over the same axes.",
    Replicated.EVERYTHING: "takes the memory and the time of one device. Mark its tensors in "
    "another way, or call spmd.sync() between its operations to find the one that causes this.",
}


def compile_lowered(lowered: Lowered, record: counters.ProgramRecord | None = None) -> Program:
    """Compiles ahead of time. The graph lock need not be held.

    Args:
        lowered: what is compiled.
        record: what is to be filled in, made by the user's thread; None: made here.

    Raises:
        JaxRuntimeError: XLA refuses the program, for instance because it does not fit.
    """
    interrupts.raise_deferred()
    start = time.perf_counter()
    options = compile_options(lowered.graph)
    with (
        jax.enable_x64(True),
        _metadata_in_disk_cache_key(lowered.graph),
        counters.timed(counters.Activity.COMPILING),
        _in_turn(lowered) as turn,
    ):
        compiled = lowered.stage.compile(compiler_options=options)
        if turn is not None:
            disk_cache.store(turn, compiled, lowered.stage.as_text)
    compile_s = time.perf_counter() - start
    record = record or new_record(lowered.graph, lowered.name)
    record.trace_s, record.compile_s = lowered.trace_s, compile_s
    record.loops, record.unfolded = lowered.loops, lowered.unfolded
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

    A program that the partitioner makes invalid is lowered again with more of it replicated. A
    program with results that the partitioner splits unevenly, which jax cannot read, is lowered
    again with these results replicated.

    Args:
        graph: the recorded graph.
        name: the program's name.
        compiler: compiles a lowered program; it raises jax's errors.
        names: returns the names of tensors, for the error that memory ran out.

    Raises:
        DeviceMemoryError: the program does not fit the device's memory.
        ProgramError: the program cannot be compiled for another reason.
    """
    return completed(building(graph, name, names=names), compiler)


def completed(
    making: Making, compiler: Callable[[Lowered], Program], lowered: Lowered | None = None
) -> Program:
    """The program that `building` makes with this compiler, which raises jax's errors.

    Args:
        making: makes the program.
        compiler: compiles a lowered program; it raises jax's errors.
        lowered: what `making` has yielded, if it was begun.
    """
    with closing(making):
        try:
            lowered = lowered or next(making)
            while True:
                try:
                    program = compiler(lowered)
                except jax.errors.JaxRuntimeError as error:
                    lowered = making.throw(error)
                else:
                    lowered = making.send(program)
        except StopIteration as end:
            built: Program = end.value
            return built


def building(
    graph: RecordedGraph, name: str, *, names: Callable[[], Mapping[Storage, str]]
) -> Making:
    """As `build`, for callers that compile by themselves, such as several programs at a time.

    Args:
        graph, name, names: see `build`.

    Yields:
        What is to be compiled. Send its program, or throw jax's error.

    Returns:
        The program.

    Raises:
        DeviceMemoryError, ProgramError: as `build`.
    """
    levels, refusal = iter(Replicated), None
    replicated_part = next(levels)
    while True:
        recorded = ir.Graph.of(graph)
        target = Target.of(recorded, replicated_part=replicated_part)
        try:
            program = yield lower(recorded, target, name)
        except jax.errors.JaxRuntimeError as error:
            refusal = refusal or error
            is_invalid = "[hlo verifier]" in str(error) and len(graph.device_ids) > 1
            more = next(levels, None) if is_invalid else None
            if more is None:
                raise explained(refusal, graph, new_record(graph, name), names) from refusal
            replicated_part = more
            continue
        even = _with_even_results(program)
        if even is graph:
            break
        graph, refusal = even, None
    # Its traceback refers to this frame, which would live on until Python collects the circle.
    del refusal
    if replicated_part is not Replicated.NOTHING:
        counters.count(f"programs_with_whole_{replicated_part.name.lower()}")
        warnings.warn(
            f"XLA's partitioner made program {name} ({len(graph.nodes)} ops on "
            f"{len(graph.device_ids)} devices) invalid. It was compiled with "
            f"{replicated_part.value} replicated, which {_COSTS[replicated_part]}",
            RuntimeWarning,
            stacklevel=3,  # the caller of `build`
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
        # The first of these passes removes optimization barriers, which keep a block and the tensor
        # that it is written into apart (ops/kernels/blocks.py). The second one outlines while loops
        # of less than a kilobyte, for which the CPU backend has no code if they have barriers.
        _skip(options, *_PASSES_WITHOUT_BARRIERS)
        # The CPU backend's default scheduler starts operations long before they are read, such as
        # the gathers of all parameters: GPT-2 on 8 devices takes a quarter more memory with it, and
        # no less time.
        options.setdefault("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
    elif devices.platform() == "tpu" and any(_reads_a_stack(node.entry) for node in graph.nodes):
        # Where a loop reads each row of a float32 stack as bfloat16, this pass has the loop carry
        # all of the stack as bfloat16 beside the float32 one: 8% of the memory of a GPT-2 4B step.
        _skip(options, _PASS_THAT_CONVERTS_STACKS)
    plan = abstract.run()
    if plan is not None:
        options |= plan.compile_options()
    return options


def _skip(options: dict[str, Any], *passes: str) -> None:
    """Has XLA skip passes beside those that it skips already."""
    skipped = (options.get(_SKIPPED_PASSES), *passes)
    options[_SKIPPED_PASSES] = ",".join(str(name) for name in skipped if name)


def _reads_a_stack(entry: Entry) -> bool:
    return isinstance(entry, ControlEntry) and len(entry.stacked) > 0


def _analyse(compiled: Any, record: counters.ProgramRecord) -> None:
    """Records the compiler's memory and cost analysis."""
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
def _in_turn(lowered: Lowered) -> Iterator[compile_turns.Turn | None]:
    """Inside, this process waits for another one of its host that compiles the same program.

    Processes with GPUs compile a common program together, as they share what they tune for it.
    """
    processes = {device.process_index for device in lowered.devices}
    if abstract.run() is not None or (len(processes) > 1 and lowered.target.platform == "gpu"):
        yield None
        return
    with compile_turns.taken(stores=disk_cache.stores()) as turn:
        yield turn


@contextmanager
def _metadata_in_disk_cache_key(graph: RecordedGraph) -> Iterator[None]:
    """Inside, the key of jax's disk cache has names and source lines, if the graph has origins.

    By default jax leaves metadata out of its key, so a program with origins could be loaded with
    the names and lines of another program. The flag is that of all threads: it stays on until the
    last compilation that needs it has ended.
    """
    if all(node.origin is None for node in graph.nodes):
        yield
        return
    with _metadata_lock:
        if not _with_metadata:
            _with_metadata.append(jax.config.values[_METADATA_IN_KEY])
            jax.config.update(_METADATA_IN_KEY, True)
        _with_metadata.append(True)
    try:
        yield
    finally:
        with _metadata_lock:
            _with_metadata.pop()
            if len(_with_metadata) == 1:
                jax.config.update(_METADATA_IN_KEY, _with_metadata.pop())
