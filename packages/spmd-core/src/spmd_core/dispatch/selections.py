"""Operations on `x[mask]` without reading how many elements the mask selects.

Elementwise operations compute all elements, selected or not. `x[mask] = values` then takes those at
True, by `where`, and so does a sum. Any other operation, and one whose operands must have the
selected number of elements, gets the selected elements alone, for which the mask is read.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from spmd_core import releases
from spmd_core.dispatch import masked_writes
from spmd_core.graph.storage import read
from spmd_core.recording import schema
from spmd_core.recording.calls import Handler, from_host
from spmd_core.recording.inference import map_tensors
from spmd_core.recording.stand_ins import leaves_of
from spmd_core.tensor.selected_tensor import (
    Count,
    SelectedTensor,
    Selection,
    concrete,
    counted,
)
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

aten = torch.ops.aten
_PRESERVED = (None, torch.contiguous_format, torch.preserve_format)
# Called once, when the first tensor without a known size is made: from then on autograd gives
# SymInts to operations. Set by `dispatch.router`.
# Guarded by: imports.
# Cleared by: its call; not needed: a handler that takes no SymInt takes numbers, too.
on_first: Callable[[], None] | None = None


def select(x: torch.Tensor, mask: XLAShardedTensor, place: int) -> SelectedTensor:
    """`x[mask]`, whose size is not read yet.

    Args:
        x: a tensor on the device.
        mask: a boolean tensor on the device, not 0-dim, whose dims agree with those of x from
            `place` on.
        place: the number of dims of x before those of the mask.
    """
    global on_first
    if on_first is not None:
        announce, on_first = on_first, None
        announce()
    return SelectedTensor.over(Selection(aten.clone.default(x), Count(mask), place))


def route(
    cls: type[SelectedTensor] | None,
    func: torch._ops.OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`SelectedTensor.__torch_dispatch__`: records an operation on all elements, if possible."""
    kwargs = kwargs or {}
    if func in _SIZES:
        return _sizes(func, args[0], args[1:])
    handler = _HANDLERS.get(func) or (_elementwise(func) if is_elementwise(func) else None)
    if handler is not None and not any(
        t._selection.dense is not None for t in _selected([*args, *kwargs.values()])
    ):
        result = handler(args, kwargs)
        if result is not None:
            return result
    return _on_dense(func, args, kwargs)


def _selected(args: Iterable[Any]) -> list[SelectedTensor]:
    return [t for t in leaves_of(args) if isinstance(t, SelectedTensor)]


