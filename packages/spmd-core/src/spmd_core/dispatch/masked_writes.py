"""`x[mask] = values` without reading how many elements the mask selects.

A single value for every True is selected with `where`. Of several values, each True takes the one
at its rank among the Trues. The program checks that there are as many values as Trues, in the same
way as indices outside of their dim (`config.check_indices`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from spmd_core.config import config
from spmd_core.graph.storage import Storage
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def writes_same_values(x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor) -> bool:
    """Whether `x[mask] = values` writes the same at each True, so that no count is needed."""
    place = mask_of(indices)
    if place is None:
        return False
    region = _region(x, place, indices[place], 1)
    shape = tuple(values.shape)
    return len(shape) <= len(region) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(region))
    )


def by_rank(
    x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, *, accumulate: bool
) -> torch.Tensor | None:
    """`x` after `x[mask] = values`, in its shape; None if the count must be read.

    It must be read if the number of Trues has to be checked now, as without `config.check_indices`.

    Args:
        x: the tensor.
        indices: one mask on the device, and None for the dims before it.
        values: a value for each True, in their order.
        accumulate: whether they are added to what is there.
    """
    place = mask_of(indices)
    if place is None or not config.check_indices or values.dtype is not x.dtype:
        return None
    mask = indices[place]
    rest = x.dim() - place - mask.dim()
    dim = values.dim() - rest - 1
    if dim < 0 or dim > place or values.shape[dim] == 0 or mask.numel() == 0:
        return None
    count = values.shape[dim]
    known = _host_mask(mask)
    if known is not None and int(known.sum()) != count:
        return None  # refused right away
    region = _region(x, place, mask, count)
    if any(n not in (1, m) for n, m in zip(reversed(values.shape), reversed(region))):
        return None
    flat = mask.reshape(-1).long()
    ranks = (flat.cumsum(0) - 1) * flat
    # If the number of Trues differs, every rank is outside of the values.
    ranks = ranks + (flat.sum() != count) * count
    taken = values.index_select(dim, ranks).unflatten(dim, mask.shape)
    selected = mask.reshape(*mask.shape, *(1 for _ in range(rest)))
    new = x + taken if accumulate else taken
    return torch.where(selected, new.expand(x.shape), x)


def mask_of(indices: Sequence[Any]) -> int | None:
    """The position of the only index, a boolean mask; None if there are other indices."""
    given = [i for i, index in enumerate(indices) if index is not None]
    is_mask = len(given) == 1 and indices[given[0]].dtype is torch.bool
    return given[0] if is_mask else None


def _host_mask(mask: torch.Tensor) -> torch.Tensor | None:
    """The mask, if it is still on the host, so that reading it does not wait."""
    if not isinstance(mask, XLAShardedTensor):
        return mask
    handle = mask._handle
    is_known = isinstance(handle, Storage) and isinstance(handle.value.data, torch.Tensor)
    return handle.value.data if is_known else None


def _region(x: torch.Tensor, place: int, mask: torch.Tensor, count: int) -> tuple[int, ...]:
    """The shape of `x[mask]` for a mask with `count` Trues."""
    return (*x.shape[:place], count, *x.shape[place + mask.dim() :])
