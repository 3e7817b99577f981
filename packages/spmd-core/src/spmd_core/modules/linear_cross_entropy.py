"""The cross entropy of a linear layer's logits, computed in chunks of rows.

torch's function of that name is computed by this one, for tensors of this device, if its `options`
ask for chunks.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F

from spmd_core.arguments import checked, require_int, require_kind
from spmd_core.dispatch.composite import recorder
from spmd_core.marks.along import AxisLayout, Redistribute
from spmd_core.recording.calls import NO_KWARGS
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_class_sums = recorder("spmd.class_sums.default")
_class_sums_backward = recorder("spmd.class_sums_backward.default")


class _ClassSums(torch.autograd.Function):
    """For each row, the logit of its target and the logarithm of the sum of exponentials."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        chunks: int,
    ) -> Any:
        picked, lse = _class_sums((x, weight, bias, target, chunks), NO_KWARGS)
        ctx.save_for_backward(x, weight, bias, target, lse)
        ctx.chunks = chunks
        return picked, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy is differentiable once; got create_graph=True. "
                "Use F.cross_entropy(F.linear(input, linear_weight), target) for such a loss."
            )
        x, weight, bias, target, lse = ctx.saved_tensors
        arguments = (*grads, x, weight, bias, target, lse, ctx.chunks)
        mask = list(ctx.needs_input_grad[:3])
        return (*_class_sums_backward((*arguments, mask), NO_KWARGS), None, None)


