"""Evaluates a graph's operations with jax, one after the other, without knowledge of any pass."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core import dtypes
from spmd_core.graph.subgraphs import Body, ControlEntry
from spmd_core.graph.values import Entry
from spmd_core.ops import registry
from spmd_core.ops.barrier import BARRIER
from spmd_core.ops.host_memory import in_device_memory
from spmd_core.ops.kernels.threefry import prng_key
from spmd_core.program import regions, shardy_constraints, split_dims
from spmd_core.program.constraints import constrain, constrain_along, replicate_last_block_dims
from spmd_core.program.index_flag import Flag
from spmd_core.program.ir import Graph, Input, Op, Position, Ref
from spmd_core.program.operation_names import named
from spmd_core.program.program_graph import padded_shape
from spmd_core.program.repeated_entries import RepeatedEntry
from spmd_core.program.safe_forms import in_safe_forms
from spmd_core.program.shared_kernels import SharedKernels
from spmd_core.program.splits import Splits
from spmd_core.program.target import Replicated, Target
from spmd_core.runtime import interrupts
from spmd_core.runtime.jax_sharding import jax_mesh, jax_partition_spec
from spmd_core.sharding.sharding import Manual, Sharding


class Scalars:
    """The scalar inputs of a program, by their positions.

    Args:
        kinds: their Python types, in the order of recording.
        packed: one array for the floats, one for the ints and bools, and one for the complex
            numbers; without arrays that would be empty.
    """

    def __init__(self, kinds: Sequence[type], packed: Sequence[jax.Array]) -> None:
        packed_kinds = [int if kind is bool else kind for kind in kinds]
        present: list[type] = [kind for kind in (float, int, complex) if kind in packed_kinds]
        self._kinds = kinds
        self._arrays = dict(zip(present, packed))
        counters = {kind: itertools.count() for kind in present}
        self._places = [(kind, next(counters[kind])) for kind in packed_kinds]
        self._read: dict[int, registry.Number] = {}
        self._floats: jax.Array | None = None
        self._in_float32: dict[int, registry.Number] = {}

    def __getitem__(self, position: int) -> registry.Number:
        # A number is sliced from its array when the first operation reads it.
        if position not in self._read:
            kind, place = self._places[position]
            value = jax.lax.index_in_dim(self._arrays[kind], place, keepdims=False)
            self._read[position] = self._number(value, position)
        return self._read[position]

    def in_float32(self, position: int) -> registry.Number:
        """A number, with its value in float32 beside it if it is an int.

        All ints of the program are converted at once. A TPU has no int64: XLA converts one by 37
        operations, whether it is one number or an array of them.
        """
        if self._kinds[position] is not int:
            return self[position]
        if position not in self._in_float32:
            if self._floats is None:
                self._floats = self._arrays[int].astype(np.float32)
            place = self._places[position][1]
            value = jax.lax.index_in_dim(self._floats, place, keepdims=False)
            self._in_float32[position] = replace(self[position], float32=value)
        return self._in_float32[position]

    def rows(self, positions: tuple[int, ...]) -> registry.Number:
        """Numbers of one type as one array."""
        kind, first = self._places[positions[0]]
        places = np.array([self._places[position][1] for position in positions])
        steps = {*np.diff(places).tolist()}
        array = self._arrays[kind]
        if len(steps) == 1 and (step := steps.pop()) > 0:
            value = jax.lax.slice(array, (first,), (int(places[-1]) + 1,), (step,))
        else:
            value = array[places]
        return self._number(value, positions[0])

    def _number(self, value: jax.Array, position: int) -> registry.Number:
        kind = self._kinds[position]
        return registry.Number(value.astype(np.bool_) if kind is bool else value, kind)


class Fold:
    """The operations of a program as one function.

    Args:
        graph: the graph after all passes.
        target: what it is lowered for.
        is_for_partitioner: whether to apply the rules for XLA's partitioner (`partitioner_rules`).
    """

    def __init__(self, graph: Graph, target: Target, *, is_for_partitioner: bool = True) -> None:
        self._graph, self._target = graph, target
        self.flag = graph.flag or Flag([], [], target.jax_mesh)
        self._mesh = target.jax_mesh
        self._num_devices = len(target.device_ids)
        self._is_for_partitioner = is_for_partitioner and self._num_devices > 1
        self._without_rules: set[tuple[Entry, registry.Hint | None]] = set()
        self._kernels = SharedKernels(graph.all_ops())
        self.splits = split_dims.splits(
            target.placed,
            self._replicate_last_dims,
            self._num_devices,
            replicates_indices=target.replicated_part is Replicated.INDICES,
        )
        self._batch = registry.BatchSplit()
        if target.is_split and target.mesh.exists:
            count = math.prod(self._mesh.shape[axis] for axis in target.batch_axes)
            self._batch = registry.BatchSplit(count, self._with_split_first_dim)

    def __call__(
        self, scalars: Scalars, leaves: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array]:
        """The program's results, padded where they are split unevenly, and its token."""
        values = {
            Ref(x): self._without_padding(x, self._at_priority(x, array))
            for x, array in zip(self._graph.inputs, leaves)
        }
        found = self._compute(self._graph, values, scalars)
        self._kernels.clear()
        return self._outputs(values, leaves), self.flag.token(found)

    def _compute(
        self,
        graph: Graph,
        values: dict[Ref, jax.Array],
        scalars: "Scalars | Sequence[registry.Number]",
    ) -> list[jax.Array]:
        """Adds the results of all operations to `values`; returns what its index checks found."""
        found: list[jax.Array] = []
        for op in graph.ops:
            interrupts.raise_deferred()
            inputs = [values[operand] for operand in op.operands]
            numbers = self._numbers(scalars, op)
            results: Sequence[jax.Array]
            with named(op.source):
                if op.bodies:
                    results, inside = self._controlled(op, inputs, numbers)
                    found += inside
                else:
                    results = self._results(op, inputs, numbers)
            _check(op, results)
            values.update(zip(op.results, results))
        return [*found, *(values[check] for check in graph.checked)]

    def _numbers(
        self, scalars: "Scalars | Sequence[registry.Number]", op: Op
    ) -> list[registry.Number]:
        """The scalar inputs of an operation; of one on stacks, some may have one for each row."""
        in_float32 = self._target.platform == "tpu" and _computes_floats(op)
        return [
            scalars.in_float32(position)
            if in_float32 and isinstance(scalars, Scalars) and isinstance(position, int)
            else _number(scalars, position)
            for position in op.scalars
        ]

    def _controlled(
        self, op: Op, inputs: list[jax.Array], numbers: list[registry.Number]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The results of an operation that runs bodies, and what their index checks found.

        Iterations go over dims that no device splits: the partitioner errs on slices of a split
        dim at a position that is not known, and on updates of one.
        """
        entry = op.entry
        assert isinstance(entry, ControlEntry)
        has_checks = any(_has_checks(body) for body in op.bodies)
        bodies: list[Body] = []
        inputs = [
            self.replicate_dims(x, [0]) if i in entry.stacked else x for i, x in enumerate(inputs)
        ]
        if isinstance(entry, RepeatedEntry):
            bodies.append(partial(self._iteration, op.bodies[0], entry.number_kinds, has_checks))
            inputs += [number.value for number in numbers]
        else:
            first = 0
            for body, subgraph in zip(op.bodies, entry.subgraphs):
                end = first + len(subgraph.number_kinds)
                bodies.append(partial(self._run, body, numbers[first:end], has_checks))
                first = end
        none = self.flag.first([]) if has_checks else None
        results, found = entry.control(bodies, inputs, none)
        results = [
            self.replicate_dims(x, [0]) if i in entry.stacks else x for i, x in enumerate(results)
        ]
        return results, [] if found is None else [found]

    def _run(
        self,
        body: Graph,
        numbers: Sequence[registry.Number],
        has_checks: bool,
        arrays: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """The results of a body, and what its index checks found."""
        values = {Ref(x): array for x, array in zip(body.inputs, arrays, strict=True)}
        found = self._compute(body, values, numbers)
        outputs = [values[x] for x in body.outputs]
        return outputs, self.flag.first(found) if has_checks else None

    def _iteration(
        self,
        body: Graph,
        kinds: Sequence[type],
        has_checks: bool,
        arrays: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """As `_run`, of an iteration that gets its own scalar inputs behind its operands."""
        count = len(arrays) - len(kinds)
        numbers = [registry.Number(x, kind) for x, kind in zip(arrays[count:], kinds)]
        return self._run(body, numbers, has_checks, arrays[:count])

    def _results(
        self, op: Op, inputs: list[jax.Array], numbers: list[registry.Number]
    ) -> Sequence[jax.Array]:
        entry = op.entry
        if not op.is_inserted:
            if entry.border is not None:
                return [regions.cross(entry.border, inputs[0])]
            if entry.sharding is not None and op.manual is None:
                return [self._as_marked(inputs[0], entry.sharding, entry.along)]
        return self._kernels.results(op, partial(self._computed, op), inputs, numbers)

    def _computed(
        self, op: Op, inputs: list[jax.Array], numbers: list[registry.Number]
    ) -> Sequence[jax.Array]:
        """The results of an operation's kernel."""
        entry, target = op.entry, self._target
        key = prng_key(numbers.pop().value) if entry.random else None
        context = registry.Context(
            tuple(registry.Out(spec.shape, spec.dtype) for spec in entry.outs),
            target.platform,
            key,
            self._num_devices,
            target.split_dims,
            self._replicate_last_dims,
            op.hint,
            batch=self._batch,
        )
        if op.is_inserted:
            return entry.kernel(context, inputs, numbers)
        if op.manual is not None:
            return self._local_results(op.manual, op, context, inputs, numbers)
        if not self._is_for_partitioner:
            return entry.kernel(context, inputs, numbers)
        return self._in_safe_forms(entry, context, inputs, numbers, self.splits)

    def _as_marked(
        self, x: jax.Array, sharding: Sharding, along: tuple[int, ...] | None
    ) -> jax.Array:
        # A manual region must have all devices of its program, in the program's order.
        if along is not None and sharding.mesh.ids == self._target.device_ids:
            return constrain_along(x, *self._with_split_sequences(x, sharding, along))
        return constrain(x, sharding, self._target.mesh(self._target.named(sharding)))

    def _with_split_sequences(
        self, x: jax.Array, sharding: Sharding, along: tuple[int, ...]
    ) -> tuple[Sharding, tuple[int, ...]]:
        """A mark along some axes that splits the sequence dim, which the data's axes split as well.

        The data's axes come first. The partitioner would put them after those of the mark.
        """
        if x.ndim < 3 or not sharding.dims[1]:
            return sharding, along
        mesh, own = sharding.mesh, sharding.dims[1]
        for data in self._target.data_splits:
            if data.mesh != mesh or not data.sequence or not {*along}.isdisjoint(data.sequence):
                continue
            axes = (*data.sequence, *own)
            wider = Sharding.of(mesh, (sharding.dims[0], axes, *sharding.dims[2:]), x.ndim)
            if x.shape[1] % wider.tiles[1] == 0:
                return wider, (*along, *data.sequence)
        return sharding, along

    def _in_safe_forms(
        self,
        entry: Entry,
        context: registry.Context,
        inputs: list[jax.Array],
        numbers: list[registry.Number],
        splits: Splits,
    ) -> Sequence[jax.Array]:
        """The results of an entry's kernel, rewritten by the rules for the partitioner."""
        kernel = entry.kernel
        what = entry, context.hint
        if what in self._without_rules:
            return kernel(context, inputs, numbers)

        def function(arguments: tuple[Any, Any, Any]) -> Sequence[jax.Array]:
            arrays, given, key = arguments
            return kernel(replace(context, key=key), arrays, given)

        arguments = (inputs, numbers, context.key)
        keeps_nan = not entry.traits.passes_nan_on
        is_users = entry.name.startswith("jax::")
        splits = replace(splits, keeps_nan=keeps_nan, is_users=is_users)
        results = in_safe_forms(function, arguments, splits)
        if results is None:
            self._without_rules.add(what)
            return kernel(context, inputs, numbers)
        return results

    def _local_results(
        self,
        manual: Manual,
        op: Op,
        context: registry.Context,
        inputs: list[jax.Array],
        numbers: list[registry.Number],
    ) -> list[jax.Array]:
        """An operation's results on values that are local to a manual region."""
        entry = op.entry

        def kernel(
            blocks: list[jax.Array], numbers: list[registry.Number], key: jax.Array | None
        ) -> list[jax.Array]:
            if entry.sharding is not None:
                spec = jax_partition_spec(entry.sharding)
                if entry.sharding.has_hints:
                    named = jax.sharding.NamedSharding(jax_mesh(entry.sharding.mesh), spec)
                    return [constrain(blocks[0], entry.sharding, named)]
                if entry.along is not None:
                    free = jax.sharding.PartitionSpec.UNCONSTRAINED
                    spec = jax.sharding.PartitionSpec(*(axes or free for axes in spec))
                return [jax.lax.with_sharding_constraint(blocks[0], spec)]
            # Every device runs the kernel on its own, so its context has one device, and no dim is
            # split.
            inner = registry.Context(context.outs, context.platform, key)
            if entry.traits.has_seeds:
                numbers = [regions.own_seed(manual, seed) for seed in numbers]
            is_alone = manual.size == self._num_devices or any(entry.block_axes)
            if is_alone or not self._is_for_partitioner:
                return list(entry.kernel(inner, blocks, numbers))
            # Over the axes that are not manual, the partitioner may still split the blocks.
            splits = replace(self.splits, replicate_last_dims=replicate_last_block_dims)
            return list(self._in_safe_forms(entry, inner, blocks, numbers, splits))

        local = [operand.manual is not None for operand in op.operands]
        if entry.name == BARRIER:
            # Not inside of jax.shard_map, which would drop an operand whose result is not used.
            stacks = regions.run(manual, lambda blocks, *_: blocks, inputs, local, [], None)
            return list(jax.lax.optimization_barrier(tuple(stacks)))
        return regions.run(
            manual, kernel, inputs, local, numbers, context.key, others=entry.block_axes
        )

    def _at_priority(self, x: Input, array: jax.Array) -> jax.Array:
        """An input whose mark has another priority than the highest, which jax gives to all.

        What jax gives ends at a closed constraint, whose axes are propagated at their own priority.
        """
        placement = x.leaf.placement
        sharding = placement.sharding
        if sharding is None or not sharding.priority or self._num_devices == 1:
            return array
        named = self._target.mesh(placement.device_sharding)
        return shardy_constraints.constrain(array, named, (), sharding.priority)

    def _without_padding(self, x: Input, array: jax.Array) -> jax.Array:
        """An input as torch sees it; a value that is local to a manual region stays as it is."""
        shape = x.leaf.spec.shape
        if x.leaf.placement.manual is not None or array.shape == shape:
            return array
        # The partitioner crashes on some reshapes of split dims of one element.
        single = [d for d, n in enumerate(shape) if n == 1 and array.shape[d] > 1]
        array = jax.lax.slice(array, (0,) * array.ndim, shape)
        return self.replicate_dims(array, single) if single else array

    def _with_padding(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A result, padded where it is split unevenly. Dims of one element are replicated first."""
        single = [d for d, n in enumerate(x.shape) if n == 1 and shape[d] > 1]
        x = self.replicate_dims(x, single) if single else x
        return jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, shape)])

    def replicate_dims(self, x: jax.Array, dims: Iterable[int]) -> jax.Array:
        """`x` with those dims replicated; the partitioner chooses the sharding of the others."""
        if self._num_devices == 1:
            return x
        free, fixed = jax.sharding.PartitionSpec.UNCONSTRAINED, {*dims}
        spec = jax.sharding.PartitionSpec(*(None if d in fixed else free for d in range(x.ndim)))
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(self._mesh, spec))

    def _replicate_last_dims(self, x: jax.Array, num: int) -> jax.Array:
        return self.replicate_dims(x, range(x.ndim - num, x.ndim))

    def _with_split_first_dim(self, x: jax.Array) -> jax.Array:
        """`x` with its first dim split like the batch; the partitioner chooses the others."""
        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        axes = self._target.batch_axes or None
        spec = jax.sharding.PartitionSpec(axes, *(free for _ in x.shape[1:]))
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(self._mesh, spec))

    def _outputs(
        self, values: Mapping[Ref, jax.Array], leaves: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The program's results, padded where they are split unevenly."""
        returned = {id(x) for x in leaves}
        outputs = []
        for output, value in zip(self._graph.recorded.outputs, self._graph.outputs):
            x = in_device_memory(values[value])
            target = padded_shape(output.spec, output.sharding)
            if target != x.shape and value.manual is None:
                x = self._with_padding(x, target)
            sharding = output.sharding
            if sharding is not None and sharding.priority and self._num_devices > 1:
                named = self._target.mesh(self._target.named(sharding))
                x = shardy_constraints.constrain(x, named, (), sharding.priority)
            if id(x) in returned:
                # jit would return the same buffer twice, and donating one result later would delete
                # the other.
                x = jnp.copy(x)
            returned.add(id(x))
            outputs.append(x)
        return outputs


def _number(scalars: "Scalars | Sequence[registry.Number]", position: Position) -> registry.Number:
    """A scalar input of an operation; of one on stacks, maybe an array with one for each row."""
    if not isinstance(position, tuple):
        return scalars[position]
    if isinstance(scalars, Scalars):
        return scalars.rows(position)
    numbers = [scalars[i] for i in position]
    return registry.Number(jnp.stack([x.value for x in numbers]), numbers[0].kind)


def _computes_floats(op: Op) -> bool:
    """Whether an operation may read its ints as floats: not as a seed, for instance."""
    outs = op.entry.outs
    return not op.entry.random and bool(outs) and outs[0].dtype.is_floating_point


def _has_checks(body: Graph) -> bool:
    """Whether a body checks indices, or what it runs does."""
    return any(graph.checked for graph in (body, *(b for op in body.all_ops() for b in op.bodies)))


def _check(op: Op, results: Sequence[jax.Array]) -> None:
    """Asserts that the results have the shapes and dtypes that torch gives them."""
    entry = op.entry
    assert len(results) == len(entry.outs), (
        f"{entry.name} is lowered to {len(results)} results; torch has {len(entry.outs)}"
    )
    for x, spec, manual in zip(results, entry.outs, op.manuals):
        shape = x.shape[manual is not None :]
        assert shape == spec.shape and x.dtype == dtypes.to_jax(spec.dtype), (
            f"{entry.name} is lowered to {x.dtype}{list(x.shape)}; torch says {spec!r}"
        )
