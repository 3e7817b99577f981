"""A program of a plan: recorded and never run, and compiled only on demand."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from spmd_core import dtypes
from spmd_core.graph.placement import Placement
from spmd_core.program.compilation import build
from spmd_core.program.index_flag import Check
from spmd_core.program.program import Program, new_record, refuse_mixed
from spmd_core.program.program_graph import Output, RecordedGraph, stored_shape
from spmd_core.program.tensor_names import names
from spmd_core.runtime import abstract
from spmd_core.runtime.abstract import AbstractArray
from spmd_core.runtime.jax_sharding import replicated


class PlannedProgram:
    """Stands in for a `Program` in a plan.

    Attributes:
        graph: the recorded graph.
        name: the program's name.
        record: its record, without the compiler's figures.
        names: the names of its tensors (`tensor_names.names`), for errors: the model may be gone by
            the time the program is compiled.
        out_placements: the placements of the results. Without a mark, a scalar is replicated, and a
            program on one device has only one choice; all others are taken from the compiler.
    """

    def __init__(self, graph: RecordedGraph, name: str) -> None:
        self.graph, self.name = graph, name
        self._compiled: Program | None = None
        self.record, self.names = new_record(graph, name), names()
        known = [self._placement(output) for output in graph.outputs]
        placed = tuple(placement for placement in known if placement is not None)
        self.out_placements = placed if len(placed) == len(known) else self.compiled.out_placements

    def _placement(self, output: Output) -> Placement | None:
        if output.placement is not None:
            return output.placement
        is_in_region = any(node.entry.border is not None for node in self.graph.nodes) or any(
            leaf.placement.manual is not None for leaf in self.graph.leaves
        )
        if (output.spec.shape and len(self.graph.device_ids) > 1) or is_in_region:
            return None
        return Placement.of(replicated(self.graph.device_ids), None)

    @property
    def compiled(self) -> Program:
        """The program, compiled for the plan's devices.

        Raises:
            DeviceMemoryError: it does not fit.
        """
        if self._compiled is None:
            self._compiled = build(self.graph, self.name, names=lambda: self.names)
        return self._compiled

    @property
    def is_compiled(self) -> bool:
        """Whether `compiled` was read, for instance to place a result."""
        return self._compiled is not None

    # Nothing runs, so nothing is checked.
    index_checks: Sequence[Check] = ()

    def run(
        self,
        floats: list[float],
        ints: list[int],
        complexes: list[complex],
        leaves: list[Any],
        lines: Sequence[str] = (),
    ) -> list[jax.Array]:
        """Results without elements.

        Args:
            floats, ints, complexes: the graph's numbers, which are not used.
            leaves: one `AbstractArray` for each leaf.
            lines: as for `Program.run`.

        Raises:
            PlanError: a leaf was made before the plan.
        """
        plan = abstract.run()
        if plan is None or not all(isinstance(x, AbstractArray) for x in leaves):
            refuse_mixed(self.record)
        plan.on_program(self, leaves)
        self.record.executions += 1
        for i in self.graph.donated:
            leaves[i].delete()
        return [
            abstract.array(
                stored_shape(output.spec, placement),
                dtypes.to_jax(output.spec.dtype),
                placement.device_sharding,
            )
            for output, placement in zip(self.graph.outputs, self.out_placements)
        ]


def of(key: Any, graph: Callable[[], RecordedGraph], name: str) -> PlannedProgram:
    """The program of this key in the plan in progress.

    Args:
        key: the program's key (`compile_cache`).
        graph: returns the graph; called for a new key.
        name: the program's name.
    """
    plan = abstract.run()
    assert plan is not None
    found: PlannedProgram | None = plan.programs.get(key)
    if found is None:
        found = plan.programs[key] = PlannedProgram(graph(), name)
    return found
