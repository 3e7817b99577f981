"""A device storage's bytes in the form of torch's files: written by pickles, read by loads.

torch writes a tensor as a storage with a location ("cpu", "cuda:0"), an offset, sizes and strides.
Tensors that share a storage share it in the file and after loading. Tensors of the device are
written in this form, with the location "xla:0". So every `map_location` applies to them, and other
tensors can be loaded to the device.
"""

import weakref
from collections import OrderedDict
from typing import Any

import torch

from spmd_core.graph.storage import Handle, Storage, View
from spmd_core.graph.strides import is_dense
from spmd_core.program import execution

aten = torch.ops.aten


class HostBytes(torch.UntypedStorage):
    """Host memory that stands for a storage of the device, for torch's save and load.

    A storage of torch's becomes one when its class is assigned.

    Attributes:
        restored: the storage on the device that has these bytes, while a tensor holds it. Weak, as
            a storage that was loaded holds this memory.
    """

    device = torch.device("xla:0")
    restored: "weakref.ref[Storage] | None" = None


# For each storage that is being written: its version and its bytes, so that tensors of one storage
# share them.
# Guarded by: the GIL. Cleared by: never: freed with the pickle.
_written: "weakref.WeakKeyDictionary[Storage, tuple[int, weakref.ref[HostBytes]]]" = (
    weakref.WeakKeyDictionary()
)


def reduced(tensor: torch.Tensor, handle: Handle) -> Any:
    """What `__reduce_ex__` of a tensor over this handle returns. Waits for the device."""
    if not _shows_memory(handle):
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        handle = copy._handle  # type: ignore[attr-defined]
    spec = handle.spec
    # torch has no typed storage for some dtypes; tensors of these are pickled with their dtype.
    names_dtype = spec.dtype in torch.storage._new_dtypes()
    storage = torch.storage.TypedStorage(
        wrap_storage=_bytes_of(handle.storage),
        dtype=torch.uint8 if names_dtype else spec.dtype,
        _internal=True,
    )
    hooks: OrderedDict[str, Any] = OrderedDict()  # torch writes none either
    common = (storage, handle.offset, spec.shape, spec.strides, tensor.requires_grad, hooks)
    if names_dtype:
        return torch._utils._rebuild_tensor_v3, (*common, spec.dtype)
    return torch._utils._rebuild_tensor_v2, common


def _shows_memory(handle: Handle) -> bool:
    """Whether the tensor's elements are those of its storage, by strides."""
    if not is_dense(handle.storage.spec.shape, handle.storage.spec.strides):
        return False
    for view in handle.chain() if isinstance(handle, View) else ():
        func, args, _ = view.link.call
        changes = args[3] if func is aten.as_strided.default else (func,)
        if aten._conj.default in changes or aten._neg_view.default in changes:
            return False
    return True


def _bytes_of(storage: Storage) -> HostBytes:
    """The storage's memory on the host; the same object as long as it is referenced."""
    version, reference = _written.get(storage, (-1, None))
    kept = None if reference is None or version != storage.version else reference()
    if kept is not None:
        return kept
    spec = storage.spec
    memory = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
    memory.copy_(execution.to_host(storage))
    made: Any = memory.untyped_storage()
    made.__class__ = HostBytes
    made.restored = weakref.ref(storage)  # `copy.copy` makes another tensor over the storage
    _written[storage] = (storage.version, weakref.ref(made))
    bytes_: HostBytes = made
    return bytes_
