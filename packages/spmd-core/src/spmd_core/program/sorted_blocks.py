"""Operations on rows that are sorted by group, computed within each part of the rows.

Each device has a part of the rows, in a manual region over the axes that split them: it sorts its
own rows, reads and writes among them, and multiplies them by the matrices of their groups.
Positions count the rows of all parts, so that they are right outside of the region, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.ops.kernels.traits import Parts, Traits
from spmd_core.program.ir import InsertedEntry
from spmd_core.program.sorted_rows import Role
from spmd_core.program.split_dims import GROUPED
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh
from spmd_core.sharding.mesh import Mesh

# The names of an operation within parts, of the ends of groups in each part, and of a sum of parts.
IN_PARTS, ENDS, SUM = "spmd::in_parts", "spmd::ends_of_groups", "spmd::sum_of_parts"


@dataclass(frozen=True)
class RowParts:
    """The parts of rows.

    Attributes:
        mesh: the mesh, which has all devices of the program, in their order.
        axes: the numbers of the axes that split the rows, the major one first.
    """

    mesh: Mesh
    axes: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        names = jax_axis_names(self.mesh)
        return tuple(names[axis] for axis in self.axes)

    @property
    def num(self) -> int:
        """The number of parts."""
        return int(np.prod([self.mesh.mesh_shape[axis] for axis in self.axes]))

    def split(self, dim: int | None) -> PartitionSpec:
        """The partition spec of an array whose dim has the rows; None for none."""
        return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, self.names)

    def mapped(
        self,
        function: Callable[..., Any],
        dims: Sequence[int | None],
        result_dims: Sequence[int | None],
    ) -> Callable[..., list[jax.Array]]:
        """Has each device apply `function(part, arrays)` to its parts.

        Args:
            function: takes the number of the part and arrays, and returns arrays.
            dims: for each array, the dim that has the rows; None if each device needs all of it.
            result_dims: for each result, the dim that has the rows.
        """
        mapped = jax.shard_map(
            lambda parts, arrays: function(parts[0], arrays),
            mesh=jax_mesh(self.mesh),
            in_specs=(self.split(0), [self.split(d) for d in dims]),
            out_specs=[self.split(d) for d in result_dims],
            axis_names={*self.names},
            check_vma=False,
        )
        # Not `lax.axis_index`: the partitioner refuses it where the mesh has further axes.
        return lambda arrays: mapped(jnp.arange(self.num, dtype=np.int32), arrays)

    def part(self, spec: Spec, dim: int | None) -> registry.Out:
        """A part of a result whose dim has the rows."""
        shape = tuple(n // self.num if d == dim else n for d, n in enumerate(spec.shape))
        return registry.Out(shape, spec.dtype)


def in_parts(entry: Entry, role: Role, parts: RowParts) -> InsertedEntry:
    """An operation on sorted rows, within each part of the rows.

    A product takes the ends of groups in each part (`ends_of_groups`) in place of the offsets. Sums
    have an additional first dim for the parts.

    Args:
        entry: the operation.
        role: what it does.
        parts: the parts.
    """
    accumulates = bool((entry.arguments or {}).get("accumulate", False))
    outs = tuple(x.logical for x in entry.outs)
    if role is Role.SUMS:
        outs = (Spec.contiguous((parts.num, *entry.spec.shape), entry.spec.dtype),)

    def lowered(context: registry.Context, inputs: list[jax.Array], numbers: Any) -> Any:
        def local(part: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
            rest = context.num_devices // parts.num
            inner = registry.Context(
                tuple(parts.part(x, result_dim) for x in entry.outs), context.platform
            )
            if rest > 1:  # the partitioner may split the other dims over these devices
                inner = replace(inner, num_devices=rest, split_dims=context.split_dims)
            return _KERNELS[role](inner, part, arrays, accumulates)

        dims, result_dim = _DIMS[role]
        if role is Role.SUMS:
            return parts.mapped(local, dims, (0,))(inputs)
        return parts.mapped(local, dims, (result_dim,) * len(outs))(inputs)

    made = InsertedEntry(IN_PARTS, lowered, outs)
    made.key = IN_PARTS, role, outs, accumulates, parts
    return made


# Inside the region, for each role: (context, the number of the part, arrays, whether writes add up)
# -> results.


def _sort(
    context: registry.Context, part: jax.Array, arrays: list[jax.Array], accumulates: bool
) -> list[jax.Array]:
    values, positions = _lowering("aten::sort")(context, *arrays)
    return [values, positions + _first(part, len(positions), positions.dtype)]


def _read(
    context: registry.Context, part: jax.Array, arrays: list[jax.Array], accumulates: bool
) -> list[jax.Array]:
    x, positions = arrays
    within = positions - _first(part, len(x), positions.dtype)
    return [_lowering("aten::index.Tensor")(context, x, [within])]


def _write(
    context: registry.Context, part: jax.Array, arrays: list[jax.Array], accumulates: bool
) -> list[jax.Array]:
    base, positions, values = arrays
    within = positions - _first(part, len(base), positions.dtype)
    return [_lowering("aten::index_put")(context, base, [within], values, accumulates)]


def _multiply(
    context: registry.Context, part: jax.Array, arrays: list[jax.Array], accumulates: bool
) -> list[jax.Array]:
    a, b, ends = arrays
    return [_lowering(GROUPED)(context, a, b, ends[0])]


def _sum(
    context: registry.Context, part: jax.Array, arrays: list[jax.Array], accumulates: bool
) -> list[jax.Array]:
    return [x[None] for x in _multiply(context, part, arrays, accumulates)]


def _lowering(name: str) -> Callable[..., Any]:
    return registry.lowering_named(name).function


def _first(part: jax.Array, num_rows: int, dtype: Any) -> jax.Array:
    """The number of the part's first row."""
    return part.astype(dtype) * np.asarray(num_rows, dtype)


