"""Uninitialized parameters and buffers of lazy modules, moved to and from the device.

torch moves one as an empty tensor, which its module then puts into the parameter. Here the moved
one is uninitialized itself, so whoever moves it alone does not compute with an empty tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import parameter
from torch.nn.parameter import is_lazy

from spmd_core.tensor.sharded_tensor import XLAShardedTensor, attributes_of

_mixin: Any = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_function_of_torch = _mixin.__torch_function__.__func__
_MOVES = (torch.Tensor.to, torch.Tensor.cpu)


def _function(
    cls: Any, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """`UninitializedTensorMixin.__torch_function__`."""
    if func in _MOVES and is_lazy(args[0]):
        source = args[0]
        with torch._C.DisableTorchFunctionSubclass():
            moved = func(source.detach(), *args[1:], **(kwargs or {}))
            if isinstance(moved, XLAShardedTensor) != isinstance(source, XLAShardedTensor):
                needs_grad = moved.is_floating_point() or moved.is_complex()
                kept = torch.Tensor._make_subclass(cls, moved, source.requires_grad and needs_grad)
                kept.__dict__.update(attributes_of(source))
                return kept
    if func is torch.Tensor.copy_ and all(is_lazy(a) for a in args[:2]):
        return args[0]  # there is nothing to copy
    return _function_of_torch(cls, func, types, args, kwargs)


def install() -> None:
    """Makes moves of uninitialized parameters and buffers keep what they are."""
    _mixin.__torch_function__ = classmethod(_function)
