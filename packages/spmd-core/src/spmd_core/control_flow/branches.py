"""`cond`: one of two functions, as a value on the device says, differentiable, as one operation.

Backward runs the branch again with its gradients behind it: nothing of a branch is kept, as the
other one would have to keep something of the same size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.arguments import require_callable
from spmd_core.control_flow import derivatives
from spmd_core.control_flow.operands import (
    Key,
    Tree,
    active,
    flatten,
    record,
    refuse_region,
    require_like,
    results_of,
)
from spmd_core.control_flow.repeated import Record, under_autocast
from spmd_core.errors import ControlFlowError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import read
from spmd_core.graph.subgraphs import ControlEntry
from spmd_core.graph.values import Spec, Value
from spmd_core.ops.kernels import control
from spmd_core.recording.calls import known
from spmd_core.recording.functions import FunctionRecording, inside
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_NAMES = ("the true branch of a cond", "the false branch of a cond")


def cond(
    pred: torch.Tensor | bool,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    *operands: Any,
) -> Any:
    """`true_fn(*operands)` where `pred` is true, else `false_fn(*operands)`, chosen on the device.

    Python calls both functions once, on tensors without values; the device runs one of them.
    Tensors that they close over are operands, too, and all have gradients; backward computes the
    chosen branch again. A Python bool chooses at once. Does not wait for the device.

    Args:
        pred: a boolean tensor without dims on device `xla`; or a bool.
        true_fn: returns tensors in nested lists, tuples and dicts.
        false_fn: returns tensors of the same structure, shapes and dtypes.
        *operands: tensors on device `xla`, so nested.

    Returns:
        What the chosen function returns.

    Raises:
        TypeError: `pred` is something else; or the branches return other structures, shapes or
            dtypes.
        ControlFlowError: a branch reads a value on the host, or writes in place to a tensor from
            outside.
        DeviceMismatchError: a tensor on another device.

    Example:
        >>> import torch
        >>> x = torch.tensor([3.0, 4.0], device="xla")
        >>> cond(x.sum() > 5, lambda x: x / x.norm(), lambda x: x, x).tolist()
        [0.6000000238418579, 0.800000011920929]
    """
    require_callable("true_fn", true_fn)
    require_callable("false_fn", false_fn)
    if isinstance(pred, bool):
        return (true_fn if pred else false_fn)(*operands)
    refuse_region("cond")
    choice = _require_choice(pred)
    given, tree = flatten(operands, "the operands of a cond")
    given = [inside(t) for t in given]
    functions = under_autocast(true_fn), under_autocast(false_fn)
    plan = _Plan.of(functions, given, tree)
    tensors = [inside(choice), *given, *(inside(t) for t, _ in plan.closed_over)]
    if not plan.num_results:
        return plan.out_tree.unflatten([])
    if any(plan.differentiable):
        results = _Cond.apply(plan, *tensors)
    else:
        results = plan.run(tensors)
    return plan.out_tree.unflatten(results)


def _require_choice(pred: Any) -> XLAShardedTensor:
    if isinstance(pred, XLAShardedTensor) and not pred.dim() and pred.dtype is torch.bool:
        return pred
    got = (
        f"a {pred.dtype} tensor of shape {tuple(pred.shape)} on {pred.device}"
        if isinstance(pred, torch.Tensor)
        else f"{type(pred).__name__} {pred!r}"
    )
    raise TypeError(
        "the pred of a cond is a bool, or a boolean tensor without dims on device 'xla'; "
        f"got {got}. Write a comparison, with .all() or .any()."
    )


class _Branch:
    """One recorded branch.

    Attributes:
        recording: of the function.
        given: the stand-ins of the operands, with their values.
        results: what it returned, and its structure.
    """

    def __init__(
        self,
        what: str,
        function: Callable[..., Any],
        operands: Sequence[XLAShardedTensor],
        tree: Tree,
    ) -> None:
        recording = self.recording = FunctionRecording(what)
        follows = torch.is_grad_enabled()
        with active(recording):
            self.given = [
                recording.argument(
                    t._handle.spec.logical,
                    t._handle.sharding,
                    requires_grad=t.requires_grad and follows,
                    name="an operand",
                )
                for t in operands
            ]
            start = derivatives.sequence_number() if follows else 0
            returned = function(*tree.unflatten([t for t, _ in self.given]))
            self.results = results_of(recording, returned, f"what {what} returns")
            if follows:
                derivatives.find_closed_over(recording, self.results[0], start)
            recording.check_writes()

    def stand_in(self, key: tuple[int, bool]) -> XLAShardedTensor | None:
        """What the branch has in place of a tensor; None if it does not read it."""
        for each in self.recording.captured:
            if _key(each) == key:
                return each.stand_in
        return None

    def parameters(self, keys: Sequence[tuple[int, bool]]) -> tuple[list[Value], list[int]]:
        """The values of the operands and of what it closes over; and which of `keys` these are."""
        of_key = {_key(each): each.parameter for each in self.recording.captured}
        own = [i for i, key in enumerate(keys) if key in of_key]
        return [*(value for _, value in self.given), *(of_key[keys[i]] for i in own)], own


def _key(captured: Any) -> tuple[int, bool]:
    return id(captured.tensor), captured.stand_in is captured.tensor


@dataclass
class _Operation:
    """A condition, as an operation.

    Attributes:
        entry: the operation.
        closed_over: for each branch the positions of the closed-over tensors that it reads.
        outer: for each branch its last operands, values from outside that no call of torch read.
        numbers: its scalar inputs.
    """

    entry: ControlEntry
    closed_over: list[list[int]]
    outer: list[list[Value]]
    numbers: list[Any]

    def run(
        self,
        choice: XLAShardedTensor,
        operands: Sequence[XLAShardedTensor],
        closed_over: Sequence[XLAShardedTensor],
    ) -> tuple[XLAShardedTensor, ...]:
        with lock:
            values = [read(t._handle) for t in operands]
            closed = [read(t._handle) for t in closed_over]
            given = [read(choice._handle)]
        for own, outer in zip(self.closed_over, self.outer):
            given += [*values, *(closed[i] for i in own), *outer]
        return record(self.entry, given, self.numbers)


def _operation(
    branches: Sequence[_Branch],
    first: Sequence[Sequence[Value]],
    outputs: Sequence[Sequence[Value]],
    keys: Sequence[tuple[int, bool]],
    outs: tuple[Spec, ...],
) -> _Operation:
    """The condition that computes `outputs` of each branch.

    Args:
        branches: the two.
        first: for each its first parameters, before those of the branch.
        outputs: for each what it computes.
        keys: of the closed-over tensors.
        outs: the specs of the results.
    """
    parts = []
    closed_over = []
    for branch, before, results in zip(branches, first, outputs):
        parameters, own = branch.parameters(keys)
        closed_over.append(own)
        parts.append(branch.recording.subgraph([*before, *parameters], results))
    subgraphs = tuple(subgraph for subgraph, _, _ in parts)
    entry = known(
        Key("cond", subgraphs),
        lambda: ControlEntry(
            "spmd::cond",
            control.cond((len(subgraphs[0].parameters), len(subgraphs[1].parameters))),
            subgraphs,
            outs,
        ),
    )
    numbers = [number for _, _, own in parts for number in own]
    return _Operation(entry, closed_over, [outer for _, outer, _ in parts], numbers)


@dataclass
class _Plan:
    """A condition, whose operands are not known.

    Attributes:
        functions: the two branches.
        tree: the structure of the operands.
        out_tree: that of the results.
        num_operands: the number of operands.
        num_results: the number of results.
        closed_over: the tensors that the branches close over, and whether no call of torch read it.
        forward: the operation.
        differentiable: for each result whether it has a gradient.
        backward: the operation of the gradients; None if no result has one.
        inputs: the positions, among operands and closed-over tensors, of those that have gradients.
        is_random: whether a branch draws random numbers.
        record: what the branches have recorded.
    """

    functions: tuple[Callable[..., Any], Callable[..., Any]]
    tree: Tree
    out_tree: Tree
    num_operands: int
    num_results: int
    closed_over: list[tuple[XLAShardedTensor, bool]]
    forward: _Operation | None
    differentiable: list[bool]
    backward: _Operation | None
    inputs: list[int]
    is_random: bool
    record: Record

    @staticmethod
    def of(
        functions: tuple[Callable[..., Any], Callable[..., Any]],
        operands: Sequence[XLAShardedTensor],
        tree: Tree,
    ) -> "_Plan":
        """Records both functions."""
        branches = [
            _Branch(what, function, operands, tree) for what, function in zip(_NAMES, functions)
        ]
        results = [branch.results for branch in branches]
        require_like("what the false branch of a cond returns", results[1], results[0], "the true")
        captured = {_key(each): each for branch in branches for each in branch.recording.captured}
        keys = [*captured]
        differentiable = [
            any(t.requires_grad for t in pair) for pair in zip(*(r[0] for r in results))
        ]
        with lock:
            outputs = [[read(t._handle) for t in tensors] for tensors, _ in results]
        outs = tuple(t._handle.spec.logical for t in results[0][0])
        forward = _operation(branches, [[], []], outputs, keys, outs) if outs else None
        tensors = [*operands, *(each.tensor for each in captured.values())]
        follows = torch.is_grad_enabled()
        inputs = [i for i, t in enumerate(tensors) if t.requires_grad and follows]
        backward = None
        if any(differentiable):
            backward = _backward(branches, differentiable, inputs, keys, tensors)
        subgraphs = () if forward is None else forward.entry.subgraphs
        outer = [] if forward is None else [value for own in forward.outer for value in own]
        return _Plan(
            functions,
            tree,
            results[0][1],
            len(operands),
            len(outs),
            [(each.tensor, each.stand_in is each.tensor) for each in captured.values()],
            forward,
            differentiable,
            backward,
            inputs,
            any(entry.random for subgraph in subgraphs for entry in subgraph.entries()),
            Record.of(
                subgraphs,
                [] if forward is None else forward.numbers,
                [each.tensor for each in captured.values()],
                outer,
            ),
        )

    def run(self, tensors: Sequence[XLAShardedTensor]) -> tuple[XLAShardedTensor, ...]:
        """The results; the choice comes first, then operands, then closed-over tensors."""
        assert self.forward is not None
        end = 1 + self.num_operands
        return self.forward.run(tensors[0], tensors[1:end], tensors[end:])

    def gradients(
        self, tensors: Sequence[XLAShardedTensor], grads: Sequence[XLAShardedTensor]
    ) -> list[XLAShardedTensor | None]:
        """The gradients of what `run` takes."""
        assert self.backward is not None
        end = 1 + self.num_operands
        own = [grad for grad, has in zip(grads, self.differentiable) if has]
        found = self.backward.run(tensors[0], [*own, *tensors[1:end]], tensors[end:])
        return self._in_order(found, len(tensors))

    def differentiable_gradients(
        self, tensors: Sequence[XLAShardedTensor], grads: Sequence[XLAShardedTensor]
    ) -> list[XLAShardedTensor | None]:
        """As `gradients`, by a cond that can be differentiated again."""
        if self.is_random:
            raise ControlFlowError(
                "a cond whose branches draw random numbers has gradients, and no gradients of "
                "gradients, as a second recording draws others; got create_graph=True. "
                "Draw the numbers before, and pass them as operands."
            )
        operands = list(tensors[1 : 1 + self.num_operands])
        again = _Plan.of(self.functions, operands, self.tree)
        self.record.require_same(again.record, "the branches of a cond")
        own = [grad for grad, has in zip(grads, self.differentiable) if has]

        def product(function: Callable[..., Any]) -> Callable[..., Any]:
            def compute(cotangents: Any, operands: Any) -> Any:
                with torch.enable_grad():
                    followed = [
                        t
                        if t.requires_grad or i not in self.inputs
                        else t.detach().requires_grad_()
                        for i, t in enumerate(operands)
                    ]
                    results = flatten(function(*self.tree.unflatten(followed)), "")[0]
                    results = [inside(t) for t, has in zip(results, self.differentiable) if has]
                    closed = [t if direct else inside(t) for t, direct in self.closed_over]
                    inputs = [[*followed, *closed][i] for i in self.inputs]
                    found = derivatives.vector_jacobian_product(
                        results, inputs, cotangents, create_graph=True
                    )
                    return [
                        torch.zeros_like(t) if grad is None else grad
                        for grad, t in zip(found, inputs)
                    ]

            return compute

        found = cond(tensors[0], *map(product, self.functions), own, operands)
        return self._in_order(found, len(tensors))

    def _in_order(self, found: Sequence[Any], count: int) -> list[XLAShardedTensor | None]:
        gradients: list[XLAShardedTensor | None] = [None] * count
        for i, gradient in zip(self.inputs, found, strict=True):
            gradients[1 + i] = gradient
        return gradients


def _backward(
    branches: Sequence[_Branch],
    differentiable: Sequence[bool],
    inputs: Sequence[int],
    keys: Sequence[tuple[int, bool]],
    tensors: Sequence[XLAShardedTensor],
) -> _Operation:
    """The operation of the gradients: each branch again, with its gradients behind it."""
    first: list[list[Value]] = []
    outputs: list[list[Value]] = []
    for branch in branches:
        recording = branch.recording
        results = [t for t, has in zip(branch.results[0], differentiable) if has]
        with active(recording):
            cotangents = [
                recording.argument(t._handle.spec.logical, None, name="") for t in results
            ]
            stand_ins = [*(t for t, _ in branch.given), *(branch.stand_in(key) for key in keys)]
            wanted = [stand_ins[i] for i in inputs]
            present = [t for t in wanted if t is not None]
            with torch.autocast("xla", enabled=False):  # as backward() runs
                found = derivatives.vector_jacobian_product(
                    results, present, [t for t, _ in cotangents]
                )
            of_present = iter(found)
            made: list[Any] = []
            for i, t in zip(inputs, wanted):
                grad = None if t is None else next(of_present)
                made.append(_zeros(tensors[i]) if grad is None else grad)
            recording.check_writes()
        first.append([value for _, value in cotangents])
        with lock:
            outputs.append([read(t._handle) for t in made])
    outs = tuple(tensors[i]._handle.spec.logical for i in inputs)
    return _operation(branches, first, outputs, keys, outs)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="xla")


class _Cond(torch.autograd.Function):
    """A condition, with that of its gradients as backward."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: XLAShardedTensor) -> Any:
        results = plan.run(tensors)
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(result for result, has in zip(results, plan.differentiable) if not has)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = ctx.saved_tensors
        plan: _Plan = derivatives.take_plan(ctx)
        if torch.is_grad_enabled():
            return None, *plan.differentiable_gradients(tensors, grads)
        return None, *plan.gradients(tensors, grads)
