"""Writes to points of a row of a stack are writes to the stack.

A loop over layers carries what they write in place, such as caches of keys and values, as stacks
(`modules.layer_state`). It is recorded as a row that is read, changed and put back. XLA makes three
passes over the row of that, whatever was written. With this pass, a write at indices is one to the
stack in place, with the row's number as another index; who reads the row later reads it there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch

from spmd_core.graph.stacks import ROW, WITH_ROW, row_entry
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops.kernels.stacks import put_in_row
from spmd_core.program.ir import Graph, Op, Ref, Rewriter
from spmd_core.program.mark_names import MARK_SHARDING
from spmd_core.program.target import Target

_NAME = "spmd::put_in_row"


@dataclass(frozen=True)
class _Write:
    """A write to a row.

    Attributes:
        stack: before the write.
        index: the row's.
        put: the operation that computes the new row from the old one.
        indices: for each dim of the row, whether it is indexed.
        wraps: whether negative indices count from the end.
    """

    stack: Ref
    index: Ref
    put: Op
    indices: tuple[bool, ...]
    wraps: bool


def row_writes(graph: Graph, target: Target) -> Graph:
    """The graph with such writes; unchanged without any."""
    found = _found(graph)
    if not found:
        return graph
    writes = {write.put: write for write in found.values()}
    written: dict[Op, Ref] = {}
    rewriter = Rewriter(graph)
    for op in graph.ops:
        if op in writes:
            write = writes[op]
            given = [rewriter.now(x) for x in (write.stack, write.index, *op.operands[1:])]
            made = rewriter.add(_entry(write), given, op.source)
            row = row_entry(op.entry.spec.logical, write.stack.spec.shape[0])
            now = rewriter.add(row, [Ref(made), given[1]], op.source)
            rewriter.replace(Ref(op), Ref(now))
            written[op] = Ref(made)
        elif op in found:
            rewriter.replace(Ref(op), written[found[op].put])
        else:
            rewriter.keep(op)
    return rewriter.graph()


def _found(graph: Graph) -> dict[Op, _Write]:
    """The operations that put changed rows back, each with the change."""
    ends = [op for op in graph.ops if op.entry.name == WITH_ROW]
    users = graph.users() if ends else {}
    returned = {*graph.outputs, *graph.checked}
    found: dict[Op, _Write] = {}
    for end in ends:
        stack, index, new = end.operands
        put = new.op
        how = None if put is None or put.manual is not None else _how(put)
        if put is None or how is None:
            continue
        row, reader = put.operands[0], put
        while row.op is not None and users[row] == [reader] and row not in returned:
            reader = row.op
            if reader.entry.name != MARK_SHARDING:
                break
            row = reader.operands[0]
        # Who reads the stack as it was would need a copy of it.
        if (
            reader.entry.name == ROW
            and reader.operands == (stack, index)
            and users[stack] == [reader, end]
            and stack not in returned
        ):
            found[end] = _Write(stack, index, put, *how)
    return found


def _how(op: Op) -> tuple[tuple[bool, ...], bool] | None:
    """Which dims an operation indexes that sets points of its operand; None for another one."""
    given: Mapping[str, Any] = op.entry.arguments or {}
    name = op.entry.name.partition(".")[0]
    row = op.operands[0].spec
    if name == "aten::index_put" and not given.get("accumulate", False):
        indices = given["indices"]
        integers = all(x is None or x.dtype in (torch.int64, torch.int32) for x in indices)
        return (tuple(x is not None for x in indices), True) if integers else None
    if name == "aten::index_copy" and row.shape and len(given["index"].shape) == 1:
        dim = given["dim"] % len(row.shape)
        return (*(False,) * dim, True), False
    return None


def _entry(write: _Write) -> Entry:
    spec: Spec = write.stack.spec

    def kernel(context: Any, inputs: list[jax.Array], numbers: Any) -> list[jax.Array]:
        stack, row, *given, values = inputs
        rest = iter(given)
        indices = [next(rest) if is_given else None for is_given in write.indices]
        return [put_in_row(stack, row, indices, values, wraps=write.wraps)]

    return Entry(_NAME, kernel, (spec.logical,))
