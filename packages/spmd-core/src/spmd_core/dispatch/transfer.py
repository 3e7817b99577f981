"""Transfers between device and host: reads, copies, factories, and tensors made like others."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from torch.nn.parameter import is_lazy

from spmd_core import dtypes
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Handle, Storage, View
from spmd_core.graph.strides import is_dense
from spmd_core.graph.values import Entry, Spec, Value
from spmd_core.ops import registry
from spmd_core.ops.kernels.traits import ZEROS
from spmd_core.program import execution, leaves
from spmd_core.recording import inference
from spmd_core.recording.calls import (
    NO_KWARGS,
    Handler,
    from_host,
    functional_handler,
    inherit,
    known,
    record_own,
)
from spmd_core.recording.in_place import in_place_handler
from spmd_core.recording.layouts import require_dense, require_strided
from spmd_core.recording.views import strided_view
from spmd_core.tensor.logical_device import require_logical
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, spec_of, wrap

aten = torch.ops.aten
# The result of these replaces its source, with the same shape, so it gets the same sharding.
_INHERITS_SHARDING = frozenset(
    {
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "clone",
        "_to_copy",
    }
)


def makes_like(func: torch._ops.OpOverload) -> bool:
    """Whether the overload makes a tensor like its first argument, perhaps on another device."""
    name = func._schema.name.split("::")[1]
    return name in _INHERITS_SHARDING or name.startswith("new_")


def like_handler(lowering: registry.Lowering) -> Handler:
    """A handler for `zeros_like`, `clone`, `to(dtype)`, `new_zeros` and similar overloads.

    Recorded here, or run on the device that the `device` argument names.
    """
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
    """The values on the CPU, in a new tensor. Cuts the program, and waits for the device."""
    handle = tensor._handle
    if isinstance(handle, Storage):
        return execution.to_host(handle)
    storage = handle.storage
    if storage.spec.num_bytes <= 1 << 24:
        # All of a small base is read, and torch makes the view on the host: a program for each view
        # would cost a compilation.
        return _view_on_host(handle)
    with lock:
        execution.materialize(storage)
        value = handle.current()
        copy = Storage(
            Value(value.entry, value.inputs, value.numbers),
            Spec.contiguous(handle.spec.shape, handle.spec.dtype),
        )
    return execution.to_host(copy)


def _view_on_host(view: View) -> torch.Tensor:
    spec = view.storage.spec
    host = execution.to_host(view.storage)
    if host.stride() != spec.strides:
        host = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype).copy_(host)
    for step in view.chain():
        func, args, kwargs = step.link.call
        if func is aten.as_strided.default:
            size, strides, offset, changes = args
            host = _memory_on_host(host, changes).as_strided(size, strides, offset)
        else:
            # Resolved at once: the device computes conjugates, so a view of their real or imaginary
            # parts is allowed here.
            host = func(host, *args, **kwargs).resolve_conj().resolve_neg()
    return host.clone(memory_format=torch.contiguous_format)


def _memory_on_host(
    host: torch.Tensor, changes: Sequence[torch.dtype | torch._ops.OpOverload]
) -> torch.Tensor:
    """All elements in the order of memory, after the value changes of a chain of views.

    `recording.views` lists the changes: dtypes, and conjugate or negative views.
    """
    flat = host.as_strided((host.numel(),), (1,))
    for change in changes:
        if isinstance(change, torch.dtype):
            ratio = max(change.itemsize // flat.dtype.itemsize, 1)
            flat = flat[: flat.numel() // ratio * ratio].view(change)
        else:
            flat = change(flat).resolve_conj().resolve_neg()
    return flat


def copy_to(source: XLAShardedTensor, device: torch.device, kwargs: dict[str, Any]) -> torch.Tensor:
    """`tensor.to(another device)`: through the CPU, in the layout that torch gives a copy."""
    host = to_host(source)
    strides = torch.empty_like(
        inference.meta_like(source._handle.spec), memory_format=kwargs.get("memory_format")
    ).stride()
    if strides != host.stride():
        host = torch.empty_strided(host.shape, strides, dtype=host.dtype, device="cpu").copy_(host)
    return host.to(device=device, dtype=kwargs.get("dtype") or host.dtype)


def copy_(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`dst.copy_(src)` between any two devices, or of a number."""
    target, given = args[0], args[1]
    source: Any = given if isinstance(given, torch.Tensor) else torch.tensor(given)
    if target.__class__ is not XLAShardedTensor:
        return target.copy_(to_host(source))
    handle = target._handle
    if source.__class__ is not XLAShardedTensor:
        if is_lazy(source):
            raise ValueError(
                "the values of a parameter or buffer are copied to device 'xla' once it is "
                f"initialized; got one of class {type(source).__name__}. Move it alone with "
                ".to('xla'), or its module, or run the module once."
            )
        if source.__class__ is not torch.Tensor:
            # A user's class, which may intercept what is read here.
            with torch._C.DisableTorchFunctionSubclass():
                source = source.detach()
        require_dense(source, "a copy from a tensor")
        inference.infer(aten.copy_.default, (target, source), {}, spec_of)
        try:
            host = source.detach().to(device="cpu", dtype=target.dtype)
        except NotImplementedError:  # a dtype that torch stores, but does not convert
            inference.require_dtype(source.dtype)
            raise
        if isinstance(handle, Storage) and host.shape == target.shape:
            dtypes.to_jax(host.dtype)
            data = (
                host.clone(memory_format=torch.contiguous_format)
                if host.data_ptr() == source.data_ptr()
                else host.contiguous()
            )
            with lock:
                handle.write(
                    Value.leaf(handle.spec, data, leaves.host_placement(handle.sharding), None)
                )
            return target
        source = from_host(host)
    return _copy_on_device((target, source), NO_KWARGS)


