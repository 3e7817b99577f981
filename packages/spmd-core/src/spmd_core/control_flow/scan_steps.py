"""The recording of a scan's function: one iteration, on stand-ins."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core.control_flow import derivatives
from spmd_core.control_flow.operands import Tree, active, require_like, results_of
from spmd_core.graph.stacks import row_sharding
from spmd_core.graph.values import Spec, Value
from spmd_core.recording.functions import FunctionRecording
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_NAME = "the function of a scan"
_INDEX = Spec.contiguous((), torch.int64)


class Step:
    """One recording of a scan's function.

    Attributes:
        recording: the recording.
        carry: the stand-ins of the carry, with their values before marks.
        x: those of the slices.
        index: that of the number of the iteration.
        next_carry: what the function returned.
        y: what it returned besides.
        y_tree: the structure of that.
    """

    def __init__(
        self,
        flat: Callable[..., Any],
        carry: tuple[Sequence[XLAShardedTensor], Tree],
        stacks: Sequence[XLAShardedTensor],
        has_gradient: Sequence[bool],
    ) -> None:
        recording = self.recording = FunctionRecording(_NAME)
        follows = torch.is_grad_enabled()
        # Before the recording, which would take a stack whose attributes it reads for closed over.
        has_own_gradient = [t.requires_grad and follows for t in stacks]
        with recording.active():
            self.carry = [
                recording.argument(
                    t._handle.spec.logical,
                    t._handle.sharding,
                    requires_grad=own,
                    name="the carry",
                )
                for t, own in zip(carry[0], has_gradient)
            ]
            self.x = [
                recording.argument(
                    _slice(t._handle.spec),
                    _slice_sharding(t),
                    requires_grad=own,
                    name="a slice of xs",
                )
                for t, own in zip(stacks, has_own_gradient)
            ]
            self.index = recording.argument(_INDEX, None)
        with active(recording, self.index[0]):
            start = derivatives.sequence_number() if follows else 0
            returned = flat([t for t, _ in self.carry], [t for t, _ in self.x])
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TypeError(
                    f"{_NAME} returns a pair, the new carry and y; got "
                    f"{type(returned).__name__}. Return (carry, y), with None for no y."
                )
            what = "the carry that a scan's function returns"
            made = results_of(recording, returned[0], what)
            given = ([t for t, _ in self.carry], carry[1])
            require_like(what, made, given, "the one that it gets")
            self.next_carry = made[0]
            self.y, self.y_tree = results_of(recording, returned[1], "the y of a scan's function")
            if follows:
                derivatives.find_closed_over(recording, [*self.next_carry, *self.y], start)
            recording.check_writes()


def _slice(spec: Spec) -> Spec:
    return Spec.contiguous(spec.shape[1:], spec.dtype)


def _slice_sharding(stack: XLAShardedTensor) -> Sharding | None:
    sharding = stack._handle.sharding
    return None if sharding is None else row_sharding(sharding)


def record_step(
    flat: Callable[..., Any],
    carry: tuple[Sequence[XLAShardedTensor], Tree],
    stacks: Sequence[XLAShardedTensor],
) -> Step:
    """The recording in which the carry has gradients wherever the function gives it one."""
    has_gradient = [t.requires_grad and torch.is_grad_enabled() for t in carry[0]]
    seeds = torch.get_rng_state()
    while True:
        step = Step(flat, carry, stacks, has_gradient)
        wider = [a or t.requires_grad for a, t in zip(has_gradient, step.next_carry)]
        if wider == has_gradient:
            return step
        has_gradient = wider
        torch.set_rng_state(seeds)


def read_by(
    recording: FunctionRecording, outputs: Sequence[Value], known: Sequence[Value] = ()
) -> set[Value]:
    """The values that a function reads to compute others from some that are known, and these."""
    nodes = recording.own_nodes(outputs, known)
    return {*outputs, *(value for node in nodes for value in node.inputs)}
