"""Makes Dynamo see a tensor of the device as it sees one of any other device.

For Dynamo, a class with operations of its own (`__torch_dispatch__`) is a container of other
tensors, of which its graph is to be made. A tensor of the device is a class only because stock
torch offers no other way. So here it is traced as a plain fake tensor on device `xla`.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch._subclasses import fake_tensor, meta_utils

from spmd_core.tensor.device_storage import DeviceStorage
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.selected_tensor import SelectedTensor
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.torch_backend.after_import import after_import


def _wrap_tensors(module: Any) -> None:
    """Makes Dynamo track tensors of the device as graph inputs, guarded by their metadata."""
    wrap, class_of = module.VariableBuilder._wrap, module.infer_subclass_type

    @functools.wraps(wrap)
    def wrap_plain(self: Any, value: Any) -> Any:
        if isinstance(value, XLAShardedTensor):
            return self.wrap_tensor(value)
        return wrap(self, value)

    module.VariableBuilder._wrap = wrap_plain
    # None is for tensors whose class changes nothing.
    module.infer_subclass_type = lambda value: (
        None if type(value) in (XLAShardedTensor, SelectedTensor) else class_of(value)
    )


def _know_the_class(module: ModuleType) -> None:
    """Makes `isinstance(x, XLAShardedTensor)` in a traced function True for those of the device."""
    theirs = module.BuiltinVariable.call_isinstance

    @functools.wraps(theirs)
    def call(self: Any, tx: Any, arg: Any, types: Any) -> Any:
        found = theirs(self, tx, arg, types)
        device = getattr(arg, "device", None)
        if isinstance(device, torch.device) and device.type == "xla":
            given = types.as_python_constant()
            if XLAShardedTensor in (given if isinstance(given, tuple) else (given,)):
                return type(found)(True)
        return found

    module.BuiltinVariable.call_isinstance = call


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


def _run_effects(module: Any) -> None:
    """Makes the graphs of AOTAutograd run operations that it keeps in their order, such as checks.

    The device runs them in the order in which they are recorded.
    """
    own = module.with_effects.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    module.with_effects.py_impl(XLAShardedTensor)(own)


def install() -> None:
    """Changes torch's fake tensors now, and Dynamo once it is imported."""
    fake_tensor.FakeTensor.__new__ = staticmethod(  # type: ignore[method-assign]
        _index_device(fake_tensor.FakeTensor.__new__)
    )
    _identify_storages()
    after_import("torch._higher_order_ops.invoke_subgraph", _inline_regions)
    after_import("torch._higher_order_ops.effects", _run_effects)
    after_import("torch._dynamo.variables.builder", _wrap_tensors)
    after_import("torch._dynamo.variables.builtin", _know_the_class)
