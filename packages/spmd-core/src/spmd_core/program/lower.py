"""Lowers a recorded graph to StableHLO, with the shardings of its leaves, marks and results."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from spmd_core import counters, dtypes, source_lines
from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry
from spmd_core.ops import registry
from spmd_core.ops.host_memory import FROM_HOST, in_device_memory
from spmd_core.ops.kernels.blocks import apart
from spmd_core.program import (
    attention_layouts,
    batch_sums,
    image_layouts,
    lookups,
    narrow_gathers,
    refined_marks,
    regions,
    split_dims,
)
from spmd_core.program.exact_values import stored_values
from spmd_core.program.gradient_plans import Plans
from spmd_core.program.index_checks import Flag
from spmd_core.program.index_layouts import IndexLayouts
from spmd_core.program.index_ranges import needed
from spmd_core.program.operation_names import named
from spmd_core.program.paced_gradients import PacedGradients
from spmd_core.program.partial_sums import PartialSums
from spmd_core.program.partitioner_rules import Splits, in_safe_forms
from spmd_core.program.program_graph import (
    Graph,
    Growth,
    Leaf,
    Node,
    Output,
    padded_shape,
    stored_shape,
)
from spmd_core.program.recorded_order import late_results
from spmd_core.runtime import devices, interrupts
from spmd_core.runtime.jax_sharding import (
    CommonMesh,
    jax_axis_names,
    jax_mesh,
    jax_partition_spec,
    named_sharding,
    replicated,
)
from spmd_core.sharding.sharding import Manual, Sharding

# They subtract the largest operand before they take exponentials. A NaN among the operands makes
# their results NaN, whatever that largest one is.
_SUMS_OF_EXPONENTIALS = (
    *("aten::_softmax", "aten::_log_softmax", "aten::softmax", "aten::log_softmax"),
    *("aten::logsumexp", "spmd::attention"),
)


def constrain(x: jax.Array, sharding: Sharding, named: jax.sharding.NamedSharding) -> jax.Array:
    """A sharding constraint that also holds for dims that their number of shards does not divide.

    jax ignores the constraint on such dims without a message, so `x` is padded, constrained and cut
    back to its shape. A dim of one element is left out: there is nothing to split, and the
    partitioner crashes on some reshapes of such dims.
    """
    if 1 in x.shape:
        axes = [None if n == 1 else axis for n, axis in zip_longest(x.shape, named.spec)]
        named = jax.sharding.NamedSharding(named.mesh, jax.sharding.PartitionSpec(*axes))
    padded = tuple(1 if n == 1 else p for n, p in zip(x.shape, sharding.padded_shape(x.shape)))
    if padded == x.shape:
        return jax.lax.with_sharding_constraint(x, named)
    wide = jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, padded)])
    wide = jax.lax.with_sharding_constraint(wide, named)
    return jax.lax.slice(wide, (0,) * x.ndim, x.shape)


def constrain_along(x: jax.Array, sharding: Sharding, along: Sequence[int]) -> jax.Array:
    """A sharding constraint along some axes of a mesh; the partitioner chooses the others.

    It is a manual region over these axes that does nothing: jax's constraints speak of all axes.
    """
    names = jax_axis_names(sharding.mesh)
    dims = (() if n == 1 else axes for n, axes in zip(x.shape, sharding.dims))
    spec = jax.sharding.PartitionSpec(*(tuple(names[a] for a in axes) or None for axes in dims))
    mapped = jax.shard_map(
        lambda block: block,
        mesh=jax_mesh(sharding.mesh),
        in_specs=spec,
        out_specs=spec,
        axis_names={names[axis] for axis in along},
        check_vma=False,
    )
    padded = tuple(1 if n == 1 else p for n, p in zip(x.shape, sharding.padded_shape(x.shape)))
    if padded == x.shape:
        return mapped(x)
    wide = jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, padded)])
    return jax.lax.slice(mapped(wide), (0,) * x.ndim, x.shape)


def _with_whole_block_dims(x: jax.Array, num: int) -> jax.Array:
    """A block whose last `num` dims are whole, along the axes that are not a region's."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = jax.sharding.PartitionSpec(*([free] * (x.ndim - num)), *([None] * num))
    return jax.lax.with_sharding_constraint(x, spec)


class Whole(Enum):
    """What is whole on each device in a program that the partitioner makes invalid otherwise."""

    NOTHING = "nothing"
    INDICES = "the indices of its gathers and scatters"
    EVERYTHING = "all its tensors"


