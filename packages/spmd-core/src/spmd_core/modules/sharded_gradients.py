"""A parameter's gradient as each device's own share of it: the parts that devices have from their share of the batch, reduce-scattered.

The gradient of a weight is a sum over the batch. Where the batch is split, each device can sum its own part, and what is left is one reduce-scatter.
A partitioner that is told where the whole gradient shall live makes an all-reduce of it first, and relies on a later pass to turn that and the slice
into a reduce-scatter; XLA has that pass for GPU and TPU, and not for the CPU, where it joins the all-reduces of all parameters into one. So the
operation that made the gradient is looked up in the recorded graph, and recorded anew inside a manual region over the batch's axes. The values are
those of the whole operation, however its inputs lie. A gradient that came about in another way is returned as it is.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from spmd_core import metrics
from spmd_core.graph.storage import Storage, lock, read
from spmd_core.graph.values import Entry, Part, Spec, Value
from spmd_core.manual.collectives import all_reduce, reduce_scatter
from spmd_core.manual.shard_map import shard_map
from spmd_core.recording.calls import entries, remember
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


@dataclass(frozen=True)
class Scatter:
    """Where a gradient goes.

    Attributes:
        mesh: the mesh.
        batch_axes: the axes that split the batch, the major one first; `axis` is one of them.
        axis: the axis that splits the parameter.
        dim: the parameter's dim that it splits.
        dtype: in which devices' parts are summed; None: the gradient's own.
    """

    mesh: Mesh
    batch_axes: tuple[int, ...]
    axis: int
    dim: int
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Sum:
    """An operation that sums over the batch: which of its inputs have the batch in which dim, and from which of torch's results on it is summed."""

    batch_dims: tuple[int | None, ...]
    first_summed: int


_SUMS = {
    "aten::linear_backward": _Sum((0, 0, None), 1),  # x, gradient, weight
    "aten::convolution_backward": _Sum((0, 0, None), 1),  # gradient, x, weight
    "aten::native_layer_norm_backward": _Sum(
        (0, 0, 0, 0, None, None), 1
    ),  # gradient, x, mean, rstd, weight, bias
    "aten::embedding_dense_backward": _Sum((0, 0), 0),  # gradient, indices
    "aten::mm": _Sum((1, 0), 0),
}


def reduce_scattered(gradient: XLAShardedTensor, scatter: Scatter) -> XLAShardedTensor:
    """The same gradient, where it can be as a reduce-scatter of the devices' parts. Not differentiable; does not wait.

    Args:
        gradient: of a parameter, of the parameter's shape, floating point.
        scatter: where it goes.

    Returns:
        A tensor of the same shape, of `scatter.dtype` where the sum was made in it, else of the gradient's dtype.
    """
    # A manual region is over all devices of its program, in the program's order.
    if scatter.mesh.size() == 1 or scatter.mesh.ids != tuple(
        range(devices.global_runtime_device_count())
    ):
        return gradient
    with torch.no_grad():
        found = _of_value(read(gradient._handle), scatter)
    return gradient if found is None else found


def _of_value(value: Value, scatter: Scatter) -> XLAShardedTensor | None:
    total = _find(value, scatter)
    if total is not None:
        metrics.count("reduce_scattered_gradients")
        return _in_region(total, value.spec, scatter)
    if (
        value.data is None
        and not isinstance(value, Part)
        and value.entry.name == "aten::add.Tensor"
    ):
        # What autograd adds up where a parameter is used more than once.
        found = [
            _of_value(x, scatter) if x.spec.shape == value.spec.shape else None
            for x in value.inputs
        ]
        if any(f is not None for f in found):
            terms = [
                x if f is None else read(f.to(x.spec.dtype)._handle)  # type: ignore[attr-defined]
                for x, f in zip(value.inputs, found)
            ]
            with lock:
                return wrap(Storage(Value(value.entry, tuple(terms), value.numbers), value.spec))
    return None


@dataclass(frozen=True)
class _Found:
    """A result of an operation that sums over the batch."""

    node: Value
    result: int
    batch_dims: tuple[int | None, ...]


