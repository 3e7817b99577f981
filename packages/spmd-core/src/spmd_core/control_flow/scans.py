"""`scan`: a loop over the first dim of tensors, differentiable, as one operation.

Its function is recorded once, with its vector-Jacobian product behind it if a gradient may be asked
for; `control_flow.scan_loops` makes a loop of each.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.arguments import require_bool, require_callable, require_int
from spmd_core.control_flow import derivatives
from spmd_core.control_flow.operands import Tree, flatten, refuse_region
from spmd_core.control_flow.repeated import Record, under_autocast
from spmd_core.control_flow.scan_loops import Backward, Gradients, Loop
from spmd_core.control_flow.scan_steps import read_by, record_step
from spmd_core.errors import ControlFlowError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage, read
from spmd_core.graph.values import Value
from spmd_core.recording.calls import inherit
from spmd_core.recording.functions import inside
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """A loop on the device: carries a state over the slices of `xs`, and stacks what comes out.

    The program has the function's operations once, whatever the length. Computes what this does,
    gradients included, also those of gradients:

        ys = []
        for x in xs:
            init, y = fn(init, x)
            ys.append(y)
        return init, torch.stack(ys)

    Python calls `fn` once or twice for all iterations, on tensors without values. Tensors that it
    closes over, such as the parameters of modules that it calls, are operands of the loop, with
    gradients. Random operations in it draw other numbers in each iteration. Marks of `init`, and
    those of `xs` and of closed-over tensors, hold in the loop, also for their gradients there; no
    device splits the dim that the loop goes over. Does not wait for the device.

    Args:
        fn: (carry, x) -> (new carry, y). The new carry has the structure, shapes and dtypes of the
            carry.
        init: the first carry: tensors on device `xla` in nested lists, tuples and dicts.
        xs: tensors of shape `(length, ...)`, so nested; `fn` gets slices of shape `(...)`.
        length: the number of iterations; only needed if `xs` has no tensor.
        reverse: whether the loop begins with the last slice; results are stacked in the order of
            `xs`.

    Returns:
        The last carry, and the stacked results, each of shape `(length, ...)`.

    Raises:
        TypeError: `fn` does not return a pair, or changes the carry's structure, shapes or dtypes;
            or what is no tensor.
        ValueError: the lengths differ, or there is none.
        ControlFlowError: `fn` reads a value on the host, or writes in place to a tensor from
            outside.
        DeviceMismatchError: a tensor on another device.

    Example:
        >>> import torch
        >>> x = torch.arange(1.0, 5.0, device="xla")
        >>> total, sums = scan(lambda total, x: (total + x, total + x), x.new_zeros(()), x)
        >>> total.item(), sums.tolist()
        (10.0, [1.0, 3.0, 6.0, 10.0])
    """
    return scan_inside(nullcontext, fn, init, xs, length=length, reverse=reverse)


def scan_inside(
    around: Callable[[], AbstractContextManager[Any]],
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    on_kept: Callable[[Sequence[Storage]], None] | None = None,
) -> tuple[Any, Any]:
    """As `scan`, of a function that sets something which its backward reads.

    Args:
        around: returns a context, inside of which `fn` is called and then differentiated; again
            for gradients of gradients.
        fn: as for `scan`, like the arguments behind it.
        init: the first carry.
        xs: what the loop goes over.
        length: the number of iterations.
        reverse: whether the loop begins with the last slice.
        on_kept: called if tensors of an iteration are kept after it, with their storages.
    """
    require_callable("fn", fn)
    require_bool("reverse", reverse)
    refuse_region("scan")
    carry, carry_tree = flatten(init, "the init of a scan")
    stacks, stack_tree = flatten(xs, "the xs of a scan")
    carry, stacks = [inside(t) for t in carry], [inside(t) for t in stacks]
    length = _length(stacks, length)

    @under_autocast
    def flat(carry: Sequence[Any], x: Sequence[Any]) -> Any:
        return fn(carry_tree.unflatten(carry), stack_tree.unflatten(x))

    plan, closed_over, y_tree = _plan(
        around, flat, (carry, carry_tree), stacks, length=length, reverse=reverse
    )
    if on_kept is not None and (kept := plan.kept_tensors()):
        on_kept(kept)
    operands = [*carry, *stacks, *closed_over]
    if any(plan.differentiable):
        results = _Scan.apply(plan, *operands)
    else:
        results, _ = plan.run(operands)
    for result, first in zip(results, carry):
        inherit(result, first)
    return carry_tree.unflatten(results[: len(carry)]), y_tree.unflatten(results[len(carry) :])


def _length(stacks: Sequence[torch.Tensor], length: int | None) -> int:
    """The number of iterations."""
    if any(not t.dim() for t in stacks):
        raise ValueError(
            "a scan goes over the first dim of xs; got a tensor without dims. "
            "Close over it, or expand it."
        )
    lengths = {t.shape[0] for t in stacks}
    if length is not None:
        lengths.add(require_int("length", length, least=0))
    if len(lengths) != 1:
        shapes = [tuple(t.shape) for t in stacks]
        raise ValueError(
            "a scan has one length, that of the first dim of each tensor of xs; "
            f"got {f'shapes {shapes}' if shapes else 'no tensor in xs'} and length={length}. "
            "Give tensors of one length, or length=n without any."
        )
    return lengths.pop()


@dataclass
class _Plan:
    """A scan, whose operands are not known.

    Attributes:
        around: returns the context in which the function is called and differentiated.
        flat: the function of lists.
        tree: the structure of the carry.
        closed_over: what it closes over, and whether it gets a stand-in of that.
        num_carry: the number of tensors that are carried.
        num_stacks: the number of tensors that it goes over.
        num_y: the number of tensors of y.
        length: the number of iterations.
        reverse: whether it begins with the last one.
        forward: the loop.
        reads_index: whether the function reads the number of the iteration, as it is random.
        differentiable: for each result whether it has a gradient.
        record: what the function has recorded.
        vjp: its gradients; None if no result has one.
        kept: the values of each iteration that these read.
        closed: those of what it closes over.
        made: the storages that the function has made.
    """

    around: Callable[[], AbstractContextManager[Any]]
    flat: Callable[..., Any]
    tree: Tree
    closed_over: list[tuple[XLAShardedTensor, bool]]
    num_carry: int
    num_stacks: int
    num_y: int
    length: int
    reverse: bool
    forward: Loop
    reads_index: bool
    differentiable: list[bool]
    record: Record
    vjp: Gradients | None
    kept: list[Value]
    closed: list[Value]
    made: "list[weakref.ref[Storage]]"

    def kept_tensors(self) -> list[Storage]:
        """The storages of tensors that the function has made, and something outside has kept."""
        if any(made() is not None for made in self.made):
            gc.collect()  # what is left in a cycle is not kept
        return [storage for made in self.made if (storage := made()) is not None]

    def run(
        self, operands: Sequence[XLAShardedTensor]
    ) -> tuple[tuple[XLAShardedTensor, ...], tuple[XLAShardedTensor, ...]]:
        """The last carry and the stacked y; and what is kept for backward."""
        num = self.num_carry + self.num_stacks
        first, others = operands[:num], operands[num:]
        results = self.forward.run([*first, *self._index(self.reads_index), *others])
        end = self.num_carry + self.num_y
        return results[:end], results[end:]

    def _index(self, is_read: bool) -> list[XLAShardedTensor]:
        found: Any = [torch.arange(self.length, device="xla")] if is_read else []
        return found

    def _backward(self, grads: Sequence[XLAShardedTensor | None]) -> Backward:
        """The loop of the gradients, where those of some results are given."""
        assert self.vjp is not None
        given = [i for i in range(self.num_y) if grads[self.num_carry + i] is not None]
        options: Any = {"length": self.length, "reverse": not self.reverse}
        return self.vjp.backward(self.kept, self.closed, given, **options)

    def gradients(
        self,
        operands: Sequence[XLAShardedTensor],
        kept: Sequence[XLAShardedTensor],
        grads: Sequence[XLAShardedTensor | None],
    ) -> list[XLAShardedTensor | None]:
        """The gradients of the operands.

        Args:
            operands: the operands.
            kept: what the forward loop has kept.
            grads: the gradients of the results; None for zeros.
        """
        back, given = self._backward(grads), self._with_zeros(grads, self.num_carry)
        num = self.num_carry + self.num_stacks
        stacks, closed_over = operands[self.num_carry : num], operands[num:]
        sums: Any = [torch.zeros_like(closed_over[i]) for i in back.closed_over]
        results = back.loop.run(
            [
                *(given[i] for i in back.carry),
                *sums,
                *kept,
                *(stacks[i] for i in back.slices),
                *self._index(back.reads_index),
                *(given[self.num_carry + i] for i in back.y),
                *closed_over,
            ]
        )
        return self._in_order(back, results, operands)

    def _with_zeros(self, grads: Sequence[XLAShardedTensor | None], count: int) -> Sequence[Any]:
        """The gradients, the first of them with zeros in place of None."""
        outs = self.forward.entry.outs
        filled: list[Any] = [
            torch.zeros(out.shape, dtype=out.dtype, device="xla") if grad is None else grad
            for grad, out in zip(grads[:count], outs)
        ]
        return [*filled, *grads[count:]]

    def _in_order(
        self,
        back: Backward,
        results: Sequence[XLAShardedTensor],
        operands: Sequence[XLAShardedTensor],
    ) -> list[XLAShardedTensor | None]:
        """The gradients by operand, from those that have one."""
        num = self.num_carry + self.num_stacks
        places = [
            *back.carry,
            *(num + i for i in back.closed_over),
            *(self.num_carry + i for i in back.stacks),
        ]
        found: list[XLAShardedTensor | None] = [None] * len(operands)
        for place, result in zip(places, results, strict=True):
            inherit(result, operands[place])
            found[place] = result
        return found

    def differentiable_gradients(
        self, operands: Sequence[XLAShardedTensor], grads: Sequence[XLAShardedTensor | None]
    ) -> list[XLAShardedTensor | None]:
        """As `gradients`, by scans that can be differentiated again."""
        filled = self._with_zeros(grads, len(grads))
        back = self._backward(filled)
        if self.reads_index or back.reads_index:
            raise ControlFlowError(
                "a scan whose function draws random numbers has gradients, and no gradients of "
                "gradients, as a second recording draws others; got create_graph=True. "
                "Draw the numbers before, and pass them in xs."
            )
        num = self.num_carry + self.num_stacks
        carry, stacks = list(operands[: self.num_carry]), list(operands[self.num_carry : num])
        options: Any = {"length": self.length, "reverse": self.reverse}
        again, _, _ = _plan(self.around, self.flat, (carry, self.tree), stacks, **options)
        self.record.require_same(again.record, "the function of a scan")

        def keeping(c: Any, x: Any) -> Any:
            return flatten(self.flat(c, x)[0], "the carry")[0], c

        _, carries = scan_inside(self.around, keeping, carry, stacks, **options)

        def product(state: Any, given: Any) -> Any:
            cotangents, sums = state
            x, c, y_cotangents = given
            with torch.enable_grad():
                c = [_following(t) if i in back.carry else t for i, t in enumerate(c)]
                x = [_following(t) if i in back.stacks else t for i, t in enumerate(x)]
                next_carry, y = ([*map(inside, flatten(t, "")[0])] for t in self.flat(c, x))
                others = [t if direct else inside(t) for t, direct in self.closed_over]
                inputs = [
                    *(c[i] for i in back.carry),
                    *(others[i] for i in back.closed_over),
                    *(x[i] for i in back.stacks),
                ]
                found = derivatives.vector_jacobian_product(
                    [*(next_carry[i] for i in back.carry), *(y[i] for i in back.y)],
                    inputs,
                    [*cotangents, *y_cotangents],
                    create_graph=True,
                )
                made = [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs)]
            ends = (len(back.carry), len(back.carry) + len(back.closed_over))
            sums = [a + b for a, b in zip(sums, made[ends[0] : ends[1]])]
            return (made[: ends[0]], sums), made[ends[1] :]

        zeros = [torch.zeros_like(operands[num + i]) for i in back.closed_over]
        first = ([filled[i] for i in back.carry], zeros)
        given = (stacks, carries, [filled[self.num_carry + i] for i in back.y])
        options["reverse"] = not self.reverse
        (cotangents, sums), of_stacks = scan_inside(self.around, product, first, given, **options)
        return self._in_order(back, [*cotangents, *sums, *of_stacks], operands)


def _following(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or one like it that requires a gradient."""
    return t if t.requires_grad else t.detach().requires_grad_()


