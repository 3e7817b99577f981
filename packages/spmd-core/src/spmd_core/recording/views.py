"""Records views: a view is a link of a chain of views over a shared storage."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from spmd_core import counters, dtypes
from spmd_core.config import config
from spmd_core.errors import UnsupportedOpError
from spmd_core.graph.storage import Handle, Link, Storage, View
from spmd_core.graph.strides import is_dense
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.ops.kernels.blocks import write_block_in_dim
from spmd_core.ops.kernels.traits import BLOCK
from spmd_core.recording import inference, schema
from spmd_core.recording.calls import NO_KWARGS, Handler, known, new_entry, remember
from spmd_core.runtime import devices
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, spec_of, wrap_alias

aten = torch.ops.aten
_new = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided
_is_inference_mode = torch.is_inference_mode_enabled
# When a position in a view's arguments has changed in this many programs, it becomes an input of
# the program: as a constant, each new position would cost a compilation.
_MOVING_AFTER = 3


def lowering_of(func: torch._ops.OpOverload) -> registry.Lowering:
    """The lowering of an overload that has one."""
    found = registry.find_lowering(func)
    assert found is not None, f"{func} has no lowering"
    return found


def view_handler(lowering: registry.Lowering) -> Handler:
    """Records a view of its first argument.

    The hot path of views: one lookup, and no value until the view is read.
    """
    func = lowering.overload
    token = object()  # stands for the overload in the keys of `entries`
    links: dict[Any, Link] = {}  # for this overload alone, so that keys need not contain it
    find = links.get
    moving = _MOVING.get(func)

    def make(key: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Link:
        base = spec_of(args[0])
        try:
            result = inference.infer(func, args, kwargs, spec_of)
        except RuntimeError as error:
            if func is aten.view.default:
                _explain_local_sizes(error, base, args[1])
            raise
        inference.require_dtype(result.dtype)
        call = (func, tuple(args[1:]), inference.without_placement(kwargs))
        offset = int(result.storage_offset())
        link = None if moving is None else moving(base, offset, result, call)
        if link is None:
            entry = new_entry(lowering, result, args, kwargs, ())
            entry.arguments = _without_base(entry)
            entry.key = (token, *key)
            link = Link(entry, call, offset, base=base)
        link = remember((token, *key), link)
        if len(links) >= config.max_op_entries:
            links.clear()
        links[key] = link
        return link

    def record(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        base = args[0]._handle
        # Every argument is static: positions, sizes, dims, a dtype.
        if kwargs is NO_KWARGS and len(args) == 2:
            a = args[1]
            key: Any = (base.spec, tuple(a) if a.__class__ is list else a)
        else:
            rest = [tuple(a) if a.__class__ is list else a for a in args[1:]]
            key = (base.spec, *rest, *kwargs.items())
        link = find(key)
        if link is None:
            link = make(key, args, kwargs)
        spec, offset = link.spec, link.offset
        if base.__class__ is Storage:
            view = View(base, base, link, offset)
        else:
            if base.offset:
                offset = link.begins_at(base.offset)
            view = View(base, base.storage, link, offset)
        if view.storage.inference is not _is_inference_mode():
            return wrap_alias(view)
        tensor = _new(
            XLAShardedTensor,
            spec.size,
            spec.strides,
            offset,
            None,
            spec.dtype,
            _STRIDED,
            XLA_DEVICE,
        )
        tensor._handle = view
        return tensor

    return record


def _explain_local_sizes(error: RuntimeError, base: Spec, sizes: Sequence[int]) -> None:
    """Adds a note to the error of a view whose sizes are those of one device's part."""
    wanted = math.prod(sizes)
    times, rest = divmod(base.num_elements, wanted) if wanted > 0 else (0, 0)
    if rest == 0 and times > 1 and devices.global_runtime_device_count() % times == 0:
        error.add_note(
            f"A tensor of device xla is always the whole one, and this one has {times} times the "
            "elements of that view: do not divide its sizes, such as the number of heads, by the "
            "number of devices."
        )


def _without_base(entry: Entry) -> dict[str, Any]:
    """A view's arguments without its base, which is the view's input in the graph."""
    own = entry.arguments or {}
    return {name: given for name, given in own.items() if not isinstance(given, Spec)}


def _moves(family: Any) -> bool:
    """Whether a new position in this family of calls should be an input of the program.

    That is so once new positions came in more than `_MOVING_AFTER` programs.
    """
    cuts: list[int] = known(family, list)
    now = counters.counter("cuts")
    if not cuts or cuts[-1] != now:
        cuts.append(now)
        del cuts[: -_MOVING_AFTER - 1]
    return len(cuts) > _MOVING_AFTER


