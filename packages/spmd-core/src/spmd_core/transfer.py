"""Between the device and the host: reads, copies, factories, and tensors made like others."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from spmd_core import dtypes, execution, inference
from spmd_core.aliasing import in_place_handler
from spmd_core.graph import Entry, Spec, Value
from spmd_core.ops import registry
from spmd_core.recording import NO_KWARGS, Handler, entries, from_host, functional_handler, inherit, remember
from spmd_core.storage import Storage, lock
from spmd_core.tensor import XLAShardedTensor, spec_of, wrap

aten = torch.ops.aten
# Same shape in, same shape out, and the result stands for its source: it is sharded like it.
_INHERITS_SHARDING = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "clone", "_to_copy"})


def makes_like(func: torch._ops.OpOverload) -> bool:
    """Whether the overload makes a tensor in the likeness of its first argument, perhaps on another device."""
    name = func._schema.name.split("::")[1]
    return name in _INHERITS_SHARDING or name.startswith("new_")


def like_handler(lowering: registry.Lowering) -> Handler:
    """`zeros_like`, `clone`, `to(dtype)`, `new_zeros`, ...: recorded here, or made where their `device` argument says."""
    func = lowering.overload
    record = functional_handler(lowering)
    inherits = func._schema.name.split("::")[1] in _INHERITS_SHARDING

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type != "xla":
            if func is aten._to_copy.default:
                return copy_to(args[0], device, kwargs)
            return func(inference.meta_like(spec_of(args[0])), *args[1:], **kwargs)
        result = record(args, kwargs)
        if inherits:
            inherit(result, args[0])
        return result

    return handler


def to_host(tensor: XLAShardedTensor) -> torch.Tensor:
    """The values on the CPU, in a new tensor. Cuts, and waits for the device."""
    handle = tensor._handle
    if isinstance(handle, Storage):
        return execution.to_host(handle)
    base, spec = handle.storage.spec, handle.spec
    if base.num_bytes <= 1 << 24 and base is Spec.contiguous(base.shape, base.dtype) and spec.dtype is base.dtype:
        # A small base is read whole: a program for each different view of it would cost a compile.
        return execution.to_host(handle.storage).as_strided(spec.shape, spec.strides, spec.offset).clone(memory_format=torch.contiguous_format)
    with lock:
        execution.materialize(handle.storage)
        copy = Storage(handle.current(), Spec.contiguous(spec.shape, spec.dtype))
        value = handle.current()
        handle.value = Value(value.entry, value.inputs, ())  # the copy owns its value alone
    return execution.to_host(copy)


def copy_to(source: XLAShardedTensor, device: torch.device, kwargs: dict[str, Any]) -> torch.Tensor:
    """`tensor.to(another device)`: through the CPU."""
    host = to_host(source)
    return host.to(device=device, dtype=kwargs.get("dtype") or host.dtype)


def copy_(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`dst.copy_(src)` between any two devices."""
    target, source = args[0], args[1]
    if target.__class__ is not XLAShardedTensor:
        return target.copy_(to_host(source))
    handle = target._handle
    if source.__class__ is not XLAShardedTensor:
        inference.infer(aten.copy_.default, (target, source), {}, spec_of)
        host = source.detach().to(device="cpu", dtype=target.dtype)
        if isinstance(handle, Storage) and host.shape == target.shape:
            dtypes.to_jax(host.dtype)
            data = host.clone(memory_format=torch.contiguous_format) if host.data_ptr() == source.data_ptr() else host.contiguous()
            with lock:
                handle.write(Value.leaf(handle.spec, data, execution.host_placement(handle.sharding), None))
            return target
        source = from_host(host)
    return _copy_on_device((target, source), NO_KWARGS)


def store(target: Any, result: torch.Tensor) -> Any:
    """Writes a computed result into a tensor, converted to its dtype; returns the tensor."""
    return copy_((target, result), NO_KWARGS)


def resize(target: XLAShardedTensor, shape: Sequence[int]) -> None:
    """What torch does to an `out=` tensor of another shape: an empty one takes the shape, others are refused."""
    if target.numel() != 0 or not isinstance(target._handle, Storage):
        raise RuntimeError(
            f"an `out` tensor must be empty or have the result's shape {tuple(shape)}; got {tuple(target.shape)}. Pass torch.empty(0, device='xla')."
        )
    target.data = wrap(new_storage(tuple(shape), target.dtype))


def new_storage(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Storage:
    """A storage of zeros: memory on the device is never uninitialised."""
    dtypes.to_jax(dtype)
    key = ("empty", shape, dtype, strides)
    entry = entries.get(key)
    if entry is None:
        spec = Spec.contiguous(shape, dtype) if strides is None else Spec.of(shape, strides, dtype)
        entry = Entry("aten::empty", lambda context, inputs, numbers: [jnp.zeros(shape, dtypes.to_jax(dtype))], (spec,))
        remember(key, entry)
    with lock:
        return Storage(Value(entry, (), ()), entry.spec)


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> XLAShardedTensor:
    """`aten::empty` on device `xla`, from which torch builds its other factories."""
    shape = tuple(size)
    strides = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = tuple(torch.empty(shape, device="meta", memory_format=memory_format).stride())
    return wrap(new_storage(shape, dtype or torch.get_default_dtype(), strides))


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> XLAShardedTensor:
    """`aten::empty_strided` on device `xla`."""
    return wrap(new_storage(tuple(size), dtype or torch.get_default_dtype(), tuple(stride)))


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten::_copy_from` on device `xla`: how C++ copies where it goes round Python's dispatch, as `torch.tensor(..., device="xla")` does."""
    return copy_((target, source), NO_KWARGS)


def item(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`tensor.item()`. Cuts, and waits for the device."""
    return to_host(args[0]).item()


_copy_lowering = registry.find(aten.copy.default)
assert _copy_lowering is not None
_copy_on_device = in_place_handler(aten.copy_.default, _copy_lowering)
