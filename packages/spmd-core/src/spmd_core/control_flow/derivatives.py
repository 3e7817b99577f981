"""Gradients of a function that is recorded: torch's autograd runs on its stand-ins."""

from collections.abc import Sequence
from typing import Any

import torch

from spmd_core.errors import ControlFlowError, DeviceMismatchError
from spmd_core.recording.functions import FunctionRecording
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def take_plan(ctx: Any) -> Any:
    """The plan of the `autograd.Function` whose backward runs, with what it reads.

    A plan holds the function's closure and so tensors, which torch frees with the saved ones: after
    a backward without `retain_graph`, a loss that is still there would keep the parameters of
    before the optimizer's step.
    """
    plan = ctx.plan
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.plan = None
    return plan


def sequence_number() -> int:
    """A number below those of autograd's nodes that this thread makes later."""
    with torch.enable_grad():
        node = torch.zeros((), device="cpu", requires_grad=True).clone().grad_fn
    assert node is not None
    return node._sequence_nr()


def find_closed_over(
    recording: FunctionRecording, outputs: Sequence[torch.Tensor], start: int
) -> None:
    """Captures the leaves that autograd reaches from a function's results, but no call of torch.

    These are parameters that functions which are none of torch's have read, such as `call_jax`.

    Args:
        recording: of the function.
        outputs: what it returned.
        start: `sequence_number` before the function was called.

    Raises:
        ControlFlowError: it has read a computed tensor so.
        DeviceMismatchError: it has read a tensor on another device that requires a gradient.
    """
    pending: list[Any] = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, XLAShardedTensor):
            if not recording.is_own(variable):
                recording.capture(variable)
            continue
        if variable is not None:
            raise DeviceMismatchError(
                f"{recording.what} runs on the device alone; got a tensor of shape "
                f"{tuple(variable.shape)} on {variable.device} that requires a gradient. "
                "Move it with .to('xla') before."
            )
        if node._sequence_nr() < start:
            raise ControlFlowError(
                f"gradients of {recording.what} reach what it closes over by calls of torch; got a "
                f"computed tensor (by {node.name()}) that a function which is none of torch's "
                "reads inside. Pass the tensor as an operand, or call that function before."
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def vector_jacobian_product(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    *,
    create_graph: bool = False,
) -> list[XLAShardedTensor | None]:
    """The gradient for each input; None where no output depends on it.

    Args:
        outputs: those that do not require a gradient are left out, with their cotangents.
        inputs: each requires a gradient.
        cotangents: the gradients of the outputs.
        create_graph: whether the gradients can be differentiated again.
    """
    pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
    if not pairs or not inputs:
        return [None] * len(inputs)
    found: Any = torch.autograd.grad(
        [output for output, _ in pairs],
        list(inputs),
        [cotangent for _, cotangent in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    return list(found)