def _find(value: Value, scatter: Scatter) -> _Found | None:
    """The sum that a value is, or is a conversion of."""
    shape = value.spec.shape
    while (
        value.data is None and not isinstance(value, Part) and value.entry.name == "aten::_to_copy"
    ):
        value = value.inputs[0]
    node = value.parent if isinstance(value, Part) else value
    if value.data is not None or node is None or node.entry.name not in _SUMS:
        return None
    result = value.index if isinstance(value, Part) else 0
    rule, entry = _SUMS[node.entry.name], node.entry
    place = result if entry.structure is None else entry.structure.index(result)
    batch_dims = rule.batch_dims[: len(node.inputs)]
    parts = math.prod(scatter.mesh.mesh_shape[axis] for axis in scatter.batch_axes)
    batch = {
        x.spec.shape[dim] if x.spec.shape else 0
        for x, dim in zip(node.inputs, batch_dims)
        if dim is not None
    }
    splits = len(batch) == 1 and 0 not in batch and batch.pop() % parts == 0
    if place < rule.first_summed or value.spec.shape != shape or not splits or not _is_linear(node):
        return None
    return _Found(node, result, batch_dims)


def _is_linear(node: Value) -> bool:
    """Whether there is a batch, and the operation with its static arguments is the sum of what it is for parts of it."""
    ranks = [len(x.spec.shape) for x in node.inputs]
    if node.entry.name == "aten::linear_backward":
        return ranks[0] > 1 and ranks[2] == 2  # x, weight
    if node.entry.name == "aten::native_layer_norm_backward":
        return len(ranks) > 4 and ranks[4] < ranks[0]  # weight, gradient
    if node.entry.name != "aten::embedding_dense_backward":
        return True
    # Scaled by how often a row is used in the whole batch, it is not. That is the operation's one flag, and part of the key that it was recorded by.
    known = ("is a sum over the batch", node.entry)
    if known not in entries:
        key = next((key for key, entry in entries.items() if entry is node.entry), (True,))
        remember(known, not any(part is True for part in key))
    return bool(entries[known])


def _in_region(found: _Found, spec: Spec, scatter: Scatter) -> XLAShardedTensor:
    """The sum as each device's part, summed over the devices. `spec` is what torch says of the gradient."""
    size = scatter.mesh.mesh_shape[scatter.axis]
    length = spec.shape[scatter.dim]
    padding = -length % size
    others = tuple(axis for axis in scatter.batch_axes if axis != scatter.axis)

    def part(*blocks: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _local(found, spec, blocks)
        if scatter.dtype is not None:
            total = total.to(scatter.dtype)
        if padding:
            total = functional.pad(total, (0, 0) * (total.dim() - 1 - scatter.dim) + (0, padding))
        total = reduce_scatter(total, scatter.axis, scatter.dim)
        return all_reduce(total, others) if others else total

    in_specs = [
        () if dim is None else (None,) * dim + (scatter.batch_axes,) for dim in found.batch_dims
    ]
    out_spec = (None,) * scatter.dim + (scatter.axis,)
    with lock:
        tensors = [wrap(Storage(x, x.spec)) for x in found.node.inputs]
    result: XLAShardedTensor = shard_map(
        part, scatter.mesh, in_specs, out_spec, axis_names=scatter.batch_axes
    )(*tensors)
    return result.narrow(scatter.dim, 0, length) if padding else result  # type: ignore[return-value]


def _local(found: _Found, spec: Spec, blocks: tuple[torch.Tensor, ...]) -> XLAShardedTensor:
    """The operation on one device's blocks, in the dtype of `spec`: its kernel, and of its results the one that is a sum."""
    entry, result = found.node.entry, found.result
    values = tuple(read(block._handle) for block in blocks)  # type: ignore[attr-defined]
    key = ("part of a sum", entry, result, tuple(x.spec for x in values))
    local = entries.get(key)
    if local is None:

        def kernel(context: Any, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [entry.kernel(context, inputs, numbers)[result]]

        out = Spec.contiguous(entry.outs[result].shape, entry.outs[result].dtype)
        local = Entry(entry.name, kernel, (out,), number_kinds=entry.number_kinds)
        remember(key, local)
    with lock:
        total = wrap(Storage(Value(local, values, found.node.numbers), local.spec))
    return total.to(spec.dtype)  # type: ignore[return-value]
