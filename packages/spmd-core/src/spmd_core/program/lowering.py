"""From a recorded graph to one compiled XLA program: traced by `jax.jit`, partitioned by the shardings of leaves, marks and results."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from spmd_core import dtypes, metrics, source_lines
from spmd_core.graph.values import Entry
from spmd_core.ops import registry
from spmd_core.program import regions
from spmd_core.program.program_graph import Graph, Node, Output, padded_shape, stored_shape
from spmd_core.runtime import devices
from spmd_core.runtime.placement import (
    OneMesh,
    Placement,
    jax_partition_spec,
    named_sharding,
    replicated,
)
from spmd_core.sharding.sharding import Manual, Sharding


def constrain(x: jax.Array, sharding: Sharding, named: jax.sharding.NamedSharding) -> jax.Array:
    """A sharding constraint that also holds where a dim does not divide: jax drops those in silence, so pad, constrain, cut."""
    padded = sharding.padded_shape(x.shape)
    if padded == x.shape:
        return jax.lax.with_sharding_constraint(x, named)
    wide = jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, padded)])
    wide = jax.lax.with_sharding_constraint(wide, named)
    return jax.lax.slice(wide, (0,) * x.ndim, x.shape)


class Traced:
    """A graph as StableHLO with shardings, not compiled.

    Attributes:
        lowered: jax's stage before the compiler; its StableHLO names each operation `aten::mm`. Where the graph has origins, the name is
            `GPT.h.0.attn/aten::mm#7/train.py:12` (7 is the node's number), and the location is the user's line.
    """

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph = graph
        self.device_ids = graph.device_ids
        self._num_floats = sum(
            kind is float for node in graph.nodes for kind in node.entry.number_kinds
        )
        self._num_ints = sum(
            kind in (int, bool) for node in graph.nodes for kind in node.entry.number_kinds
        )
        self._num_complex = sum(
            kind is complex for node in graph.nodes for kind in node.entry.number_kinds
        )
        self.record = metrics.ProgramRecord(
            name,
            len(graph.nodes),
            len(graph.leaves),
            len(graph.outputs),
            len(graph.device_ids),
            donated=graph.donated,
            source=source_lines.user_line(),
        )
        self.out_placements: list[Any]
        self._lower(name)

    @property
    def lowered_text(self) -> Callable[[], str]:
        """The StableHLO as text, when called."""
        return self.lowered.as_text

    def _lower(self, name: str) -> None:
        graph = self.graph
        self._manual_of_values()
        marks = [
            named_sharding(node.entry.sharding, self.device_ids)
            for node in graph.nodes
            if node.entry.sharding is not None
        ]
        self.out_placements = out_placements = [self._placement(output) for output in graph.outputs]
        placements = [
            *(leaf.placement for leaf in graph.leaves),
            *(p for p in out_placements if p is not None),
        ]
        placed = [placement.jax_sharding for placement in placements]
        self._on_one_mesh = on_one_mesh = OneMesh([*placed, *marks], self.device_ids)
        everywhere = on_one_mesh(replicated(self.device_ids))
        self._mesh = everywhere.mesh
        self._split_dims = self._dims_that_are_split()
        numbers = [
            jax.ShapeDtypeStruct((count,), dtype, sharding=everywhere)
            for count, dtype in (
                (self._num_floats, np.float64),
                (self._num_ints, np.int64),
                (self._num_complex, np.complex128),
            )
            if count
        ]
        leaves = [
            jax.ShapeDtypeStruct(
                stored_shape(leaf.spec, leaf.placement),
                dtypes.to_jax(leaf.spec.dtype),
                sharding=on_one_mesh(leaf.placement.jax_sharding),
            )
            for leaf in graph.leaves
        ]
        free = None if on_one_mesh.exists else everywhere
        out_shardings = [free if p is None else on_one_mesh(p.jax_sharding) for p in out_placements]

        def program(
            numbers: list[jax.Array], *leaves: jax.Array
        ) -> tuple[list[jax.Array], jax.Array]:
            return self._trace(numbers, leaves), jnp.zeros((), np.int32)

        program.__name__ = name
        with jax.enable_x64(True):
            start = time.perf_counter()
            jitted = jax.jit(
                program,
                out_shardings=(out_shardings, everywhere),
                donate_argnums=tuple(i + 1 for i in graph.donated),
                keep_unused=True,
            )
            self.lowered = jitted.lower(numbers, *leaves)
        self.record.trace_s = time.perf_counter() - start

    def _manual_of_values(self) -> None:
        """To which axes each value is local."""
        graph = self.graph
        self._manuals: list[Manual | None] = []
        for node in graph.nodes:
            manual = regions.manual_of(
                node.entry.name, node.entry.border, [self._manual(i) for i in node.inputs]
            )
            if manual is not None or node.entry.border is not None:
                regions.check_devices(manual or node.entry.border.manual, self.device_ids)
            self._manuals.extend([manual] * len(node.entry.outs))

    def _manual(self, value: int) -> Manual | None:
        return (
            self._manuals[value] if value >= 0 else self.graph.leaves[-value - 1].placement.manual
        )

    def _placement(self, output: Output) -> Placement | None:
        manual = self._manual(output.value)
        return output.placement if manual is None else regions.placement(manual)

    def _dims_that_are_split(self) -> frozenset[int]:
        """The dims that a leaf, a mark or a result splits, counted from the last one, which is -1; weights (floats of two dims at most) apart.

        Integers are taken for indices into a table as well, whose rows become one more dim behind.
        """
        graph = self.graph
        marked = [
            (node.entry.outs[0], named_sharding(node.entry.sharding, self.device_ids))
            for node in graph.nodes
            if node.entry.sharding
        ]
        placed = [(leaf.spec, leaf.placement.jax_sharding) for leaf in graph.leaves]
        placed += [
            (output.spec, output.placement.jax_sharding)
            for output in graph.outputs
            if output.placement is not None
        ]
        found = set()
        for spec, sharding in (*marked, *placed):
            ndim, is_float = len(spec.shape), spec.dtype.is_floating_point or spec.dtype.is_complex
            split = (
                {dim - ndim for dim, axes in enumerate(sharding.spec) if axes}
                if ndim > 2 or not is_float
                else set()
            )
            found |= split if is_float else split | {dim - 1 for dim in split}
        return frozenset(found)

    def _with_whole_dims(self, x: jax.Array, num: int) -> jax.Array:
        """`x` with its last `num` dims whole on each device; how the others lie is the partitioner's choice."""
        if len(self.device_ids) == 1:
            return x
        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        spec = jax.sharding.PartitionSpec(*(free,) * (x.ndim - num), *(None,) * num)
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(self._mesh, spec))

    def _trace(self, packed: list[jax.Array], leaves: tuple[jax.Array, ...]) -> list[jax.Array]:
        graph = self.graph
        platform = devices.platform()
        packs = iter(packed)
        sources = {
            float: iter(next(packs)) if self._num_floats else iter(()),
            int: iter(next(packs)) if self._num_ints else iter(()),
            complex: iter(next(packs)) if self._num_complex else iter(()),
        }
        logical = [
            array
            if leaf.placement.manual is not None or array.shape == leaf.spec.shape
            else jax.lax.slice(array, (0,) * array.ndim, leaf.spec.shape)
            for leaf, array in zip(graph.leaves, leaves)
        ]
        values: list[jax.Array] = []
        for position, node in enumerate(graph.nodes):
            entry = node.entry
            numbers = [
                registry.Number(next(sources[int]).astype(np.bool_), bool)
                if kind is bool
                else registry.Number(next(sources[kind]), kind)
                for kind in entry.number_kinds
            ]
            key = _prng_key(numbers.pop().value) if entry.random else None
            outs = tuple(registry.Out(s.shape, s.dtype) for s in entry.outs)
            context = registry.Context(
                outs, platform, key, len(self.device_ids), self._split_dims, self._with_whole_dims
            )
            inputs = [values[i] if i >= 0 else logical[-i - 1] for i in node.inputs]
            manual = self._manual(len(values))
            with _named(node, position):
                if entry.border is not None:
                    results = [regions.cross(entry.border, inputs[0])]
                elif manual is not None:
                    results = self._run_local(manual, node, context, inputs, numbers)
                elif entry.sharding is not None:
                    results = [
                        constrain(
                            inputs[0],
                            entry.sharding,
                            self._on_one_mesh(named_sharding(entry.sharding, self.device_ids)),
                        )
                    ]
                else:
                    results = entry.kernel(context, inputs, numbers)
            _check(entry, results, is_local=manual is not None)
            values.extend(results)
        taken = {id(x) for x in leaves}
        outputs = []
        for output in graph.outputs:
            x = values[output.value]
            target = padded_shape(output.spec, output.sharding)
            if target != x.shape and self._manual(output.value) is None:
                x = jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, target)])
            if id(x) in taken:
                # jit would hand out one buffer twice; a later donation of one would then destroy the other.
                x = jnp.copy(x)
            taken.add(id(x))
            outputs.append(x)
        return outputs

    def _run_local(
        self,
        manual: Manual,
        node: Node,
        context: registry.Context,
        inputs: list[Any],
        numbers: list[registry.Number],
    ) -> list[jax.Array]:
        entry = node.entry

        def kernel(own: list[Any], given: list[Any], key: jax.Array | None) -> list[jax.Array]:
            if entry.sharding is not None:
                spec = jax_partition_spec(entry.sharding)
                return [jax.lax.with_sharding_constraint(own[0], spec)]
            # Each device by itself: nothing that it computes is partitioned along the manual axes.
            results: list[jax.Array] = entry.kernel(
                registry.Context(context.outs, context.platform, key), own, given
            )
            return results

        local = [self._manual(i) is not None for i in node.inputs]
        return regions.run(manual, kernel, inputs, local, numbers, context.key)


