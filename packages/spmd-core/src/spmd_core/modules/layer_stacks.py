"""`stacked`: one tensor of the parameters of layers, whose gradient goes to each; and its rows.

It records `spmd::stack`, and its gradient `spmd::unstack`. What becomes of that, so that no step
copies a parameter, is decided where a program is planned (`graph.stacks`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from spmd_core.control_flow.operands import flatten
from spmd_core.errors import WrapError
from spmd_core.graph.recorders import lock
from spmd_core.graph.stacks import (
    ROW,
    row_entry,
    row_sharding,
    stack_entry,
    stacked_sharding,
    unstack_entry,
    with_row_entry,
)
from spmd_core.graph.storage import Storage, read
from spmd_core.graph.values import OpResult, Spec, Value
from spmd_core.marks.marking import mark
from spmd_core.program import automatic
from spmd_core.recording.calls import record_own
from spmd_core.recording.functions import inside
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


def stacked(tensors: Sequence[torch.Tensor], what: str = "a tensor of layers") -> XLAShardedTensor:
    """A tensor of shape `(len(tensors), ...)` with the values of tensors, differentiable.

    If the tensors have a sharding, the stack has it behind its first dim, which no device splits,
    and so has its gradient. Does not wait.

    Args:
        tensors: at least one; of one shape and dtype, on device `xla`, the i-th of layer i.
        what: the tensors, in errors.

    Raises:
        WrapError: their shardings differ.
        DeviceMismatchError: a tensor on another device.
        ControlFlowError: a tensor with a tangent, or of a transform of torch.func.
    """
    given = [inside(t) for t in flatten(list(tensors), what)[0]]
    first = given[0].sharding
    for index, tensor in enumerate(given):
        if tensor.sharding != first:
            raise WrapError(
                f"layers that run as one loop are split over the devices alike; got {what} with "
                f"{_marked(tensor)} in layer {index} and {_marked(given[0])} in layer 0. "
                "Mark this tensor in all layers alike."
            )
    result: XLAShardedTensor = _Stack.apply(*given)
    if first is not None and not _is_searched_input(given):
        mark(result, stacked_sharding(first))
    return result


def _is_searched_input(rows: Sequence[XLAShardedTensor]) -> bool:
    """Whether a stack of these will be an input of a program that automatic sharding searches.

    Such an input lies as its rows do, and the search marks what it splits inside of the program. A
    mark in the steps after the search alone would make another program of them.
    """
    if automatic.search is None:
        return False
    with lock:
        return all(read(row._handle).data is not None for row in rows)


def rows_of(stack: torch.Tensor) -> tuple[XLAShardedTensor, ...]:
    """The rows of a stack as tensors of their own, differentiable. Does not wait."""
    rows: tuple[XLAShardedTensor, ...] = _Unstack.apply(stack)
    return rows


def row_of(stack: XLAShardedTensor, index: XLAShardedTensor) -> XLAShardedTensor:
    """A row of a stack as a tensor of its own, without a gradient.

    It has the sharding of the stack behind its first dim. Does not wait.

    Args:
        stack: `(number of rows, ...)`.
        index: int64 of shape (), on device `xla`, and in range.
    """
    shape, sharding = stack._handle.spec.shape, stack._handle.sharding
    entry = row_entry(Spec.contiguous(shape[1:], stack._handle.spec.dtype), shape[0])
    row: XLAShardedTensor = record_own(entry, (stack, index))
    if sharding is not None:
        row._handle.sharding = row_sharding(sharding)
    return row


def with_row(
    stack: XLAShardedTensor, index: XLAShardedTensor, row: XLAShardedTensor
) -> XLAShardedTensor:
    """A stack with another row, without a gradient; the stack itself where it has that row.

    Args:
        stack: `(number of rows, ...)`.
        index: int64 of shape (), on device `xla`, and in range.
        row: what `row_of` returned for both, with what was written to it since.
    """
    handle = stack._handle
    with lock:
        new = read(row._handle)
        if new.entry.name == ROW and new.inputs[0] is read(handle):
            return stack
    entry = with_row_entry(new.spec.logical, handle.spec.shape[0])
    result: XLAShardedTensor = record_own(entry, (stack, index, row))
    result._handle.sharding = handle.sharding
    return result


def _marked(tensor: XLAShardedTensor) -> str:
    sharding = tensor.sharding
    if sharding is None:
        return "no mark"
    return f"the mark {sharding.marked_spec!r}{sharding.priority_text}"


class _Stack(torch.autograd.Function):
    """Tensors as one; the transpose: `_Unstack`."""

    @staticmethod
    def forward(ctx: Any, *tensors: XLAShardedTensor) -> XLAShardedTensor:
        ctx.shardings = [t._handle.sharding for t in tensors]
        with lock:
            entry = stack_entry(tensors[0]._handle.spec.logical, len(tensors))
            value = Value(entry, tuple(read(t._handle) for t in tensors), ())
            return wrap(Storage(value, entry.spec))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows = _Unstack.apply(grads[0])
        for row, sharding in zip(rows, ctx.shardings):
            row._handle.sharding = sharding
        return rows


class _Unstack(torch.autograd.Function):
    """The rows of a tensor; the transpose: `_Stack`."""

    @staticmethod
    def forward(ctx: Any, stack: XLAShardedTensor) -> tuple[XLAShardedTensor, ...]:
        handle = stack._handle
        ctx.sharding, count = handle.sharding, handle.spec.shape[0]
        with lock:
            entry = unstack_entry(Spec.contiguous(handle.spec.shape[1:], handle.spec.dtype), count)
            node = Value(entry, (read(handle),), ())
            rows = [OpResult(node, i) for i in range(count)] if count > 1 else [node]
            return tuple(wrap(Storage(row, entry.spec)) for row in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result = _Stack.apply(*grads)
        result._handle.sharding = ctx.sharding
        return result
