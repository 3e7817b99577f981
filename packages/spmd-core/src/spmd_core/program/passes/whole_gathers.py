"""Gathers over all devices of a TPU's torus in stages, which libtpu would compile as a sum.

FSDP over all devices of a slice gathers each weight over all of them. Where libtpu would sum arrays
that are zero elsewhere (`runtime.torus`), twice as much is sent.
"""

import functools
import math

import jax
from jax.sharding import PartitionSpec

from spmd_core.ops import registry
from spmd_core.ops.kernels.traits import SAME
from spmd_core.program.ir import Graph, InsertedEntry, Op, Ref, Rewriter
from spmd_core.program.mark_names import MARK_SHARDING
from spmd_core.program.moved_dims import axes_of_mark, axes_of_weight
from spmd_core.program.target import Target
from spmd_core.runtime import torus
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh
from spmd_core.sharding.mesh import Mesh

GATHER = "spmd::gather_in_stages"


def whole_gathers(graph: Graph, target: Target) -> Graph:
    """The graph with these gathers in place of marks."""
    if not target.is_split:
        return graph
    users = graph.users()
    gathers = {
        op: found
        for op in graph.ops
        if (found := _gathered(op, target)) is not None and Ref(op) in users
    }
    if not gathers:
        return graph
    rewriter = Rewriter(graph)
    for op in graph.ops:
        if op not in gathers:
            rewriter.keep(op)
            continue
        dim, axes = gathers[op]
        assert op.entry.sharding is not None
        kernel = functools.partial(_in_stages, op.entry.sharding.mesh, axes, dim)
        entry = InsertedEntry(GATHER, kernel, (op.entry.spec.logical,), traits=SAME)
        made = rewriter.add(entry, [rewriter.now(op.operands[0])], op.source)
        rewriter.replace(Ref(op), Ref(made))
    return rewriter.graph()


def _gathered(op: Op, target: Target) -> tuple[int, tuple[int, ...]] | None:
    """The dim that a mark gathers over axes that need stages, and these axes; None if none does.

    All devices have blocks of one size, and the mark leaves the tensor whole.
    """
    entry = op.entry
    if entry.name != MARK_SHARDING or entry.along is not None or op.manual is not None:
        return None
    assert entry.sharding is not None
    mesh, shape = entry.sharding.mesh, entry.spec.shape
    if entry.sharding.has_hints or mesh.ids != target.device_ids:
        return None
    split = []
    for dim, size in enumerate(shape):
        before = axes_of_weight(op.operands[0], dim)
        if before is None or axes_of_mark(op, dim) or any(m != mesh for m, _ in before):
            return None
        axes = tuple(axis for _, axis in before)
        if axes:
            split.append((dim, axes))
        if size % math.prod(mesh.mesh_shape[axis] for axis in axes):
            return None
    if len(split) != 1 or len(torus.gather_stages(mesh, split[0][1])) == 1:
        return None
    return split[0]


def _in_stages(
    mesh: Mesh,
    axes: tuple[int, ...],
    dim: int,
    context: registry.Context,
    inputs: list[jax.Array],
    numbers: object,
) -> list[jax.Array]:
    names = tuple(jax_axis_names(mesh)[axis] for axis in axes)
    mapped = jax.shard_map(
        functools.partial(torus.gather, mesh=mesh, axes=axes, dim=dim),
        mesh=jax_mesh(mesh),
        in_specs=PartitionSpec(*[None] * dim, names),
        out_specs=PartitionSpec(),
        axis_names={*names},
        check_vma=False,
    )
    return [mapped(inputs[0])]
