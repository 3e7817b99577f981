"""Tests `shard_dataset`: every k-th sample of any kind of dataset, with whole groups alone."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import spmd_core as spmd
from spmd_core.errors import DataError
from spmd_data import shard_dataset
from spmd_data.shard_dataset import every_kth


class Stream(IterableDataset[int]):
    """Numbers, of which each worker yields its own, as torch asks of such a dataset."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        yield from range(
            0 if worker is None else worker.id, 24, worker.num_workers if worker else 1
        )


def hub_dataset(n: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": list(range(n))})


def test_one_process_has_everything(mesh: spmd.Mesh) -> None:
    assert list(shard_dataset([5, 6, 7], mesh, "data")) == [5, 6, 7]
    assert list(shard_dataset(iter([5, 6, 7]), mesh, "data")) == [5, 6, 7]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["list", "tensors", "hub", "hub stream", "generator", "stream"])
def test_parts_are_disjoint_and_exhaustive(kind: str, num_parts: int) -> None:
    def samples() -> Any:
        return {
            "list": list(range(24)),
            "tensors": TensorDataset(torch.arange(24)),
            "hub": hub_dataset(24),
            "hub stream": hub_dataset(24).to_iterable_dataset(num_shards=4),
            "generator": (i for i in range(24)),
            "stream": Stream(),
        }[kind]

    def number(sample: Any) -> int:
        if isinstance(sample, dict):
            return int(sample["x"])
        return int(sample[0] if isinstance(sample, tuple) else sample)

    for part in range(num_parts):
        found = [number(sample) for sample in every_kth(samples(), part, num_parts)]
        assert found == list(range(part, 24, num_parts))


def test_the_part_of_a_hub_dataset_is_one() -> None:
    part = every_kth(hub_dataset(24).with_format("numpy"), 1, 4)
    assert isinstance(part, datasets.Dataset)
    assert np.array_equal(part[:]["x"], np.arange(1, 24, 4))


def test_a_view_is_indexed_as_a_list() -> None:
    part = every_kth(range(10), 1, 2)
    assert (len(part), part[0], part[-1], part.__getitems__([1, 2])) == (5, 1, 9, [3, 5])
    with pytest.raises(IndexError, match="out of range for a part of 5"):
        part[5]


def test_batches_of_a_view_are_read_at_once() -> None:
    class Batched(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [100 + i for i in indices]

    part = every_kth(Batched(torch.arange(8)), 1, 2)
    assert next(iter(DataLoader(part, batch_size=4))).tolist() == [101, 103, 105, 107]


@pytest.mark.parametrize("kind", ["iterable", "torch dataset"])
def test_workers_share_the_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = _Plain(24) if kind == "iterable" else Stream()
    found = []
    for part in range(3):
        for worker in range(2):
            info = SimpleNamespace(id=worker, num_workers=2)
            monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
            found += list(every_kth(samples, part, 3))
    assert sorted(found) == list(range(24))


class _Plain:
    """An iterable that knows nothing of workers."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._n))


def test_the_epoch_of_a_stream_reaches_it() -> None:
    stream = hub_dataset(24).to_iterable_dataset().shuffle(seed=0, buffer_size=24)
    part = every_kth(stream, 0, 2)
    first = [row["x"] for row in part]
    part.set_epoch(1)
    assert first != [row["x"] for row in part]
    with pytest.raises(DataError, match=r"an iterable that has epochs; got a _Plain"):
        every_kth(_Plain(4), 0, 2).set_epoch(1)


def test_a_rest() -> None:
    for samples in (range(10), hub_dataset(10)):
        with pytest.raises(DataError, match=r"a multiple of 4, .* got 10, which leaves 2\..*'pad'"):
            every_kth(samples, 0, 4)
    # A stream shows its length at its end, to every process alike.
    for part in range(4):
        kept = iter(every_kth(iter(range(10)), part, 4))
        assert [next(kept), next(kept)] == [part, 4 + part]
        with pytest.raises(DataError, match=r"got 10, which leaves 2"):
            next(kept)
    for samples in (range(10), _Plain(10)):
        parts = [list(every_kth(samples, part, 4, tail="drop")) for part in range(4)]
        assert parts == [[0, 4], [1, 5], [2, 6], [3, 7]]
    dropped = [every_kth(hub_dataset(10), part, 4, tail="drop")["x"][:] for part in range(4)]
    assert dropped == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_padding_is_the_samplers() -> None:
    with pytest.raises(DataError, match=r"got 'pad'\. .* take ShardedSampler"):
        every_kth(range(8), 0, 2, tail="pad")


def test_what_is_no_dataset() -> None:
    with pytest.raises(DataError, match="can be iterated over; got a int"):
        every_kth(5, 0, 2)
