"""Moves one batch to the device, keeping its structure, and shards its tensors. Uses no threads."""

import dataclasses
import enum
import math
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

import spmd_core as spmd
from spmd_core import dtypes
from spmd_core.errors import DataError, DeviceMismatchError
from spmd_core.marks import process_data
from spmd_core.marks.upload import upload_sharded
from spmd_core.recording import layouts
from spmd_core.steps import structures
from spmd_core.tensor.logical_device import as_device
from spmd_data.matching import InputSharding, Leaf, matched, require_shardings, text

ROW_MASK = "row_mask"
"""The key of the mask that `UnevenBatch.PAD` adds to dict batches."""


class UnevenBatch(enum.StrEnum):
    """What to do with a batch that has a sharded dim not divisible by its number of shards.

    The last batch of an epoch is often such a batch. `KEEP` runs it: the device pads its blocks,
    results are exact, and the new shape compiles one more program. `DROP` leaves the batch out.
    `ERROR` raises. `PAD` repeats the last row until the rows are as many as in the other batches
    (the wrapped loader's `batch_size`; without one, the next multiple of the number of shards), so
    there is one shape, and adds a mask to every batch: bool of shape (rows,), False for padding,
    sharded like the rows. It is the key `row_mask` of a dict, the last item of a list or tuple, and
    beside a lone tensor in a tuple. Tensors that have as many rows as the sharded ones are padded.
    Rows that a `ShardedSampler` with the tail "pad" repeated are False, too.
    """

    KEEP = "keep"
    DROP = "drop"
    PAD = "pad"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A batch on the host that is ready to be moved.

    Attributes:
        batch: the structure.
        leaves: its tensors.
    """

    batch: Any
    leaves: list[Leaf]


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A batch on the device.

    Attributes:
        batch: the structure, with its tensors on the device.
        num_bytes: what its tensors take in host memory.
    """

    batch: Any
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class BatchPlacement:
    """Moves batches to one device and shards them there.

    Args:
        device: target device of the tensors.
        input_sharding: see `InputSharding`.
        uneven_batch: see `UnevenBatch`.
        full_rows: the rows of a full batch, to which `UnevenBatch.PAD` pads; None if not known.

    Raises:
        DataError: shardings were given for a device that is not "xla", or something that is none.
    """

    device: torch.device
    input_sharding: InputSharding
    uneven_batch: UnevenBatch
    full_rows: int | None = None

    def __post_init__(self) -> None:
        require_shardings(self.input_sharding)
        if self.input_sharding is not None and not is_spmd_device(self.device):
            raise DataError(
                "only tensors on the xla device can be sharded; got input_sharding together with "
                f"the device {str(self.device)!r}. Pass device='xla', or leave input_sharding out."
            )

    def prepare(
        self,
        batch: Any,
        row_mask: Callable[[int], torch.Tensor | None] | None = None,
        stream: process_data.Stream = process_data.CALLS,
    ) -> Prepared | None:
        """Finds the tensors of a batch and their shardings, and pads them.

        Returns None in place of a dropped batch. Processes that give parts of global tensors
        compare these, so each must prepare the batches of a stream in the same order.

        Args:
            batch: on the host.
            row_mask: a function of the number of rows of the batch: which rows are not padding
                already. None if no row is padding. Used by `UnevenBatch.PAD`.
            stream: the stream of batches that this one belongs to.

        Raises:
            DataError: `input_sharding` does not fit the batch (see `matching.matched`), the
                batch is uneven and the policy is `ERROR`, or the processes have different batches.
            MissingShardingError: the batch has a key that `input_sharding` lacks.
            UnsupportedOpError, TypeError: a tensor is not dense, or has a dtype that the device has
                not.
        """
        batch, leaves = matched(batch, self.input_sharding)
        if is_spmd_device(self.device):
            for leaf in leaves:
                layouts.require_dense(leaf.tensor, text(leaf.path))
                dtypes.to_jax(leaf.tensor.dtype)
        # Compared before anything is decided, so that all processes leave out, pad or refuse the
        # same batches.
        process_data.check_alike(
            [
                (text(leaf.path), leaf.tensor, leaf.spec)
                for leaf in leaves
                if leaf.spec is not None and _is_part(leaf.spec)
            ],
            stream,
        )
        if self.uneven_batch is UnevenBatch.PAD:
            batch, leaves = _padded(batch, leaves, self.full_rows, row_mask)
        elif self.uneven_batch is not UnevenBatch.KEEP:
            uneven = [dim for leaf in leaves for dim in _uneven_dims(leaf)]
            if uneven and self.uneven_batch is UnevenBatch.DROP:
                return None
            if uneven:
                raise DataError(
                    "every sharded dim must divide by its number of shards under "
                    f"uneven_batch='error'; got {', '.join(uneven)}. "
                    "Let the DataLoader drop the last batch (drop_last=True), or pass another "
                    "policy: uneven_batch='drop' leaves such a batch out, 'pad' fills it up and "
                    "adds a mask, 'keep' runs it as it is, 'error' raises this."
                )
        return Prepared(batch, leaves)

    def place(self, prepared: Prepared) -> Placed:
        """Returns the same structure with its tensors on the device and sharded.

        Tensors are copied from host memory straight to their shards; when this returns, the host's
        memory may be used for something else. May be called in several threads.
        """
        # By identity: a tensor that occurs twice is moved once.
        placed = {id(leaf.tensor): self._placed(leaf) for leaf in prepared.leaves}
        return Placed(
            structures.map_tensors(prepared.batch, lambda tensor: placed[id(tensor)]),
            sum(leaf.tensor.nbytes for leaf in prepared.leaves),
        )

    def _placed(self, leaf: Leaf) -> torch.Tensor:
        if leaf.spec is None:
            # Uploaded later: the loop may still mark it.
            return leaf.tensor.to(self.device)
        if _is_part(leaf.spec):
            return process_data.global_tensor(leaf.tensor, leaf.spec)
        return upload_sharded(leaf.tensor, leaf.spec)


