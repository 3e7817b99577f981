"""`MpDeviceLoader` over a DataLoader with `ShardedSampler`: padding and resuming, on parts."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from spmd_data import MpDeviceLoader, ShardedSampler

pytestmark = pytest.mark.one_device


def loaders(num_parts: int, *, tail: str = "pad", n: int = 21, batch: int = 8) -> Any:
    """A loader for each process, as if each of them ran here."""
    for part in range(num_parts):
        sampler = ShardedSampler(
            n, batch_size=batch, num_parts=num_parts, part=part, seed=5, tail=tail
        )
        local = DataLoader(torch.arange(n), batch_size=batch // num_parts, sampler=sampler)
        yield MpDeviceLoader(local, "cpu", uneven_batch="pad" if tail == "pad" else "keep")


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_the_row_mask_knows_the_samplers_padding(num_parts: int) -> None:
    counted = []
    for loader in loaders(num_parts):
        batches = list(loader)
        assert [len(x) for x, _ in batches] == [8 // num_parts] * 3
        counted += [sample for x, mask in batches for sample in x[mask].tolist()]
    assert sorted(counted) == list(range(21))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1), (2, 2)])
def test_each_sample_once_after_a_resume_on_other_parts(before: int, after: int) -> None:
    counted, states = [], []
    for loader in loaders(before):
        x, mask = next(iter(loader))
        counted += x[mask].tolist()
        states.append(loader.state_dict())
        loader.close()
    assert all(state == states[0] for state in states) and states[0]["samples"] == 8
    for loader in loaders(after):
        loader.load_state_dict(states[0])
        counted += [sample for x, mask in loader for sample in x[mask].tolist()]
    assert sorted(counted) == list(range(21))


def test_batches_have_the_same_samples_on_any_number_of_parts() -> None:
    def batches(num_parts: int) -> list[list[int]]:
        by_part = [list(loader) for loader in loaders(num_parts, tail="drop")]
        return [sorted(torch.cat(rows).tolist()) for rows in zip(*by_part, strict=True)]

    assert batches(1) == batches(2) == batches(4)
    assert len(batches(1)) == 2
