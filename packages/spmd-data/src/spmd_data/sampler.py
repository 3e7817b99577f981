"""`ShardedSampler`: which samples this process loads, in which order, from which position on.

The order is global: `order.permuted` of (seed, epoch). Of k parts, part j takes the positions j,
j + k, j + 2k, ... of it. So a global batch of B samples consists of the samples at B consecutive
positions, for every k that divides B, and a run continues at the same position with another number
of processes.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch

import spmd_core as spmd
from spmd_core.arguments import checked, require_int, require_kind
from spmd_core.errors import DataError
from spmd_core.sharding.mesh import check_devices
from spmd_data.order import MAX_SAMPLES, permuted
from spmd_data.parts import BatchPart, parts_of_processes
from spmd_data.saved_states import check_counts, check_same

_FORMAT = 1
_CHUNK = 8192  # positions computed at a time: little memory, and no Python loop over samples


class Tail(enum.StrEnum):
    """What to do with the last samples of an epoch, if they do not fill a global batch.

    The rule looks at global numbers alone, so every process does the same number of steps.
    `DROP` leaves them out; other epochs leave out others. `PAD` fills the batch up with samples
    from the start of the order; `ShardedSampler.row_mask` says which rows these are. `ERROR` raises
    when the sampler is made.
    """

    DROP = "drop"
    PAD = "pad"
    ERROR = "error"


class SampleIndex(int):
    """The number of a sample, with the epoch in which it is read.

    To a dataset it is an int. A dataset whose random numbers depend on the epoch reads the epoch
    here: a worker process has a copy of the dataset, which no `set_epoch` reaches.

    Attributes:
        epoch: as in `ShardedSampler.epoch`.
    """

    epoch: int

    def __new__(cls, number: int, epoch: int) -> "SampleIndex":
        made = super().__new__(cls, number)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type["SampleIndex"], tuple[int, int]]:
        return SampleIndex, (int(self), self.epoch)


class ShardedSampler(torch.utils.data.Sampler[int]):
    """The samples that one part of the processes loads: a sampler for torch's `DataLoader`.

    The numbers are ints that know their epoch (`SampleIndex`). The order takes no memory that grows
    with the dataset. Each iteration starts at `start` and has the order of `epoch`; nothing
    advances by itself: `set_epoch` chooses the next epoch.

    Args:
        dataset: the dataset, or the number of its samples, at most 2**40.
        batch_size: samples of a global batch, over all parts; a multiple of `num_parts`. A
            `DataLoader` of one part has `batch_size=sampler.local_batch_size`.
        num_parts: the number of parts of a batch (k).
        part: the number of this part (j).
        seed: of the order.
        shuffle: whether the order is shuffled; else it is the dataset's.
        tail: a `Tail` or its value.

    Attributes:
        num_parts, part, epoch: as above; set the epoch by `set_epoch`.
        start: how many samples of the global epoch are skipped: a multiple of `batch_size`.

    Raises:
        DataError: an argument breaks a rule above, or `tail` is `error` and samples are left over.

    Example:
        >>> list(ShardedSampler(10, batch_size=4, num_parts=2, part=1, shuffle=False))
        [1, 3, 5, 7]
    """

    @checked()
    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int,
        num_parts: int = 1,
        part: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail | str = Tail.DROP,
    ) -> None:
        super().__init__()
        self._num_samples = (
            len(dataset)
            if isinstance(dataset, Sized)
            else require_int("the number of samples", dataset, least=0)
        )
        self._batch_size = require_int("batch_size", batch_size)
        self._seed, self._shuffle = require_int("seed", seed), shuffle
        self.num_parts, self.part = require_int("num_parts", num_parts), require_int("part", part)
        self.epoch = self.start = 0
        try:
            self._tail = Tail(tail)
        except ValueError:
            raise DataError(
                f"tail must be one of {_POLICIES}; got {tail!r}. Pass one of them."
            ) from None
        self._check()

    @classmethod
    def of_mesh(
        cls,
        dataset: Sized | int,
        mesh: spmd.Mesh,
        axis: str | int | Sequence[str | int] | None,
        **options: Any,
    ) -> "ShardedSampler":
        """The sampler of this process's part, when `axis` of `mesh` splits the batch.

        Starts the devices.

        Args:
            dataset: as in the class.
            mesh: the mesh of the program.
            axis: the axis or axes that split the batch, as in a partition spec; None for a batch
                that each process loads whole.
            options: the class's others, without `num_parts` and `part`.

        Raises:
            DataError: as the class; or the mesh gives the processes parts that overlap or differ in
                size, or gives this process none.
            PartitionSpecError: the mesh has no such axis.
        """
        part = process_part(mesh, axis)
        return cls(dataset, num_parts=part.num_parts, part=part.number, **options)

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self._batch_size

    @property
    def local_batch_size(self) -> int:
        """Samples of this part of a batch."""
        return self._batch_size // self.num_parts

    @property
    def num_samples(self) -> int:
        """Samples of a whole global epoch: without those that are dropped, with the padding."""
        whole, rest = divmod(self._num_samples, self._batch_size)
        return (whole + (rest > 0 and self._tail is Tail.PAD)) * self._batch_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iterations, which then start at the epoch's start."""
        self.epoch, self.start = require_int("epoch", epoch, least=0), 0

    def state_dict(self) -> dict[str, Any]:
        """The position where iterations start, and what identifies the order.

        It holds numbers and strings alone, is the same on every process, and does not depend on
        their number.
        """
        return {
            "format": _FORMAT,
            "epoch": self.epoch,
            "samples": self.start,
            "source": self.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes iterations start at the position of `state`, with any number of parts.

        Raises:
            DataError: the state is of another dataset, seed or batch size, or not a sampler's
                state.
        """
        require_kind("state", state, Mapping, write="what state_dict() returned")
        missing = [key for key in ("format", "epoch", "samples", "source") if key not in state]
        if missing or state["format"] != _FORMAT:
            raise DataError(
                f"the state of a sampler has format {_FORMAT}, an epoch, samples and a source; got "
                f"the keys {sorted(map(str, state))} and format {state.get('format')!r}. "
                "Pass what state_dict() returned."
            )
        check_counts(state, ("epoch", "samples"), who="a sampler")
        check_same(
            self.fingerprint(),
            state["source"],
            who="a sampler",
            advice="Give the dataset and options of the saved run, or begin a new epoch.",
        )
        samples = state["samples"]
        if samples % self._batch_size or not 0 <= samples <= self.num_samples:
            raise DataError(
                f"a saved place lies at a whole batch of {self._batch_size} samples, up to "
                f"{self.num_samples:,}; got {samples:,} samples. Pass what state_dict() returned."
            )
        self.epoch, self.start = state["epoch"], samples

    def fingerprint(self) -> dict[str, Any]:
        """What decides the order, apart from the epoch; the parts do not."""
        return {
            "num_samples": self._num_samples,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "tail": str(self._tail),
        }

    @checked(start=0, count=0)
    def row_mask(self, start: int, count: int) -> np.ndarray:
        """Which rows of this part are samples and not padding, which is False.

        Args:
            start: the first row, counted from the start of the epoch in this part.
            count: the number of rows.

        Returns:
            bool, of shape (count,).

        Raises:
            DataError: an epoch has no such rows.
        """
        if start + count > self.num_samples // self.num_parts:
            raise DataError(
                f"an epoch has {self.num_samples // self.num_parts} rows in this part; got {count} "
                f"from row {start} on. Ask for rows that it has."
            )
        rows = np.arange(start, start + count)
        return rows * self.num_parts + self.part < self._num_samples

    def __len__(self) -> int:
        """Samples of an iteration: of this part, from `start` on."""
        return (self.num_samples - self.start) // self.num_parts

    def __iter__(self) -> Iterator[SampleIndex]:
        epoch, end = self.epoch, self.num_samples
        for first in range(self.start + self.part, end, _CHUNK * self.num_parts):
            last = min(end, first + _CHUNK * self.num_parts)
            # Padding: the order once more.
            positions = np.arange(first, last, self.num_parts) % self._num_samples
            samples = (
                permuted(positions, self._num_samples, seed=self._seed, epoch=epoch)
                if self._shuffle
                else positions
            )
            for sample in samples.tolist():
                yield SampleIndex(sample, epoch)

    def _check(self) -> None:
        if not 1 <= self._num_samples <= MAX_SAMPLES:
            raise DataError(
                f"a sampler needs from 1 to {MAX_SAMPLES:,} samples; got {self._num_samples:,}. "
                "Give a dataset with samples."
            )
        if self.num_parts < 1 or not 0 <= self.part < self.num_parts:
            raise DataError(
                "a part is one of 0 to num_parts - 1; got part "
                f"{self.part} of {self.num_parts}. ShardedSampler.of_mesh chooses both."
            )
        if self._batch_size < 1 or self._batch_size % self.num_parts:
            raise DataError(
                "batch_size counts the samples of all parts, whose number must divide it; got "
                f"{self._batch_size} for {self.num_parts} parts. Pass for instance "
                f"{max(1, round(self._batch_size / self.num_parts)) * self.num_parts}."
            )
        if self._tail is Tail.ERROR and self._num_samples % self._batch_size:
            raise uneven_tail(self._num_samples, self._batch_size)
        if self.num_samples == 0:
            raise DataError(
                "an epoch must fill a global batch when the rest is dropped; got "
                f"{self._num_samples} samples for a batch of {self._batch_size}. Pass a smaller "
                "batch_size, or tail='pad'."
            )


_POLICIES = ", ".join(repr(tail.value) for tail in Tail)


def uneven_tail(num_samples: int, divisor: int) -> DataError:
    """The error for samples that do not fill their last group."""
    return DataError(
        f"under tail='error' the number of samples must be a multiple of {divisor}, those of a "
        f"group over all processes; got {num_samples}, which leaves {num_samples % divisor}. "
        "Choose what happens to the rest by one of the policies: tail='drop' leaves it out, "
        "tail='pad' fills it up with repeated samples and a mask, tail='error' raises this."
    )


def require_samples(dataset: object) -> None:
    """Raises TypeError for a dataset without a length and samples by index."""
    is_no_sequence = isinstance(dataset, str | bytes) or (
        isinstance(dataset, Mapping) and 0 not in dataset
    )
    if is_no_sequence or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            "a dataset has a length and samples by index, len(dataset) and dataset[0]; got "
            f"one of type {type(dataset).__name__}. Write for instance a TensorDataset."
        )


def process_part(mesh: spmd.Mesh, axis: str | int | Sequence[str | int] | None) -> BatchPart:
    """The part of this process when `axis` of `mesh` splits the batch. Starts the devices.

    Raises:
        TypeError: `mesh` is no Mesh.
        DataError: see `parts.parts_of_processes`; or the mesh has no device of this process.
        MeshError: the mesh has a device that is not there.
        PartitionSpecError: the mesh has no such axis.
    """
    require_kind("mesh", mesh, spmd.Mesh, write="spmd_core.Mesh(device_ids, shape, axis_names)")
    if axis is None:
        axis = ()
    given = tuple(axis) if isinstance(axis, Iterable) and not isinstance(axis, str) else (axis,)
    axes = [mesh.axis_index(each) for each in given]
    process_of = [device["process_index"] for device in spmd.distributed.device_attributes()]
    check_devices(mesh, len(process_of))
    parts = parts_of_processes(mesh.get_logical_mesh(), axes, process_of)
    if spmd.distributed.process_index() not in parts:
        raise DataError(
            "a process loads data for its own devices; process "
            f"{spmd.distributed.process_index()} has none in {mesh!r}. Take devices of every "
            "process into the mesh."
        )
    return parts[spmd.distributed.process_index()]
