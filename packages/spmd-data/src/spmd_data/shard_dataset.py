"""`shard_dataset`: the part of a dataset that this process loads, by the rule of the samplers.

Of k parts, part j has the samples j, j + k, j + 2k, ...
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

import spmd_core as spmd
from spmd_core.errors import DataError
from spmd_data.sampler import Tail, process_part, require_samples, uneven_tail


def shard_dataset(
    dataset: Any,
    mesh: spmd.Mesh,
    axis: str | int | Sequence[str | int] | None,
    *,
    tail: Tail | str = Tail.ERROR,
) -> Any:
    """This process's part of a dataset, when `axis` of `mesh` splits the batch. Starts the devices.

    The parts of the processes are disjoint, unless processes hold the same blocks of the batch, and
    together they have every sample that `tail` leaves in. They are equally long, so that no process
    waits for another's batch.

    Args:
        dataset: one of
            - Hugging Face's `datasets.Dataset`: the result is one too, over the same memory-mapped
              file, with 8 bytes of memory a sample;
            - what has a length and `dataset[i]`: the result is a view, which holds no indices;
            - an iterable, also `datasets.IterableDataset`: the result is a torch `IterableDataset`
              that reads everything and keeps every k-th sample. In a DataLoader's workers, each
              worker of an iterable that is no torch dataset keeps its part of these. A torch
              `IterableDataset` cuts itself among workers, so `tail` then holds for what each reads.
        mesh: the mesh of the program.
        axis: the axis or axes that split the batch, as in a partition spec.
        tail: what to do with the last samples if k does not divide their number: `drop` or `error`.
            An iterable's error comes at its end, on every process. (To pad with a mask, take
            `ShardedSampler`.)

    Raises:
        TypeError: `dataset` has no samples by index, or `mesh` is none.
        DataError: see `tail`; or the mesh gives the processes parts that overlap or differ in size.
        PartitionSpecError: the mesh has no such axis.
    """
    part = process_part(mesh, axis)
    return every_kth(dataset, part.number, part.num_parts, tail=tail)


def every_kth(dataset: Any, part: int, num_parts: int, *, tail: Tail | str = Tail.ERROR) -> Any:
    """The samples `part`, `part + num_parts`, ...; see `shard_dataset`."""
    if tail not in (Tail.DROP, Tail.ERROR):
        raise DataError(
            f"a dataset is cut with tail='drop' or tail='error'; got {tail!r}. To fill up the rest "
            "by repeated samples with a mask, take ShardedSampler(dataset, ..., tail='pad')."
        )
    tail = Tail(tail)
    # `datasets` may not be installed; a dataset of its types has imported it.
    datasets = sys.modules.get("datasets")
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(
        dataset, "__getitem__"
    )
    if is_iterable:
        if not hasattr(dataset, "__iter__"):
            raise DataError(
                "a dataset has a length and dataset[i], or can be iterated over; got a "
                f"{type(dataset).__name__}. Pass a Dataset, a sequence or an iterable."
            )
        return _EveryKth(dataset, part, num_parts, tail)
    require_samples(dataset)
    rest = len(dataset) % num_parts
    if rest and tail is Tail.ERROR:
        raise uneven_tail(len(dataset), num_parts)
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        return dataset.select(range(part, len(dataset) - rest, num_parts))
    return _View(dataset, part, num_parts)


class _View(torch.utils.data.Dataset[Any]):
    """Every k-th sample of a dataset with a length."""

    def __init__(self, dataset: Any, part: int, num_parts: int) -> None:
        self._dataset, self._part, self._num_parts = dataset, part, num_parts

    def __len__(self) -> int:
        return len(self._dataset) // self._num_parts

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._position(index)]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Called by torch's DataLoader for a batch, which some datasets read at once."""
        positions = [self._position(index) for index in indices]
        read: Callable[[Sequence[int]], Any] | None = getattr(self._dataset, "__getitems__", None)
        return read(positions) if read else [self._dataset[position] for position in positions]

    def _position(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for a part of {len(self)} samples")
        return self._part + index % len(self) * self._num_parts


class _EveryKth(torch.utils.data.IterableDataset[Any]):
    """Every k-th sample of an iterable, from whole groups of k."""

    def __init__(self, samples: Iterable[Any], part: int, num_parts: int, tail: Tail) -> None:
        self._samples, self._part, self._num_parts = samples, part, num_parts
        self._tail = tail

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an iterable that shuffles itself, such as that of `datasets`."""
        choose = getattr(self._samples, "set_epoch", None)
        if choose is None:
            raise DataError(
                "set_epoch() is handed to an iterable that has epochs; got a "
                f"{type(self._samples).__name__} without set_epoch(). Leave the call out, or "
                "shuffle where the samples are made."
            )
        choose(epoch)

    def __iter__(self) -> Iterator[Any]:
        # A torch IterableDataset divides itself among the workers; another iterable yields
        # everything to each.
        worker = torch.utils.data.get_worker_info()
        if worker is None or isinstance(self._samples, torch.utils.data.IterableDataset):
            mine, count = 0, 1
        else:
            mine, count = worker.id, worker.num_workers
        kept, position = None, -1
        for position, sample in enumerate(self._samples):
            group, place = divmod(position, self._num_parts)
            if place == self._part:
                kept = sample
            # Only a whole group yields a sample: a process that began a group alone would wait for
            # the others.
            if place == self._num_parts - 1 and group % count == mine:
                yield kept
        if (position + 1) % self._num_parts and self._tail is Tail.ERROR:
            raise uneven_tail(position + 1, self._num_parts)