def _on_dense(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operation on the selected elements alone. Reads the masks."""
    given: dict[int, tuple[SelectedTensor, Any]] = {}
    plain: dict[int, XLAShardedTensor] = {}

    def strip(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, SelectedTensor):
            return t
        if id(t) not in plain:
            stripped = plain[id(t)] = t.plain()
            given[id(stripped)] = (t, stripped._handle)
        return plain[id(t)]

    result = func(
        *(map_tensors(concrete(a), strip) for a in args),
        **{name: map_tensors(concrete(a), strip) for name, a in kwargs.items()},
    )
    for stripped in plain.values():
        t, handle = given[id(stripped)]
        if stripped._handle is not handle:  # `t_`, `resize_` and others exchange it
            t.data = stripped
    if not isinstance(result, (torch.Tensor, list, tuple)):
        return result
    found = map_tensors(result, lambda r: given[id(r)][0] if id(r) in given else r)
    return tuple(found) if isinstance(result, tuple) else found


@cache
def is_elementwise(func: torch._ops.OpOverload) -> bool:
    """Whether the only result is computed element by element from the operands."""
    form = (schema.functional(func) if schema.of(func).written else func) or func
    tags = {*func.tags, *form.tags}
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and len(func._schema.returns) == 1
        and str(func._schema.returns[0].type) == "Tensor"
        and not schema.of(func).out_names
        and schema.of(func).written in ((), schema.of(func).names[:1])
    )


def _elementwise(func: torch._ops.OpOverload) -> Handler:
    """A handler that records the operation on all elements, if its operands broadcast to them."""
    is_written = bool(schema.of(func).written)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        first = _selected([*args, *kwargs.values()])[0]._selection
        if is_written and not isinstance(args[0], SelectedTensor):
            return None
        shapes: list[Sequence[int]] = []

        def place(t: torch.Tensor) -> torch.Tensor | None:
            placed = _placed(t, first)
            shapes.append(() if placed is None else placed.shape)
            return placed

        all_args = [map_tensors(a, place) for a in args]
        all_kwargs = {name: map_tensors(a, place) for name, a in kwargs.items()}
        is_missing = any(
            a is None and b is not None
            for a, b in zip([*all_args, *all_kwargs.values()], [*args, *kwargs.values()])
        )
        if is_missing or not _broadcast(shapes, shapes[0] if is_written else None):
            return None
        result = func(*all_args, **all_kwargs)
        return args[0] if is_written else SelectedTensor.over(first.like(result))

    return handler


def _placed(t: torch.Tensor, selection: Selection) -> torch.Tensor | None:
    """An operand for all elements; None if it must have the selected number of elements."""
    full = selection.full
    assert full is not None
    behind, num_dims = selection.num_behind, selection.count.mask.dim()
    if isinstance(t, SelectedTensor):
        other = t._selection
        agrees = (other.count is selection.count or other.count.is_of(selection.count._given)) and (
            other.place,
            other.num_behind,
        ) == (selection.place, behind)
        return other.full if agrees else None
    if t.dim() <= behind:
        return t
    dim = t.dim() - behind - 1
    if dim > selection.place or t.shape[dim] != 1:
        return None
    for _ in range(num_dims - 1):
        t = t.unsqueeze(dim)
    return t


def _broadcast(shapes: list[Sequence[int]], into: Sequence[int] | None) -> bool:
    """Whether shapes broadcast, and to this one if it is given."""
    try:
        found = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False  # torch's error should name the shapes of the selected elements
    return into is None or tuple(found) == tuple(into)


def _at_true(selection: Selection) -> torch.Tensor:
    """The mask in a shape that broadcasts over all elements."""
    mask = selection.count.mask
    return mask.reshape(*mask.shape, *(1 for _ in range(selection.num_behind)))


def _dense(selection: Selection) -> XLAShardedTensor:
    """The selected elements alone. Reads the mask."""
    assert selection.full is not None
    positions = selection.count.on_host.nonzero(as_tuple=True)
    indices = [*(None for _ in range(selection.place)), *map(from_host, positions)]
    found: XLAShardedTensor = aten.index.Tensor(selection.full, indices)
    return found


def _write(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """`x` after `x[mask] = values`, if the values were selected by the same mask."""
    x, indices, values = args[0], args[1], args[2]
    accumulate = bool(args[3]) if len(args) > 3 else kwargs.get("accumulate", False)
    if isinstance(x, SelectedTensor) or not isinstance(values, SelectedTensor):
        return None
    selection = values._selection
    place = masked_writes.mask_of(indices)
    if place is None or isinstance(indices[place], SelectedTensor):
        return None
    mask = (
        indices[place]
        if isinstance(indices[place], XLAShardedTensor)
        else from_host(indices[place])
    )
    full = selection.full
    assert full is not None
    if (
        not selection.count.is_of(read(mask._handle))
        or place != selection.place
        or values.dtype is not x.dtype
        or x.dim() != full.dim()
        or not _broadcast([x.shape, full.shape], x.shape)
    ):
        return None
    values = full.expand(x.shape)
    return torch.where(_at_true(selection), x + values if accumulate else values, x)


def _put(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _write(args, kwargs)


def _put_in_place(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    written = _write(args, kwargs)
    return None if written is None else args[0].copy_(written)


def _sum(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`t.sum(dims)`: over all elements, with zeros in place of those that are not selected."""
    t, given = args[0], args[1] if len(args) > 1 else None
    keepdim = bool(args[2]) if len(args) > 2 else kwargs.get("keepdim", False)
    selection = t._selection
    full, place, behind = selection.full, selection.place, selection.num_behind
    num_dims, num_before = selection.count.mask.dim(), full.dim() - behind
    ndim = place + 1 + behind
    dims = (
        range(ndim) if not given and given != 0 else (given if given.__class__ is list else [given])
    )
    if not all(-ndim <= d < ndim for d in dims):
        return None
    chosen = {d % ndim for d in dims}
    if len(chosen) != len(dims):
        return None
    spread = [d if d < place else d + num_dims - 1 for d in chosen if d != place] + (
        [*range(place, num_before)] if place in chosen else []
    )
    options = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {}
    if place not in chosen:
        result = full.sum(spread, keepdim=keepdim, **options)
        lost = 0 if keepdim else sum(d < place for d in chosen)
        return SelectedTensor.over(Selection(result, selection.count, place - lost))
    zero = torch.zeros((), dtype=full.dtype, device=full.device)
    result = torch.where(_at_true(selection), full, zero).sum(spread, keepdim=keepdim, **options)
    if keepdim:
        result = result.reshape(*result.shape[:place], 1, *result.shape[num_before:])
    return result


def _on_all(func: torch._ops.OpOverload) -> Handler:
    """A handler for operations that make a tensor like their first argument, or overwrite it."""
    is_written = bool(schema.of(func).written)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        is_here = device is None or torch.device(device).type == "xla"
        if not is_here or kwargs.get("memory_format") not in _PRESERVED:
            return None
        selection = args[0]._selection
        result = func(selection.full, *args[1:], **kwargs)
        return args[0] if is_written else SelectedTensor.over(selection.like(result))

    return handler


def _aliased(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return SelectedTensor.over(args[0]._selection)


def _new_like(func: torch._ops.OpOverload) -> Handler:
    """A handler for `t.new_zeros(size)` and others, which use only the dtype and device of t."""

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return func(args[0]._selection.full, *args[1:], **kwargs)

    return handler


def expanded(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`x.expand(sizes)` with a mask's count among the sizes; None if x must have that size."""
    x, sizes = args[0], args[1]
    found = counted(sizes)
    if found is None or kwargs or isinstance(x, SelectedTensor):
        return None
    place, count = found
    dim = x.dim() - len(sizes) + place
    if dim >= 0 and x.shape[dim] != 1:
        return None
    mask = count.mask
    for _ in range(mask.dim() - 1 if dim >= 0 else 0):
        x = x.unsqueeze(dim)
    full = x.expand(*sizes[:place], *mask.shape, *sizes[place + 1 :])
    return SelectedTensor.over(Selection(full, count, place))


def with_sizes(func: torch._ops.OpOverload, handler: Handler) -> Handler:
    """The handler of an operation on plain tensors to which autograd may pass SymInts as sizes."""

    def with_numbers(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if any(map(_is_symbolic, args)) or any(map(_is_symbolic, kwargs.values())):
            if func is aten.expand.default:
                result = expanded(args, kwargs)
                if result is not None:
                    return result
            args = [concrete(a) for a in args]
            kwargs = {name: concrete(a) for name, a in kwargs.items()}
        return handler(args, kwargs)

    return with_numbers


def factory(make: Callable[..., XLAShardedTensor]) -> Callable[..., XLAShardedTensor]:
    """A factory of tensors of a size, such as the zeros that autograd makes for a selection."""

    def made(size: Sequence[Any], *args: Any, **kwargs: Any) -> XLAShardedTensor:
        if on_first is None and _is_symbolic(size):
            found = None if args else counted(size)
            if found is not None:
                place, count = found
                full = make([*size[:place], *count.mask.shape, *size[place + 1 :]], **kwargs)
                return SelectedTensor.over(Selection(full, count, place))
            size, args = concrete(size), concrete(args)
        return make(size, *args, **kwargs)

    return made


def takes_sizes(func: torch._ops.OpOverload) -> bool:
    """Whether an argument of the overload may be a SymInt."""
    return "SymInt" in str(func._schema)


def _is_symbolic(a: Any) -> bool:
    if a.__class__ is list or a.__class__ is tuple:
        return any(x.__class__ is torch.SymInt for x in a)
    return a.__class__ is torch.SymInt


def _sizes(func: torch._ops.OpOverload, t: SelectedTensor, args: Sequence[Any]) -> Any:
    """Answers torch's C++ about a tensor's sizes; None leaves the answer to its SymInts."""
    selection = t._selection
    if selection.dense is None:
        if func is aten.sym_size.default:
            return None
        if func is aten.dim.default:
            return selection.place + 1 + selection.num_behind
    plain = t.plain()
    with torch._C._DisableTorchDispatch():
        return func(plain, *args)


Selection.select = staticmethod(_dense)
# The operations by which C++ asks Python about a tensor with the policy "sizes".
_SIZES = frozenset(
    releases.overloads(
        dict.fromkeys(
            f"aten.{name}"
            for name in (
                "dim.default",
                "size.default",
                "sym_size.default",
                "stride.default",
                "sym_stride.default",
                "numel.default",
                "sym_numel.default",
                "storage_offset.default",
                "sym_storage_offset.default",
                "is_contiguous.default",
                "is_contiguous.memory_format",
                "sym_is_contiguous.default",
                "is_strides_like_format.default",
                "is_non_overlapping_and_dense.default",
            )
        )
    )
)
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full")
_LIKE = ("clone", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like")
_MADE: dict[str, Callable[[torch._ops.OpOverload], Handler]] = {
    **{f"aten.{name}.default": _new_like for name in _NEW},
    **{f"aten.{name}.default": _on_all for name in _LIKE},
    "aten.fill_.Scalar": _on_all,
    "aten.zero_.default": _on_all,
    "aten.copy_.default": _elementwise,
}
_HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    **{func: make(func) for func, make in releases.overloads(_MADE).items()},
    **releases.overloads(
        {
            "aten.detach.default": _aliased,
            "aten.sum.default": _sum,
            "aten.sum.dim_IntList": _sum,
            "aten.index_put.default": _put,
            "aten.index_put_.default": _put_in_place,
            "aten._index_put_impl_.default": _put_in_place,
        }
    ),
}
