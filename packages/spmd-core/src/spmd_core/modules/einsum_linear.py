"""The linear layer as one contraction over the last dim, which keeps the other dims separate.

So each of the other dims can be split over a mesh axis of its own. On device `xla` every linear
layer is recorded in this way. This module adds the operators `xla::einsum_linear_forward` and its
backward: a graph that is traced with fake tensors keeps these operators, whereas it decomposes
`aten::linear` and merges dims.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd_core.arguments import checked, require_kind
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_library = torch.library.Library("xla", "FRAGMENT")
_library.define("einsum_linear_forward(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    "einsum_linear_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, "
    "bool needs_input_grad_input, bool needs_input_grad_weight, bool needs_input_grad_bias)"
    " -> (Tensor, Tensor, Tensor)"
)
_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Input `(..., n)`, weight `(m, n)` and bias `(m,)` to `(..., m)`."""
    return F.linear(input, weight, bias)


def _backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    needs_input_grad_input: bool,
    needs_input_grad_weight: bool,
    needs_input_grad_bias: bool,
) -> _Gradients:
    """The gradients of input, weight and bias; None for one that is not needed."""
    wanted = (
        needs_input_grad_input,
        needs_input_grad_weight,
        needs_input_grad_bias and bias is not None,
    )
    if isinstance(grad_output, XLAShardedTensor):
        found: _Gradients = torch.ops.aten.linear_backward(input, grad_output, weight, wanted)
        return found
    return (
        torch.einsum("...m,mn->...n", grad_output, weight.conj()) if wanted[0] else None,
        torch.einsum("...m,...n->mn", grad_output, input.conj()) if wanted[1] else None,
        grad_output.flatten(0, -2).sum(0)
        if wanted[2] and grad_output.dim() > 1
        else grad_output.clone()
        if wanted[2]
        else None,
    )


def _meta_forward(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if input.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            "a linear layer contracts the last dim of its input with the last of its weight; "
            f"got {tuple(input.shape)} and {tuple(weight.shape)}. "
            "Make these two sizes equal."
        )
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _meta_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> _Gradients:
    return (
        input.new_empty(input.shape) if for_input else None,
        weight.new_empty(weight.shape) if for_weight else None,
        bias.new_empty(bias.shape) if bias is not None and for_bias else None,
    )


class _Traced(torch.autograd.Function):
    """The operators with their derivative, for tensors not on device `xla`: fake and on the CPU."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, bias)
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = torch.ops.xla.einsum_linear_forward(input, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        input, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return _backward(grads[0], input, weight, bias, *ctx.needs_input_grad)
        return torch.ops.xla.einsum_linear_backward(
            grads[0], input, weight, bias, *ctx.needs_input_grad
        )


def _with_autograd(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(input, XLAShardedTensor) or isinstance(weight, XLAShardedTensor):
        # Recorded as one operation, with torch's own derivative, under autocast too.
        return F.linear(input, weight, bias)
    result: torch.Tensor = _Traced.apply(input, weight, bias)
    return result


_library.impl("einsum_linear_forward", _forward, "CompositeExplicitAutograd")
_library.impl("einsum_linear_forward", _with_autograd, "Autograd")
_library.impl("einsum_linear_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("xla::einsum_linear_forward", _meta_forward, lib=_library)
torch.library.register_fake("xla::einsum_linear_backward", _meta_backward, lib=_library)


class EinsumLinear(nn.Linear):
    """`nn.Linear` by `xla::einsum_linear_forward`: (..., in_features) to (..., out_features)."""

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    @checked(in_features=0, out_features=0)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.xla.einsum_linear_forward(input, self.weight, self.bias)
        return result


def apply_einsum_linear(module: nn.Module) -> nn.Module:
    """Makes every `nn.Linear` in the module, and the module itself if it is one, an `EinsumLinear`.

    In place: parameters, buffers, hooks and references to a layer stay valid. Subclasses of
    `nn.Linear` are not changed, as they may have a forward of their own.

    Returns:
        The module.

    Raises:
        TypeError: `module` is none.
    """
    require_kind("module", module, nn.Module, write="a torch.nn.Module")
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = EinsumLinear
    return module
