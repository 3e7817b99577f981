"""Handlers that exchange or compare the memory under a tensor: `set_`, `resize_`, `is_set_to`.

No values move; tensors get other handles.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from spmd_core import dtypes
from spmd_core.dispatch.transfer import new_storage
from spmd_core.errors import DeviceMismatchError, UnsupportedOpError
from spmd_core.graph.storage import Handle, Storage, View
from spmd_core.graph.values import Spec
from spmd_core.program import leaves
from spmd_core.recording.views import strided_view
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap
from spmd_core.tensor.stored_bytes import HostBytes

aten = torch.ops.aten


def _replace_memory(target: XLAShardedTensor, handle: Handle) -> XLAShardedTensor:
    # torch's setter: the metadata alone would be checked against the size of the old storage.
    target.data = wrap(handle)
    return target


def set_to_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`target.set_(source)`: `target` becomes a tensor over the source's memory.

    It gets the source's shape and strides.
    """
    target, source = args[0], args[1]
    if source.__class__ is not XLAShardedTensor or target.__class__ is not XLAShardedTensor:
        raise DeviceMismatchError(
            "set_ needs two tensors on one device; got a "
            f"source on {source.device} for a tensor on {target.device}. Move it with .to('xla')."
        )
    return _replace_memory(target, source._handle)


def set_to_nothing(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`target.set_()`: `target` becomes an empty tensor of one dim."""
    return _replace_memory(args[0], new_storage((0,), args[0].dtype))


def set_to_storage(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`target.set_(storage, offset, size, stride)`, by which `torch.load` makes tensors.

    Tensors over the same bytes share a storage on the device.

    Raises:
        UnsupportedOpError: the storage is not one that `torch.load` mapped to the device.
    """
    target, source = args[0], args[1]
    if not isinstance(source, HostBytes):
        _refuse_storage(target)
    dtypes.to_jax(target.dtype)
    # Without sizes, all elements; without strides, contiguous ones.
    offset, size, *rest = args[2:] or (0, (source.nbytes() // target.dtype.itemsize,))
    size = tuple(size)
    strides = tuple(rest[0]) if rest else Spec.contiguous(size, target.dtype).strides
    return _replace_memory(target, _over_bytes(source, target.dtype, size, strides, offset))


def _over_bytes(
    source: HostBytes,
    dtype: torch.dtype,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
) -> Handle:
    """The storage over these bytes, or the view of it, that has these elements."""
    if 0 in size:
        return new_storage(size, dtype)
    spec = Spec.of(size, strides, dtype)
    # If the first tensor covers all bytes, it is the storage itself, not a view of it, as marks and
    # updates of a storage cost least.
    covers = spec is spec.logical and offset == 0 and spec.num_bytes == source.nbytes()
    storage = None if source.restored is None else source.restored()
    if storage is None:
        if not covers:
            spec = Spec.contiguous((source.nbytes() // dtype.itemsize,), dtype)
        # Without a copy, as torch reads old files after it has made the tensors.
        data = torch.empty(0, dtype=dtype, device="cpu").set_(source, 0, spec.size, spec.strides)
        storage = Storage.of_leaf(spec, data, leaves.host_placement())
        source.restored = weakref.ref(storage)
    if covers and storage.spec is spec:
        return storage
    if storage.spec.dtype is dtype:
        return strided_view(storage, size, strides, offset)
    whole = wrap(strided_view(storage, (storage.spec.num_elements,), (1,), 0))
    other: Any = whole.view(dtype)
    return strided_view(other._handle, size, strides, offset)


def _refuse_storage(target: XLAShardedTensor) -> NoReturn:
    raise UnsupportedOpError(
        "set_ to a storage object exchanges the memory under a tensor, which "
        f"a recorded value does not have; got a call on a tensor of shape {tuple(target.shape)}. "
        "Write target.set_(other_tensor), or assign tensor.data = other; "
        "to save a scripted module, write torch.jit.save(module.cpu(), path)."
    )


def resize_(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`x.resize_(size)`: the first elements of x's memory from its offset on, contiguous.

    The memory stays shared with other tensors. Memory that is too short is replaced by a longer one
    with the same beginning, which is possible only if no other tensor shares it.

    Raises:
        UnsupportedOpError: the memory would have to grow under another tensor.
    """
    target, size = args[0], tuple(args[1])
    is_unshared = _is_unshared(target)  # before a local name holds the handle
    memory_format = kwargs.get("memory_format")
    if any(n < 0 for n in size):
        raise RuntimeError(
            f"resize_ needs sizes of at least 0; got {size}. "
            "Give the number of elements of each dim."
        )
    meta = torch.empty(
        size,
        dtype=target.dtype,
        device="meta",
        memory_format=memory_format or torch.contiguous_format,
    )
    strides = tuple(meta.stride())
    handle = target._handle
    if size == handle.spec.shape and (memory_format is None or strides == handle.spec.strides):
        return target
    available = handle.storage.spec.num_bytes // target.dtype.itemsize
    needed = handle.offset + meta.numel()
    if needed <= available:
        return _replace_memory(target, strided_view(handle, size, strides, handle.offset))
    if available == 0:
        return _replace_memory(target, new_storage(size, target.dtype, strides))
    if handle.offset or not is_unshared:
        raise UnsupportedOpError(
            "resize_ can lengthen the memory of a tensor only where no other tensor shares it; "
            f"got size {size}, which needs {needed} elements where there are {available}, "
            "on a tensor that is a view or has one. "
            f"Make a new tensor: torch.empty({size}, device='xla')."
        )
    longer = new_storage(size, target.dtype, strides)
    wrap(strided_view(longer, (available,), (1,), 0)).copy_(
        wrap(strided_view(handle, (available,), (1,), 0))
    )
    return _replace_memory(target, longer)


def resize_out(target: XLAShardedTensor, result: torch.Tensor) -> None:
    """Gives an `out=` tensor the shape and the strides of a result, as torch does."""
    shape, strides = tuple(result.shape), result.stride()
    if target._handle.storage.spec.num_bytes == 0:
        _replace_memory(target, new_storage(shape, target.dtype, strides))
        return
    resize_((target, shape), {})
    handle = target._handle
    if handle.spec.strides != strides:
        _replace_memory(target, strided_view(handle, shape, strides, handle.offset))


def _is_unshared(target: XLAShardedTensor) -> bool:
    """Whether no other tensor shares the storage of this one.

    Compares the number of references with that of a new tensor of the same kind.
    """
    storage = new_storage((1,), target.dtype)
    fresh = wrap(storage)
    if isinstance(target._handle, View):
        if target._handle.base is not target._handle.storage:
            return False
        fresh = wrap(strided_view(storage, (1,), (1,), 0))
    del storage
    held = sys.getrefcount(target._handle) <= sys.getrefcount(fresh._handle)
    return held and sys.getrefcount(target._handle.storage) <= sys.getrefcount(
        fresh._handle.storage
    )


def is_set_to(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors consist of the same elements of the same memory."""
    a, b = args[0]._handle, args[1]._handle if isinstance(args[1], XLAShardedTensor) else None
    return b is not None and a.storage is b.storage and (a.spec, a.offset) == (b.spec, b.offset)