# For each role the dim that has the rows of each operand, and of the results; None for none.
_DIMS: dict[Role, tuple[tuple[int | None, ...], int | None]] = {
    Role.SORT: ((0,), 0),
    Role.READ: ((0, 0), 0),
    Role.WRITE: ((0, 0, 0), 0),
    Role.ROWS: ((0, None, 0), 0),
    Role.COLUMNS: ((None, 1, 0), 1),
    Role.SUMS: ((1, 0, 0), None),
}
_KERNELS: dict[Role, Callable[..., list[jax.Array]]] = {
    Role.SORT: _sort,
    Role.READ: _read,
    Role.WRITE: _write,
    Role.ROWS: _multiply,
    Role.COLUMNS: _multiply,
    Role.SUMS: _sum,
}


def ends_of_groups(num_rows: int, num_groups: int, spec: Spec, parts: RowParts) -> InsertedEntry:
    """One past the last row of each group in each part: (parts, groups), from the rows' groups.

    Args:
        num_rows: the number of all rows.
        num_groups: the number of groups; rows of further ones come last.
        spec: of the offsets of all rows.
        parts: the parts.
    """

    def local(part: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        (groups,) = arrays
        # Compared and summed, which needs no scatter: there are few groups.
        is_before = groups[:, None] <= np.arange(num_groups, dtype=groups.dtype)
        return [is_before.sum(0, dtype=np.int32)[None].astype(dtype)]

    dtype = np.dtype(str(spec.dtype).removeprefix("torch."))
    out = Spec.contiguous((parts.num, num_groups), spec.dtype)
    made = InsertedEntry(
        ENDS, lambda context, inputs, numbers: parts.mapped(local, (0,), (0,))(inputs), (out,)
    )
    made.key = ENDS, num_rows, num_groups, out, parts
    return made


def sum_of_parts(spec: Spec) -> Entry:
    """The sum over the first dim, the parts; it is a sum over the batch for `batch_sums`."""

    def summed(context: registry.Context, inputs: list[jax.Array], numbers: Any) -> list[jax.Array]:
        return [jnp.sum(inputs[0], axis=0).astype(inputs[0].dtype)]

    entry = Entry(SUM, summed, (spec.logical,), traits=Traits(parts=Parts.DIMS))
    entry.key = SUM, spec
    return entry
