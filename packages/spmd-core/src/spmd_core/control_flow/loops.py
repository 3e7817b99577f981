"""Loops whose number of iterations a value decides, and loops over numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core.arguments import require_callable
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
from spmd_core.control_flow.scans import scan
from spmd_core.errors import ControlFlowError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import read
from spmd_core.graph.subgraphs import ControlEntry
from spmd_core.graph.values import Spec, Value
from spmd_core.ops.kernels import control
from spmd_core.recording.calls import inherit, known
from spmd_core.recording.functions import FunctionRecording, inside
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_INDEX = Spec.contiguous((), torch.int64)


def while_loop(
    cond_fn: Callable[[Any], torch.Tensor], body_fn: Callable[[Any], Any], init: Any
) -> Any:
    """A loop on the device that goes on while a condition is true; nothing is read on the host.

    Computes what this does:

        while cond_fn(init):
            init = body_fn(init)
        return init

    Python calls each function once for all iterations, on tensors without values. Tensors that they
    close over are operands of the loop. Random operations draw other numbers in each iteration. It
    has no gradients, as backward would need what all iterations have computed, and their number is
    not known: `fori_loop` and `scan` have. Does not wait for the device.

    Args:
        cond_fn: state -> a boolean tensor without dims.
        body_fn: state -> the next state, of the same structure, shapes and dtypes.
        init: the first state: tensors on device `xla` in nested lists, tuples and dicts.

    Returns:
        The last state.

    Raises:
        TypeError: `cond_fn` returns something else, or `body_fn` changes the state's structure,
            shapes or dtypes.
        ControlFlowError: a function reads a value on the host, or writes in place to a tensor from
            outside; or, from backward, a gradient is asked for.
        DeviceMismatchError: a tensor on another device.

    Example:
        >>> import torch
        >>> x = torch.tensor(3.0, device="xla")
        >>> while_loop(lambda x: x < 100, lambda x: x * x, x).item()
        6561.0
    """
    require_callable("cond_fn", cond_fn)
    require_callable("body_fn", body_fn)
    refuse_region("while_loop")
    carry, tree = flatten(init, "the init of a while_loop")
    carry = [inside(t) for t in carry]
    condition = _Recorded("the condition of a while_loop", cond_fn, carry, tree)
    _require_condition(condition)
    body = _Recorded("the body of a while_loop", body_fn, carry, tree)
    what = "the state that a while_loop's body returns"
    require_like(what, body.results, (carry, tree), "the one that it gets")
    if not carry:
        raise TypeError(
            "a while_loop has a state that changes; got an init without a tensor. "
            "Give what its condition depends on."
        )
    index: list[XLAShardedTensor] = []
    if condition.reads_index or body.reads_index:
        index = [torch.zeros((), dtype=torch.int64, device="xla")]  # type: ignore[list-item]
    parts = [part.subgraph(counts=bool(index)) for part in (condition, body)]
    entry = known(
        Key("while_loop", tuple(subgraph for subgraph, _, _ in parts)),
        lambda: ControlEntry(
            "spmd::while_loop",
            control.while_loop(
                len(carry) + len(index),
                len(condition.recording.captured) + len(parts[0][1]),
            ),
            tuple(subgraph for subgraph, _, _ in parts),
            tuple(t._handle.spec.logical for t in (*carry, *index)),
        ),
    )
    closed = [
        [inside(each.tensor) for each in part.recording.captured] for part in (condition, body)
    ]

    def run(*operands: XLAShardedTensor) -> tuple[XLAShardedTensor, ...]:
        with lock:
            values = [read(t._handle) for t in operands]
        end = len(carry) + len(index) + len(closed[0])
        operand_values = [*values[:end], *parts[0][1], *values[end:], *parts[1][1]]
        return record(entry, operand_values, [*parts[0][2], *parts[1][2]])

    operands = [*carry, *index, *closed[0], *closed[1]]
    # What the functions detach has no gradient to refuse.
    has_gradient = any(t.requires_grad for t in (*carry, *body.results[0]))
    if torch.is_grad_enabled() and has_gradient:
        results = _WithoutGradient.apply(run, *operands)
    else:
        results = run(*operands)
    for result, first in zip(results, carry):
        inherit(result, first)
    return tree.unflatten(results[: len(carry)])


class _Recorded:
    """One function of a while_loop.

    Attributes:
        recording: of the function.
        results: what it returned, and its structure.
    """

    def __init__(
        self,
        what: str,
        function: Callable[[Any], Any],
        carry: Sequence[XLAShardedTensor],
        tree: Tree,
    ) -> None:
        recording = self.recording = FunctionRecording(what)
        with recording.active():
            self._state = [
                recording.argument(
                    t._handle.spec.logical,
                    t._handle.sharding,
                    requires_grad=t.requires_grad and torch.is_grad_enabled(),
                    name="its state",
                )
                for t in carry
            ]
            self._index = recording.argument(_INDEX, None)
        with active(recording, self._index[0]):
            returned = function(tree.unflatten([t for t, _ in self._state]))
            self.results = results_of(recording, returned, f"what {what} returns")
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


def _require_condition(condition: _Recorded) -> None:
    """Raises TypeError unless the condition returned a boolean tensor without dims."""
    tensors, tree = condition.results
    specs = [t._handle.spec for t in tensors]
    is_one = tree.spec.is_leaf() and len(specs) == 1
    if not is_one or specs[0].shape or specs[0].dtype is not torch.bool:
        raise TypeError(
            "the condition of a while_loop returns a boolean tensor without dims; "
            f"got {specs[0] if is_one else tree!r}. Write a comparison, with .all() or .any()."
        )


class _WithoutGradient(torch.autograd.Function):
    """A loop whose gradient is refused."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *operands: XLAShardedTensor) -> Any:
        results = run(*operands)
        ctx.mark_non_differentiable(
            *(t for t in results if not (t.is_floating_point() or t.is_complex()))
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ControlFlowError(
            "a while_loop has no gradient, as the number of its iterations is not known when it is "
            "recorded; got a backward through one. Write fori_loop between integers, or scan, "
            "or detach() what the loop returns."
        )


def fori_loop(
    lower: int | torch.Tensor,
    upper: int | torch.Tensor,
    body_fn: Callable[[torch.Tensor, Any], Any],
    init: Any,
) -> Any:
    """A loop on the device over the integers from `lower` up to and without `upper`.

    Computes what this does:

        for i in range(lower, upper):
            init = body_fn(torch.tensor(i), init)
        return init

    Between Python integers it is a `scan`, and differentiable; other bounds are another program.
    Where a bound is a tensor, it is a `while_loop`, which has no gradients. Does not wait.

    Args:
        lower: the first integer: a number, or an integer tensor without dims on device `xla`.
        upper: the integer behind the last one.
        body_fn: (i, state) -> the next state; `i` is an int64 tensor without dims.
        init: the first state: tensors on device `xla` in nested lists, tuples and dicts.

    Returns:
        The last state.

    Raises:
        TypeError: a bound is no integer; otherwise as `scan` and `while_loop`.

    Example:
        >>> import torch
        >>> fori_loop(1, 5, lambda i, x: x * i, torch.ones((), device="xla")).item()
        24.0
    """
    require_callable("body_fn", body_fn)
    for name, bound in (("lower", lower), ("upper", upper)):
        _require_bound(name, bound)
    if isinstance(lower, int) and isinstance(upper, int):
        numbers = torch.arange(lower, max(lower, upper), device="xla")
        state, _ = scan(lambda state, i: (body_fn(i, state), None), init, numbers)
        return state
    first = torch.as_tensor(lower, dtype=torch.int64, device="xla")
    last = torch.as_tensor(upper, dtype=torch.int64, device="xla")
    _, state = while_loop(
        lambda state: state[0] < last,
        lambda state: (state[0] + 1, body_fn(state[0], state[1])),
        (first, init),
    )
    return state


def _require_bound(name: str, bound: object) -> None:
    is_number = isinstance(bound, int) and not isinstance(bound, bool)
    if isinstance(bound, torch.Tensor):
        is_integer = not (bound.is_floating_point() or bound.is_complex())
        is_number = is_integer and not bound.dim() and bound.dtype is not torch.bool
    if not is_number:
        got = (
            f"a {bound.dtype} tensor of shape {tuple(bound.shape)}"
            if isinstance(bound, torch.Tensor)
            else f"{type(bound).__name__} {bound!r}"
        )
        raise TypeError(
            f"{name} of a fori_loop is an integer, or an integer tensor without dims; got {got}. "
            "Write int(n), or n.long() of one element."
        )