@contextmanager
def _named(node: Node, position: int) -> Iterator[None]:
    """Names what is traced inside after the torch operation; with an origin, also after its place in the graph, its module and the user's line."""
    here = node.origin
    if here is None:
        with jax.named_scope(node.entry.name):
            yield
        return
    scope = f"{here.module}/{node.entry.name}#{position}/{Path(here.file).name}:{here.line}".lstrip(
        "/"
    )
    with (
        source_info_util.user_context(_traceback(here.file, here.line, here.function)),
        jax.named_scope(scope),
    ):
        yield


@lru_cache(maxsize=4096)
def _traceback(file: str, line: int, function: str) -> Any:
    """jax's traceback with the user's line innermost: taken by one call that seems to stand there."""
    code = compile("\n" * (line - 1) + "current().traceback", file, "eval")
    return eval(
        code.replace(co_name=function, co_qualname=function), {"current": source_info_util.current}
    )


def _prng_key(seed: jax.Array) -> jax.Array:
    words = jnp.stack([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF]).astype(np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _check(entry: Entry, results: list[Any], *, is_local: bool) -> None:
    assert len(results) == len(entry.outs), (
        f"{entry.name} is lowered to {len(results)} results; torch has {len(entry.outs)}"
    )
    for x, spec in zip(results, entry.outs):
        assert x.shape[is_local:] == spec.shape and x.dtype == dtypes.to_jax(spec.dtype), (
            f"{entry.name} is lowered to {x.dtype}{list(x.shape)}; torch says {spec!r}"
        )
