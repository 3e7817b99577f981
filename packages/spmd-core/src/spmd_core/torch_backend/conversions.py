"""`module.to("xla")`, `module.cpu()` and `module.to(dtype)` keep the parameters' identity.

torch replaces the parameters of a module if their kind of memory changes, and swaps their contents
if the new tensor is a wrapper. Both would disconnect them from what refers to them: optimizers,
tied weights, hooks, attributes, weak references. Here a parameter that moves between device `xla`
and another stays the same object, with all of these, with its gradient, and with its mark when it
returns. Other modules and parameters are converted by torch alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules import module
from torch.utils.weak import WeakIdKeyDictionary

from spmd_core.errors import SpmdError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.program import leaves
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor import changes
from spmd_core.tensor.gradient_sharding import GradientSharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, attributes_of
from spmd_core.torch_backend.subclasses import device_class, user_class

_SCRIPTED: Any = torch.jit.ScriptModule  # for type checkers, no subclass of nn.Module
_apply = nn.Module._apply
_is_traceable_wrapper_subclass = module.is_traceable_wrapper_subclass


class _Mark(NamedTuple):
    """The mark that a parameter gets back when it returns to the device."""

    sharding: Sharding
    gradient_sharding: GradientSharding | None


# The marks of parameters that left the device, by weak reference.
# Guarded by: the GIL. Cleared by: never: freed with the parameter.
_marks = WeakIdKeyDictionary()


class _KeepsParameters:
    """A conversion of tensors, which moves parameters to and from the device in place.

    Attributes:
        convert: the conversion itself, which returns another tensor.
    """

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.convert = convert

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        converted = self.convert(t)
        if (
            isinstance(t, XLAShardedTensor) == isinstance(converted, XLAShardedTensor)
            or not isinstance(t, nn.Parameter)
            or torch.__future__.get_overwrite_module_params_on_conversion()
        ):
            return converted
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradient = None if t.grad is None else self.convert(t.grad)
            _move(t, converted, gradient)
        return t


def _move(parameter: nn.Parameter, moved: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Puts the contents of `moved`, which is on another device, into the parameter."""
    cls: type = user_class(type(parameter))
    cls = nn.Parameter if cls is torch.Tensor else cls
    requires_grad, attributes = parameter.requires_grad, attributes_of(parameter)
    hooks, post_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if requires_grad and not parameter.is_inference():
        _refuse_backward(parameter)
    leaves_device = isinstance(parameter, XLAShardedTensor)
    mark = _mark_of(parameter) if leaves_device else _marks.pop(parameter, None)
    if leaves_device:
        changes.note(parameter)
    # A new object, to which nothing else refers.
    new: Any = torch.Tensor._make_subclass(nn.Parameter, moved, requires_grad)
    # As in `torch.utils.swap_tensors`, which refuses parameters to which something else refers.
    parameter.__class__, new.__class__ = new.__class__, parameter.__class__
    parameter.__dict__, new.__dict__ = new.__dict__, parameter.__dict__
    torch._C._swap_tensor_impl(parameter, new)
    parameter.__dict__.update(attributes)
    if not issubclass(cls, nn.Parameter):
        parameter._is_param = True
    parameter.__class__ = cls if leaves_device else device_class(cls)
    # These are attributes of the object, but torch finds them by its contents.
    if hooks is not None:
        parameter._backward_hooks = hooks
    if post_hooks is not None:
        parameter._post_accumulate_grad_hooks = post_hooks
    parameter.grad = gradient
    if mark is not None and leaves_device:
        _marks[parameter] = mark
    elif mark is not None:
        _mark_again(parameter, mark)


def _refuse_backward(parameter: nn.Parameter) -> None:
    """Makes backward raise for results computed from the parameter's present contents.

    Their graph keeps these contents, whose gradient would be lost.

    Raises:
        SpmdError: in that backward.
    """

    def refuse(gradients: Any) -> NoReturn:
        raise SpmdError(
            "a result can be differentiated as long as the parameters that it was computed from "
            f"stay on their device; got backward() after a parameter of shape {shape} moved. "
            "Call backward() before module.to(device), or compute the result again."
        )

    shape = tuple(parameter.size())
    with torch.inference_mode(False):
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(refuse)


def _mark_of(parameter: Any) -> _Mark | None:
    sharding = parameter.sharding
    return None if sharding is None else _Mark(sharding, parameter._gradient_sharding)


def _mark_again(parameter: Any, mark: _Mark) -> None:
    """Gives a parameter that is back on the device, and its gradient, the mark that it had."""
    for tensor in (parameter, parameter.grad):
        handle = None if tensor is None else tensor._handle
        if isinstance(handle, Storage) and len(handle.spec.shape) == mark.sharding.ndim:
            with lock:
                leaves.set_sharding(handle, mark.sharding)
    if mark.gradient_sharding is not None:
        # The gradient's hook is among those of the parameter.
        parameter._gradient_sharding = mark.gradient_sharding
        mark.gradient_sharding.follow(parameter._handle)


def _apply_keeping_parameters(
    self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`Module._apply`, through which all conversions of a module go."""
    convert = fn.convert if isinstance(fn, _KeepsParameters) else fn
    if isinstance(self, _SCRIPTED):
        # Its tensors are held in C++, where swapping the contents of Python objects has no effect;
        # those of a loaded module are not parameters, which torch requires.
        for name, tensor in self._parameters.items():
            if tensor is not None and not isinstance(tensor, nn.Parameter):
                parameter = nn.Parameter(tensor.detach(), tensor.requires_grad)
                parameter.grad = tensor.grad
                self._parameters[name] = parameter
        return _apply(self, convert, recurse)
    return _apply(self, _KeepsParameters(convert), recurse)


def install() -> None:
    """Makes conversions of modules keep parameters that move to or from the device."""
    nn.Module._apply = _apply_keeping_parameters  # type: ignore[method-assign]
    # torch exchanges the contents of wrappers; for tensors of the device, `.data =` is enough.
    module.is_traceable_wrapper_subclass = lambda t: (  # type: ignore[assignment]
        not isinstance(t, XLAShardedTensor) and _is_traceable_wrapper_subclass(t)
    )
