"""Tests random transforms: the same pixels with any workers and processes, in each epoch others."""

import pickle
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from spmd_core.errors import DataError
from spmd_data import ShardedSampler, TransformedSamples, sharded_dataloader
from spmd_data.synthetic import SyntheticImages

v2 = pytest.importorskip("torchvision.transforms.v2")  # below spmd_core, which lets it load


def augmented(seed: int = 0) -> TransformedSamples:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(8, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(brightness=0.4),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    return TransformedSamples(SyntheticImages(24, size=16, num_classes=24), transform, seed=seed)


def epoch_of(num_parts: int, epoch: int, **options: Any) -> dict[int, torch.Tensor]:
    """The pixels by label, over all parts."""
    found = {}
    for part in range(num_parts):
        sampler = ShardedSampler(24, batch_size=8, num_parts=num_parts, part=part)
        sampler.set_epoch(epoch)
        loader = DataLoader(
            augmented(**options), batch_size=sampler.local_batch_size, sampler=sampler
        )
        for batch in loader:
            found |= dict(zip(batch["label"].tolist(), batch["pixels"]))
    assert sorted(found) == list(range(24))
    return found


def equal(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> list[bool]:
    return [torch.equal(a[label], b[label]) for label in range(24)]


def test_pixels_do_not_depend_on_the_number_of_processes() -> None:
    one = epoch_of(1, epoch=2)
    assert one[0].shape == (3, 8, 8)
    assert one[0].dtype == torch.float32
    assert all(equal(one, epoch_of(2, epoch=2)))
    assert all(equal(one, epoch_of(4, epoch=2)))
    assert not any(equal(one, epoch_of(1, epoch=3)))
    assert not any(equal(one, epoch_of(1, epoch=2, seed=1)))


def test_the_programs_own_draws_stay_as_they_are() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    augmented()[4]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pixels_do_not_depend_on_the_workers() -> None:
    loader = sharded_dataloader(augmented(), None, None, batch_size=8, num_workers=2)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        found: dict[int, torch.Tensor] = {}
        for batch in loader:
            found |= dict(zip(batch["label"].tolist(), batch["pixels"]))
        assert all(equal(found, epoch_of(1, epoch)))


def test_an_index_keeps_its_epoch_on_the_way_to_a_worker() -> None:
    sampler = ShardedSampler(24, batch_size=8)
    sampler.set_epoch(7)
    index = pickle.loads(pickle.dumps(next(iter(sampler))))
    assert index.epoch == 7
    assert [10, 11, 12][int(index) % 3] == list(range(10, 13))[index % 3]


def test_another_thread_is_refused() -> None:
    errors: list[DataError] = []

    def read() -> None:
        try:
            augmented()[0]
        except DataError as error:
            errors.append(error)

    thread = threading.Thread(target=read, name="reader")
    thread.start()
    thread.join()
    (error,) = errors
    assert "got a call in the thread 'reader'. Read samples in worker processes" in str(error)