@dataclass(frozen=True)
class Findings:
    """What is found in a graph before its operations are lowered, by their positions.

    Attributes:
        images: how the images of convolutions and poolings are split.
        attentions: how attentions may be split.
        tables: how tables of lookups are split that are not gathered.
        plans: the gradients that are reduced in manual regions.
        gathers: what is cast before it is gathered.
        batch: how the program's data splits the batch.
        refined: the marks that constrain nothing, as others refine them.
    """

    images: Mapping[int, registry.ImageLayout] = field(default_factory=dict)
    attentions: Mapping[int, registry.AttentionLayout] = field(default_factory=dict)
    tables: Mapping[int, registry.TableLayout] = field(default_factory=dict)
    plans: Plans = field(default_factory=Plans)
    gathers: Mapping[int, narrow_gathers.NarrowGather] = field(default_factory=dict)
    batch: registry.BatchSplit = field(default_factory=registry.BatchSplit)
    refined: frozenset[int] = frozenset()


class Function:
    """A graph as a jax function with shardings.

    Attributes:
        index_flag: what the program checks of its indices.
        jitted: the function of the packed numbers and the leaves.
        arguments: the shapes, dtypes and shardings of these.

    Args:
        graph: what to lower.
        name: the program's.
        whole: what is whole on each device, whatever the marks say.
        is_for_partitioner: whether operations get the forms that the partitioner gets right.
    """

    def __init__(
        self,
        graph: Graph,
        name: str,
        *,
        whole: Whole = Whole.NOTHING,
        is_for_partitioner: bool = True,
    ) -> None:
        self.graph = graph
        self._whole = whole
        self._is_for_partitioner = is_for_partitioner and len(graph.device_ids) > 1
        self._without_rules: set[Entry] = set()
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
        self.record = counters.ProgramRecord(
            name,
            len(graph.nodes),
            len(graph.leaves),
            len(graph.outputs),
            len(graph.device_ids),
            donated=graph.donated,
            source=source_lines.user_line(),
        )
        self.out_placements: list[Any]
        self._make(name)

    def jaxpr(self) -> ClosedJaxpr:
        """The function, traced."""
        with jax.enable_x64(True):
            return self.jitted.trace(*self.arguments).jaxpr

    def _make(self, name: str) -> None:
        graph = self.graph
        self._find_local_values()
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
        placed = [placement.device_sharding for placement in placements]
        self._common_mesh = common_mesh = CommonMesh([*placed, *marks], self.device_ids)
        everywhere = common_mesh(replicated(self.device_ids))
        self._mesh = everywhere.mesh
        found = split_dims.shardings(graph)
        self._split_dims = split_dims.split_dims(found)
        self._splits = split_dims.splits(
            found,
            self._with_whole_dims,
            len(self.device_ids),
            has_whole_indices=self._whole is Whole.INDICES,
        )
        numbers = [
            jax.ShapeDtypeStruct((count,), dtype, sharding=everywhere)
            for count, dtype in (
                (self._num_floats, np.float64),
                (self._num_ints + (graph.growth is not None), np.int64),
                (self._num_complex, np.complex128),
            )
            if count
        ]
        leaves = [
            jax.ShapeDtypeStruct(
                stored_shape(leaf.spec, leaf.placement),
                dtypes.to_jax(leaf.spec.dtype),
                sharding=common_mesh(leaf.placement.device_sharding),
            )
            for leaf in graph.leaves
        ]
        self.index_flag = self._make_index_flag()
        free = None if common_mesh.exists else everywhere
        out_shardings = [
            free if p is None else common_mesh(p.device_sharding) for p in out_placements
        ]

        def program(
            numbers: list[jax.Array], *leaves: jax.Array
        ) -> tuple[list[jax.Array], jax.Array]:
            if graph.growth is not None:
                return self._grow(graph.growth, numbers, leaves)
            self.index_flag.begin()
            results = self._trace(numbers, leaves)
            return results, self.index_flag.token()

        program.__name__ = name
        self.jitted = jax.jit(
            program,
            out_shardings=(out_shardings, self.index_flag.out_sharding),
            donate_argnums=tuple(i + 1 for i in graph.donated),
            keep_unused=True,
        )
        self.arguments = (numbers, *leaves)

    def _grow(
        self, growth: Growth, packed: list[jax.Array], leaves: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array]:
        """The results and the token for the number that comes last among the ints."""
        position = int(self._num_floats > 0)
        ints = packed[position]
        rest = [ints[:-1]] if self._num_ints else []
        numbers = [*packed[:position], *rest, *packed[position + 1 :]]

        def function(arguments: tuple[jax.Array, list[jax.Array]]) -> list[jax.Array]:
            results, token = growth.evaluate(*arguments, self._with_whole)
            return [*results, token]

        arguments = (ints[-1], [*numbers, *leaves])
        found = None
        if self._is_for_partitioner:
            found = in_safe_forms(function, arguments, self._splits)
        *results, token = function(arguments) if found is None else found
        return results, token

    def _make_index_flag(self) -> Flag:
        graph = self.graph
        checks = needed(graph) if graph.checks_indices else ()
        layouts = IndexLayouts(graph, self._common_mesh, self._to_named, self._manual)
        is_split = self._whole is Whole.NOTHING and len(self.device_ids) > 1
        splits = [layouts.split(check.value) if is_split else () for check in checks]
        assert isinstance(self._mesh, jax.sharding.Mesh)
        return Flag(checks, splits, self._mesh)

    def _find_local_values(self) -> None:
        """Sets for each value the axes of the manual region that it is local to, else None."""
        graph = self.graph
        self._manuals: list[Manual | None] = []
        for node in graph.nodes:
            border = node.entry.border
            manual = regions.manual_of(
                node.entry.name, border, [self._manual(i) for i in node.inputs]
            )
            region = border.manual if manual is None and border is not None else manual
            if region is not None:
                regions.check_devices(region, self.device_ids)
            self._manuals.extend([manual] * len(node.entry.outs))

    def _manual(self, value: int) -> Manual | None:
        return (
            self._manuals[value] if value >= 0 else self.graph.leaves[-value - 1].placement.manual
        )

    def _placement(self, output: Output) -> Placement | None:
        manual = self._manual(output.value)
        return output.placement if manual is None else regions.placement(manual)

    def _findings(self) -> Findings:
        def is_local(number: int) -> bool:
            return self._manual(number) is not None

        graph, mesh = self.graph, self._common_mesh
        images = image_layouts.find(graph, mesh, self._to_named, is_local)
        return Findings(
            images,
            attention_layouts.find(graph, mesh, is_local),
            lookups.find(graph, is_local),
            batch_sums.find(graph, is_local, self._split_dims, images),
            narrow_gathers.find(graph),
            self._batch_split(),
            refined_marks.find(graph),
        )

    def _to_named(self, entry: Entry) -> jax.sharding.NamedSharding:
        assert entry.sharding is not None
        return named_sharding(entry.sharding, self.device_ids)

    def _batch_split(self) -> registry.BatchSplit:
        """How the program's data splits the batch, for operations that keep it so."""
        if not self._common_mesh.exists:
            return registry.BatchSplit()
        axes = split_dims.batch_axes(self.graph, self._common_mesh)
        count = math.prod(self._mesh.shape[axis] for axis in axes)
        return registry.BatchSplit(count, functools.partial(self._with_first_dim, axes))

    def _with_first_dim(self, names: tuple[str, ...], x: jax.Array) -> jax.Array:
        """`x` with its first dim split by these axes; the partitioner chooses the others."""
        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        spec = jax.sharding.PartitionSpec(names or None, *(free for _ in x.shape[1:]))
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(self._mesh, spec))

    def _with_whole_dims(self, x: jax.Array, num: int) -> jax.Array:
        """`x` with its last `num` dims whole on each device; the partitioner chooses the others."""
        return self._with_whole(x, range(x.ndim - num, x.ndim))

    def _logical(
        self, leaf: Leaf, x: jax.Array, keep: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """A leaf as torch sees it; a value that is local to a manual region stays as it is."""
        if leaf.placement.manual is not None:
            return x
        same = x.shape == leaf.spec.shape
        return keep(x if same else self._without_padding(x, leaf.spec.shape))

    def _without_padding(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The leaf without the padding of uneven shards; a dim of one element is whole."""
        single = [d for d, n in enumerate(shape) if n == 1 and x.shape[d] > 1]
        x = jax.lax.slice(x, (0,) * x.ndim, shape)
        return self._with_whole(x, single) if single else x

    def _with_padding(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A result with the padding of uneven shards; before, a dim of one element is whole."""
        single = [d for d, n in enumerate(x.shape) if n == 1 and shape[d] > 1]
        x = self._with_whole(x, single) if single else x
        return jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, shape)])

    def _keep_whole(self, x: jax.Array) -> jax.Array:
        return self._with_whole(x, range(x.ndim))

    def _with_whole(self, x: jax.Array, dims: Iterable[int]) -> jax.Array:
        """`x` with those dims whole on each device; the partitioner chooses the others."""
        if len(self.device_ids) == 1:
            return x
        free, whole = jax.sharding.PartitionSpec.UNCONSTRAINED, {*dims}
        spec = jax.sharding.PartitionSpec(*(None if d in whole else free for d in range(x.ndim)))
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
        keep = self._keep_whole if self._whole is Whole.EVERYTHING else lambda x: x
        logical = [self._logical(leaf, x, keep) for leaf, x in zip(graph.leaves, leaves)]
        values: list[jax.Array] = []

        def read(number: int) -> jax.Array:
            return values[number] if number >= 0 else logical[-number - 1]

        stored = stored_values(graph)
        found = Findings() if self._whole is Whole.EVERYTHING else self._findings()
        plans, gathers = found.plans, found.gathers
        sums = PartialSums(graph, plans, platform, read)
        gathered: dict[tuple[Any, Entry], Sequence[jax.Array]] = {}  # casts that were gathered
        waits = late_results(graph) if platform == "cpu" else {}
        is_summed = len(self.device_ids) > 1
        paced = PacedGradients(values, sums, is_summed) if platform == "tpu" else None
        ready: list[jax.Array] = []  # what the next product waits for
        checks = self._index_checks()
        for position, node in enumerate(graph.nodes):
            interrupts.raise_deferred()
            entry = node.entry
            numbers = [_number(kind, sources) for kind in entry.number_kinds]
            key = _prng_key(numbers.pop().value) if entry.random else None
            outs = tuple(registry.Out(s.shape, s.dtype) for s in entry.outs)
            context = registry.Context(
                outs,
                platform,
                key,
                len(self.device_ids),
                self._split_dims,
                self._with_whole_dims,
                found.images.get(position),
                found.attentions.get(position),
                found.tables.get(position),
                batch=found.batch,
            )
            gather = gathers.get(position)
            inputs = [
                read(number) for number in (node.inputs if gather is None else [gather.source])
            ]
            manual = self._manual(len(values))
            wait = waits.get(position)
            if wait is not None:
                waited = [i for i in wait.values if i not in plans.replaced]
                ready += [values[i] for i in waited if self._manual(i) is None]
                # Read behind the barrier from here on: XLA drops what nobody reads there, if it
                # has another reader inside of the program, as local sums have.
                local = [i for i in waited if self._manual(i) is not None]
                if ready or local:
                    own = [inputs[i] for i in wait.operands]
                    own, ready, behind = jax.lax.optimization_barrier(
                        (own, ready, [values[i] for i in local])
                    )
                    ready = []
                    for i, x in zip(wait.operands, own):
                        inputs[i] = x
                    for i, x in zip(local, behind):
                        values[i] = x
            if paced is not None and manual is None:
                inputs = [*paced.before(node, inputs)]
            if entry.name == FROM_HOST and platform != "cpu":
                self._copy_late(inputs, values)
            with named(node, position):
                for number, value in checks.get(position, ()):
                    self.index_flag.add(number, read(value))
                gradient = sums.gradient(position)
                if gradient is not None:
                    inputs = [gradient]
                total, made = sums.addition(position)
                results: Sequence[jax.Array]
                if total is not None:
                    results = [total]
                elif (gather, entry) in gathered:
                    results = gathered[gather, entry]
                elif position in found.refined:
                    results = inputs
                else:
                    results = self._results(node, manual, context, inputs, numbers)
                    if gather is not None:
                        cast = self._as_marked(results[0], gather.before, gather.along)
                        results = [self._as_marked(cast, gather.after, gather.along)]
                        gathered[gather, entry] = results
                if paced is not None and position in plans.sums:
                    inputs = paced.after(node, inputs, results)
                made += sums.lower(position, inputs, numbers)
                ready += made if waits else []
            _check(entry, results, is_local=manual is not None)
            if paced is not None:
                paced.add(node, len(values))
            for x in results if manual is not None else map(keep, results):
                values.append(apart(x) if len(values) in stored else x)
        return self._outputs(values, leaves)

    def _index_checks(self) -> Mapping[int, list[tuple[int, int]]]:
        """For each position with checks, their numbers and those of the values."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, check in enumerate(self.index_flag.checks):
            found.setdefault(check.position, []).append((number, check.value))
        return found

    def _copy_late(self, inputs: list[jax.Array], values: list[jax.Array]) -> None:
        """Makes what comes back from the host wait for what was recorded just before.

        XLA would copy everything back as soon as it is on the host.
        """
        whole = (i for i in reversed(range(len(values))) if self._manual(i) is None)
        last = next((i for i in whole if values[i] is not inputs[0]), None)
        if last is not None:
            # Read behind the barrier from here on: XLA drops what nobody reads there.
            inputs[0], values[last] = jax.lax.optimization_barrier((inputs[0], values[last]))

    def _outputs(self, values: Sequence[jax.Array], leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The program's results, with the padding of uneven shards."""
        returned = {id(x) for x in leaves}
        outputs = []
        for output in self.graph.outputs:
            x = in_device_memory(values[output.value])
            target = padded_shape(output.spec, output.sharding)
            if target != x.shape and self._manual(output.value) is None:
                x = self._with_padding(x, target)
            if id(x) in returned:
                # jit would return one buffer twice; donating one result later would then destroy
                # the other.
                x = jnp.copy(x)
            returned.add(id(x))
            outputs.append(x)
        return outputs

    def _results(
        self,
        node: Node,
        manual: Manual | None,
        context: registry.Context,
        inputs: list[jax.Array],
        numbers: list[registry.Number],
    ) -> Sequence[jax.Array]:
        """The node's results; `manual` is the region that they are local to."""
        entry = node.entry
        if entry.border is not None:
            return [regions.cross(entry.border, inputs[0])]
        if manual is not None:
            return self._run_local(manual, node, context, inputs, numbers)
        if entry.sharding is None:
            return self._run(node, context, inputs, numbers)
        if self._whole is Whole.EVERYTHING:
            return inputs
        return [self._as_marked(inputs[0], entry.sharding, entry.along)]

    def _as_marked(
        self, x: jax.Array, sharding: Sharding, along: tuple[int, ...] | None
    ) -> jax.Array:
        # A manual region is over all devices of its program, in the program's order.
        if along is not None and sharding.mesh.ids == self.device_ids:
            return constrain_along(x, *self._with_split_sequences(x, sharding, along))
        named = self._common_mesh(named_sharding(sharding, self.device_ids))
        return constrain(x, sharding, named)

    def _with_split_sequences(
        self, x: jax.Array, sharding: Sharding, along: tuple[int, ...]
    ) -> tuple[Sharding, tuple[int, ...]]:
        """A mark that splits the sequence, the second dim, beside the axes that split the data's.

        These come first. The partitioner would put them behind the mark's.
        """
        if x.ndim < 3 or not sharding.dims[1]:
            return sharding, along
        mesh, own = sharding.mesh, sharding.dims[1]
        for data in self._data_splits:
            if data.mesh != mesh or not data.sequence or not {*along}.isdisjoint(data.sequence):
                continue
            axes = (*data.sequence, *own)
            wider = Sharding.of(mesh, (sharding.dims[0], axes, *sharding.dims[2:]), x.ndim)
            if x.shape[1] % wider.tiles[1] == 0:
                return wider, (*along, *data.sequence)
        return sharding, along

    @functools.cached_property
    def _data_splits(self) -> list[split_dims.DataSplit]:
        return split_dims.data_splits(self.graph)

    def _run(
        self,
        node: Node,
        context: registry.Context,
        inputs: list[jax.Array],
        numbers: list[registry.Number],
    ) -> Sequence[jax.Array]:
        """The node's results, in forms that the partitioner gets right."""
        if not self._is_for_partitioner:
            return node.entry.kernel(context, inputs, numbers)
        return self._in_safe_forms(node.entry, context, inputs, numbers, self._splits)

    def _in_safe_forms(
        self,
        entry: Entry,
        context: registry.Context,
        inputs: list[jax.Array],
        numbers: list[registry.Number],
        splits: Splits,
    ) -> Sequence[jax.Array]:
        """The results of an entry's kernel, with the partitioner's rules applied to it."""
        kernel = entry.kernel
        if entry in self._without_rules:
            return kernel(context, inputs, numbers)
        kinds = [number.kind for number in numbers]

        def function(arguments: tuple[Any, Any, Any]) -> Sequence[jax.Array]:
            arrays, values, key = arguments
            typed = [registry.Number(x, kind) for x, kind in zip(values, kinds)]
            inner = replace(context, key=key)
            return kernel(inner, arrays, typed)

        arguments = (inputs, [number.value for number in numbers], context.key)
        keeps_nan = not entry.name.startswith(_SUMS_OF_EXPONENTIALS)
        is_users = entry.name.startswith("jax::")
        splits = replace(splits, keeps_nan=keeps_nan, is_users=is_users)
        results = in_safe_forms(function, arguments, splits)
        if results is None:
            self._without_rules.add(entry)
            return kernel(context, inputs, numbers)
        return results

    def _run_local(
        self,
        manual: Manual,
        node: Node,
        context: registry.Context,
        inputs: list[jax.Array],
        numbers: list[registry.Number],
    ) -> list[jax.Array]:
        """The node's results on values that are local to a manual region."""
        entry = node.entry

        def kernel(
            blocks: list[jax.Array], numbers: list[registry.Number], key: jax.Array | None
        ) -> list[jax.Array]:
            if entry.sharding is not None:
                spec = jax_partition_spec(entry.sharding)
                if entry.along is not None:
                    free = jax.sharding.PartitionSpec.UNCONSTRAINED
                    spec = jax.sharding.PartitionSpec(*(axes or free for axes in spec))
                return [jax.lax.with_sharding_constraint(blocks[0], spec)]
            # Every device runs the kernel by itself: the context has one device and no split dims.
            inner = registry.Context(context.outs, context.platform, key)
            if entry.name.startswith("spmd::attention"):  # its only number is the seed of dropout
                numbers = [regions.own_seed(manual, seed) for seed in numbers]
            if manual.size == len(self.device_ids) or not self._is_for_partitioner:
                return list(entry.kernel(inner, blocks, numbers))
            # The partitioner splits blocks over the other axes.
            splits = replace(self._splits, keep_whole=_with_whole_block_dims)
            return list(self._in_safe_forms(entry, inner, blocks, numbers, splits))

        local = [self._manual(i) is not None for i in node.inputs]
        if entry.name == "spmd::optimization_barrier":
            # Outside of jax.shard_map, which would drop an operand whose result is not used.
            stacks = regions.run(manual, lambda blocks, *_: blocks, inputs, local, [], None)
            return list(jax.lax.optimization_barrier(tuple(stacks)))
        return regions.run(manual, kernel, inputs, local, numbers, context.key)