@checked(label_smoothing=0)
def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_chunks: int = 8,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)`, without its logits.

    The logits of one chunk of rows are in memory at a time, in forward and in backward, where they
    are computed again. Wherever mesh axes split the rows, each device has rows in every chunk; if
    axes split the classes (the first dim of `linear_weight`), devices exchange numbers for each
    row, and not logits. Sums are in float32 for 16-bit operands. Differentiable once. Does not
    wait. Tensors of other devices are computed as written above.

    Args:
        input: (..., features), floating-point.
        linear_weight: (classes, features).
        target: class indices, int64 of the shape of `input` without features.
        linear_bias: (classes,), or None.
        weight: a factor for each class, (classes,), or None.
        reduction: "mean" (over the weights of the targets), "sum" or "none".
        ignore_index: a target whose row is ignored.
        label_smoothing: the share of the targets that is spread over all classes.
        num_chunks: into how many chunks the rows are cut.

    Returns:
        A scalar, or losses of the shape of `target`; float32 for 16-bit operands.

    Raises:
        ValueError: shapes that do not fit, another reduction, or fewer than 1 chunk.
        TypeError: targets that are no int64, such as probabilities.
        RuntimeError: in backward, with create_graph=True.

    Example:
        >>> x, w = torch.ones(6, 4, device="xla"), torch.zeros(10, 4, device="xla")
        >>> y = torch.zeros(6, dtype=torch.int64, device="xla")
        >>> round(linear_cross_entropy(x, w, y).item(), 4)
        2.3026
    """
    _check(input, linear_weight, target, linear_bias, weight, reduction, num_chunks)
    if label_smoothing > 1:
        raise ValueError(
            f"label_smoothing is a share from 0 to 1; got {label_smoothing!r}. "
            "Write for instance 0.1."
        )
    rows, labels = input.flatten(0, -2), target.flatten()
    if not isinstance(input, XLAShardedTensor):
        losses = F.cross_entropy(
            F.linear(rows, linear_weight, linear_bias),
            labels,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
        return losses.view(target.shape) if reduction == "none" else losses
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
        rows, linear_weight = rows.to(dtype), linear_weight.to(dtype)
    rows = _whole_along_classes(rows, linear_weight)
    used = labels != ignore_index
    picked, lse = _ClassSums.apply(
        rows, linear_weight, linear_bias, torch.where(used, labels, 0), num_chunks
    )
    factor = used.to(lse.dtype)
    if weight is not None:
        factor = factor * weight.to(lse.dtype)[torch.where(used, labels, 0)]
    losses = torch.where(used, lse - picked, 0) * factor
    if label_smoothing:
        # The sum over classes of their factors times the logits needs no logits.
        spread = torch.ones_like(linear_weight[:, 0]) if weight is None else weight
        spread = spread.to(linear_weight.dtype)
        sums = (rows @ (spread @ linear_weight)).to(lse.dtype)
        if linear_bias is not None:
            sums = sums + (spread * linear_bias).sum().to(lse.dtype)
        smooth = torch.where(used, lse * spread.sum().to(lse.dtype) - sums, 0)
        share = label_smoothing / linear_weight.shape[0]
        losses = (1 - label_smoothing) * losses + share * smooth
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / factor.sum() if reduction == "mean" else total


_torch_function = getattr(F, "linear_cross_entropy", None)  # torch 2.13 has it


def _taken_over(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int | None = None,
    options: Any = None,
    **arguments: Any,
) -> torch.Tensor:
    assert _torch_function is not None
    is_chunked = isinstance(input, XLAShardedTensor) and options is not None
    if not is_chunked or (input.dim(), linear_weight.dim(), target.dtype) != (2, 2, torch.int64):
        return _torch_function(
            input, linear_weight, target, ignore_index=ignore_index, options=options, **arguments
        )
    size = options.batch_chunk_size
    loss = linear_cross_entropy(
        input,
        linear_weight,
        target,
        ignore_index=-100 if ignore_index is None else ignore_index,
        num_chunks=8 if size is None else -(-len(input) // size) or 1,
        **arguments,
    )
    return loss.to(input.dtype)


if _torch_function is not None:
    # `nn.LinearCrossEntropyLoss` looks it up at each call.
    F.linear_cross_entropy = functools.wraps(_torch_function)(_taken_over)


def _whole_along_classes(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows, replicated along the axes that split the classes and sum the rows' gradient."""
    sharding = weight.sharding if isinstance(weight, XLAShardedTensor) else None
    if sharding is None or not sharding.dims[0]:
        return rows
    whole = AxisLayout(sharding.mesh, sharding.dims[0])
    of_gradient = AxisLayout(sharding.mesh, sharding.dims[0], is_sum=True)
    redistributed: torch.Tensor = Redistribute.apply(rows, whole, of_gradient)
    return redistributed


def _check(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    linear_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    reduction: str,
    num_chunks: int,
) -> None:
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    for name, tensor in tensors.items():
        require_kind(name, tensor, torch.Tensor, write="a tensor on device 'xla'")
    if input.dim() < 2 or linear_weight.dim() != 2 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            "a linear layer takes (..., features) and a weight of (classes, features); got "
            f"{tuple(input.shape)} and {tuple(linear_weight.shape)}. "
            "Make the last dims of both equal."
        )
    if target.dtype != torch.int64:
        raise TypeError(
            f"targets are class indices, int64; got {target.dtype}. For probabilities use "
            "F.cross_entropy(F.linear(input, linear_weight), target)."
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            "there is a target for each row of the input; got targets of shape "
            f"{tuple(target.shape)} for an input of {tuple(input.shape)}. "
            f"Pass targets of {tuple(input.shape[:-1])}."
        )
    for name, given in (("linear_bias", linear_bias), ("weight", weight)):
        if given is not None and given.shape != linear_weight.shape[:1]:
            raise ValueError(
                f"{name} has one number for each class; got {tuple(given.shape)} for "
                f"{linear_weight.shape[0]} classes. Pass ({linear_weight.shape[0]},)."
            )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"reduction is 'mean', 'sum' or 'none'; got {reduction!r}. Use one of them."
        )
    if require_int("num_chunks", num_chunks) < 1:
        raise ValueError(f"num_chunks is at least 1; got {num_chunks}. Use for instance 8.")
