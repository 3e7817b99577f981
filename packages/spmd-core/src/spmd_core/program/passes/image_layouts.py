"""Propagates how images are split to the convolutions, poolings and norms that read them.

A lowering must know the split to choose its form, but XLA's partitioner chooses the shardings of
unmarked values only after lowering. So the layouts of inputs and marks are propagated through the
operations of vision models. A layout that was guessed wrong costs a resharding, and changes no
value: lowerings are right for every sharding. If a layout is not known, windows are lowered in
another form (`ops.kernels.windows`).
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

from jax.sharding import NamedSharding

from spmd_core.graph.values import Entry, Spec
from spmd_core.ops.registry import Hint, ImageLayout
from spmd_core.program.ir import Graph, Op, Ref
from spmd_core.program.target import Target

# The axes that split each dim.
_Axes: TypeAlias = tuple[tuple[str, ...], ...]


def image_layouts(graph: Graph, target: Target) -> Graph:
    """The graph with hints that have the layouts of the images that windows read, if known."""
    if not target.is_split or not target.mesh.exists:
        return graph
    if not any(op.entry.traits.images for op in graph.ops):
        return graph
    known: dict[Ref, _Axes] = {}

    def axes_of(sharding: NamedSharding, spec: Spec) -> _Axes:
        entries = target.mesh(sharding).spec
        found = [e if isinstance(e, tuple) else (e,) if e else () for e in entries]
        return tuple(axes or () for _, axes in zip_longest(spec.shape, found))

    for x in graph.inputs:
        placement, value = x.leaf.placement, Ref(x)
        known[value] = () if value.manual else axes_of(placement.device_sharding, value.spec)
    hints: dict[Op, Hint] = {}
    for op in graph.ops:
        entry = op.entry
        if op.manual is not None:
            known.update((result, ()) for result in op.results)
            continue
        if entry.sharding is not None:
            is_complete = entry.along is None
            named = target.named(entry.sharding)
            known[Ref(op)] = axes_of(named, entry.spec) if is_complete else ()
            continue
        inputs = [(x.spec, known[x]) for x in op.operands]
        images = _images(entry, inputs)
        if any(images):
            hints[op] = ImageLayout(target.jax_mesh, images)
        known.update((x, _result(entry, x.spec, inputs)) for x in op.results)
    return graph.with_hints(hints)


def _images(entry: Entry, inputs: Sequence[tuple[Spec, _Axes]]) -> _Axes:
    """The layout of the images that the operation's windows read; empty if there are none."""
    read = (inputs[i] for i in entry.traits.images)
    return next((axes for _, axes in read if any(axes)), ())


def _result(entry: Entry, spec: Spec, inputs: Sequence[tuple[Spec, _Axes]]) -> _Axes:
    """The layout of a result: that of the first split input of its shape.

    The number of channels may differ, as for a concatenation along them.
    """
    if len(spec.shape) < 3:
        return ()
    if len(entry.traits.images) == 1:  # a convolution or pooling, whose result has other sizes
        axes = inputs[entry.traits.images[0]][1]
        return (axes[0], (), *axes[2:]) if axes and entry.traits.is_product else axes
    for x, axes in inputs:
        if any(axes) and len(x.shape) == len(spec.shape):
            if x.shape == spec.shape:
                return axes
            if (x.shape[0], *x.shape[2:]) == (spec.shape[0], *spec.shape[2:]):
                return (axes[0], (), *axes[2:])
    return ()
