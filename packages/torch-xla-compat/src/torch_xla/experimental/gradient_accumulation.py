"""`gradient_accumulation`: forward and backward of the parts of a batch, as one loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core import control_flow
from spmd_core.errors import ControlFlowError
from spmd_core.modules.other_tensors import having


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: Sequence[torch.Tensor],
    model: nn.Module,
    *carried_tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Adds up the gradients of several steps in a loop on the device.

    The program has the operations of one step, forward and backward, whatever their number, and
    the memory of one. Computes what this does:

        total = 0
        for slices in zip(*iterable_tensors):
            loss, *carried_tensors = train_step(*slices, *(t.detach() for t in carried_tensors))
            (loss / len(iterable_tensors[0])).backward()
            total = total + loss.detach() / len(iterable_tensors[0])
        return total, *carried_tensors

    Buffers of the model that a step writes, such as running statistics, are carried, too. Hooks of
    parameters get the gradients of each step. Does not wait for the device.

    Args:
        train_step: (*slices, *carried) -> the loss, a scalar, or (loss, *carried). It calls `model`
            and not `backward()`, and does not write to its arguments.
        iterable_tensors: tensors of shape `(steps, ...)`; a step gets slices of shape `(...)`.
        model: its parameters get the gradients. Nothing else does.
        *carried_tensors: passed from step to step, without gradients.

    Returns:
        The mean of the losses, without a gradient, and the last carried tensors, in their order.

    Raises:
        ValueError: there are no iterable tensors; one is no tensor or is empty; their first dims
            differ; or a step returns another number of tensors than it is given.
        TypeError: a carried tensor changes its shape or dtype.
        AssertionError: a step writes in place to a slice or to a carried tensor.
        RuntimeError: it writes in place to another tensor, reads a value on the host, or calls
            backward; or a parameter has a hook that reads its accumulated gradient.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1).to("xla")
        >>> def step(x, count):
        ...     return model(x).square().mean(), count + 1
        >>> x, count = torch.ones(3, 2, 4, device="xla"), torch.zeros((), device="xla")
        >>> loss, count = gradient_accumulation(step, (x,), model, count)
        >>> count.item(), model.weight.grad.shape
        (3.0, torch.Size([1, 4]))
    """
    num_steps = _num_steps(iterable_tensors)
    steps = _Steps(train_step, model, num_steps)
    init = (
        {name: _gradient_so_far(p) for name, p in steps.trained.items()},
        steps.buffers,
        [t.detach() if isinstance(t, torch.Tensor) else t for t in carried_tensors],
    )
    with torch.enable_grad():  # the step's own gradients need it, wherever this is called
        (gradients, buffers, carried), losses = control_flow.scan(
            steps.record, init, [t.detach() for t in iterable_tensors]
        )
    with torch.no_grad():
        for name in steps.reached:
            parameter = steps.trained[name]
            if parameter.grad is None:
                parameter.grad = gradients[name]
            else:
                parameter.grad.copy_(gradients[name])
        for name in steps.written:
            steps.buffers[name].copy_(buffers[name])
        return losses.sum(0), *carried


def _num_steps(tensors: Sequence[torch.Tensor]) -> int:
    """The size of the first dim; raises ValueError unless all tensors have one."""
    rule = "iterable_tensors are tensors of shape (steps, ...), of the same number of steps; got"
    if len(tensors) == 0:
        raise ValueError(f"{rule} none. Pass the parts of the batch, as (inputs, labels).")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{rule} a {type(tensor).__name__}. Convert it by torch.tensor, or close over it."
            )
        if tensor.dim() == 0 or tensor.numel() == 0:
            raise ValueError(
                f"{rule} an empty one, of shape {tuple(tensor.shape)}. Pass at least one step, or "
                "close over a tensor that is the same for all."
            )
    if len({t.shape[0] for t in tensors}) > 1:
        raise ValueError(
            f"{rule} shapes {[tuple(t.shape) for t in tensors]}. Reshape each to "
            "(steps, size of a part, ...)."
        )
    return tensors[0].shape[0]


