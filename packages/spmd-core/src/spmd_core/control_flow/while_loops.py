"""`WhileLoop`: a loop whose number of iterations a value decides, as one operation.

Its condition and its body are recorded once each, for all iterations. It has no gradients;
`while_gradients` makes loops of several of these that have.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core.control_flow import derivatives
from spmd_core.control_flow.operands import (
    Key,
    Tree,
    active,
    flatten,
    record,
    require_like,
    results_of,
)
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import read
from spmd_core.graph.subgraphs import ControlEntry
from spmd_core.graph.values import Spec, Value
from spmd_core.ops.kernels import control
from spmd_core.recording.calls import inherit, known
from spmd_core.recording.functions import FunctionRecording, inside
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_INDEX = Spec.contiguous((), torch.int64)


class WhileLoop:
    """A loop whose functions are recorded.

    Attributes:
        condition: the first function.
        body: the second one.
        carry: the first state.
        tree: its structure.
        differentiable: of each tensor of the last state, whether it may have a gradient.
    """

    def __init__(
        self, cond_fn: Callable[[Any], torch.Tensor], body_fn: Callable[[Any], Any], init: Any
    ) -> None:
        carry, self.tree = flatten(init, "the init of a while_loop")
        self.carry = [inside(t) for t in carry]
        state = (self.carry, self.tree)
        follows = [t.requires_grad and torch.is_grad_enabled() for t in self.carry]
        self.condition = Recorded("the condition of a while_loop", cond_fn, state, follows)
        _require_condition(self.condition)
        seeds = torch.get_rng_state()
        while True:  # until the state has gradients wherever the body gives it one
            self.body = Recorded("the body of a while_loop", body_fn, state, follows)
            self.differentiable = follows
            follows = [a or t.requires_grad for a, t in zip(follows, self.body.results[0])]
            if follows == self.differentiable:
                break
            torch.set_rng_state(seeds)
        what = "the state that a while_loop's body returns"
        require_like(what, self.body.results, state, "the one that it gets")
        if not carry:
            raise TypeError(
                "a while_loop has a state that changes; got an init without a tensor. "
                "Give what its condition depends on."
            )

    @property
    def reads_index(self) -> bool:
        """Whether it depends on the number of the iteration, as a random function does."""
        return self.condition.reads_index or self.body.reads_index

    @property
    def operands(self) -> list[XLAShardedTensor]:
        """The first state, and the tensors that the body closes over."""
        return [*self.carry, *(inside(each.tensor) for each in self.body.recording.captured)]

    def run(self) -> tuple[XLAShardedTensor, ...]:
        """Records the loop; the last state."""
        index: list[Any] = []
        if self.reads_index:
            index = [torch.zeros((), dtype=torch.int64, device="xla")]
        both = (self.condition, self.body)
        parts = [part.subgraph(counts=bool(index)) for part in both]
        state = [*self.carry, *index]
        num_read = len(self.condition.recording.captured) + len(parts[0][1])
        subgraphs = tuple(subgraph for subgraph, _, _ in parts)
        entry = known(
            Key("while_loop", subgraphs),
            lambda: ControlEntry(
                "spmd::while_loop",
                control.while_loop(len(state), num_read),
                subgraphs,
                tuple(t._handle.spec.logical for t in state),
            ),
        )
        closed = [[inside(each.tensor) for each in part.recording.captured] for part in both]
        with lock:
            values, first, second = (
                [read(t._handle) for t in tensors] for tensors in (state, *closed)
            )
        operands = [*values, *first, *parts[0][1], *second, *parts[1][1]]
        results = record(entry, operands, [*parts[0][2], *parts[1][2]])[: len(self.carry)]
        for result, given in zip(results, self.carry):
            inherit(result, given)
        return results


def run(cond_fn: Callable[[Any], torch.Tensor], body_fn: Callable[[Any], Any], init: Any) -> Any:
    """What `while_loop` returns, without gradients."""
    loop = WhileLoop(cond_fn, body_fn, init)
    return loop.tree.unflatten(loop.run())


class Recorded:
    """One function of a while_loop.

    Attributes:
        recording: of the function.
        results: what it returned, and its structure.

    Args:
        what: the function, in errors.
        function: state -> what it returns.
        state: the first state, and its structure.
        follows: of each tensor of the state, whether autograd follows it.
    """

    def __init__(
        self,
        what: str,
        function: Callable[[Any], Any],
        state: tuple[Sequence[XLAShardedTensor], Tree],
        follows: Sequence[bool],
    ) -> None:
        carry, tree = state
        recording = self.recording = FunctionRecording(what)
        with recording.active():
            self._state = [
                recording.argument(
                    t._handle.spec.logical,
                    t._handle.sharding,
                    requires_grad=own,
                    name="its state",
                )
                for t, own in zip(carry, follows)
            ]
            self._index = recording.argument(_INDEX, None)
        with active(recording, self._index[0]):
            start = derivatives.sequence_number() if torch.is_grad_enabled() else 0
            returned = function(tree.unflatten([t for t, _ in self._state]))
            self.results = results_of(recording, returned, f"what {what} returns")
            if torch.is_grad_enabled():
                derivatives.find_closed_over(recording, self.results[0], start)
            self._next = self._index[0] + 1
            recording.check_writes()
        with lock:
            self._outputs = [read(t._handle) for t in self.results[0]]

    @property
    def reads_index(self) -> bool:
        """Whether it depends on the number of the iteration."""
        nodes = self.recording.own_nodes(self._outputs)
        return any(self._index[1] in node.inputs for node in nodes)

    def subgraph(self, *, counts: bool) -> Any:
        """As `FunctionRecording.subgraph`, with the number of the iteration if it is counted."""
        parameters = [value for _, value in self._state]
        outputs: list[Value] = list(self._outputs)
        if counts:
            parameters.append(self._index[1])
            if len(self._state) == len(outputs) and self.recording.what.startswith("the body"):
                with lock:
                    outputs.append(read(self._next._handle))  # type: ignore[attr-defined]
        closed = [each.parameter for each in self.recording.captured]
        return self.recording.subgraph([*parameters, *closed], outputs)


def _require_condition(condition: Recorded) -> None:
    """Raises TypeError unless the condition returned a boolean tensor without dims."""
    tensors, tree = condition.results
    specs = [t._handle.spec for t in tensors]
    is_one = tree.spec.is_leaf() and len(specs) == 1
    if not is_one or specs[0].shape or specs[0].dtype is not torch.bool:
        raise TypeError(
            "the condition of a while_loop returns a boolean tensor without dims; "
            f"got {specs[0] if is_one else tree!r}. Write a comparison, with .all() or .any()."
        )
