"""A compiled program: runs it, and explains its failures."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jaxlib
import numpy as np

from spmd_core import counters, source_lines
from spmd_core.errors import DeviceMemoryError, PlanError, ProgramError
from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage
from spmd_core.program import folding, index_checks, memory_table, tensor_names
from spmd_core.program.index_flag import Check
from spmd_core.program.lower import Lowered
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.runtime import executables, in_flight, watch
from spmd_core.runtime.abstract import AbstractArray
from spmd_core.runtime.jax_sharding import replicated


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled graph. `run` starts it and returns without waiting.

    Attributes:
        lowered: the lowered program.
        compiled: the jax executable; in a plan it may only have the text.
        out_placements: the placements of the results.
        record: memory, cost, and the number of executions.
        dump_folder: the folder with XLA's text of the buffers; None if XLA did not write any.
    """

    lowered: Lowered
    compiled: Any
    out_placements: tuple[Placement, ...]
    record: counters.ProgramRecord
    dump_folder: str | None = None

    @property
    def graph(self) -> RecordedGraph:
        """The recorded graph."""
        return self.lowered.graph

    @property
    def index_checks(self) -> Sequence[Check]:
        """The program's index checks."""
        return self.lowered.checks

    @functools.cached_property
    def _is_on_this_process(self) -> bool:
        """Whether this process has one of the program's devices, and so the program's token."""
        devices = self.lowered.devices
        return any(device.process_index == jax.process_index() for device in devices)

    @functools.cached_property
    def _execute(self) -> executables.Execute:
        """Executes the program without comparing its arguments."""
        return executables.execute_of(self.compiled) or self._call

    def _call(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Executes the program on its numbers and leaves: its results, and then its token."""
        num_packed = self.lowered.num_packed
        with jax.enable_x64(True):
            results, token = self.compiled(arrays[:num_packed], *arrays[num_packed:])
        return [*results, token]

    @functools.cached_property
    def _packed(self) -> list[executables.Replicated]:
        """The arrays of floats, of ints and of complex numbers."""
        everywhere = replicated(self.graph.device_ids)
        types = (np.float64, np.int64, np.complex128)
        return [executables.Replicated(dtype, everywhere) for dtype in types]

    def compiled_text(self) -> str:
        """The optimised HLO module that each device runs, as text."""
        text: str | None = self.compiled.as_text()
        assert text is not None
        return text

    def run(
        self,
        floats: list[float],
        ints: list[int],
        complexes: list[complex],
        leaves: list[jax.Array],
        lines: Sequence[str] = (),
    ) -> list[jax.Array]:
        """Starts the program and returns its results without waiting.

        The lists of numbers are not changed afterwards.

        Args:
            floats: the graph's float numbers, in the order of the nodes.
            ints: its int and bool numbers.
            complexes: its complex numbers.
            leaves: one array for each leaf, with the leaf's placement.
            lines: the user's source line of each index check.

        Raises:
            PlanError: a leaf was made in a plan that has ended, or before the current plan.
            DeviceMemoryError: the device's memory is too small.
            ProgramError: jax raised another error, or a leaf was deleted.
        """
        kinds: tuple[list[Any], ...] = (floats, ints, complexes)
        packed = [array.of(numbers) for array, numbers in zip(self._packed, kinds) if numbers]
        try:
            if (lost := executables.first_deleted(leaves)) is not None:
                raise ProgramError(
                    f"the inputs of program {self.record.name} have their data; got a "
                    f"{self.graph.leaves[lost].spec!r} without, such as a jax array that was "
                    "deleted, or that a jitted function took over. Load it again, and pass jax a "
                    "copy."
                )
            # For these settings, jax's own call looks at all results, and raises.
            settings: Any = jax.config
            is_looked_at = settings.jax_debug_nans or settings.jax_debug_infs
            execute = self._call if is_looked_at else self._execute
            *results, token = execute([*packed, *leaves])
        except TypeError:
            if any(isinstance(x, AbstractArray) for x in leaves):
                refuse_mixed(self.record)
            raise
        except in_flight.FAILURES as error:
            own = functools.partial(explained, graph=self.graph, record=self.record)
            raise (
                watch.failure_of_others(error) or in_flight.programs.explained_at_start(error, own)
            ) from error
        self.record.executions += 1
        # A weak reference, because the newest programs stay in flight until something waits, and a
        # program that is dropped from the cache must be freed before.
        later = weakref.WeakMethod(self._explain_later)
        in_flight.programs.add(token, lambda error: _explained_later(later, error))
        if self.index_checks and self._is_on_this_process:
            index_checks.add(token, self.record.name, self.graph, self.index_checks, lines)
        return results

    def _explain_later(self, error: Exception) -> Exception:
        """The error of a program that failed on the devices after its start."""
        found = explained(error, self.graph, self.record)
        return type(found)(
            f"{found}\nIt failed after its start, so its results are lost, with the tensors that "
            "were donated to it and all that was computed from these since. Load them again, for "
            "instance from a checkpoint."
        )


def _explained_later(explain: "weakref.WeakMethod[Any]", error: Exception) -> Exception:
    """The error of a program in flight, explained by the program if it still exists."""
    found = explain()
    return in_flight.of_unknown_program(error) if found is None else found(error)


def new_record(graph: RecordedGraph, name: str) -> counters.ProgramRecord:
    """The record of a program of this name, without the compiler's figures."""
    return counters.ProgramRecord(
        name,
        len(graph.nodes),
        len(graph.leaves),
        len(graph.outputs),
        len(graph.device_ids),
        donated=graph.donated,
        source=source_lines.user_line(),
        folding=folding.explained(len(graph.nodes), folds=graph.fold_layers),
    )


def refuse_mixed(record: counters.ProgramRecord) -> NoReturn:
    """Raises PlanError for a program that got both concrete and abstract arrays."""
    raise PlanError(
        "tensors of a plan have no elements, so a program takes only such tensors or none; "
        f"{record.name} for {record.source} got both. Make every tensor inside of what is planned, "
        "and use none of them after it."
    )


def explained(
    error: Exception,
    graph: RecordedGraph,
    record: counters.ProgramRecord,
    names: Callable[[], Mapping[Storage, str]] = tensor_names.names,
) -> Exception:
    """jax's error as this package's error, which lists the largest tensors if memory ran out.

    Args:
        error: the error of a program that could not be compiled, or failed.
        graph: the program's graph.
        record: the program's record, without figures if it could not be compiled.
        names: returns the names of tensors.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
        options, correction = "", ""
        if graph.options:
            options = f" under spmd.config.compiler_options {dict(graph.options)}"
        if "No such compile option" in text:
            correction = (
                ". Correct the option's name, or assign {} for none."
                if graph.options
                else f". It is set on CPUs, as the XLA of jaxlib {jaxlib.__version__} has it: take "
                "a plugin that was built from that XLA or a newer one."
            )
        return ProgramError(
            f"program {record.name} ({record.num_ops} ops on {record.num_devices} devices) "
            f"failed{options}: {text}{correction}"
        )
    advice = "Shard more, lower the batch, or checkpoint activations."
    if graph.growth is not None:
        advice += (
            f" Its arrays have room for a growing size up to {graph.growth.bound}; "
            "spmd.config.bound_growing_sizes = False compiles each size without."
        )
    figures = f", {record.argument_bytes / 1e6:.1f} MB of arguments and "
    figures += f"{record.temp_bytes / 1e6:.1f} MB of temporaries per device"
    return DeviceMemoryError(
        f"a program and its arguments must fit the device's memory; {record.name} "
        f"({record.num_ops} ops on {record.num_devices} devices"
        f"{figures if record.argument_bytes else ''}, needed at {record.source}) did not: "
        f"{text.splitlines()[0]}\n{advice}\n{memory_table.text(graph, names())}"
    )