def as_target(name: str, value: object) -> torch.device:
    """The device that an argument names, to which batches are moved.

    Raises:
        TypeError: it is no device, name or number.
        DeviceMismatchError: the name is of no device, or of one that holds no values here.
    """
    device = as_device(name, value)
    reason: Exception | str | None = None
    if device.type == "meta":
        reason = "its tensors have no values"
    elif not is_spmd_device(device):
        try:
            torch.empty(0, device=device)
        except Exception as error:  # each device type has its own
            reason = error
    if reason is not None:
        raise DeviceMismatchError(
            f"{name} is 'xla', or a device on which this torch computes, such as 'cpu'; got "
            f"{str(device)!r}: {str(reason).splitlines()[0]}. Write {name}='xla'."
        ) from (reason if isinstance(reason, Exception) else None)
    return device


def is_spmd_device(device: torch.device) -> bool:
    """Whether operations on `device` are recorded and run as sharded programs."""
    return device.type == "xla"


def _is_part(spec: spmd.ShardingSpec) -> bool:
    """Whether tensors of this spec are one process's part of global ones."""
    return spec.minibatch and spmd.distributed.process_count() > 1


def _uneven_dims(leaf: Leaf) -> list[str]:
    """Describes each dim of a tensor that its number of shards does not divide."""
    where = f" of {text(leaf.path)}" if leaf.path else ""
    return [
        f"dim {dim}{where} with {size} rows for {shards} shards"
        for dim, size in enumerate(leaf.tensor.shape)
        if size % (shards := _num_shards(leaf.spec, dim))
    ]


def _num_shards(spec: spmd.ShardingSpec | None, dim: int) -> int:
    """Number of blocks into which a spec splits a dim of this process's part."""
    if spec is None:
        return 1
    if _is_part(spec):
        part = process_data.part_of(spec.mesh, spec.partition_spec)
        return part.tiles[dim] if part.is_whole[dim] else len(part.blocks[dim])
    entry: Any = spec.partition_spec[dim]  # a ShardingSpec has no open dims
    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return math.prod(spec.mesh.mesh_shape[spec.mesh.axis_index(axis)] for axis in axes)


def _padded(
    batch: Any,
    leaves: list[Leaf],
    full_rows: int | None,
    row_mask: Callable[[int], torch.Tensor | None] | None,
) -> tuple[Any, list[Leaf]]:
    """The batch with more rows, and its row mask."""
    with_spec = [leaf for leaf in leaves if leaf.spec is not None]
    split = [leaf for leaf in with_spec if _num_shards(leaf.spec, 0) > 1] or with_spec
    split = split or [leaf for leaf in leaves if leaf.tensor.ndim][:1]
    rows = {leaf.tensor.shape[0] for leaf in split}
    if len(rows) != 1:
        raise DataError(
            "uneven_batch='pad' needs the number of rows of a batch: tensors whose dim 0 is "
            f"sharded, all of one size; got the sizes {sorted(rows)}. "
            "Shard dim 0 of the tensors that have the rows, and no other's."
        )
    (num_rows,) = rows
    first = split[0].spec
    shards = math.lcm(*(_num_shards(leaf.spec, 0) for leaf in split))
    wanted = max(num_rows, full_rows or 0)
    wanted += -wanted % shards
    if not num_rows and wanted:
        raise DataError(
            "uneven_batch='pad' repeats the last row; got a batch of 0 rows for "
            f"{wanted}. Leave such a batch out in the dataset."
        )
    tensors, padded = {}, []
    for leaf in leaves:
        tensor = leaf.tensor
        if tensor.ndim and tensor.shape[0] == num_rows and wanted > num_rows:
            last = tensor[-1:].expand(wanted - num_rows, *tensor.shape[1:])
            tensor = torch.cat([tensor, last])
        tensors[id(leaf.tensor)] = tensor
        made = dataclasses.replace(leaf, tensor=tensor)
        if uneven := _uneven_dims(made):
            raise DataError(
                f"uneven_batch='pad' fills up rows, dim 0 alone; got {', '.join(uneven)}. "
                "Pad that dim in the dataset, or do not shard it."
            )
        padded.append(made)
    mask = torch.arange(wanted) < num_rows
    own = None if row_mask is None else row_mask(num_rows)
    if own is not None:
        mask[:num_rows] = own
    spec = first and dataclasses.replace(first, partition_spec=first.partition_spec[:1])
    batch = structures.map_tensors(batch, lambda tensor: tensors[id(tensor)])
    return _with_mask(batch, mask), [*padded, Leaf((ROW_MASK,), mask, spec)]


def _with_mask(batch: Any, mask: torch.Tensor) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch, mask
    if type(batch) in (list, tuple):
        return type(batch)([*batch, mask])
    if isinstance(batch, MutableMapping):
        if ROW_MASK in batch:
            raise DataError(
                f"uneven_batch='pad' adds the key {ROW_MASK!r} to a dict batch; got one that has "
                f"it, with the keys {list(batch)}. Rename it in the dataset."
            )
        return structures.with_values(batch, {**batch, ROW_MASK: mask})
    raise DataError(
        "uneven_batch='pad' adds a mask to dicts, lists, tuples and tensors; got a batch of type "
        f"{type(batch).__name__}. Return one of these from the DataLoader's collate_fn."
    )
