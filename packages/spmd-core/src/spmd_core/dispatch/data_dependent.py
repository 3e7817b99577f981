"""Operations with data-dependent result shapes: positions or counts are read on the host.

Each read cuts the program and waits. It is counted in the metrics as `data_dependent_reads`; the
first read of each operation warns, with the static alternative. It is no host fallback: the host
computes only positions, so strict mode allows it. The values are gathered on the device, so
gradients flow.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from spmd_core import releases
from spmd_core.dispatch import masked_writes, selections
from spmd_core.dispatch.shape_reads import read_for_shape
from spmd_core.dispatch.unique import (
    unique,
    unique2,
    unique_consecutive,
    unique_dim,
    unique_dim_consecutive,
)
from spmd_core.graph.storage import Storage
from spmd_core.ops import registry
from spmd_core.recording import inference, schema
from spmd_core.recording.calls import Handler, from_host, functional_handler
from spmd_core.recording.in_place import in_place_handler
from spmd_core.tensor.selected_tensor import Count
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, spec_of

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """The positions of True in a 1-d host mask, on the device."""
    return from_host(mask.nonzero().reshape(-1))


# Positions of non-zeros.


def nonzero(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`x.nonzero()`: int64 of shape (number of non-zeros, x.dim())."""
    x = args[0]
    mask = x if x.dtype is torch.bool else x != 0
    return from_host(
        read_for_shape(
            mask,
            "nonzero",
            "torch.nonzero_static(x, size=n) and torch.where(condition, x, y) stay on the device.",
        ).nonzero()
    )