def _moving_link(
    base: Spec,
    offset: int,
    result: torch.Tensor,
    call: Any,
    *,
    dim: int,
    start: int,
    length: int,
    keeps: bool,
) -> Link | None:
    """The slice of `length` elements from `start` on, with `start` as an input of the program.

    A loop over all positions in one program keeps them static, which partitions and fuses best. A
    position that changes from program to program, such as a decoding step's in its cache, would
    cost a compilation each time.

    Args:
        base: the spec of the base.
        offset: where the view begins in the base, in elements.
        result: the view, as a meta tensor.
        call: of the link.
        dim: the dim that is sliced.
        start: the position.
        length: the number of elements.
        keeps: whether the view keeps the dim; if not, `length` is 1.

    Returns:
        The link; None as long as the position should be static (see `_moves`).
    """
    family = ("moving", call[0], base, dim, length)
    if not _moves(family):
        return None

    def make() -> Entry:
        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            piece = lax.dynamic_slice_in_dim(inputs[0], numbers[0].value, length, dim)
            return [piece if keeps else piece.squeeze(dim)]

        def write_back(
            context: registry.Context, inputs: list[Any], numbers: list[Any]
        ) -> list[Any]:
            piece = inputs[1] if keeps else jnp.expand_dims(inputs[1], dim)
            return [write_block_in_dim(inputs[0], piece, numbers[0].value, dim)]

        spec, name = Spec.from_tensor(result), f"{call[0].name()}.moving"
        arguments = {"dim": dim, "start": int, "length": length}
        entry = Entry(name, kernel, (spec,), number_kinds=(int,), arguments=arguments, traits=BLOCK)
        entry.view_write = Entry(
            f"write.{name}", write_back, (base,), number_kinds=(int,), replaces=(0,)
        )
        entry.view_write.key = ("write", *family)
        return entry

    entry = known((*family, "entry"), make)
    return Link(entry, call, offset, numbers=(start,), base=base)


def _moving_select(base: Spec, offset: int, result: torch.Tensor, call: Any) -> Link | None:
    dim, index = call[1]
    dim %= len(base.shape)
    return _moving_link(
        base, offset, result, call, dim=dim, start=index % base.shape[dim], length=1, keeps=False
    )


def _moving_slice(base: Spec, offset: int, result: torch.Tensor, call: Any) -> Link | None:
    given: list[Any] = [*call[1], *(0, None, None, 1)[len(call[1]) :]]
    dim, start, end, step = given[0] % len(base.shape), *given[1:]
    length = result.shape[dim]
    if call[2] or step != 1 or length in (0, base.shape[dim]):
        return None
    first, _, _ = slice(start, end).indices(base.shape[dim])
    return _moving_link(base, offset, result, call, dim=dim, start=first, length=length, keeps=True)


_MOVING: dict[Any, Callable[[Spec, int, torch.Tensor, Any], Link | None]] = {
    aten.select.int: _moving_select,
    aten.slice.Tensor: _moving_slice,
}


