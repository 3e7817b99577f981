"""Distinct elements: a sort puts equal ones together, and the host reads where groups start."""

from collections.abc import Sequence
from typing import Any

import torch

from spmd_core.dispatch.shape_reads import read_for_shape
from spmd_core.recording import cpu_kernels
from spmd_core.recording.calls import from_host

_UNIQUE = (
    "There is no unique of static shape; "
    "sort() with a comparison of neighbours stays on the device."
)
_EMPTY_SHAPE = (0,)


def _groups(first: torch.Tensor, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The starts and the lengths of groups of equal elements.

    `first` is a mask over sorted elements that is True at the start of each group.
    """
    starts = read_for_shape(first, what, _UNIQUE).nonzero().reshape(-1)
    ends = (
        torch.cat([starts[1:], starts.new_full((1,), first.numel())]) if starts.numel() else starts
    )
    return from_host(starts), from_host(ends - starts)


def _starts_group(rows: torch.Tensor) -> torch.Tensor:
    """Whether each row of (n, m) differs from the row before; True for the first row."""
    differs = (rows[1:] != rows[:-1]).any(1)
    return torch.cat([differs.new_ones((min(rows.shape[0], 1),)), differs])


def _ranks(order: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The number of each element's group, along dim 0, from the sorted order and the starts."""
    return torch.zeros_like(order).scatter(0, order, first.long().cumsum(0) - 1)


def _distinct(
    x: torch.Tensor,
    dim: int,
    order: torch.Tensor | None,
    first: torch.Tensor,
    what: str,
    shape: Sequence[int],
) -> Any:
    starts, counts = _groups(first, what)
    chosen = starts if order is None else order.index_select(0, starts)
    inverse = first.long().cumsum(0) - 1 if order is None else _ranks(order, first)
    values = x.movedim(dim, 0).index_select(0, chosen).movedim(0, dim)  # for torch's strides
    return values, inverse.reshape(shape), counts


def _requested(result: Any, *, inverse: bool, counts: bool) -> Any:
    values, positions, lengths = result
    nothing = positions.new_empty(_EMPTY_SHAPE)
    return values, positions if inverse else nothing, lengths if counts else nothing


def unique2(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`_unique2(x, sorted, return_inverse, return_counts)`: always sorted, as torch's on CPU."""
    x, _, inverse, counts = _defaults(
        args, kwargs, sorted=True, return_inverse=False, return_counts=False
    )
    values, order = x.reshape(-1).sort(stable=True)
    result = _distinct(
        x.reshape(-1), 0, order, _starts_group(values.unsqueeze(1)), "unique", x.shape
    )
    return _requested(result, inverse=inverse, counts=counts)


def unique(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`_unique(x, sorted, return_inverse)`: the older form of `_unique2`."""
    x, is_sorted, inverse = _defaults(args, kwargs, sorted=True, return_inverse=False)
    return unique2((x, is_sorted, inverse, False), {})[:2]


def unique_consecutive(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`unique_consecutive(x, return_inverse, return_counts, dim)`: one element of each run."""
    cpu_kernels.refuse(torch.ops.aten.unique_consecutive.default, args, kwargs)
    x, inverse, counts, dim = _defaults(
        args, kwargs, return_inverse=False, return_counts=False, dim=None
    )
    if dim is not None:
        return unique_dim_consecutive((x, dim, inverse, counts), {})
    flat = x.reshape(-1)
    return _requested(
        _distinct(flat, 0, None, _starts_group(flat.unsqueeze(1)), "unique_consecutive", x.shape),
        inverse=inverse,
        counts=counts,
    )


def unique_dim_consecutive(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`unique_dim_consecutive(x, dim, return_inverse, return_counts)`: for runs of equal slices."""
    x, dim, inverse, counts = _defaults(
        args, kwargs, dim=0, return_inverse=False, return_counts=False
    )
    rows = _rows(x, dim)
    result = _distinct(x, dim, None, _starts_group(rows), "unique_consecutive", (x.shape[dim],))
    return _requested(result, inverse=inverse, counts=counts)


def unique_dim(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`unique_dim(x, dim, sorted, return_inverse, return_counts)`: distinct slices, sorted.

    The order is lexicographic. Slices are ranked by pairs of columns, then pairs of pairs, so the
    number of sorts is the logarithm of a slice's length.
    """
    x, dim, _, inverse, counts = _defaults(
        args, kwargs, dim=0, sorted=True, return_inverse=False, return_counts=False
    )
    rows = _rows(x, dim)
    keys = _dense_ranks(rows)
    while keys.shape[1] > 1:
        even, odd = keys[:, 0:-1:2], keys[:, 1::2]
        paired = _dense_ranks(even * rows.shape[0] + odd)
        keys = torch.cat([paired, keys[:, -1:]], 1) if keys.shape[1] % 2 else paired
    values, order = keys[:, 0].sort(stable=True)
    result = _distinct(x, dim, order, _starts_group(values.unsqueeze(1)), "unique", (x.shape[dim],))
    return _requested(result, inverse=inverse, counts=counts)


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The slices along `dim` as rows."""
    if x.dim() == 0 or (x.numel() == 0 and (x.shape[dim] != 0 or list(x.shape).count(0) > 1)):
        raise RuntimeError(
            "unique along a dim needs slices with elements; got "
            f"shape {tuple(x.shape)} and dim {dim}. Give a tensor without other dims of size 0."
        )
    slices = x.movedim(dim, 0)
    return slices.reshape(x.shape[dim], slices[0].numel() if x.numel() else 1)


def _dense_ranks(columns: torch.Tensor) -> torch.Tensor:
    """Each element's rank among the distinct elements of its column, for columns of (n, m)."""
    values, order = columns.sort(dim=0, stable=True)
    first = torch.cat([torch.ones_like(values[:1], dtype=torch.bool), values[1:] != values[:-1]])
    return _ranks(order, first)


def _defaults(args: Sequence[Any], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """The first argument, then the arguments of `defaults` in order; defaults for missing ones."""
    values = {**defaults, **dict(zip(defaults, args[1:])), **kwargs}
    return [args[0], *values.values()]
