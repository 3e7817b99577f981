"""Lowers a graph to StableHLO, with the shardings of its inputs, marks and results."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from spmd_core import counters, dtypes
from spmd_core.graph.placement import Placement
from spmd_core.program import ir, pipeline, repeated_entries
from spmd_core.program.fold import Fold, Scalars
from spmd_core.program.index_flag import Check
from spmd_core.program.passes.folded_layers import why_unfolded
from spmd_core.program.program_graph import Growth, RecordedGraph, stored_shape
from spmd_core.program.safe_forms import in_safe_forms
from spmd_core.program.target import Target
from spmd_core.runtime import collection
from spmd_core.runtime.jax_sharding import replicated


@dataclass(frozen=True, eq=False)
class Lowered:
    """A graph as StableHLO with shardings, not compiled.

    Attributes:
        graph: the recorded graph; the one that passes made of it is not kept.
        target: what it is lowered for.
        name: the program's name.
        checks: the program's index checks.
        out_placements: the placements of the results; None for those that the partitioner chooses.
        stage: jax's stage before compilation. Its StableHLO names each operation as torch does,
            `aten::mm`. Where the graph has origins, the name is
            `GPT.h.0.attn/aten::mm#7/train.py:12` (7 is the node's position), and the location is
            the user's line.
        trace_s: the seconds that lowering took.
        loops, unfolded: as in `ProgramRecord`.
    """

    graph: RecordedGraph
    target: Target
    name: str
    checks: Sequence[Check]
    out_placements: tuple[Placement | None, ...]
    stage: jax.stages.Lowered
    trace_s: float
    loops: tuple[tuple[int, int], ...]
    unfolded: str

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The jax devices, in the order of the graph's `device_ids`."""
        return tuple(self.target.jax_mesh.devices.flat)

    @property
    def num_packed(self) -> int:
        """The number of arrays of packed scalar inputs, which come before the leaves."""
        return len(self.stage.args_info[0][0])


def lower(
    graph: ir.Graph, target: Target, name: str, *, platforms: tuple[str, ...] | None = None
) -> Lowered:
    """Runs the passes on a graph, and lowers the result.

    Args:
        graph: the graph before passes.
        target: what it is lowered for.
        name: the program's name.
        platforms: jax's names of the platforms to lower for; by default that of the devices.
    """
    start = time.perf_counter()
    with (
        collection.paused(),  # what a trace makes lives until its end
        jax.enable_x64(True),
        counters.timed(counters.Activity.TRACING),
    ):
        rewritten = pipeline.run(graph, target, name)
        fold = Fold(rewritten, target)
        stage = _trace(fold, graph, target, name).lower(lowering_platforms=platforms)
    trace_s = time.perf_counter() - start
    checks, placements = fold.flag.checks, graph.out_placements
    loops = repeated_entries.loops(rewritten.all_ops())
    why = "" if loops else why_unfolded(graph)
    return Lowered(graph.recorded, target, name, checks, placements, stage, trace_s, loops, why)


def jaxpr(recorded: RecordedGraph, name: str) -> ClosedJaxpr:
    """A graph's function as a jaxpr, without the rules for the partitioner, and without loops.

    Args:
        recorded: the graph before passes.
        name: the program's name.
    """
    graph = ir.Graph.of(replace(recorded, fold_layers=False))
    target = Target.of(graph)
    with jax.enable_x64(True):
        fold = Fold(pipeline.run(graph, target, name), target, is_for_partitioner=False)
        return _trace(fold, graph, target, name).jaxpr


def _trace(fold: Fold, graph: ir.Graph, target: Target, name: str) -> jax.stages.Traced:
    """The function of the packed scalar inputs and the leaves."""
    recorded, mesh = graph.recorded, target.mesh
    free = None if mesh.exists else mesh(replicated(target.device_ids))
    out_shardings = [free if p is None else mesh(p.device_sharding) for p in graph.out_placements]
    kinds = [kind for node in recorded.nodes for kind in node.entry.number_kinds]
    growth = recorded.growth

    def program(packed: list[jax.Array], *leaves: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        if growth is not None:
            return _at_size(growth, fold, target, kinds, packed, leaves)
        return fold(Scalars(kinds, packed), leaves)

    program.__name__ = name
    jitted = jax.jit(
        program,
        out_shardings=(out_shardings, fold.flag.out_sharding),
        donate_argnums=tuple(i + 1 for i in recorded.donated),
        keep_unused=True,
    )
    return jitted.trace(*_arguments(recorded, target, kinds))


def _arguments(graph: RecordedGraph, target: Target, kinds: Sequence[type]) -> Iterator[Any]:
    """The scalar inputs, packed into one array for each kind, and the leaves."""
    everywhere = target.mesh(replicated(target.device_ids))
    counts = {float: 0, int: int(graph.growth is not None), complex: 0}
    for kind in kinds:
        counts[int if kind is bool else kind] += 1
    types = (np.float64, np.int64, np.complex128)
    yield [
        jax.ShapeDtypeStruct((count,), dtype, sharding=everywhere)
        for count, dtype in zip(counts.values(), types)
        if count
    ]
    for leaf in graph.leaves:
        yield jax.ShapeDtypeStruct(
            stored_shape(leaf.spec, leaf.placement),
            dtypes.to_jax(leaf.spec.dtype),
            sharding=target.mesh(leaf.placement.device_sharding),
        )


def _at_size(
    growth: Growth,
    fold: Fold,
    target: Target,
    kinds: Sequence[type],
    packed: list[jax.Array],
    leaves: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array]:
    """The results and the token of a program for growing sizes; the size is the last int."""
    position = int(float in kinds)
    ints = packed[position]
    rest = [ints[:-1]] if ints.size > 1 else []
    scalars = [*packed[:position], *rest, *packed[position + 1 :]]

    def function(arguments: tuple[jax.Array, list[jax.Array]]) -> list[jax.Array]:
        results, token = growth.evaluate(*arguments, fold.replicate_dims)
        return [*results, token]

    arguments = (ints[-1], [*scalars, *leaves])
    found = None
    if len(target.device_ids) > 1:
        found = in_safe_forms(function, arguments, fold.splits)
    *results, token = function(arguments) if found is None else found
    return results, token
