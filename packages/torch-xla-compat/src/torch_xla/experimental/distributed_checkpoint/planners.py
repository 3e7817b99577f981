"""Planners for torch.distributed.checkpoint that save and load sharded tensors block by block.

Each process writes blocks of its own devices, and reads what they hold: a whole sharded tensor is
on no host. A checkpoint loads into any sharding, with and without these planners.
"""

import dataclasses
import math
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from spmd_core.graph.storage import Storage
from spmd_core.tensor import shards
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from torch_xla.experimental.distributed_checkpoint import _helpers
from torch_xla.experimental.distributed_checkpoint._helpers import Index, _CpuShards

Sharded = XLAShardedTensor | _CpuShards


def _split(state_dict: dict[str, Any]) -> tuple[dict[str, Sharded], dict[str, Any]]:
    """A flat state dict's sharded tensors, and all else."""
    sharded = {k: v for k, v in state_dict.items() if _helpers._is_sharded_tensor(v)}
    return sharded, {k: v for k, v in state_dict.items() if k not in sharded}


def _chunk(index: Index) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size([s.start for s in index]),
        sizes=torch.Size([s.stop - s.start for s in index]),
    )


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


class SPMDSavePlanner(DefaultSavePlanner):
    """Saves sharded tensors by the blocks of this process's devices, each once.

    Everything else is saved as torch's own planner does it. A nested state dict is flattened.

    Attributes:
        sharded_state_dict: the sharded tensors by name.
        unsharded_state_dict: all else.

    Raises:
        ValueError: by `set_up_planner`: two entries have one name when the dict is flattened.
        AssertionError: by `resolve_data`: an item was resolved before, or belongs to no block.

    Example:
        >>> import tempfile, torch, torch.distributed as dist
        >>> import torch.distributed.checkpoint as dist_cp
        >>> from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> state = torch.nn.Linear(2, 2, device="xla").state_dict()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = dist_cp.save(state, checkpoint_id=folder, planner=SPMDSavePlanner())
        >>> sorted(found.state_dict_metadata)
        ['bias', 'weight']
        >>> dist.destroy_process_group()
    """

    sharded_state_dict: dict[str, Sharded]
    unsharded_state_dict: dict[str, Any]

    def __init__(self) -> None:
        super().__init__(
            flatten_state_dict=True, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )
        self._blocks: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
        self._resolved: set[tuple[str, tuple[int, ...]]] = set()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: Any = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.sharded_state_dict, self.unsharded_state_dict = _split(self.state_dict)
        self._blocks, self._resolved = {}, set()

    def create_local_plan(self) -> SavePlan:
        plan = create_default_local_save_plan(self.unsharded_state_dict, self.is_coordinator)
        items = [
            item for name, value in self.sharded_state_dict.items() for item in _writes(name, value)
        ]
        self.plan = dataclasses.replace(
            plan, items=[*plan.items, *items], planner_data=self.mappings
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        name, offset = _key(write_item.index)
        if name not in self.sharded_state_dict:
            return super().resolve_data(write_item)
        assert (name, offset) not in self._resolved, (
            f"WriteItem has already been processed: {write_item.index}. Set the planner up again."
        )
        if name not in self._blocks:
            self._blocks[name] = _helpers.local_blocks(self.sharded_state_dict[name])
        assert offset in self._blocks[name], (
            f"{write_item.index} does not correspond to the correct shard: this process has those "
            f"at {sorted(self._blocks[name])}. Save from the plan of this process."
        )
        self._resolved.add((name, offset))
        block = self._blocks[name].pop(offset)
        if all(_key(item.index)[0] != name or _key(item.index) in self._resolved
               for item in self.plan.items):  # fmt: skip
            del self._blocks[name]  # the copies for other processes to write
        return block


def _writes(name: str, value: Sharded) -> list[WriteItem]:
    """What is to be written of a sharded tensor."""
    shape = _helpers.global_shape(value)
    like = value.shards[0].data if isinstance(value, _CpuShards) else value
    properties = TensorProperties.create_from_tensor(torch.empty((), dtype=like.dtype))
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets, number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for number, chunk in enumerate(map(_chunk, _helpers.local_indices(value)))
    ]


