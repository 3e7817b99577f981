"""What is sharded in a state dict: which blocks this process has, and copies of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from spmd_core.graph.storage import Storage
from spmd_core.tensor import shards
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.tensor.shards import XLAShard

Index = tuple[slice, ...]


@dataclass(frozen=True)
class _CpuShards:
    """This process's blocks of a sharded tensor, in host memory.

    Attributes:
        shards: as `XLAShardedTensor.local_shards` gives them.
        global_shape: the shape of the whole tensor.
    """

    shards: list[XLAShard]
    global_shape: torch.Size


def _is_sharded_tensor(value: Any) -> bool:
    """Whether a value is split over devices."""
    if isinstance(value, _CpuShards):
        return True
    if not isinstance(value, XLAShardedTensor) or not isinstance(value._handle, Storage):
        return False
    sharding = value.sharding
    return sharding is not None and not sharding.is_replicated


def _sharded_cpu_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict in host memory, with `_CpuShards` for what is sharded.

    Cuts, and waits for the devices.
    """

    def copy(value: Any) -> Any:
        if _is_sharded_tensor(value) and isinstance(value, XLAShardedTensor):
            return _CpuShards(value.local_shards, value.shape)
        if isinstance(value, torch.Tensor):
            return value.detach().cpu() if value.device.type == "xla" else value.detach().clone()
        return value

    copied: dict[str, Any] = _pytree.tree_map(copy, state_dict)
    return copied


def global_shape(value: XLAShardedTensor | _CpuShards) -> torch.Size:
    """The shape of the whole tensor."""
    return value.global_shape if isinstance(value, _CpuShards) else value.shape


def local_indices(value: XLAShardedTensor | _CpuShards) -> list[Index]:
    """Where the blocks of this process lie in the whole: each once, without padding."""
    if isinstance(value, _CpuShards):
        found = [tuple(s.indices) for s in value.shards if not isinstance(s.indices, type(...))]
    else:
        assert isinstance(value._handle, Storage)
        found = shards.local_blocks(value._handle)
    once = {tuple(s.start for s in index): index for index in found}
    return [index for index in once.values() if all(s.start < s.stop for s in index)]


def local_blocks(value: XLAShardedTensor | _CpuShards) -> dict[tuple[int, ...], torch.Tensor]:
    """Copies of the blocks of this process by where they begin. Cuts, and waits."""
    copies = value.shards if isinstance(value, _CpuShards) else value.local_shards
    return {
        tuple(s.start for s in shard.indices): shard.unpadded_data
        for shard in copies
        if not isinstance(shard.indices, type(...))
    }
