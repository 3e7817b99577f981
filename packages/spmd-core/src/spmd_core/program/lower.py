"""Lowers a recorded graph to StableHLO, with the shardings of its leaves, marks and results."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from spmd_core import counters, dtypes, source_lines
from spmd_core.graph.placement import Placement
from spmd_core.program import ir, pipeline, regions
from spmd_core.program.fold import Fold, Scalars
from spmd_core.program.index_flag import Flag
from spmd_core.program.program_graph import Growth, RecordedGraph, stored_shape
from spmd_core.program.safe_forms import in_safe_forms
from spmd_core.program.target import Target, Whole
from spmd_core.runtime import devices
from spmd_core.runtime.jax_sharding import replicated


def out_placements(graph: ir.Graph) -> list[Placement | None]:
    """Where a program's results lie; None where the partitioner chooses."""
    return [
        output.placement if value.manual is None else regions.placement(value.manual)
        for output, value in zip(graph.recorded.outputs, graph.outputs)
    ]


class Function:
    """A graph as a jax function with shardings.

    Attributes:
        graph: what it computes.
        target: what it is lowered for.
        index_flag: what the program checks of its indices.
        out_placements: where its results lie; None where the partitioner chooses.
        jitted: the function of the packed scalar inputs and the leaves.
        arguments: the shapes, dtypes and shardings of these.

    Args:
        graph: what to lower.
        name: the program's.
        whole: what is whole on each device, whatever the marks say.
        is_for_partitioner: whether operations get the forms that the partitioner gets right.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        name: str,
        *,
        whole: Whole = Whole.NOTHING,
        is_for_partitioner: bool = True,
    ) -> None:
        self.graph = graph
        self.record = counters.ProgramRecord(
            name,
            len(graph.nodes),
            len(graph.leaves),
            len(graph.outputs),
            len(graph.device_ids),
            donated=graph.donated,
            source=source_lines.user_line(),
        )
        recorded = ir.Graph.of(graph)
        self.out_placements: list[Any] = out_placements(recorded)
        self.target = Target.of(recorded, devices.platform(), self.out_placements, whole)
        rewritten = pipeline.run(recorded, self.target, name)
        self.index_flag = rewritten.flag or Flag([], [], self.target.jax_mesh)
        self._kinds = [kind for node in graph.nodes for kind in node.entry.number_kinds]
        self._fold = Fold(
            rewritten, self.target, self.index_flag, is_for_partitioner=is_for_partitioner
        )
        self.arguments = (self._scalars(), *self._leaves())
        self.jitted = self._jitted(name)

    def jaxpr(self) -> ClosedJaxpr:
        """The function, traced."""
        with jax.enable_x64(True):
            return self.jitted.trace(*self.arguments).jaxpr

    def _scalars(self) -> list[jax.ShapeDtypeStruct]:
        """The packed scalar inputs: those of each kind in one array."""
        everywhere = self.target.mesh(replicated(self.target.device_ids))
        counts = {float: 0, int: int(self.graph.growth is not None), complex: 0}
        for kind in self._kinds:
            counts[int if kind is bool else kind] += 1
        types = (np.float64, np.int64, np.complex128)
        return [
            jax.ShapeDtypeStruct((count,), dtype, sharding=everywhere)
            for count, dtype in zip(counts.values(), types)
            if count
        ]

    def _leaves(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                stored_shape(leaf.spec, leaf.placement),
                dtypes.to_jax(leaf.spec.dtype),
                sharding=self.target.mesh(leaf.placement.device_sharding),
            )
            for leaf in self.graph.leaves
        ]

    def _jitted(self, name: str) -> Any:
        graph, mesh = self.graph, self.target.mesh
        free = None if mesh.exists else mesh(replicated(graph.device_ids))
        out_shardings = [
            free if p is None else mesh(p.device_sharding) for p in self.out_placements
        ]

        def program(
            packed: list[jax.Array], *leaves: jax.Array
        ) -> tuple[list[jax.Array], jax.Array]:
            if graph.growth is not None:
                return self._grow(graph.growth, packed, leaves)
            return self._fold(Scalars(self._kinds, packed), leaves)

        program.__name__ = name
        return jax.jit(
            program,
            out_shardings=(out_shardings, self.index_flag.out_sharding),
            donate_argnums=tuple(i + 1 for i in graph.donated),
            keep_unused=True,
        )

    def _grow(
        self, growth: Growth, packed: list[jax.Array], leaves: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array]:
        """The results and the token for the number that comes last among the ints."""
        position = int(float in self._kinds)
        ints = packed[position]
        rest = [ints[:-1]] if ints.size > 1 else []
        scalars = [*packed[:position], *rest, *packed[position + 1 :]]

        def function(arguments: tuple[jax.Array, list[jax.Array]]) -> list[jax.Array]:
            results, token = growth.evaluate(*arguments, self._fold.with_whole_dims)
            return [*results, token]

        arguments = (ints[-1], [*scalars, *leaves])
        found = None
        if len(self.target.device_ids) > 1:
            found = in_safe_forms(function, arguments, self._fold.splits)
        *results, token = function(arguments) if found is None else found
        return results, token


class Traced:
    """A graph as StableHLO with shardings, not compiled.

    Attributes:
        graph, record, target, index_flag, out_placements, arguments: as of the `Function`, which
            is dropped with what passes have made of the graph.
        lowered: jax's stage before compilation. Its StableHLO names each operation as torch does,
            `aten::mm`. Where the graph has origins, the name is
            `GPT.h.0.attn/aten::mm#7/train.py:12` (7 is the node's position), and the location is
            the user's line.

    Args:
        graph: what to lower.
        name: the program's.
        whole: what is whole on each device, whatever the marks say.
        platforms: jax's names of what it is lowered for; by default the platform of the devices.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        name: str,
        *,
        whole: Whole = Whole.NOTHING,
        platforms: tuple[str, ...] | None = None,
    ) -> None:
        start = time.perf_counter()
        with (
            _without_collection(),
            jax.enable_x64(True),
            counters.timed(counters.Part.TRACING),
        ):
            function = Function(graph, name, whole=whole)
            traced = function.jitted.trace(*function.arguments)
            self.lowered = traced.lower(lowering_platforms=platforms)
        self.graph, self.record, self.target = function.graph, function.record, function.target
        self.index_flag, self.arguments = function.index_flag, function.arguments
        self.out_placements = function.out_placements
        self.record.trace_s = time.perf_counter() - start

    @property
    def lowered_text(self) -> Callable[[], str]:
        """A function that returns the StableHLO as text."""
        return self.lowered.as_text


@contextmanager
def _without_collection() -> Iterator[None]:
    """Inside, Python's garbage collector does not look through the many objects of a trace.

    They stay until its end, and the collector would look through them again and again.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