def _gradient_so_far(parameter: nn.Parameter) -> torch.Tensor:
    if parameter._post_accumulate_grad_hooks:
        raise ControlFlowError(
            "gradient_accumulation sets the gradients of parameters after its last step; got a "
            f"parameter of shape {tuple(parameter.shape)} with a hook that is called behind each "
            "accumulation. Remove it, and call it after gradient_accumulation."
        )
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class _Steps:
    """The steps of a loop: calls `train_step` while the model has other tensors.

    Autograd then follows tensors of the loop, also where a function that is none of torch's, such
    as the gather of FSDP, gets a parameter.

    Attributes:
        trained: the model's parameters that require gradients, by name.
        buffers: its buffers, by name.
        reached: the names of parameters that have got a gradient.
        written: those of buffers that the step writes.
    """

    def __init__(self, train_step: Callable[..., Any], model: nn.Module, num_steps: int) -> None:
        self._train_step, self._model, self._num_steps = train_step, model, num_steps
        self._frozen, self.trained = (
            {n: p for n, p in model.named_parameters() if p.requires_grad is trained}
            for trained in (False, True)
        )
        self.buffers = dict(model.named_buffers())
        self._hooks = {n: [*(p._backward_hooks or {}).values()] for n, p in self.trained.items()}
        self.reached: list[str] = []
        self.written: list[str] = []

    def record(self, carry: Any, slices: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """One step: the function of the scan."""
        sums, buffers, carried = carry
        own = {name: p.detach().requires_grad_() for name, p in self.trained.items()}
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        versions = _versions((slices, carried, copies))
        with having(self._model, {**self._frozen, **own, **copies}) as assigned:
            loss, following = self._results(self._train_step(*slices, *carried), len(carried))
            states = {**copies, **assigned()}
            gradients = self._gradients(loss / self._num_steps, own)
        now = _versions((slices, carried, copies))
        for what, values in (("a slice", slices), ("a carried tensor", carried)):
            for tensor in pytree.tree_leaves(values):
                if now.get(id(tensor)) != versions.get(id(tensor)):
                    raise AssertionError(
                        "train_step does not write to its arguments, as the loop runs what it "
                        f"returns; got a write in place to {what} of shape {tuple(tensor.shape)}. "
                        "Write to a clone(), and return it as a carried tensor."
                    )
        self.written = [
            name
            for name, copy in copies.items()
            if states[name] is not copy or now[id(copy)] != versions[id(copy)]
        ]
        self.reached = [*gradients]
        sums = {n: t + gradients[n] if n in gradients else t for n, t in sums.items()}
        buffers = {n: states[n] if n in self.written else t for n, t in buffers.items()}
        following = [t.detach() if isinstance(t, torch.Tensor) else t for t in following]
        return (sums, buffers, following), loss.detach() / self._num_steps

    @staticmethod
    def _results(result: Any, num_carried: int) -> tuple[torch.Tensor, Sequence[Any]]:
        loss, *following = result if isinstance(result, (tuple, list)) else (result,)
        if len(following) != num_carried:
            raise ValueError(
                "train_step returns the loss, and as many tensors as are carried; got "
                f"{len(following)} for {num_carried}. Return (loss, *carried)."
            )
        return loss, following

    def _gradients(
        self, loss: torch.Tensor, own: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The gradients of the parameters that the loss depends on."""
        if any(t.grad is not None for t in own.values()):
            raise ControlFlowError(
                "gradient_accumulation runs backward itself; got a call of backward() in "
                "train_step. Return the loss."
            )
        names = {id(p): name for name, p in self.trained.items()}
        missed = [names[id(leaf)] for leaf in _leaves(loss) if id(leaf) in names]
        if missed:
            raise ControlFlowError(
                "gradient_accumulation follows parameters by the model and by calls of torch; got "
                f"{missed[0]}, which an autograd.Function got from "
                "elsewhere. Read it from the model inside of train_step."
            )
        # Of a parameter that is also read apart from the model, there is a second part.
        inputs = [*own.values(), *self.trained.values()]
        with torch.autocast("xla", enabled=False):  # as backward() runs
            found = torch.autograd.grad(loss, inputs, allow_unused=True)
        gradients = {}
        for i, name in enumerate(self.trained):
            parts = [g for g in (found[i], found[len(own) + i]) if g is not None]
            if not parts:
                continue
            gradient = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            for hook in self._hooks[name]:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            gradients[name] = gradient
        return gradients


def _versions(tree: Any) -> dict[int, int]:
    """For the id of each tensor, how often it was written."""
    tensors: Any = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return {id(t): t._handle.storage.version for t in tensors}


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors at which the graph of a loss ends."""
    pending: list[Any] = [loss.grad_fn]
    seen = {None, *pending}
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            yield node.variable
        following = {n for n, _ in node.next_functions} - seen
        seen |= following
        pending += following