class _Scan(torch.autograd.Function):
    """A scan, with the loop of its gradients as backward."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *operands: XLAShardedTensor) -> Any:
        results, kept = plan.run(operands)
        ctx.plan, ctx.num_operands = plan, len(operands)
        ctx.set_materialize_grads(False)  # a stack of zeros may be large
        ctx.save_for_backward(*operands, *kept)
        ctx.mark_non_differentiable(
            *(result for result, has in zip(results, plan.differentiable) if not has)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors  # an error of torch, if they are freed
        plan: _Plan = derivatives.take_plan(ctx)
        operands, kept = saved[: ctx.num_operands], saved[ctx.num_operands :]
        if torch.is_grad_enabled():
            return None, *plan.differentiable_gradients(operands, grads)
        return None, *plan.gradients(operands, kept, grads)


def _plan(
    around: Callable[[], AbstractContextManager[Any]],
    flat: Callable[..., Any],
    carry: tuple[Sequence[XLAShardedTensor], Tree],
    stacks: Sequence[XLAShardedTensor],
    *,
    length: int,
    reverse: bool,
) -> tuple[_Plan, list[XLAShardedTensor], Tree]:
    """The scan of a function; the tensors that it closes over; and the structure of its y."""
    with around():
        step = record_step(flat, carry, stacks)
        outputs = [*step.next_carry, *step.y]
        gradients = Gradients(step) if any(t.requires_grad for t in outputs) else None
    recording = step.recording
    captured = recording.captured
    with lock:
        next_carry = [read(t._handle) for t in step.next_carry]
        y = [read(t._handle) for t in step.y]
    kept = [] if gradients is None else gradients.kept([*next_carry, *y])
    parameters = [value for _, value in step.carry]
    slices = [value for _, value in step.x]
    index = step.index[1]
    reads_index = index in read_by(recording, [*next_carry, *y, *kept])
    closed = [each.parameter for each in captured]
    loop = Loop.of(
        recording,
        (parameters, [*slices, *([index] if reads_index else [])], closed),
        (next_carry, [*y, *kept]),
        length=length,
        reverse=reverse,
    )
    plan = _Plan(
        around,
        flat,
        carry[1],
        [(each.tensor, each.stand_in is each.tensor) for each in captured],
        len(next_carry),
        len(stacks),
        len(y),
        length,
        reverse,
        loop,
        reads_index,
        [t.requires_grad for t in outputs],
        Record.of(
            loop.entry.subgraphs, loop.numbers, [each.tensor for each in captured], loop.outer
        ),
        gradients,
        kept,
        closed,
        recording.close(),
    )
    return plan, [inside(each.tensor) for each in captured], step.y_tree
