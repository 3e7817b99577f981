"""Finds how the leaves, marks and results of a program split their dims."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax.sharding import NamedSharding

from spmd_core.graph.values import Spec
from spmd_core.program.partitioner_rules import Splits
from spmd_core.program.program_graph import Graph
from spmd_core.runtime.jax_sharding import named_sharding

# The sharding of a leaf, mark or result, with the spec of its tensor.
Placed: TypeAlias = tuple[Spec, NamedSharding]


def shardings(graph: Graph) -> list[Placed]:
    """The sharding of each leaf, mark and result."""
    marked = [
        (node.entry.outs[0], named_sharding(node.entry.sharding, graph.device_ids))
        for node in graph.nodes
        if node.entry.sharding
    ]
    placed = [(leaf.spec, leaf.placement.device_sharding) for leaf in graph.leaves]
    results = [
        (output.spec, output.placement.device_sharding)
        for output in graph.outputs
        if output.placement is not None
    ]
    return [*marked, *placed, *results]


def split_dims(found: Sequence[Placed]) -> frozenset[int]:
    """The dims that any of them splits, as negative numbers: -1 is the last dim.

    Floating-point and complex tensors of at most two dims are taken for weights and left out.
    Integer tensors may be indices into a table, whose rows become an additional last dim, so a
    split dim of an integer tensor also counts as the dim before it.
    """
    dims: set[int] = set()
    for spec, sharding in found:
        ndim, is_float = len(spec.shape), spec.dtype.is_floating_point or spec.dtype.is_complex
        split = (
            {dim - ndim for dim, axes in enumerate(sharding.spec) if axes}
            if ndim > 2 or not is_float
            else set()
        )
        dims |= split if is_float else split | {dim - 1 for dim in split}
    return frozenset(dims)


def splits(
    found: Sequence[Placed],
    keep_whole: Callable[[jax.Array, int], jax.Array],
    num_devices: int,
    *,
    has_whole_indices: bool,
) -> Splits:
    """How they split their dims, as the partitioner's rules need it.

    Args:
        found: the shardings.
        keep_whole: gives an array whose last dims, so many, are whole on each device.
        num_devices: of the program.
        has_whole_indices: as in `Splits`.
    """
    uneven: set[int] = set()
    axes_used: set[tuple[str, int]] = set()  # with sizes: two meshes may share names
    for spec, sharding in found:
        for size, axes in zip(spec.shape, sharding.spec):
            names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
            sizes = {name: sharding.mesh.shape[name] for name in names}
            axes_used |= sizes.items()
            count = math.prod(sizes.values())
            if size % count:
                uneven.add(count)
    return Splits(
        keep_whole,
        num_devices,
        tuple(size for _, size in axes_used),
        frozenset(uneven),
        has_whole_indices=has_whole_indices,
    )
