"""Finds how the images that convolutions and poolings read are split, by following the operations.

XLA's partitioner chooses the shardings of what nobody marked when it is too late for a lowering to
choose its form. So the layouts are followed from leaves and marks through the operations of vision
models. A layout that was guessed wrong costs a resharding, and no value: what a lowering does with
it holds for tensors of any sharding. Where a layout is not known, windows take other forms
(`ops.kernels.windows`).
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeAlias

import jax
from jax.sharding import NamedSharding

from spmd_core.graph.values import Entry, Spec
from spmd_core.ops.registry import ImageLayout
from spmd_core.program.program_graph import Graph
from spmd_core.runtime.jax_sharding import CommonMesh

# The axes that split each dim.
_Axes: TypeAlias = tuple[tuple[str, ...], ...]

# Operations of windows: results have their input's layout, whatever their sizes.
_WINDOWS = (
    *("aten::convolution", "aten::convolution_overrideable"),
    *("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices"),
    *("aten::avg_pool2d", "aten::avg_pool3d"),
)
_GRADIENTS = (
    *("aten::convolution_backward", "aten::convolution_backward_overrideable"),
    *("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward"),
    *("aten::avg_pool2d_backward", "aten::avg_pool3d_backward"),
)


def find(
    graph: Graph,
    common_mesh: CommonMesh,
    to_named: Callable[[Entry], NamedSharding],
    is_local: Callable[[int], bool],
) -> dict[int, ImageLayout]:
    """The layout of the images of each convolution and pooling.

    Args:
        graph: the recorded operations.
        common_mesh: of the program.
        to_named: the sharding that an entry marks its input with.
        is_local: whether the value of a number is local to a manual region.

    Returns:
        The layouts by the node's position, where they are known.
    """
    names = {node.entry.name for node in graph.nodes}
    if graph.growth is not None or len(graph.device_ids) == 1 or not common_mesh.exists:
        return {}
    if names.isdisjoint((*_WINDOWS, *_GRADIENTS)):
        return {}

    def axes_of(sharding: NamedSharding, spec: Spec) -> _Axes:
        entries = common_mesh(sharding).spec
        found = [e if isinstance(e, tuple) else (e,) if e else () for e in entries]
        return tuple(axes or () for _, axes in zip_longest(spec.shape, found))

    mesh = common_mesh.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    leaves = [
        (leaf.spec, () if is_local(-i - 1) else axes_of(leaf.placement.device_sharding, leaf.spec))
        for i, leaf in enumerate(graph.leaves)
    ]
    values: list[tuple[Spec, _Axes]] = []
    layouts: dict[int, ImageLayout] = {}
    for position, node in enumerate(graph.nodes):
        inputs = [values[i] if i >= 0 else leaves[-i - 1] for i in node.inputs]
        local = is_local(len(values))
        if node.entry.sharding is not None and not local:
            marked, is_whole = node.entry.spec, node.entry.along is None
            values.append((marked, axes_of(to_named(node.entry), marked) if is_whole else ()))
            continue
        images = () if local else _images(node.entry, inputs)
        if any(images):
            layouts[position] = ImageLayout(mesh, images)
        values += [
            (spec, () if local else _result(node.entry, spec, inputs)) for spec in node.entry.outs
        ]
    return layouts


def _images(entry: Entry, inputs: Sequence[tuple[Spec, _Axes]]) -> _Axes:
    """The layout of what the operation's windows read; empty if unknown or no such operation."""
    if entry.name not in (*_WINDOWS, *_GRADIENTS):
        return ()
    read = inputs[:1] if entry.name in _WINDOWS else inputs[:2]
    return next((axes for _, axes in read if any(axes)), ())


def _result(entry: Entry, spec: Spec, inputs: Sequence[tuple[Spec, _Axes]]) -> _Axes:
    """The layout of a result: that of the first split input of its shape, but for channels.

    A concatenation of channels has that shape too.
    """
    if len(spec.shape) < 3:
        return ()
    if entry.name in _WINDOWS:
        axes = inputs[0][1]
        return (axes[0], (), *axes[2:]) if axes and "convolution" in entry.name else axes
    for x, axes in inputs:
        if any(axes) and len(x.shape) == len(spec.shape):
            if x.shape == spec.shape:
                return axes
            if (x.shape[0], *x.shape[2:]) == (spec.shape[0], *spec.shape[2:]):
                return (axes[0], (), *axes[2:])
    return ()
