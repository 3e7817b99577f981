"""`x[i]` at a position that is a tensor on the device: a slice that no host read has to find.

torch reads an integer tensor without dims that indexes, as it reads Python's integers. Where no
value can be read, in the function of a loop, the slice is looked up on the device.
"""

from typing import Any

import torch

from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def get_item(x: torch.Tensor, index: Any) -> torch.Tensor:
    """`x[index]`, without a read of integer tensors without dims in the index."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not any(map(_is_position, items)) or any(map(_is_array, items)):
        found: torch.Tensor = torch.Tensor.__getitem__(x, index)
        return found
    ellipsis = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    x = x[tuple(slice(None) if _is_position(item) else item for item in items)]
    for place in reversed(range(len(items))):
        if _is_position(items[place]):
            # Dims behind this one are looked up already; those of integers are gone.
            if place < ellipsis:
                dim = sum(not _is_integer(item) for item in items[:place])
            else:
                later = [
                    x for x in items[place + 1 :] if not _is_integer(x) and not _is_position(x)
                ]
                dim = x.dim() - 1 - len(later)
            x = _select(x, dim, items[place])
    return x


def _is_integer(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_position(item: Any) -> bool:
    return (
        isinstance(item, XLAShardedTensor)
        and not item.dim()
        and item.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    )


def _is_array(item: Any) -> bool:
    """Whether an item is an index of several elements, which moves dims."""
    return isinstance(item, (list, tuple)) or (
        isinstance(item, torch.Tensor) and not _is_position(item)
    )


def _select(x: torch.Tensor, dim: int, position: torch.Tensor) -> torch.Tensor:
    position = position.long()
    from_start = torch.where(position < 0, position + x.shape[dim], position)
    return x.index_select(dim, from_start.reshape(1)).squeeze(dim)
