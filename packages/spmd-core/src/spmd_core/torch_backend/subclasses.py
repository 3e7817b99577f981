"""The user's subclasses of Tensor and Parameter, on the device.

A tensor of the device has the class `XLAShardedTensor`, and torch gives a tensor only one class. So
a tensor of the device with the user's class gets a class derived from both, made here: operations
reach the user's `__torch_function__`, then the router, to which the tensor is a plain one.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from spmd_core.dispatch import router
from spmd_core.errors import UnsupportedOpError
from spmd_core.graph.storage import Handle
from spmd_core.recording.inference import map_tensors
from spmd_core.tensor.selected_tensor import SelectedTensor
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, replace_handle, wrap_alias

aten = torch.ops.aten
_disabled = torch._C._disabled_torch_function_impl
_make_on_host: Callable[..., torch.Tensor] = torch.Tensor._make_subclass


def user_class(cls: Any) -> Any:
    """The user's class of a class on the device: the reverse of `device_class`."""
    given = getattr(cls, "_user_class", cls)
    return torch.Tensor if given is XLAShardedTensor else given


@cache
def device_class(cls: Any) -> Any:
    """The class of the tensors of the device that are instances of `cls`.

    Raises:
        UnsupportedOpError: `cls` intercepts operations below autograd, or has slots.
    """
    if issubclass(cls, XLAShardedTensor):
        return cls
    if cls in (torch.Tensor, nn.Parameter):
        return XLAShardedTensor  # which `nn.Parameter` marks by an attribute
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedOpError(
            "a tensor of device 'xla' records operations in its own __torch_dispatch__; got the "
            f"class {cls.__name__}, which has another one. Write {cls.__name__} as a wrapper that "
            "holds tensors (torch.Tensor._make_wrapper_subclass), or with __torch_function__."
        )
    if any(getattr(base, "__slots__", ()) for base in cls.__mro__):
        raise UnsupportedOpError(
            "a tensor of device 'xla' can take a class without __slots__ only; got the class "
            f"{cls.__name__}. Remove its __slots__."
        )
    members: dict[str, Any] = {
        "_user_class": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__torch_dispatch__": classmethod(dispatch),
        "__torch_function__": _function_of(cls),
    }
    if hasattr(cls, "cls_to_become"):  # the class of an uninitialized parameter after its first use
        members["cls_to_become"] = device_class(cls.cls_to_become)
    return type(cls)(cls.__name__, (cls, XLAShardedTensor), members)


def _function_of(cls: Any) -> Any:
    """The user's `__torch_function__`, for which the classes on the device are the user's own."""
    function = cls.__torch_function__
    if function is _disabled:
        return function

    def on_device(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(func, tuple(user_class(t) for t in types), args, kwargs or {})

    return classmethod(on_device)


def dispatch(
    _: type,
    func: torch._ops.OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`__torch_dispatch__`: runs the operation on plain tensors over the same handles."""
    plain: dict[int, XLAShardedTensor] = {}
    given: dict[int, tuple[XLAShardedTensor, Handle]] = {}

    def strip(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, XLAShardedTensor) or t.__class__ is XLAShardedTensor:
            return t
        if id(t) not in plain:
            stripped = plain[id(t)] = wrap_alias(t._handle)
            given[id(stripped)] = (t, t._handle)
        return plain[id(t)]

    result = router.route(
        XLAShardedTensor,
        func,
        types,
        [map_tensors(a, strip) for a in args],
        {name: map_tensors(a, strip) for name, a in (kwargs or {}).items()},
    )
    for stripped in plain.values():
        t, handle = given[id(stripped)]
        if stripped._handle is not handle:  # `t_`, `resize_` and others exchange it
            replace_handle(t, stripped._handle)
    if not isinstance(result, (torch.Tensor, list, tuple)):
        return result
    found = map_tensors(result, lambda r: given[id(r)][0] if id(r) in given else r)
    return tuple(found) if isinstance(result, tuple) else found


def give_class(tensor: Any, cls: Any) -> Any:
    """Makes a plain tensor of the device an instance of the user's class, in place."""
    if issubclass(cls, nn.Parameter):
        tensor._is_param = True
    tensor.__class__ = device_class(cls)
    return tensor


def _as_subclass(self: XLAShardedTensor, cls: Any) -> Any:
    """`tensor.as_subclass(cls)`: a view of the tensor with the user's class; differentiable."""
    with torch._C.DisableTorchFunctionSubclass():
        return give_class(aten.alias.default(self), cls)


def _make_subclass(*args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor._make_subclass(cls, data, require_grad)`, called by subclasses' constructors.

    With any arguments, as `torch.compile` compares the signature with that of its own form.
    """
    cls, data = args[:2]
    if not isinstance(data, XLAShardedTensor):
        return _make_on_host(user_class(cls), *args[1:], **kwargs)
    require_grad = args[2] if len(args) > 2 else kwargs.get("require_grad", False)
    if isinstance(data, SelectedTensor):
        data = data.plain()
    with torch._C.DisableTorchFunctionSubclass():
        plain = aten.detach.default(data)
        plain.requires_grad_(require_grad)
        return give_class(plain, cls)


_new_parameter: Callable[..., Any] = nn.Parameter.__new__


def _new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """`nn.Parameter.__new__`, which drops the user's class for all but plain tensors."""
    made = _new_parameter(cls, data, requires_grad)
    if cls is nn.Parameter or not isinstance(made, XLAShardedTensor) or isinstance(made, cls):
        return made
    return give_class(made, cls)


def install() -> None:
    """Makes torch's functions that change a tensor's class work for tensors of the device."""
    XLAShardedTensor.as_subclass = _as_subclass  # type: ignore[method-assign, assignment]
    # In C++, torch refuses data whose class is not `cls`.
    torch.Tensor._make_subclass = staticmethod(_make_subclass)  # type: ignore[method-assign]
    nn.Parameter.__new__ = staticmethod(_new)  # type: ignore[method-assign]
