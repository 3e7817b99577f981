"""Stacks the blocks of a pipeline: one tensor holds the same parameter of all stages' blocks.

A stage has `num_slots` blocks. Slot k is a module whose parameters have an additional first dim,
that of the stages; `block_index` says which of the plain model's blocks a slot is on a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spmd_core.errors import WrapError
from spmd_core.marks.marking import mark_sharding
from spmd_core.modules.checkpointing import CheckpointedForward
from spmd_core.modules.fsdp_unit import unit_of
from spmd_core.modules.pipeline_plan import PipelinePlan
from spmd_core.modules.pipeline_region import Region
from spmd_core.sharding.partition_spec import PartitionSpecLike
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@dataclass(frozen=True)
class Stacking:
    """Which block of the plain model is in which slot of which stage.

    Attributes:
        num_blocks: of the plain model.
        num_stages: p.
        rounds: how many chunks of blocks a stage has.
    """

    num_blocks: int
    num_stages: int
    rounds: int

    @staticmethod
    def of(num_blocks: int, plan: PipelinePlan) -> "Stacking":
        """For the blocks of a plain model, which the plan's chunks divide evenly.

        Raises:
            WrapError: they do not.
        """
        chunks = plan.num_stages * plan.rounds
        if num_blocks == 0 or num_blocks % chunks:
            rounds = f" x {plan.rounds} rounds" if plan.rounds > 1 else ""
            raise WrapError(
                "each stage of a pipeline has the same number of blocks: stages x rounds divides "
                f"the number of blocks; got {num_blocks} blocks for {plan.num_stages} stages"
                f"{rounds}. Choose {chunks * max(1, -(-num_blocks // chunks))} blocks, or other "
                "sizes of mesh and rounds."
            )
        return Stacking(num_blocks, plan.num_stages, plan.rounds)

    @property
    def num_slots(self) -> int:
        """Blocks of a stage."""
        return self.num_blocks // self.num_stages

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks that a stage runs in one tick."""
        return self.num_slots // self.rounds

    def block_index(self, slot: int, stage: int) -> int:
        """The plain model's index of a block."""
        chunk, position = divmod(slot, self.blocks_per_chunk)
        return (chunk * self.num_stages + stage) * self.blocks_per_chunk + position


def check_equal(blocks: Sequence[nn.Module]) -> None:
    """Raises WrapError if blocks differ in more than the values of their tensors."""
    seen: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if unit_of(block) is not None or getattr(block, "is_sharded_wrapper", False) is True:
            raise WrapError(
                "a pipeline gathers its parameters itself; got block "
                f"{index}, a {type(block).__name__} that is a unit of fully_shard. Mark the "
                "parameters with mark_sharding over the fsdp axis instead, and name that axis in "
                "batch_axes."
            )
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            if seen.setdefault(id(tensor), index) != index:
                raise WrapError(
                    "each block of a pipeline has tensors of its own; got "
                    f"{name!r} of block {index}, which block {seen[id(tensor)]} has too. "
                    "Give each block its own, or keep what is shared outside of the blocks."
                )
            if tensor.is_meta:
                raise WrapError(
                    "the blocks of a pipeline have values; got "
                    f"{name!r} of block {index} on the meta device. "
                    "Call module.to_empty(device='xla') first, and load the values."
                )
        difference = _difference(blocks[0], block)
        if difference:
            raise WrapError(
                "the blocks of a pipeline are equal but for the values of their tensors; got "
                f"block {index}, whose {difference}. Build all blocks from the same "
                "configuration, and keep other layers outside of them."
            )


def _difference(first: nn.Module, other: nn.Module) -> str:
    """How a block differs from the first one; empty if it does not."""
    if str(first) != str(other):
        return f"layers are\n{other}\nand those of block 0\n{first}\n"
    for (name, a), (_, b) in zip(first.named_modules(), other.named_modules(), strict=True):
        for key, value in a.__dict__.items():
            # `layer_idx` only names a layer's entry in caches, in Hugging Face's models.
            own = b.__dict__.get(key)
            if isinstance(value, (bool, int, float, str)) and value != own and key != "layer_idx":
                where = f"{name}.{key}".lstrip(".")
                return f"attribute {where} is {own!r}, and that of block 0 is {value!r}"
    tensors = [dict((*m.named_parameters(), *m.named_buffers())) for m in (first, other)]
    for name in {**tensors[0], **tensors[1]}:
        facts = [_facts(each.get(name)) for each in tensors]
        if facts[0] != facts[1]:
            return f"tensor {name} is {facts[1]}, and that of block 0 is {facts[0]}"
    return ""


