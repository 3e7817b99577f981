"""Makes Dynamo see a tensor of the device as it sees one of any other device.

For Dynamo, a class with operations of its own (`__torch_dispatch__`) is a container of other
tensors, of which its graph is to be made. A tensor of the device is a class only because stock
torch offers no other way. So here it is traced as a plain fake tensor on device `xla`.
"""

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor, meta_utils

from spmd_core.marks import custom_ops
from spmd_core.tensor.device_storage import DeviceStorage
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.selected_tensor import SelectedTensor
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.torch_backend.after_import import after_import


def _wrap_tensors(module: Any) -> None:
    """Makes Dynamo track tensors of the device as graph inputs, guarded by their metadata."""
    wrap, class_of = module.VariableBuilder._wrap, module.infer_subclass_type
    properties = module.get_specialized_props

    @functools.wraps(wrap)
    def wrap_plain(self: Any, value: Any) -> Any:
        if isinstance(value, XLAShardedTensor):
            return self.wrap_tensor(value)
        return wrap(self, value)

    module.VariableBuilder._wrap = wrap_plain

    def with_class(target: Any, tx: Any, example_value: Any, subclass_type: Any) -> Any:
        found = properties(target, tx, example_value, subclass_type)
        if subclass_type is None and "class_type" in found and _is_traced(example_value):
            found["class_type"] = XLAShardedTensor
        return found

    module.get_specialized_props = with_class
    # None is for tensors whose class changes no operation.
    module.infer_subclass_type = lambda value: (
        None if type(value) in (XLAShardedTensor, SelectedTensor) else class_of(value)
    )


def _is_traced(value: Any) -> bool:
    """Whether a value of a graph is a tensor of the device."""
    return isinstance(value, fake_tensor.FakeTensor) and value.device.type == "xla"


def _know_parameters(module: Any) -> None:
    """Makes `isinstance(x, Parameter)` look at the tensor, as its class does not tell."""
    theirs = module.BuiltinVariable.call_isinstance

    @functools.wraps(theirs)
    def call(self: Any, tx: Any, arg: Any, types: Any) -> Any:
        found = theirs(self, tx, arg, types)
        if not arg.is_tensor():
            return found
        value = arg.as_proxy().node.meta.get("example_value")
        if not _is_traced(value):
            return found
        given = types.as_python_constant()
        given = given if isinstance(given, tuple) else (given,)
        is_parameter = nn.Parameter in given and isinstance(value, nn.Parameter)
        return type(found)(True) if is_parameter else found

    module.BuiltinVariable.call_isinstance = call


# What Python code may ask a tensor of the device and no other tensor.
_OWN_ATTRIBUTES = frozenset(
    name for name in vars(XLAShardedTensor) if name[:1] != "_" and not hasattr(torch.Tensor, name)
)


def _refuse_attributes(module: Any) -> None:
    """Makes Dynamo leave its graph where the sharding of an intermediate result is asked for.

    It is known when the graph is recorded, as is that of an input that the graph marks.
    """
    # Releases of torch call it otherwise.
    names = [name for name in _ATTRIBUTE_READS if name in vars(module.TensorVariable)]
    assert names, "Dynamo's tensors have a method that reads attributes"
    for name in names:
        method = getattr(module.TensorVariable, name)
        setattr(module.TensorVariable, name, _without_shardings(method))


_ATTRIBUTE_READS = ("var_getattr", "tp_getattro_impl")


def _without_shardings(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def getattr_of(self: Any, tx: Any, name: str) -> Any:
        if (
            name in _OWN_ATTRIBUTES
            and self.device is not None
            and self.device.type == "xla"
            and (self.source is None or any(n.target in _MARKS for n in tx.output.graph.nodes))
        ):
            sys.modules["torch._dynamo.exc"].unimplemented(
                gb_type="Sharding of a traced tensor",
                context=f"{self}.{name}",
                explanation=f"the attribute {name!r} of a tensor of device 'xla' is known when its "
                "operations are recorded, after the function was traced.",
                hints=["Ask for it outside of the compiled function, or before its first mark."],
            )
        return theirs(self, tx, name)

    return getattr_of


# The operators that change the sharding of what they are given.
_MARKS = tuple(mark for packet in custom_ops.IN_PLACE for mark in (packet, packet.default))


def _index_device(own: Any) -> Any:
    """`FakeTensor.__new__` with the device's index: torch knows that of a real tensor only."""

    @functools.wraps(own)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return own(
            cls,
            *(map(_indexed, args)),
            **{name: _indexed(value) for name, value in kwargs.items()},
        )

    return new


def _indexed(value: Any) -> Any:
    """`xla:0` for device "xla"; other values as they are."""
    is_device = isinstance(value, (torch.device, str))
    return XLA_DEVICE if is_device and torch.device(value).type == "xla" else value


def _identify_storages() -> None:
    """Makes fake tensors share a storage where the tensors of the device do.

    Their stand-ins for a storage are new objects each time.
    """
    describer: Any = meta_utils.MetaTensorDescriber
    theirs = describer.get_storage_id

    @functools.wraps(theirs)
    def get_storage_id(self: Any, storage: Any) -> Any:
        return theirs(self, storage._storage if isinstance(storage, DeviceStorage) else storage)

    describer.get_storage_id = get_storage_id


def _inline_regions(module: Any) -> None:
    """Makes a graph call the graph of a `nested_compile_region` as if it were written out."""

    def call(region: Any, identifier: Any, *operands: Any) -> Any:
        return region(*operands)

    module.invoke_subgraph.py_impl(torch._C.DispatchKey.AutogradXLA)(call)
    module.invoke_subgraph.py_impl(XLAShardedTensor)(call)


def install() -> None:
    """Changes torch's fake tensors now, and Dynamo once it is imported."""
    fake_tensor.FakeTensor.__new__ = staticmethod(  # type: ignore[method-assign]
        _index_device(fake_tensor.FakeTensor.__new__)
    )
    _identify_storages()
    after_import("torch._higher_order_ops.invoke_subgraph", _inline_regions)
    after_import("torch._dynamo.variables.builder", _wrap_tensors)
    after_import("torch._dynamo.variables.builtin", _know_parameters)
    after_import("torch._dynamo.variables.tensor", _refuse_attributes)