def alias(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Records `detach` and similar operations: another tensor over the same handle."""
    return wrap_alias(args[0]._handle)


def pieces_handler(func: Any) -> Handler:
    """Records `split`, `split_with_sizes` and `unbind`: each result is a separate view.

    Their `unsafe` forms, too, whose results share memory as well: only autograd treats them
    differently.
    """
    select, cut = (
        view_handler(lowering_of(aten.select.int)),
        view_handler(lowering_of(aten.slice.Tensor)),
    )

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        x = args[0]
        dim = schema.of(func).by_name(args, kwargs).get("dim", 0)
        dim = dim % x.dim() if x.dim() else dim
        metas = inference.infer(func, args, kwargs, spec_of)
        if func is aten.unbind.int:
            return [select((x, dim, i), NO_KWARGS) for i in range(len(metas))]
        pieces, start = [], 0
        for meta in metas:
            pieces.append(cut((x, dim, start, start + meta.shape[dim]), NO_KWARGS))
            start += meta.shape[dim]
        return pieces

    return handler


def as_strided(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Records a view by strides, whose base is the storage itself, in the order of its memory."""
    size, strides = tuple(args[1]), tuple(args[2])
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    handle = args[0]._handle
    whole, offset = handle.storage, handle.offset if offset is None else offset
    if (size, strides, offset, handle.spec.dtype) == (
        whole.spec.shape,
        whole.spec.strides,
        0,
        whole.spec.dtype,
    ):
        # The whole storage as it is: return the storage, so that a mark on the result is a mark on
        # the storage. `empty_like` of a tensor on another device calls this.
        return wrap_alias(whole)
    return wrap_alias(strided_view(handle, size, strides, offset))


def strided_view(
    handle: Handle, size: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> View:
    """The view by strides of the handle's storage, in the handle's dtype.

    Its element [i, j, ...] is the storage's element offset + i * strides[0] + j * strides[1] + ...

    Raises:
        RuntimeError: an element would lie outside the storage.
    """
    storage, dtype = handle.storage, handle.spec.dtype
    reach = storage.spec.num_bytes // dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, strides)) if all(size) else -1
    if (
        len(size) != len(strides)
        or offset < 0
        or any(step < 0 for step in strides)
        or last >= reach
    ):
        raise RuntimeError(
            f"as_strided must stay inside the storage; size {size}, strides {strides}, "
            f"offset {offset} reach element {last} of {reach}. "
            "Use as many sizes as strides, neither negative, within the tensor's own storage."
        )
    return View(storage, storage, strided_link(handle, size, strides, offset), offset)


def strided_link(
    handle: Handle, size: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Link:
    """The link of `strided_view`."""
    base = handle.storage.spec
    # Where a view in the chain changes the values (another dtype's bits, a conjugate, a sign), the
    # same change is applied to the whole memory.
    changes: list[Any] = []
    dtype = base.dtype
    for view in handle.chain() if isinstance(handle, View) else ():
        func = view.link.call[0]
        if func in (aten._conj.default, aten._neg_view.default):
            changes.append(func)
        elif func is aten.as_strided.default:
            changes.extend(view.link.call[1][3])
        elif view.spec.dtype != dtype:
            changes.append(view.spec.dtype)
        dtype = view.spec.dtype
    key = ("as_strided", base, tuple(changes), size, strides, offset)
    call: Any = (aten.as_strided.default, (size, strides, offset, tuple(changes)), {})

    def make() -> Link:
        entry = _strided_entry(base, changes, Spec.of(size, strides, dtype), offset)
        entry.key = key
        return Link(entry, call, offset, base=base)

    return known(key, make)


def _strided_entry(base: Spec, changes: list[Any], spec: Spec, offset: int) -> Entry:
    size, strides = list(spec.shape), list(spec.strides)
    if not is_dense(base.shape, base.strides):
        raise UnsupportedOpError(
            f"as_strided needs a storage without gaps; this one has shape {base.shape} "
            f"and strides {base.strides}. Call contiguous() first."
        )
    order = sorted(range(len(base.shape)), key=lambda d: -base.strides[d])
    dense, inverse = (
        tuple(base.shape[d] for d in order),
        tuple(order.index(d) for d in range(len(order))),
    )
    bits = lowering_of(aten.view.dtype).function
    read, back = (
        lowering_of(aten.as_strided.default).function,
        registry.find_view_write(aten.as_strided.default),
    )
    assert back is not None

    def reinterpret(flat: Any, dtype: torch.dtype) -> Any:
        """The memory as elements of `dtype`, without a remainder that is too short for one."""
        ratio = max(dtype.itemsize // flat.dtype.itemsize, 1)
        flat = flat[: flat.shape[0] // ratio * ratio]
        length = flat.size * flat.dtype.itemsize // dtype.itemsize
        return bits(registry.Context((registry.Out((length,), dtype),), "cpu"), flat, dtype)

    def change(flat: Any, how: Any) -> Any:
        if how is aten._conj.default:
            return jnp.conj(flat)
        return -flat if how is aten._neg_view.default else reinterpret(flat, how)

    def change_back(flat: Any, how: Any, before: Any) -> Any:
        if not isinstance(how, torch.dtype):
            return change(flat, how)
        restored = reinterpret(flat, dtypes.to_torch(before.dtype))
        return jnp.concatenate([restored, before[restored.shape[0] :]])

    def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
        flat = inputs[0].transpose(order).reshape(-1)
        for how in changes:
            flat = change(flat, how)
        return [read(context, flat, size, strides, offset)]

    def write_back(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
        stages = [inputs[0].transpose(order).reshape(-1)]
        for how in changes:
            stages.append(change(stages[-1], how))
        flat = back(stages.pop(), inputs[1], size, strides, offset)
        for how, before in zip(reversed(changes), reversed(stages)):
            flat = change_back(flat, how, before)
        return [flat.reshape(dense).transpose(inverse)]

    arguments = {"size": spec.shape, "stride": spec.strides, "storage_offset": offset}
    entry = Entry("aten::as_strided", kernel, (spec,), arguments=arguments, traits=BLOCK)
    entry.view_write = Entry("write.aten::as_strided", write_back, (base,), replaces=(0,))
    return entry


def conjugated(tensor: torch.Tensor) -> bool:
    """Whether the tensor would be a lazy conjugate in torch, so that resolving it copies it."""
    odd = False
    handle = tensor._handle if isinstance(tensor, XLAShardedTensor) else None
    for view in handle.chain() if isinstance(handle, View) else ():
        func = view.link.call[0]
        if func is aten._conj.default:
            odd = not odd
        elif func is aten.as_strided.default:
            odd = view.link.call[1][3].count(aten._conj.default) % 2 == 1
        elif func is aten.view_as_real.default:
            odd = False
    return odd and tensor.is_complex()
