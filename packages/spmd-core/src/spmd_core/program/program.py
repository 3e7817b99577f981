"""A compiled program: compiles a lowered graph, records its memory and cost, and runs it."""

import dataclasses
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import numpy as np

from spmd_core import counters
from spmd_core.errors import DeviceMemoryError, PlanError, ProgramError
from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage
from spmd_core.program import index_checks, memory_table, tensor_names
from spmd_core.program.index_flag import Check
from spmd_core.program.lower import Traced
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.program.target import Whole
from spmd_core.runtime import abstract, devices, in_flight, interrupts, watch
from spmd_core.runtime.abstract import AbstractArray
from spmd_core.runtime.jax_sharding import replicated

_SKIPPED_PASSES = "xla_disable_hlo_passes"
_PASSES_WITHOUT_BARRIERS = ("cse_barrier_expander", "small-while-loop-hoisting")
_COSTS = {
    Whole.INDICES: "may move more bytes. Give a table and what is looked up in it marks that split "
    "their last dim over the same axes.",
    Whole.EVERYTHING: "takes the memory and the time of one device. Mark its tensors otherwise, or "
    "call spmd.sync() between its operations to find the one.",
}


class Program(Traced):
    """A compiled graph. `run` starts it and returns without waiting.

    Args:
        graph: what it computes.
        name: the program's.
        names: returns the names of tensors, for an error of memory.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        name: str,
        *,
        names: Callable[[], Mapping[Storage, str]] = tensor_names.names,
    ) -> None:
        self.names = names
        whole = self._build(graph, name)
        uneven = self._uneven_results()
        if uneven:
            # jax does not read an array of uneven shards, which the partitioner may choose.
            placement = Placement.of(replicated(graph.device_ids), None)
            outputs = tuple(
                dataclasses.replace(output, placement=placement) if i in uneven else output
                for i, output in enumerate(graph.outputs)
            )
            whole = self._build(dataclasses.replace(graph, outputs=outputs), name, whole)
        if whole is not Whole.NOTHING:
            counters.count(f"programs_with_whole_{whole.name.lower()}")
            warnings.warn(
                f"XLA's partitioner made program {name} ({len(graph.nodes)} ops on "
                f"{len(graph.device_ids)} devices) invalid. It was compiled with {whole.value} "
                f"whole on each device, which {_COSTS[whole]}",
                RuntimeWarning,
                stacklevel=2,
            )
        counters.record_program(self.record)

    def _build(self, graph: RecordedGraph, name: str, whole: Whole = Whole.NOTHING) -> Whole:
        """Lowers and compiles; a program that the partitioner makes invalid with more kept whole.

        Args:
            graph: what to build.
            name: the program's.
            whole: what is whole on each device at least.

        Returns:
            What is whole on each device.
        """
        levels = list(Whole)
        refusal = None
        for level in levels[levels.index(whole) :]:
            try:
                Traced.__init__(self, graph, name, whole=level)
                self._compile()
                return level
            except jax.errors.JaxRuntimeError as error:
                refusal = refusal or error
                if "[hlo verifier]" not in str(error) or len(graph.device_ids) == 1:
                    break
        assert refusal is not None
        raise explained(refusal, self) from refusal

    def _uneven_results(self) -> set[int]:
        """The results for which the partitioner chose a sharding that does not divide them."""
        found = set()
        for i, (output, chosen) in enumerate(zip(self.graph.outputs, self.out_placements)):
            if output.placement is None and chosen.manual is None:
                try:
                    chosen.device_sharding.shard_shape(chosen.room or output.spec.shape)
                except ValueError:
                    found.add(i)
        return found

    def _compile_options(self) -> dict[str, str | bool]:
        """XLA's options for this program."""
        options = {
            name: value if isinstance(value, bool) else str(value)
            for name, value in self.graph.options
        }
        if devices.platform() == "cpu":
            # The CPU's compiler would drop what keeps a block apart from the tensor that it is
            # written into (ops/kernels/blocks.py). It then has no code for barriers in loops of
            # less than a kilobyte, which it would write as one function.
            passes = (options.get(_SKIPPED_PASSES), *_PASSES_WITHOUT_BARRIERS)
            options[_SKIPPED_PASSES] = ",".join(str(name) for name in passes if name)
            # The CPU's default order starts operations early that later ones read, such as the
            # gathers of all parameters: for GPT-2 on 8 devices that takes a quarter more memory,
            # and no less time.
            options.setdefault("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
        plan = abstract.run()
        if plan is not None:
            options |= plan.compile_options()
        return options

    def _compile(self) -> None:
        interrupts.raise_deferred()
        start = time.perf_counter()
        options = self._compile_options()
        self.dump_folder = options.get("xla_dump_to")
        with (
            jax.enable_x64(True),
            _metadata_in_disk_cache_key(self.graph),
            counters.timed(counters.Part.COMPILING),
        ):
            self.compiled = self.lowered.compile(compiler_options=options)
        self.record.compile_s = time.perf_counter() - start
        growth = self.graph.growth
        rooms = (None,) * len(self.out_placements) if growth is None else growth.rooms
        self.out_placements = [
            (Placement.of(chosen, None) if placement is None else placement).with_room(room)
            for placement, chosen, room in zip(
                self.out_placements, self.compiled.output_shardings[0], rooms
            )
        ]
        self._analyse()

    def _explain_later(self, error: Exception) -> Exception:
        """The error of a program that failed on the devices after it was started."""
        found = explained(error, self)
        return type(found)(
            f"{found}\nIt had been started: its results are lost, with the tensors whose memory it "
            "took over and what was computed from it since. Load these anew, or from a checkpoint."
        )

    @functools.cached_property
    def _is_on_this_process(self) -> bool:
        """Whether this process has one of the program's devices, and so its token."""
        return any(device.process_index == jax.process_index() for device in self.devices)

    @property
    def index_checks(self) -> Sequence[Check]:
        """What it checks of its indices."""
        return self.index_flag.checks

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """jax's devices, in the order of the graph's `device_ids`."""
        return tuple(self.target.jax_mesh.devices.flat)

    def compiled_text(self) -> str:
        """The optimised HLO module that each device runs, as text."""
        text = self.compiled.as_text()
        assert text is not None
        return text

    def _analyse(self) -> None:
        r = self.record
        memory = self.compiled.memory_analysis()
        if memory is not None:
            r.argument_bytes, r.output_bytes = (
                memory.argument_size_in_bytes,
                memory.output_size_in_bytes,
            )
            r.alias_bytes, r.temp_bytes = memory.alias_size_in_bytes, memory.temp_size_in_bytes
            r.code_bytes = memory.generated_code_size_in_bytes
            r.peak_bytes = max(
                getattr(memory, "peak_memory_in_bytes", 0),
                r.argument_bytes + r.output_bytes - r.alias_bytes + r.temp_bytes,
            )
        cost = self.compiled.cost_analysis()
        r.flops = float((cost or {}).get("flops", 0.0)) * r.num_devices

    def run(
        self,
        floats: list[float],
        ints: list[int],
        complexes: list[complex],
        leaves: list[jax.Array],
        lines: Sequence[str] = (),
    ) -> list[jax.Array]:
        """Starts the program and returns its results without waiting.

        Args:
            floats: the values of the graph's float numbers, in the order of the nodes.
            ints: those of its int and bool numbers.
            complexes: those of its complex numbers.
            leaves: one array for each leaf, laid out as the leaf's placement says.
            lines: the user's line of each check of indices.

        Raises:
            PlanError: a leaf was made in a plan that has ended, or before it.
            DeviceMemoryError: the device's memory is too small.
            ProgramError: jax raised another error.
        """
        if any(isinstance(x, AbstractArray) for x in leaves):
            refuse_mixed(self.record)
        numbers = []
        if floats:
            numbers.append(np.array(floats, np.float64))
        if ints:
            numbers.append(np.array(ints, np.int64))
        if complexes:
            numbers.append(np.array(complexes, np.complex128))
        try:
            with jax.enable_x64(True):
                results, token = self.compiled(numbers, *leaves)
        except in_flight.FAILURES as error:
            own = functools.partial(explained, program=self)
            raise (
                watch.failure_of_others(error) or in_flight.programs.explained_at_start(error, own)
            ) from error
        self.record.executions += 1
        # Weak, as the newest programs stay in flight until something waits: one that is dropped is
        # to be freed before.
        later = weakref.WeakMethod(self._explain_later)
        in_flight.programs.add(token, lambda error: _explained_later(later, error))
        if self.index_checks and self._is_on_this_process:
            index_checks.add(token, self.record.name, self.graph, self.index_checks, lines)
        return results


def _explained_later(explain: "weakref.WeakMethod[Any]", error: Exception) -> Exception:
    """The error of a program in flight, as the program says it if it is still there."""
    found = explain()
    return in_flight.of_unknown_program(error) if found is None else found(error)


def refuse_mixed(record: counters.ProgramRecord) -> NoReturn:
    """Raises PlanError for a program that got arrays with elements and arrays without."""
    raise PlanError(
        "tensors of a plan have no elements, so a program takes only such tensors or none; "
        f"{record.name} for {record.source} got both. Make every tensor inside of what is planned, "
        "and use none of them after it."
    )


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


def explained(error: Exception, program: Program) -> Exception:
    """jax's error as this package's error, which lists the largest tensors if memory ran out."""
    text = str(error)
    record, graph = program.record, program.graph
    if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
        options = f" under config.compiler_options {dict(graph.options)}" if graph.options else ""
        return ProgramError(
            f"program {record.name} ({record.num_ops} ops on {record.num_devices} devices) "
            f"failed{options}: {text}"
        )
    advice = "Shard more, lower the batch, or checkpoint activations."
    if graph.growth is not None:
        advice += (
            f" Its arrays have room for a growing size up to {graph.growth.bound}; "
            "spmd_core.config.bound_growing_sizes = False compiles each size without."
        )
    # A program that does not compile has no such figures.
    figures = f", {record.argument_bytes / 1e6:.1f} MB of arguments and "
    figures += f"{record.temp_bytes / 1e6:.1f} MB of temporaries per device"
    return DeviceMemoryError(
        f"a program and its arguments must fit the device's memory; {record.name} "
        f"({record.num_ops} ops on {record.num_devices} devices"
        f"{figures if record.argument_bytes else ''}, needed at {record.source}) did not: "
        f"{text.splitlines()[0]}\n{advice}\n{memory_table.text(graph, program.names())}"
    )
