"""The loops of a scan, as operations: its own, and that of its gradients, in the other direction.

Backward reads what the forward loop has kept of each iteration, in stacks. Three things are
computed again there instead: what depends on nothing that changes from run to run, such as a mask;
what only rearranges or marks a value that is there; and what is cheap (`graph.cheap`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from spmd_core.control_flow import derivatives
from spmd_core.control_flow.operands import Key, active, record
from spmd_core.control_flow.scan_steps import Step, read_by
from spmd_core.graph.cheap import is_cheap
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import read
from spmd_core.graph.subgraphs import SCAN, ControlEntry
from spmd_core.graph.values import Spec, Value
from spmd_core.ops.kernels import control
from spmd_core.ops.kernels.traits import Elements
from spmd_core.recording.calls import known
from spmd_core.recording.functions import Captured, FunctionRecording
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@dataclass
class Loop:
    """An operation that is recorded, but for some of its operands.

    Attributes:
        entry: the operation.
        outer: its last operands, values from outside that the function reads by no call of torch.
        numbers: its scalar inputs.
    """

    entry: ControlEntry
    outer: list[Value]
    numbers: list[Any]

    @staticmethod
    def of(
        recording: FunctionRecording,
        parameters: Sequence[Sequence[Value]],
        outputs: Sequence[Sequence[Value]],
        *,
        length: int,
        reverse: bool,
        replaced: Mapping[Value, Value] = MappingProxyType({}),
    ) -> "Loop":
        """The scan of what a recording has.

        Args:
            recording: of the function.
            parameters: the carry, slices, and others.
            outputs: the new carry, and what is stacked.
            length: the number of iterations.
            reverse: whether it begins with the last one.
            replaced: for values the others that are read in their place.
        """
        carry, stacked, others = parameters
        subgraph, outer, numbers = recording.subgraph(
            [*carry, *stacked, *others], [*outputs[0], *outputs[1]], replaced
        )
        num_carry, num_stacked = len(carry), len(stacked)
        outs = (
            *(x.spec.logical for x in carry),
            *(Spec.contiguous((length, *x.spec.shape), x.spec.dtype) for x in outputs[1]),
        )
        key = Key("scan", (subgraph,), (num_carry, num_stacked, length, reverse))
        entry = known(
            key,
            lambda: ControlEntry(
                SCAN,
                control.scan(num_carry, num_stacked, length, reverse=reverse),
                (subgraph,),
                outs,
                steps=length,
                stacked=range(num_carry, num_carry + num_stacked),
                stacks=range(num_carry, len(outs)),
            ),
        )
        return Loop(entry, outer, numbers)

    def run(self, operands: Sequence[XLAShardedTensor]) -> tuple[XLAShardedTensor, ...]:
        with lock:
            values = [read(t._handle) for t in operands]
        return record(self.entry, [*values, *self.outer], self.numbers)


@dataclass
class Backward:
    """The loop of a scan's gradients.

    Attributes:
        loop: its carry is the carry's gradient, where it has one, and the sums for closed-over
            tensors; it goes over what was kept, slices and the gradients of y.
        carry: the positions of the carry that has gradients.
        y: the positions of y whose gradients are given.
        slices: the positions of stacks, whose slices it reads.
        reads_index: whether it reads the number of the iteration.
        closed_over: the positions of closed-over tensors that have gradients.
        stacks: the positions of stacks that have gradients.
    """

    loop: Loop
    carry: list[int]
    y: list[int]
    slices: list[int]
    reads_index: bool
    closed_over: list[int]
    stacks: list[int]


class Gradients:
    """The vector-Jacobian product of a scan's function, recorded behind the function.

    Args:
        step: the function's recording.
    """

    def __init__(self, step: Step) -> None:
        recording = self._recording = step.recording
        self._carried, self._slices = ([x for _, x in pairs] for pairs in (step.carry, step.x))
        self._index = step.index[1]
        self._carry = [i for i, (t, _) in enumerate(step.carry) if t.requires_grad]
        self._y = [i for i, t in enumerate(step.y) if t.requires_grad]
        stacks = [i for i, (t, _) in enumerate(step.x) if t.requires_grad]
        closed = [i for i, each in enumerate(recording.captured) if each.stand_in.requires_grad]
        with active(recording, step.index[0]):
            outputs = [*(step.next_carry[i] for i in self._carry), *(step.y[i] for i in self._y)]
            marks = [step.carry[i][0]._handle.sharding for i in self._carry]
            marks += [None] * len(self._y)
            cotangents = [
                recording.argument(t._handle.spec.logical, mark, name="")
                for t, mark in zip(outputs, marks)
            ]
            self._cotangents = [value for _, value in cotangents]
            # Before what may read them, as operations run in the order of recording.
            zeros: list[Any] = [
                torch.zeros(step.y[i].shape, dtype=step.y[i].dtype, device="xla") for i in self._y
            ]
            inputs: list[XLAShardedTensor] = [
                *(step.carry[i][0] for i in self._carry),
                *(step.x[i][0] for i in stacks),
                *(recording.captured[i].stand_in for i in closed),
            ]
            with torch.autocast("xla", enabled=False):  # as backward() runs
                found = derivatives.vector_jacobian_product(
                    outputs, inputs, [t for t, _ in cotangents]
                )
            ends = (len(self._carry), len(self._carry) + len(stacks))
            of_carry: list[Any] = [
                torch.zeros_like(t) if grad is None else grad
                for t, grad in zip(inputs, found[: ends[0]])
            ]
            self._stacks = [i for i, g in zip(stacks, found[ends[0] : ends[1]]) if g is not None]
            of_stacks = [g for g in found[ends[0] : ends[1]] if g is not None]
            of_closed = [(i, g) for i, g in zip(closed, found[ends[1] :]) if g is not None]
            self._closed_over = [i for i, _ in of_closed]
            totals = [self._sum(recording.captured[i]) for i in self._closed_over]
            sums: list[Any] = [t + g for (t, _), (_, g) in zip(totals, of_closed)]
            recording.check_writes()
        self._sums = [value for _, value in totals]
        with lock:
            self._next = [read(t._handle) for t in (*of_carry, *sums)]
            self._of_stacks = [read(t._handle) for t in of_stacks]
            self._zeros = [read(t._handle) for t in zeros]

    def _sum(self, captured: Captured) -> tuple[XLAShardedTensor, Value]:
        handle = captured.stand_in._handle
        return self._recording.argument(handle.spec.logical, handle.sharding, name="")

    def kept(self, forward: Sequence[Value]) -> list[Value]:
        """The values of each iteration that are kept for backward.

        Args:
            forward: what the function returns.
        """
        recording = self._recording
        first_run = set(recording.own_nodes(forward))
        carried = set(self._carried)
        changing = {*carried, *self._slices, self._index}
        same: dict[Value, bool] = {}

        for node in recording.own_nodes(forward):  # operands come first
            entry = node.entry
            same[node] = not (entry.random or entry.subgraphs) and not any(
                x in changing or not same.get(x.parent or x, True) for x in node.inputs
            )

        found: dict[Value, None] = {}
        seen: set[Value] = set()
        pending = [*self._next, *self._of_stacks]
        while pending:
            value = pending.pop()
            node = value.parent or value
            if value in seen:
                continue
            seen.add(value)
            if value in carried:
                found[value] = None
            elif node not in first_run:
                pending += node.inputs if recording.is_recorded(node) else ()
            elif same[node]:
                continue
            elif _is_rearranged(node):
                pending += node.inputs
            else:
                found[value] = None

        def is_there(value: Value) -> bool:
            """Whether backward has a value, or computes it again."""
            node = value.parent or value
            if value in found or node not in first_run:
                return value in found or value not in carried
            again = same[node] or _is_rearranged(node) or is_cheap(node.entry)
            return again and all(map(is_there, node.inputs))

        for value in [*found]:
            node = value.parent or value
            if node in first_run and is_cheap(node.entry) and all(map(is_there, node.inputs)):
                del found[value]
        return sorted(found, key=lambda x: getattr(x.parent or x, "serial", 0))

    def backward(
        self,
        kept: Sequence[Value],
        closed: Sequence[Value],
        given: Collection[int],
        *,
        length: int,
        reverse: bool,
    ) -> Backward:
        """The loop of the gradients, which reads what was kept.

        Args:
            kept: these values.
            closed: those of what the function closes over.
            given: the positions of y whose gradients are given; those of the others are zero, and
                no stack of zeros is made for them.
            length: the number of iterations.
            reverse: whether it begins with the last one.
        """
        recording = self._recording
        outputs = [*self._next, *self._of_stacks]
        read_values = read_by(recording, outputs, kept)
        slices = [i for i, value in enumerate(self._slices) if value in read_values]
        reads_index = self._index in read_values
        num = len(self._carry)
        of_y = dict(zip(self._y, self._cotangents[num:]))
        zeros = {of_y[i]: zero for i, zero in zip(self._y, self._zeros) if i not in given}
        stacked = [
            *kept,
            *(self._slices[i] for i in slices),
            *([self._index] if reads_index else []),
            *(value for i, value in of_y.items() if i in given),
        ]
        carry = [*self._cotangents[:num], *self._sums]
        loop = Loop.of(
            recording,
            (carry, stacked, closed),
            (self._next, self._of_stacks),
            length=length,
            reverse=reverse,
            replaced=zeros,
        )
        y = [i for i in self._y if i in given]
        return Backward(loop, self._carry, y, slices, reads_index, self._closed_over, self._stacks)


def _is_rearranged(node: Value) -> bool:
    """Whether an operation rearranges an operand that is no larger than its result."""
    traits = node.entry.traits
    if traits.elements > Elements.REPEATED or len(node.inputs) != 1:
        return False
    return node.inputs[0].spec.num_bytes <= node.spec.num_bytes
