"""One batch: host tensors in, the same structure of device tensors out, sharded as the user asked. Knows nothing of threads."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

import spmd_core as spmd
from spmd_core import DataError, structures

InputSharding: TypeAlias = spmd.ShardingSpec | Mapping[str, spmd.ShardingSpec | None] | None
"""One spec for every tensor of a batch, or one (or None: not sharded) for each key of a batch that is a dict, or None for no sharding."""


class MissingShardingError(DataError, KeyError):
    """A dict batch has keys for which the dict of shardings says nothing. (Also a KeyError, which is what torch_xla raises.)

    Attributes:
        missing: the keys.
    """

    def __init__(self, message: str, missing: Sequence[Any]) -> None:
        super().__init__(message)
        self.missing = list(missing)

    __str__ = DataError.__str__  # KeyError would print the message's repr


class UnevenBatch(enum.StrEnum):
    """What to do with a batch whose sharded dims do not divide by their number of shards, as the last one of an epoch often does not.

    `KEEP` runs it: the device pads its blocks, results are exact, and the new shape compiles one more program. `DROP` leaves the batch out.
    `ERROR` raises. Where every epoch should have one shape, `torch.utils.data.DataLoader(..., drop_last=True)` is the simplest.
    """

    KEEP = "keep"
    DROP = "drop"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Moves batches to one device and shards them there.

    Args:
        device: where the tensors go.
        input_sharding: see `InputSharding`. The spec is fitted to each tensor's rank: a tensor with fewer dims takes the first entries
            (1-D labels beside 4-D images take the entry of the batch dim), one with more dims is replicated along the others.
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
                f"only tensors on the xla device can be sharded; got input_sharding together with the device {str(self.device)!r}. "
                "Pass device='xla', or leave input_sharding out."
            )

    def place(self, batch: Any) -> Any:
        """The same structure with its tensors on the device and sharded; does not wait for the device. None in place of a dropped batch.

        Raises:
            DataError: `input_sharding` is a dict and the batch is not, or the batch is uneven and the policy is to raise.
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
                    f"every sharded dim must divide by its number of shards under uneven_batch='error'; got {', '.join(uneven)}. "
                    "Let the DataLoader drop the last batch (drop_last=True), or pass uneven_batch='keep' or 'drop'."
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
        """For each part of the batch, the part and its spec: the keys of a dict sharding, or the whole batch under the key None."""
        if not isinstance(self.input_sharding, Mapping):
            return {None: (batch, self.input_sharding)}
        if not isinstance(batch, Mapping):
            raise DataError(
                f"the input batch must be a dict when input_sharding is a dict; got a batch of type {type(batch).__name__} "
                f"for the keys {sorted(map(str, self.input_sharding))}. Return dicts from the dataset, or pass one ShardingSpec for all tensors."
            )
        missing = [key for key in batch if key not in self.input_sharding]
        if missing:
            raise MissingShardingError(
                f"input_sharding must have an entry for every key of the batch; the keys {missing} are missing from it, "
                f"got {list(self.input_sharding)}. Add them, with None for a tensor that should not be sharded.",
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
        # Its layout is final, so it may go up while the step before it computes. What is not marked waits: the loop may still mark it.
        return spmd.start_upload(marked)


def is_spmd_device(device: torch.device) -> bool:
    """Whether operations on `device` are recorded and run as sharded programs."""
    return device.type == "xla"


def fitted_spec(spec: Any, ndim: int) -> tuple[Any, ...]:
    """The partition spec for a tensor of rank `ndim`: cut after `ndim` entries, or filled with None."""
    entries = tuple(spec.partition_spec)[:ndim]
    return entries + (None,) * (ndim - len(entries))


def _uneven_dims(value: Any, spec: Any, key: Any) -> list[str]:
    """A line for each dim of each tensor in `value` that does not divide by its number of shards."""
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
    """Number of blocks that one entry of a partition spec makes of its dim."""
    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return math.prod(mesh.mesh_shape[mesh.axis_index(axis)] for axis in axes)