class SPMDLoadPlanner(DefaultLoadPlanner):
    """Loads into sharded tensors in place: each process what its devices hold.

    The blocks of a tensor are gathered in host memory, and go to the devices when the last one is
    there. Tensors keep their shardings, whatever those of the saved ones were.

    Attributes:
        sharded_state_dict: the sharded tensors by name.
        unsharded_state_dict: all else.

    Raises:
        RuntimeError: by `create_local_plan`: the checkpoint lacks a name.
        ValueError: likewise: a tensor has another shape there, or not all of it is there.
    """

    sharded_state_dict: dict[str, Sharded]
    unsharded_state_dict: dict[str, Any]

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False)
        self._blocks: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
        self._left: dict[str, int] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.sharded_state_dict, self.unsharded_state_dict = _split(self.state_dict)
        self._blocks, self._left = {}, {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        plan = create_default_local_load_plan(self.unsharded_state_dict, self.metadata)
        items = [*plan.items]
        for name, value in self.sharded_state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if saved is None:
                raise RuntimeError(
                    f"Missing key in checkpoint state_dict: {name}. Load a state dict that has no "
                    "such entry, or the checkpoint of another model."
                )
            items += self._reads(name, value, saved)
        return dataclasses.replace(plan, items=items)

    def _reads(self, name: str, value: Sharded, saved: Any) -> list[ReadItem]:
        shape = _helpers.global_shape(value)
        size = saved.size if isinstance(saved, TensorStorageMetadata) else None
        if size != shape:
            raise ValueError(
                f"Size mismatch between saved {size or 'no tensor'} and current: {shape} for "
                f"{name}. Build the model that was saved."
            )
        chunks = [_chunk(index) for index in _helpers.local_indices(value)]
        found: list[ReadItem] = create_read_items_for_chunk_list(name, saved, chunks)
        self._left[name] = sum(math.prod(chunk.sizes) for chunk in chunks)
        num_there = sum(math.prod(item.lengths) for item in found)
        if num_there != self._left[name]:
            raise ValueError(
                f"all elements of a tensor are loaded; the checkpoint has {num_there} of "
                f"{self._left[name]} elements of {name} that this process needs. Save it again."
            )
        return found

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        name, offset = _key(read_item.dest_index)
        if name not in self.sharded_state_dict:
            found: torch.Tensor = super().resolve_tensor(read_item)
            return found
        blocks = self._blocks.setdefault(name, {})
        if offset not in blocks:
            value = self.sharded_state_dict[name]
            if isinstance(value, _CpuShards):
                blocks.update(_helpers.local_blocks(value))
            else:
                sizes = next(
                    _chunk(index).sizes
                    for index in _helpers.local_indices(value)
                    if tuple(s.start for s in index) == offset
                )
                blocks[offset] = torch.empty(sizes, dtype=value.dtype)
        inside: torch.Tensor = self.transform_tensor(read_item, blocks[offset])
        return inside

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        name, _ = _key(read_item.dest_index)
        if name not in self.sharded_state_dict:
            super().commit_tensor(read_item, tensor)
            return
        self._left[name] -= tensor.numel()
        if self._left[name] > 0:
            return
        value, blocks = self.sharded_state_dict[name], self._blocks.pop(name)
        if isinstance(value, XLAShardedTensor):  # the others have their values
            assert isinstance(value._handle, Storage)

            def read(index: Index, into: torch.Tensor) -> None:
                if into.numel():
                    into.copy_(blocks[tuple(s.start for s in index)])

            shards.fill(value._handle, read)
            torch.autograd.graph.increment_version(value)