def store(target: Any, result: torch.Tensor) -> Any:
    """Writes a computed result into a tensor, converted to its dtype; returns the tensor."""
    return copy_((target, result), NO_KWARGS)


def resize(target: XLAShardedTensor, shape: Sequence[int]) -> None:
    """Gives an empty `out=` tensor another shape, as torch does; raises for a tensor with elements.

    Raises:
        RuntimeError: the tensor has elements, or is a view.
    """
    if target.numel() != 0 or not isinstance(target._handle, Storage):
        raise RuntimeError(
            f"an `out` tensor must be empty or have the result's shape {tuple(shape)}; "
            f"got {tuple(target.shape)}. Pass torch.empty(0, device='xla')."
        )
    target.data = wrap(new_storage(tuple(shape), target.dtype))


def new_storage(
    shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> Handle:
    """A storage of zeros: memory on the device is never uninitialised.

    If the strides leave gaps or overlap, it is a view of a dense storage.
    """
    dtypes.to_jax(dtype)
    if strides is not None and not is_dense(shape, strides):
        _check_sizes(shape, strides)
        length = 1 + sum((n - 1) * step for n, step in zip(shape, strides)) if all(shape) else 0
        return strided_view(new_storage((length,), dtype), shape, strides, 0)

    def make() -> Entry:
        _check_sizes(shape, strides)
        spec = Spec.contiguous(shape, dtype) if strides is None else Spec.of(shape, strides, dtype)
        return Entry(
            "aten::empty",
            lambda context, inputs, numbers: [jnp.zeros(shape, dtypes.to_jax(dtype))],
            (spec,),
            traits=ZEROS,
        )

    made: XLAShardedTensor = record_own(known(("empty", shape, dtype, strides), make), ())
    return made._handle


def _check_sizes(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    """Raises what torch raises for sizes or strides that no tensor can have."""
    if strides is None:
        torch.empty(shape, device="meta")
    else:
        # Meta tensors take any strides. What the CPU refuses, it refuses before it allocates.
        refused_by = "cpu" if min(strides, default=0) < 0 else "meta"
        torch.empty_strided(shape, strides, device=refused_by)


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> XLAShardedTensor:
    """`aten::empty` on device `xla`, from which torch builds its other factories."""
    require_logical(device)
    require_strided(layout, "aten::empty")
    shape = tuple(size)
    strides = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = tuple(torch.empty(shape, device="meta", memory_format=memory_format).stride())
    return wrap(new_storage(shape, dtype or torch.get_default_dtype(), strides))


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> XLAShardedTensor:
    """`aten::empty_strided` on device `xla`."""
    require_logical(device)
    require_strided(layout, "aten::empty_strided")
    return wrap(new_storage(tuple(size), dtype or torch.get_default_dtype(), tuple(stride)))


def copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """`aten::_copy_from` on device `xla`, by which C++ copies without Python's dispatch.

    `torch.tensor(..., device="xla")` uses it, for instance.
    """
    return copy_((target, source), NO_KWARGS)


def item(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`tensor.item()`. Cuts the program, and waits for the device."""
    return to_host(args[0]).item()


_copy_lowering = registry.find_lowering(aten.copy.default)
assert _copy_lowering is not None
_copy_on_device = in_place_handler(aten.copy_.default, _copy_lowering)
