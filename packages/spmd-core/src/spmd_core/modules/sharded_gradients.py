"""Computes a parameter's gradient as a reduce-scatter of the devices' sums over the batch.

The gradient of a weight is a sum over the batch. If the batch is split, each device can sum over
its own part, and one reduce-scatter remains. If the partitioner is only told the sharding of the
whole gradient, it emits an all-reduce first, and relies on a later pass to turn that and the slice
into a reduce-scatter. XLA has that pass for GPU and TPU, but not for the CPU, where it joins the
all-reduces of all parameters into one. Therefore the operation that computed the gradient is found
in the recorded graph, and recorded again inside a manual region over the batch's axes. The values
are those of the whole operation, whatever the shardings of its inputs. A gradient that was computed
in another way is returned as it is.
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
from spmd_core.ops import registry
from spmd_core.recording.calls import known, record_own
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


@dataclass(frozen=True)
class Scatter:
    """How a gradient is reduce-scattered.

    Attributes:
        mesh: the mesh.
        batch_axes: the axes that split the batch, the major one first; `axis` is one of them.
        axis: the axis that splits the parameter.
        dim: the dim of the parameter that `axis` splits.
        dtype: the dtype in which the devices' parts are summed; None: the gradient's own.
    """

    mesh: Mesh
    batch_axes: tuple[int, ...]
    axis: int
    dim: int
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _BatchReduction:
    """How an operation sums over the batch.

    Attributes:
        batch_dims: for each input, the dim that is the batch; None for an input without one.
        first_summed: the first of torch's results that is a sum over the batch; those after it are
            sums too.
    """

    batch_dims: tuple[int | None, ...]
    first_summed: int


_BATCH_REDUCTIONS = {
    # x, gradient, weight
    "aten::linear_backward": _BatchReduction((0, 0, None), 1),
    # gradient, x, weight
    "aten::convolution_backward": _BatchReduction((0, 0, None), 1),
    # gradient, x, mean, rstd, weight, bias
    "aten::native_layer_norm_backward": _BatchReduction((0, 0, 0, 0, None, None), 1),
    # gradient, indices
    "aten::embedding_dense_backward": _BatchReduction((0, 0), 0),
    "aten::mm": _BatchReduction((1, 0), 0),
}


def reduce_scattered(gradient: XLAShardedTensor, scatter: Scatter) -> XLAShardedTensor:
    """The same gradient, computed by a reduce-scatter of the devices' parts where that is possible.

    Not differentiable. Does not wait.

    Args:
        gradient: of a parameter, with the parameter's shape, floating point.
        scatter: how it is reduce-scattered.

    Returns:
        A tensor of the same shape; its dtype is `scatter.dtype` if the sum was made in that, else
        the gradient's.
    """
    # A manual region is over all devices of its program, in the program's order.
    if scatter.mesh.size() == 1 or scatter.mesh.ids != tuple(
        range(devices.global_runtime_device_count())
    ):
        return gradient
    with torch.no_grad():
        result = _reduce_scattered_value(read(gradient._handle), scatter)
    return gradient if result is None else result


def _reduce_scattered_value(value: Value, scatter: Scatter) -> XLAShardedTensor | None:
    """The value as a reduce-scatter; None if it is not a sum over the batch, or a sum of such."""
    total = _find_batch_sum(value, scatter)
    if total is not None:
        metrics.count("reduce_scattered_gradients")
        return _record_in_region(total, value.spec, scatter)
    if (
        value.data is None
        and not isinstance(value, Part)
        and value.entry.name == "aten::add.Tensor"
    ):
        # Autograd adds up the gradients of a parameter that is used more than once.
        scattered = [
            _reduce_scattered_value(x, scatter) if x.spec.shape == value.spec.shape else None
            for x in value.inputs
        ]
        if any(s is not None for s in scattered):
            terms = [
                x if s is None else read(s.to(x.spec.dtype)._handle)  # type: ignore[attr-defined]
                for x, s in zip(value.inputs, scattered)
            ]
            with lock:
                return wrap(Storage(Value(value.entry, tuple(terms), value.numbers), value.spec))
    return None


@dataclass(frozen=True)
class _BatchSum:
    """A value in the graph that is a sum over the batch.

    Attributes:
        node: the operation that computes it.
        result: which of the operation's results it is.
        batch_dims: for each input of the operation, the dim that is the batch, or None.
    """

    node: Value
    result: int
    batch_dims: tuple[int | None, ...]


def _find_batch_sum(value: Value, scatter: Scatter) -> _BatchSum | None:
    """The sum over the batch that a value is, or is a dtype conversion of."""
    shape = value.spec.shape
    while (
        value.data is None and not isinstance(value, Part) and value.entry.name == "aten::_to_copy"
    ):
        value = value.inputs[0]
    node = value.parent if isinstance(value, Part) else value
    if value.data is not None or node is None or node.entry.name not in _BATCH_REDUCTIONS:
        return None
    result = value.index if isinstance(value, Part) else 0
    reduction, entry = _BATCH_REDUCTIONS[node.entry.name], node.entry
    torch_result = result if entry.structure is None else entry.structure.index(result)
    batch_dims = reduction.batch_dims[: len(node.inputs)]
    parts = math.prod(scatter.mesh.mesh_shape[axis] for axis in scatter.batch_axes)
    batch = {
        x.spec.shape[dim] if x.spec.shape else 0
        for x, dim in zip(node.inputs, batch_dims)
        if dim is not None
    }
    splits = len(batch) == 1 and 0 not in batch and batch.pop() % parts == 0
    if (
        torch_result < reduction.first_summed
        or value.spec.shape != shape
        or not splits
        or not _is_linear(node)
    ):
        return None
    return _BatchSum(node, result, batch_dims)


def _is_linear(node: Value) -> bool:
    """Whether there is a batch, and the operation is the sum of its results for parts of the batch.

    That may depend on its static arguments.
    """
    ranks = [len(x.spec.shape) for x in node.inputs]
    if node.entry.name == "aten::linear_backward":
        return ranks[0] > 1 and ranks[2] == 2  # x, weight
    if node.entry.name == "aten::native_layer_norm_backward":
        return len(ranks) > 4 and ranks[4] < ranks[0]  # weight, gradient
    if node.entry.name != "aten::embedding_dense_backward":
        return True
    # With this flag, a row's gradient is scaled by how often the whole batch uses the row.
    arguments = node.entry.arguments
    return arguments is not None and not arguments["scale_grad_by_freq"]


def _record_in_region(batch_sum: _BatchSum, spec: Spec, scatter: Scatter) -> XLAShardedTensor:
    """Records the sum in a manual region: each device's part, then a reduce-scatter.

    `spec` is the gradient's spec as torch has it.
    """
    size = scatter.mesh.mesh_shape[scatter.axis]
    length = spec.shape[scatter.dim]
    padding = -length % size
    others = tuple(axis for axis in scatter.batch_axes if axis != scatter.axis)

    def part(*blocks: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _local_sum(batch_sum, spec, blocks)
        if scatter.dtype is not None:
            total = total.to(scatter.dtype)
        if padding:
            total = functional.pad(total, (0, 0) * (total.dim() - 1 - scatter.dim) + (0, padding))
        total = reduce_scatter(total, scatter.axis, scatter.dim)
        return all_reduce(total, others) if others else total

    in_specs = [
        () if dim is None else (None,) * dim + (scatter.batch_axes,) for dim in batch_sum.batch_dims
    ]
    out_spec = (None,) * scatter.dim + (scatter.axis,)
    with lock:
        tensors = [wrap(Storage(x, x.spec)) for x in batch_sum.node.inputs]
    result: XLAShardedTensor = shard_map(
        part, scatter.mesh, in_specs, out_spec, axis_names=scatter.batch_axes
    )(*tensors)
    return result.narrow(scatter.dim, 0, length) if padding else result  # type: ignore[return-value]


def _local_sum(
    batch_sum: _BatchSum, spec: Spec, blocks: tuple[torch.Tensor, ...]
) -> XLAShardedTensor:
    """One device's part of the sum, from its blocks of the inputs, in the dtype of `spec`."""
    entry, result = batch_sum.node.entry, batch_sum.result
    specs = tuple(block._handle.spec for block in blocks)  # type: ignore[attr-defined]

    def make() -> Entry:
        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [entry.kernel(context, inputs, numbers)[result]]

        out = Spec.contiguous(entry.outs[result].shape, entry.outs[result].dtype)
        return Entry(entry.name, kernel, (out,), number_kinds=entry.number_kinds)

    local = known(("part of a sum", entry, result, specs), make)
    total: XLAShardedTensor = record_own(local, blocks, batch_sum.node.numbers)
    return total.to(spec.dtype)  # type: ignore[return-value]
