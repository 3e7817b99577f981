"""Moves one batch to the device, keeping its structure, and shards its tensors. Uses no threads."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

import spmd_core as spmd
from spmd_core import DataError
from spmd_core.steps import structures

InputSharding: TypeAlias = spmd.ShardingSpec | Mapping[str, spmd.ShardingSpec | None] | None
"""How to shard a batch: one spec for all of its tensors, a dict of specs by key, or None.

A dict has an entry for each key of a dict batch; its value None means not sharded. None in place of
the whole means no sharding.
"""


class MissingShardingError(DataError, KeyError):
    """A dict batch has keys that the dict of shardings lacks. (Also a KeyError, as in torch_xla.)

    Attributes:
        missing: those keys.
    """

    def __init__(self, message: str, missing: Sequence[Any]) -> None:
        super().__init__(message)
        self.missing = list(missing)

    __str__ = DataError.__str__  # KeyError would print the message's repr


class UnevenBatch(enum.StrEnum):
    """What to do with a batch that has a sharded dim not divisible by its number of shards.

    The last batch of an epoch is often such a batch. `KEEP` runs it: the device pads its blocks,
    results are exact, and the new shape compiles one more program. `DROP` leaves the batch out.
    `ERROR` raises. To have a single shape in every epoch,
    `torch.utils.data.DataLoader(..., drop_last=True)` is the simplest way.
    """

    KEEP = "keep"
    DROP = "drop"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Moves batches to one device and shards them there.

    Args:
        device: target device of the tensors.
        input_sharding: see `InputSharding`. The spec is fitted to each tensor's rank: a tensor with
            fewer dims uses the first entries (1-D labels beside 4-D images use the entry of the
            batch dim), one with more dims is replicated along the extra ones.
        uneven_batch: see `UnevenBatch`.

    Raises:
        DataError: shardings were given for a device that is not "xla".
    """

    device: torch.device
    input_sharding: InputSharding
    uneven_batch: UnevenBatch

    def __post_init__(self) -> None:
        if self.input_sharding is not None and not is_spmd_device(self.device):
            raise DataError(
                "only tensors on the xla device can be sharded; got input_sharding together with "
                f"the device {str(self.device)!r}. Pass device='xla', or leave input_sharding out."
            )

    def place(self, batch: Any) -> Any:
        """Returns the same structure with its tensors on the device and sharded; does not wait.

        Returns None in place of a dropped batch.

        Raises:
            DataError: `input_sharding` is a dict and the batch is not, or the batch is uneven and
                the policy is `ERROR`.
            MissingShardingError: the batch has a key that `input_sharding` lacks.
        """
        specs = self._specs(batch)
        if self.uneven_batch is not UnevenBatch.KEEP:
            uneven = [
                text
                for key, value in specs.items()
                for text in _uneven_dims(value[0], value[1], key)
            ]
            if uneven and self.uneven_batch is UnevenBatch.DROP:
                return None
            if uneven:
                raise DataError(
                    "every sharded dim must divide by its number of shards under "
                    f"uneven_batch='error'; got {', '.join(uneven)}. "
                    "Let the DataLoader drop the last batch (drop_last=True), or pass "
                    "uneven_batch='keep' or 'drop'."
                )
        if isinstance(self.input_sharding, Mapping):
            return structures.with_values(
                batch,
                {
                    key: structures.map_tensors(value, partial(self._place_tensor, spec))
                    for key, (value, spec) in specs.items()
                },
            )
        return structures.map_tensors(batch, partial(self._place_tensor, self.input_sharding))

    def _specs(self, batch: Any) -> dict[Any, tuple[Any, Any]]:
        """(value, spec) by key of the batch; the whole batch under None without a dict of specs."""
        if not isinstance(self.input_sharding, Mapping):
            return {None: (batch, self.input_sharding)}
        if not isinstance(batch, Mapping):
            raise DataError(
                "the input batch must be a dict when input_sharding is a dict; got a batch of type "
                f"{type(batch).__name__} for the keys {sorted(map(str, self.input_sharding))}. "
                "Return dicts from the dataset, or pass one ShardingSpec for all tensors."
            )
        missing = [key for key in batch if key not in self.input_sharding]
        if missing:
            raise MissingShardingError(
                "input_sharding must have an entry for every key of the batch; the keys "
                f"{missing} are missing from it, got {list(self.input_sharding)}. "
                "Add them, with None for a tensor that should not be sharded.",
                missing,
            )
        return {key: (value, self.input_sharding[key]) for key, value in batch.items()}

    def _place_tensor(self, spec: Any, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(self.device)
        if spec is None or tensor.ndim == 0:
            return moved
        marked = spmd.apply_sharding(
            moved, dataclasses.replace(spec, partition_spec=fitted_spec(spec, tensor.ndim))
        )
        # The layout is final, so the upload may overlap with the previous step's computation. A
        # tensor without a sharding is uploaded later: the loop may still mark it.
        return spmd.start_upload(marked)


def is_spmd_device(device: torch.device) -> bool:
    """Whether operations on `device` are recorded and run as sharded programs."""
    return device.type == "xla"


def fitted_spec(spec: Any, ndim: int) -> tuple[Any, ...]:
    """The partition spec for a tensor of rank `ndim`: truncated, or padded with None, to `ndim`."""
    entries = tuple(spec.partition_spec)[:ndim]
    return entries + (None,) * (ndim - len(entries))


def _uneven_dims(value: Any, spec: Any, key: Any) -> list[str]:
    """Describes each dim of each tensor in `value` that its number of shards does not divide."""
    found: list[str] = []
    if spec is None:
        return found
    where = "" if key is None else f" of {key!r}"

    def look(tensor: torch.Tensor) -> torch.Tensor:
        for dim, (size, entry) in enumerate(zip(tensor.shape, spec.partition_spec, strict=False)):
            shards = _num_shards(spec.mesh, entry)
            if size % shards:
                found.append(f"dim {dim}{where} with {size} rows for {shards} shards")
        return tensor

    structures.map_tensors(value, look)
    return found


def _num_shards(mesh: Any, entry: Any) -> int:
    """Number of blocks into which one entry of a partition spec splits its dim."""
    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return math.prod(mesh.mesh_shape[mesh.axis_index(axis)] for axis in axes)