def masked_select(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`x.masked_select(mask)`: the elements of x at True; x and mask are broadcast."""
    x, mask = args
    if mask.dtype is not torch.bool:
        raise RuntimeError(
            "masked_select: "
            f"expected BoolTensor for mask; got a mask of {mask.dtype}. Write mask != 0."
        )
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    host = read_for_shape(mask, "masked_select", "torch.where(mask, x, 0) stays on the device.")
    return aten.index.Tensor(
        x.expand(shape).reshape(-1), [_positions(host.expand(shape).reshape(-1))]
    )


# Indexing.


def indexing(func: torch._ops.OpOverload) -> Handler:
    """A handler for `index` and `index_put`.

    Only the data knows how many elements a boolean mask selects, so its positions are read on the
    host.
    """
    reads = func is aten.index.Tensor
    lowering = registry.find_lowering(func if reads else aten.index_put.default)
    assert lowering is not None
    record = (
        functional_handler(lowering)
        if lowering.overload is func
        else in_place_handler(func, lowering)
    )

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, indices = args[0], list(args[1])
        if any(i is not None and i.dtype in _MASKS for i in indices):
            _check_masks(x, indices)
            place = masked_writes.mask_of(indices) if reads else None
            if place is not None and indices[place].dim() and indices[place].numel():
                mask = indices[place]
                on_device = mask if mask.__class__ is XLAShardedTensor else from_host(mask)
                return selections.select(x, on_device, place)
            if not reads and not masked_writes.writes_same_values(x, indices, args[2]):
                accumulate = bool(args[3]) if len(args) > 3 else kwargs.get("accumulate", False)
                written = masked_writes.by_rank(x, indices, args[2], accumulate=accumulate)
                if written is not None:
                    return written if lowering.overload is func else x.copy_(written)
            if reads or not masked_writes.writes_same_values(x, indices, args[2]):
                indices = _without_masks(indices, "x[mask]" if reads else "x[mask] = values")
        dim = 0
        for position, i in enumerate(indices):
            if i is not None and i.dtype not in _MASKS:
                if dim < x.dim():
                    check_range(i, x.shape[dim], dim)
                if i.__class__ is not XLAShardedTensor:
                    indices[position] = from_host(i)
            dim += i.dim() if i is not None and i.dtype in _MASKS else 1
        indices = [
            from_host(i) if i is not None and i.__class__ is not XLAShardedTensor else i
            for i in indices
        ]
        if not reads and not any(i is not None and i.dtype in _MASKS for i in indices):
            _check_values(
                tuple(x.shape),
                tuple(None if i is None else tuple(i.shape) for i in indices),
                tuple(args[2].shape),
            )
        return record((x, indices, *args[2:]), kwargs)

    return handler


@lru_cache(maxsize=1024)
def _check_values(
    shape: tuple[int, ...], indices: tuple[tuple[int, ...] | None, ...], values: tuple[int, ...]
) -> None:
    """Raises torch's error if values cannot be broadcast to the indexed region.

    The meta kernel of `index_put` does not check this.
    """
    metas = [
        None if i is None else torch.empty(i, dtype=torch.int64, device="meta") for i in indices
    ]
    region = aten.index.Tensor(torch.empty(shape, device="meta"), metas).shape
    if len(values) > len(region) or any(
        n not in (1, m) for n, m in zip(reversed(values), reversed(region))
    ):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values)} cannot "
            f"be broadcast to indexing result of shape {list(region)}. Give values of that shape."
        )


def _check_masks(x: torch.Tensor, indices: list[Any]) -> None:
    dim = 0
    for position, i in enumerate(indices):
        if i is None or i.dtype not in _MASKS:
            dim += 1
            continue
        if tuple(i.shape) != tuple(x.shape[dim : dim + i.dim()]):
            raise IndexError(
                f"The shape of the mask {list(i.shape)} at index {position} "
                f"does not match the shape of the indexed tensor {list(x.shape)} at index {dim}. "
                "Give a mask of the shape of the dims that it selects from."
            )
        dim += i.dim()


def _read_mask(mask: torch.Tensor) -> torch.Tensor:
    return read_for_shape(
        mask,
        "x[mask]",
        "torch.where(mask, x, y), masked_fill, x[mask] = one value, and elementwise operations "
        "between x[mask] and x[mask] = values stay on the device.",
    )


Count.read_mask = staticmethod(_read_mask)


def _without_masks(indices: list[Any], what: str) -> list[Any]:
    chosen: list[Any] = []
    for i in indices:
        if i is None or i.dtype not in _MASKS:
            chosen.append(i)
        else:
            host = read_for_shape(
                i,
                what,
                "torch.where(mask, x, y), masked_fill and x[mask] = one value stay on the device.",
            )
            chosen.extend(from_host(p) for p in host.nonzero(as_tuple=True))
    return chosen


def check_range(
    index: torch.Tensor,
    size: int,
    dim: int,
    *,
    wraps: bool = True,
    error: type[Exception] = IndexError,
) -> None:
    """Raises torch's error for an index outside its dim, if the index is still on the host.

    An index on the device is clamped or dropped instead.
    """
    if index.__class__ is XLAShardedTensor:
        handle = index._handle
        if handle.__class__ is not Storage or not isinstance(handle.value.data, torch.Tensor):
            return
        index = handle.value.data
    if index.numel() == 0 or index.is_floating_point() or index.is_complex():
        return
    low, high = (int(v) for v in torch.aminmax(index))
    least = -size if wraps else 0
    if low < least or high >= size:
        raise error(
            "index "
            f"{low if low < least else high} is out of bounds for dimension {dim} with size {size}"
        )


def in_range(
    func: torch._ops.OpOverload, *, wraps: bool = False, error: type[Exception] = IndexError
) -> Handler:
    """A handler for reads and writes at an index tensor, functional or in place.

    Indices that are still on the host are checked against the size of their dim.
    """
    form = schema.functional(func) if schema.of(func).written else func
    lowering = None if form is None else registry.find_lowering(form)
    assert lowering is not None and lowering.host_when is None
    record = (
        functional_handler(lowering)
        if lowering.overload is func
        else in_place_handler(func, lowering)
    )
    along_dim = schema.of(func).names[1] == "dim"

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        try:
            if not along_dim:
                # `take` indexes the flattened tensor, an embedding its rows.
                check_range(
                    args[1],
                    x.numel() if func is aten.take.default or not x.dim() else x.shape[0],
                    0,
                    wraps=wraps,
                    error=error,
                )
            elif len(args) > 2 and -x.dim() <= args[1] < x.dim():
                check_range(args[2], x.shape[args[1]], args[1] % x.dim(), wraps=wraps, error=error)
        except error:
            # If the shapes are wrong, too, eager torch reports the shapes.
            inference.infer(func, args, kwargs, spec_of)
            raise
        return record(args, kwargs)

    return handler


# Counts.


def bincount(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`bincount(x, weights, minlength)`: reads the extrema; the counting stays on the device."""
    x, weights, minlength = _bincount_arguments(*args, **kwargs)
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise NotImplementedError(
            f"bincount only supports integral inputs; got {x.dtype}. Convert it with .long()."
        )
    if x.dim() != 1:
        raise RuntimeError(
            "bincount only supports 1-d non-negative integral inputs; "
            f"got shape {tuple(x.shape)}. Flatten it."
        )
    if minlength < 0:
        raise RuntimeError(
            f"minlength should be >= 0; got {minlength}. Leave it out, or give the least length."
        )
    if weights is not None and (weights.dim() != 1 or weights.shape != x.shape):
        raise RuntimeError(
            "weights should be 1-d and have the same length as input; "
            f"got {tuple(weights.shape)} for {tuple(x.shape)}."
        )
    length = minlength
    if x.numel():
        bounds = read_for_shape(
            torch.stack(x.aminmax()),
            "bincount",
            "torch.zeros(n).scatter_add_(0, x, ones) has a static length.",
        )
        if int(bounds[0]) < 0:
            raise RuntimeError(
                "bincount only supports 1-d non-negative integral inputs; "
                f"got the element {int(bounds[0])}. Shift the elements to 0."
            )
        length = max(length, int(bounds[1]) + 1)
    if not x.numel():
        return x.new_zeros((length,), dtype=torch.int64)
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    return weights.new_zeros((length,)).scatter_add(0, x.long(), weights)


def _bincount_arguments(x: torch.Tensor, weights: Any = None, minlength: int = 0) -> Any:
    return x, weights, minlength


def repeat_interleave(func: torch._ops.OpOverload) -> Handler:
    """A handler for `repeat_interleave(repeats)`: without `output_size`, reads the repeats' sum."""
    lowering = registry.find_lowering(func)
    assert lowering is not None
    record = functional_handler(lowering)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        repeats = args[0]
        if kwargs.get("output_size") is None:
            if repeats.dim() != 1:
                raise RuntimeError(
                    "repeat_interleave only accept 1D vector as repeat; "
                    f"got shape {tuple(repeats.shape)}. Flatten it."
                )
            total = 0
            if repeats.numel():
                bounds = torch.stack([repeats.sum(), repeats.min().long()])
                host = read_for_shape(
                    bounds,
                    "repeat_interleave",
                    "repeat_interleave(..., output_size=n) stays on the device.",
                )
                if int(host[1]) < 0:
                    raise RuntimeError(
                        f"repeats can not be negative; got {int(host[1])}. "
                        "Give counts of at least 0."
                    )
                total = int(host[0])
            kwargs = {**kwargs, "output_size": total}
        return record(args, kwargs)

    return handler


def equal(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """`torch.equal(a, b)`: compares on the device, and reads one bool."""
    a, b = args
    return a.shape == b.shape and bool((a == b).all())


_HANDLERS: dict[str, Handler] = {
    "aten.nonzero.default": nonzero,
    "aten.masked_select.default": masked_select,
    "aten._unique2.default": unique2,
    "aten._unique.default": unique,
    "aten.unique_consecutive.default": unique_consecutive,
    "aten.unique_dim.default": unique_dim,
    "aten.unique_dim_consecutive.default": unique_dim_consecutive,
    "aten.bincount.default": bincount,
    "aten.equal.default": equal,
}
# For these, torch raises a RuntimeError for an index outside its dim, an IndexError for those with
# `in_range` alone.
_at_elements = partial(in_range, error=RuntimeError)
_MADE: dict[str, Callable[[torch._ops.OpOverload], Handler]] = {
    "aten.index.Tensor": indexing,
    "aten.index_put.default": indexing,
    "aten.index_put_.default": indexing,
    "aten.gather.default": _at_elements,
    "aten.scatter.src": _at_elements,
    "aten.scatter.value": _at_elements,
    "aten.scatter_.src": _at_elements,
    "aten.scatter_.value": _at_elements,
    "aten.scatter_add.default": _at_elements,
    "aten.scatter_add_.default": _at_elements,
    "aten.index_select.default": in_range,
    "aten.index_add.default": in_range,
    "aten.index_add_.default": in_range,
    "aten.index_fill.int_Scalar": partial(in_range, wraps=True),
    "aten.index_fill.int_Tensor": partial(in_range, wraps=True),
    # torch 2.15 uses it to write a number at an index tensor.
    "aten.index_fill_.int_Scalar": partial(in_range, wraps=True),
    "aten.index_fill_.int_Tensor": partial(in_range, wraps=True),
    "aten.index_copy.default": in_range,
    "aten.index_copy_.default": in_range,
    "aten.take.default": partial(in_range, wraps=True),
    "aten.embedding.default": in_range,
    "aten.repeat_interleave.Tensor": repeat_interleave,
}
HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    **releases.overloads(_HANDLERS),
    **{func: make(func) for func, make in releases.overloads(_MADE).items()},
}