def _facts(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "missing"
    facts = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    facts += "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    spec = _spec(tensor)
    return facts + (f", marked with {spec!r}" if spec else "")


def _spec(tensor: torch.Tensor) -> PartitionSpecLike:
    sharding = tensor.sharding if isinstance(tensor, XLAShardedTensor) else None
    return () if sharding is None else tuple(axes or None for axes in sharding.dims)


def stacked_slots(
    blocks: Sequence[nn.Module], stacking: Stacking, region: Region
) -> list[nn.Module]:
    """The slots: the first blocks, in place, with stacked tensors on device `xla`."""
    return [
        _with_stacked(
            [blocks[stacking.block_index(k, stage)] for stage in range(stacking.num_stages)], region
        )
        for k in range(stacking.num_slots)
    ]


def _with_stacked(members: Sequence[nn.Module], region: Region) -> nn.Module:
    """The first of the modules, with the stacked tensors of all."""
    slot = members[0]
    made: dict[int, torch.Tensor] = {}  # a tensor with several names is stacked once
    for path, module in list(slot.named_modules(remove_duplicate=False)):
        others = [member.get_submodule(path) for member in members]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None or hasattr(tensor, "num_stacked_dims"):
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _stacked([getattr(o, name) for o in others], region)
                tensors[name] = made[id(tensor)]
    return slot


def _stacked(tensors: Sequence[torch.Tensor], region: Region) -> torch.Tensor:
    """One tensor of all stages' values, split over the stages and as the first one's mark says."""
    first = tensors[0]
    with torch.no_grad():
        value = torch.stack([t.detach() for t in tensors]).to("xla")
    result = nn.Parameter(value, first.requires_grad) if isinstance(first, nn.Parameter) else value
    mark_sharding(result, region.mesh, (region.axis, *_spec(first)))
    result.num_stacked_dims = 1  # type: ignore[attr-defined]
    return result


def checkpointing_of(slot: nn.Module) -> dict[str, Any] | None:
    """Removes a slot's checkpoint, and returns its options; None if it has none."""
    own = slot.__dict__.get("forward")
    if not isinstance(own, CheckpointedForward):
        return None
    del slot.__dict__["forward"]
    if own.inner is not None:
        slot.__dict__["forward"] = own.inner
    return dict(own.options)


# --- Names: a state_dict has those of the plain model ---------------------------------------------


def unstack(container: nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
    """Hook of `state_dict`: gives each stage's part of a stacked tensor the plain model's name."""
    pipeline: Any = container._modules["0"]
    stacking: Stacking = pipeline.stacking
    found = {}
    for slot in range(stacking.num_slots):
        start = f"{prefix}0.slots.{slot}."
        for key in [key for key in state if key.startswith(start)]:
            value, name = state.pop(key), key.removeprefix(start)
            for stage in range(stacking.num_stages):
                part = value[stage]
                if isinstance(part, XLAShardedTensor) and (spec := _spec(value)[1:]):
                    mark_sharding(part, pipeline.region.mesh, spec)
                found[stacking.block_index(slot, stage), name] = part
    for index, name in sorted(found, key=lambda key: key[0]):
        state[f"{prefix}{index}.{name}"] = found[index, name]
    for key in [key for key in state._metadata if key.startswith(f"{prefix}0.")]:
        del state._metadata[key]


def stack(
    container: nn.Module,
    state: Any,
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    """Hook of `load_state_dict`: stacks what has the plain model's names."""
    pipeline: Any = container._modules["0"]
    stacking: Stacking = pipeline.stacking
    for slot, module in enumerate(pipeline.slots):
        for name, own in module.state_dict().items():
            keys = [
                f"{prefix}{stacking.block_index(slot, stage)}.{name}"
                for stage in range(stacking.num_stages)
            ]
            stacked_key = f"{prefix}0.slots.{slot}.{name}"
            if stacked_key in state:
                continue  # saved from `named_parameters()`
            absent = [key for key in keys if key not in state]
            given = [state.pop(key) for key in keys if key not in absent]
            if not absent:
                same = {tuple(value.shape) for value in given} == {tuple(own.shape[1:])}
                if same:
                    state[stacked_key] = torch.stack([value.detach() for value in given])
                    continue
                error_messages.append(
                    f"size mismatch for {keys[0]}: copying parameters of shapes "
                    f"{[tuple(value.shape) for value in given]} from checkpoint, the shape in "
                    f"current model is {tuple(own.shape[1:])}."
                )
            missing_keys += absent
            state[stacked_key] = own  # unchanged: torch's own check would name the stacked tensor
