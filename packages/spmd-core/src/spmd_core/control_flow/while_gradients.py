"""Gradients of loops whose number of iterations a value decides.

Backward goes from the last iteration to the first one, and needs the state that each began with.
How many there are is not known, so the forward loop keeps those of every n-th iteration, in a room
for `_KEPT` of them: of every one at first. Whenever the room is full, every second one is dropped,
and n doubles. Backward runs the iterations between two of them again, and keeps states on the way
in another such room. So a loop of up to `_KEPT` iterations computes nothing twice but what its
derivatives read, and one of up to `_KEPT`**2 runs each iteration once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.control_flow import derivatives, while_loops
from spmd_core.control_flow.operands import Tree, flatten
from spmd_core.control_flow.repeated import Record, under_autocast
from spmd_core.control_flow.while_loops import WhileLoop
from spmd_core.errors import ControlFlowError
from spmd_core.graph.stacks import row_entry, stacked_sharding, with_row_entry
from spmd_core.graph.values import Spec
from spmd_core.recording.calls import inherit, record_own
from spmd_core.recording.functions import inside
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_KEPT = 32
"""The states for which there is room, in forward and again in backward."""

_Tensors = Sequence[XLAShardedTensor]


def while_loop(
    cond_fn: Callable[[Any], torch.Tensor], body_fn: Callable[[Any], Any], init: Any
) -> Any:
    """As `control_flow.while_loop`, which has the documentation."""
    loop = WhileLoop(cond_fn, body_fn, init)
    if not torch.is_grad_enabled() or not any(loop.differentiable):
        return loop.tree.unflatten(loop.run())
    function = _WithoutGradient if loop.reads_index else _While
    results = function.apply(_Plan.of(loop, cond_fn, body_fn), *loop.operands)
    for result, given in zip(results, loop.carry):
        inherit(result, given)
    return loop.tree.unflatten(results)


@dataclass(frozen=True)
class _Plan:
    """A loop, for its gradients.

    Attributes:
        loop: as it is recorded without gradients.
        cond_fn: its condition, of a list of tensors.
        body_fn: its body, of and to a list of tensors.
        tree: the structure of its state.
        closed_over: the tensors that the body closes over, and whether it gets stand-ins of them.
        record: what the body has recorded.
    """

    loop: WhileLoop
    cond_fn: Callable[[_Tensors], Any]
    body_fn: Callable[[_Tensors], _Tensors]
    tree: Tree
    closed_over: list[tuple[XLAShardedTensor, bool]]
    record: Record

    @staticmethod
    def of(
        loop: WhileLoop, cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any]
    ) -> "_Plan":
        tree = loop.tree

        def body(state: _Tensors) -> _Tensors:
            return [*map(inside, flatten(body_fn(tree.unflatten(state)), "the state")[0])]

        captured = loop.body.recording.captured
        return _Plan(
            loop,
            under_autocast(lambda state: cond_fn(tree.unflatten(state))),
            under_autocast(body),
            tree,
            [(each.tensor, each.stand_in is not each.tensor) for each in captured],
            _recorded(loop),
        )

    def run(self) -> tuple[_Tensors, _Tensors]:
        """The last state, and what is kept for `gradients`.

        That is the number of iterations, the distance of those whose states are kept, and these.
        """
        zero = torch.zeros((), dtype=torch.int64, device="xla")
        first = (zero, zero + 1, _rooms(self.loop.carry), self.loop.carry)

        def fill(given: Any) -> Any:
            """Runs until the room is full."""
            i, distance, rooms, state = given
            is_full = i >= _KEPT * distance
            rooms = [torch.where(is_full, torch.cat([r[::2], r[::2]]), r) for r in rooms]
            distance = torch.where(is_full, 2 * distance, distance)

            def step(given: Any) -> Any:
                i, rooms, state = given
                rooms = _keeping(rooms, i // distance, state, i % distance == 0)
                return i + 1, rooms, self.body_fn(state)

            def goes_on(given: Any) -> Any:
                return (given[0] < _KEPT * distance) & self.cond_fn(given[2])

            i, rooms, state = while_loops.run(goes_on, step, (i, rooms, state))
            return i, distance, rooms, state

        found = while_loops.run(lambda given: self.cond_fn(given[3]), fill, first)
        count, distance, rooms, state = found
        return state, [count, distance, *rooms]

    def gradients(
        self, kept: _Tensors, operands: _Tensors, grads: Sequence[XLAShardedTensor | None]
    ) -> list[XLAShardedTensor | None]:
        """The gradients of the operands.

        Args:
            kept: what `run` has kept.
            operands: the first state, and the tensors that the body closes over.
            grads: those of the last state; None for zeros.
        """
        count, distance, *rooms = kept
        num = len(self.loop.carry)
        own = [i for i, has in enumerate(self.loop.differentiable) if has]
        others = [num + i for i, (t, _) in enumerate(self.closed_over) if t.requires_grad]
        given = [torch.zeros_like(operands[i]) if grads[i] is None else grads[i] for i in own]
        sums = [torch.zeros_like(operands[i]) for i in others]
        between = (distance + (_KEPT - 1)) // _KEPT

        def segment(given: Any) -> Any:
            """Goes back over the iterations from one whose state is kept."""
            end, cotangents, sums = given
            at = (end - 1) // distance
            first, begin = at * distance, _kept(rooms, at)
            last = first + (end - 1 - first) // between * between

            def again(given: Any) -> Any:
                i, inner, state = given
                i, state = i + 1, self.body_fn(state)
                at, rest = (i - first) // between, (i - first) % between
                return i, _keeping(inner, at, state, rest == 0), state

            inner = _keeping(_rooms(begin), torch.zeros_like(first), begin)
            with torch.no_grad():
                _, inner, _ = while_loops.run(lambda x: x[0] < last, again, (first, inner, begin))

            def back(given: Any) -> Any:
                end, cotangents, sums = given
                at = (end - 1 - first) // between
                with torch.no_grad():
                    _, state = while_loops.run(
                        lambda x: x[0] < end - 1,
                        lambda x: (x[0] + 1, self.body_fn(x[1])),
                        (first + at * between, _kept(inner, at)),
                    )
                cotangents, terms = self._product(state, cotangents, own, others)
                added = [s if t is None else s + t for s, t in zip(sums, terms)]
                return end - 1, cotangents, added

            return while_loops.run(lambda x: x[0] > first, back, (end, cotangents, sums))

        with torch.enable_grad():  # stand-ins of what the body closes over follow
            _, given, sums = while_loops.run(lambda x: x[0] > 0, segment, (count, given, sums))
        found: list[XLAShardedTensor | None] = [None] * len(operands)
        for place, result in zip([*own, *others], [*given, *sums], strict=True):
            inherit(result, operands[place])
            found[place] = result
        return found

    def _product(
        self, state: _Tensors, cotangents: _Tensors, own: Sequence[int], others: Sequence[int]
    ) -> tuple[_Tensors, list[XLAShardedTensor | None]]:
        """The gradients of an iteration: of its state, and of what the body closes over."""
        with torch.enable_grad():
            state = [
                t.detach().requires_grad_() if i in own else t.detach()  # type: ignore[misc]
                for i, t in enumerate(state)
            ]
            results = self.body_fn(state)
            closed = [inside(t) if has_stand_in else t for t, has_stand_in in self.closed_over]
            inputs = [
                *(state[i] for i in own),
                *(closed[i - len(state)] for i in others),
            ]
            found = derivatives.vector_jacobian_product(
                [results[i] for i in own], inputs, cotangents
            )
        of_state: list[Any] = [
            torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs)
        ]
        return of_state[: len(own)], found[len(own) :]

    def require_same(self) -> None:
        """Raises ControlFlowError unless the body records what it has recorded."""
        body = self.body_fn

        def again(state: Any) -> Any:
            return self.tree.unflatten(body(flatten(state, "the state")[0]))

        init = self.tree.unflatten(self.loop.carry)
        with torch.enable_grad():  # as it was
            loop = WhileLoop(lambda state: self.cond_fn(flatten(state, "")[0]), again, init)
        self.record.require_same(_recorded(loop), "the body of a while_loop", by="gradients")


def _recorded(loop: WhileLoop) -> Record:
    """What the body of a loop has recorded."""
    subgraph, outer, numbers = loop.body.subgraph(counts=False)
    closed = [each.tensor for each in loop.body.recording.captured]
    return Record.of([subgraph], numbers, closed, outer)


def _rooms(state: _Tensors) -> _Tensors:
    """Room for `_KEPT` states."""
    rooms: list[Any] = []
    for t in state:
        rooms.append(torch.zeros((_KEPT, *t.shape), dtype=t.dtype, device="xla"))
        if t._handle.sharding is not None:
            rooms[-1]._handle.sharding = stacked_sharding(t._handle.sharding)
    return rooms


def _kept(rooms: _Tensors, at: torch.Tensor) -> _Tensors:
    """A state that is kept."""
    return [
        record_own(row_entry(Spec.contiguous(room.shape[1:], room.dtype), _KEPT), (room, at))
        for room in rooms
    ]


def _keeping(
    rooms: _Tensors, at: torch.Tensor, state: _Tensors, is_kept: torch.Tensor | None = None
) -> _Tensors:
    """The rooms with a state, unless it is not to be kept."""
    found: list[Any] = []
    for room, t, before in zip(rooms, state, _kept(rooms, at), strict=True):
        row = t if is_kept is None else torch.where(is_kept, t, before)
        entry = with_row_entry(Spec.contiguous(room.shape[1:], room.dtype), _KEPT)
        found.append(record_own(entry, (room, at, row)))
        found[-1]._handle.sharding = room._handle.sharding
    return found


class _While(torch.autograd.Function):
    """A loop whose backward goes back over its iterations."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *operands: XLAShardedTensor) -> Any:
        results, kept = plan.run()
        ctx.plan, ctx.num_operands = plan, len(operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *kept)
        has = plan.loop.differentiable
        ctx.mark_non_differentiable(*(t for t, own in zip(results, has) if not own))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors  # an error of torch, if they are freed
        plan: _Plan = derivatives.take_plan(ctx)
        if torch.is_grad_enabled():
            raise ControlFlowError(
                "a while_loop has gradients, and no gradients of gradients; got create_graph=True. "
                "Write fori_loop between integers, or scan, which have."
            )
        plan.require_same()
        operands, kept = saved[: ctx.num_operands], saved[ctx.num_operands :]
        return None, *plan.gradients(kept, operands, grads)


class _WithoutGradient(torch.autograd.Function):
    """A loop whose gradient is refused."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *operands: XLAShardedTensor) -> Any:
        results = plan.loop.run()
        has = plan.loop.differentiable
        ctx.mark_non_differentiable(*(t for t, own in zip(results, has) if not own))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ControlFlowError(
            "a while_loop whose functions draw random numbers has no gradient, as backward runs "
            "iterations again, which would draw others; got a backward through one. Write "
            "fori_loop between integers, or scan, or detach() what the loop returns."
        )