class Traced(Function):
    """A graph as StableHLO with shardings, not compiled.

    Attributes:
        lowered: jax's stage before compilation. Its StableHLO names each operation as torch does,
            `aten::mm`. Where the graph has origins, the name is
            `GPT.h.0.attn/aten::mm#7/train.py:12` (7 is the node's position), and the location is
            the user's line.
    """

    def __init__(self, graph: Graph, name: str, *, whole: Whole = Whole.NOTHING) -> None:
        super().__init__(graph, name, whole=whole)
        start = time.perf_counter()
        with jax.enable_x64(True), counters.timed(counters.Part.TRACING):
            self.lowered = self.jitted.lower(*self.arguments)
        self.record.trace_s = time.perf_counter() - start

    @property
    def lowered_text(self) -> Callable[[], str]:
        """A function that returns the StableHLO as text."""
        return self.lowered.as_text


def _number(kind: type, sources: Mapping[type, Iterator[jax.Array]]) -> registry.Number:
    """The next number of a kind; the bools are among the ints."""
    if kind is bool:
        return registry.Number(next(sources[int]).astype(np.bool_), bool)
    return registry.Number(next(sources[kind]), kind)


def _prng_key(seed: jax.Array) -> jax.Array:
    """The threefry key of a 64-bit seed."""
    words = jnp.stack([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF]).astype(np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _check(entry: Entry, results: Sequence[jax.Array], *, is_local: bool) -> None:
    """Asserts that the results have the shapes and dtypes that torch gives them."""
    assert len(results) == len(entry.outs), (
        f"{entry.name} is lowered to {len(results)} results; torch has {len(entry.outs)}"
    )
    for x, spec in zip(results, entry.outs):
        assert x.shape[is_local:] == spec.shape and x.dtype == dtypes.to_jax(spec.dtype), (
            f"{entry.name} is lowered to {x.dtype}{list(x.shape)}; torch says {spec!r}"
        )
