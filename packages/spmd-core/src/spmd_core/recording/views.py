"""Views and writes: a view is a link of a chain over a shared storage, and a write goes back along the chain."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from spmd_core import dtypes, metrics
from spmd_core.config import config
from spmd_core.errors import UnsupportedOpError
from spmd_core.graph.storage import Handle, Link, Storage, View
from spmd_core.graph.strides import is_dense
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.recording import inference
from spmd_core.recording.calls import NO_KWARGS, Handler, entries, new_entry, remember
from spmd_core.tensor.sharded_tensor import XLA_DEVICE, XLAShardedTensor, spec_of, wrap

aten = torch.ops.aten
_new = torch.Tensor._make_wrapper_subclass
_STRIDED = torch.strided
# A position in a view's arguments that is new in this many different programs becomes an input of the program: each would cost a compile.
_MOVING_AFTER = 3


def lowering_of(func: torch._ops.OpOverload) -> registry.Lowering:
    found = registry.find(func)
    assert found is not None, f"{func} has no lowering"
    return found


# Views.


def view_handler(lowering: registry.Lowering) -> Handler:
    """Records a view of its first argument. The hot path of views: one lookup, no value until somebody reads."""
    func = lowering.overload
    token = object()  # stands for the overload in the keys of `entries`
    links: dict[Any, Link] = {}  # of this overload alone, so that a key need not name it
    find = links.get
    moving = _MOVING.get(func)

    def make(key: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Link:
        base = spec_of(args[0])
        result = inference.infer(func, args, kwargs, spec_of)
        call = (func, tuple(args[1:]), inference.without_placement(kwargs))
        offset = int(result.storage_offset())
        link = None if moving is None else moving(base, offset, result, call)
        if link is None:
            link = Link(new_entry(lowering, result, args, kwargs, ()), call, offset, base=base)
        remember((token, *key), link)
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


def _moves(family: Any) -> bool:
    """Whether a new position in this family of calls should be an input of the program: the family met new ones in several programs before."""
    cuts: list[int] | None = entries.get(family)
    if cuts is None:
        remember(family, cuts := [])
    now = metrics.counter("cuts")
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
    """The slice of `length` from `start` on, with `start` an input of the program; None as long as few starts were met.

    A loop over all positions in one program keeps them static, which partitions and fuses best. A position that changes from program to
    program, such as that of a decoding step in its cache, would cost a compile each time.
    """
    family = ("moving", call[0], base, dim, length)
    if not _moves(family):
        return None
    key = (*family, "entry")
    entry = entries.get(key)
    if entry is None:

        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            piece = lax.dynamic_slice_in_dim(inputs[0], numbers[0].value, length, dim)
            return [piece if keeps else piece.squeeze(dim)]

        def write_back(
            context: registry.Context, inputs: list[Any], numbers: list[Any]
        ) -> list[Any]:
            piece = inputs[1] if keeps else jnp.expand_dims(inputs[1], dim)
            return [lax.dynamic_update_slice_in_dim(inputs[0], piece, numbers[0].value, dim)]

        entry = Entry(
            f"{call[0].name()}.moving", kernel, (Spec.from_tensor(result),), number_kinds=(int,)
        )
        entry.view_write = Entry(f"write.{entry.name}", write_back, (base,), number_kinds=(int,))
        remember(key, entry)
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
    """`detach` and its kin: another tensor over the same handle."""
    return wrap(args[0]._handle)


def pieces_handler(func: Any) -> Handler:
    """`split`, `split_with_sizes`, `unbind`: each piece is a view of its own."""
    select, cut = (
        view_handler(lowering_of(aten.select.int)),
        view_handler(lowering_of(aten.slice.Tensor)),
    )

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        x = args[0]
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        dim = given.get("dim", 0)
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


# By strides: over the storage's memory.


def as_strided(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A view by strides: over the storage itself, in the order of its memory."""
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
        # All of the storage as it is: so what is marked is the storage itself. `empty_like` of a tensor on another device comes here.
        return wrap(whole)
    return wrap(strided_view(handle, size, strides, offset))


def strided_view(
    handle: Handle, size: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> View:
    """The view of the handle's storage, in the handle's dtype, whose element [i, j, ...] is element offset + i * strides[0] + ... of it.

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
            f"as_strided must stay inside the storage; size {size}, strides {strides}, offset {offset} reach element {last} of {reach}. "
            "Use as many sizes as strides, neither negative, within the tensor's own storage."
        )
    return View(storage, storage, strided_link(handle, size, strides, offset), offset)


def strided_link(
    handle: Handle, size: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Link:
    base = handle.storage.spec
    # What a view did to the values themselves, it does to the whole memory: other bits, a conjugate, a sign.
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
    link: Link | None = entries.get(key)
    if link is None:
        entry = _strided_entry(base, changes, Spec.of(size, strides, dtype), offset)
        link = Link(
            entry,
            (aten.as_strided.default, (size, strides, offset, tuple(changes)), {}),
            offset,
            base=base,
        )
        remember(key, link)
    return link


def _strided_entry(base: Spec, changes: list[Any], spec: Spec, offset: int) -> Entry:
    size, strides = list(spec.shape), list(spec.strides)
    if not is_dense(base.shape, base.strides):
        raise UnsupportedOpError(
            f"as_strided needs a storage without gaps; this one has shape {base.shape} and strides {base.strides}. Call contiguous() first."
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
        """Bits of as many whole elements as there are."""
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

    entry = Entry("aten::as_strided", kernel, (spec,))
    entry.view_write = Entry("write.aten::as_strided", write_back, (base,))
    return entry


def conjugated(tensor: torch.Tensor) -> bool:
    """Whether torch would hold the tensor as a conjugate that is not computed yet, so that resolving it makes a copy."""
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
