"""Batches by their number: a run goes on at any place, also behind a loader that reads ahead."""

import pytest
import torch

from examples.training.batches import NumberedBatches
from spmd_data import MpDeviceLoader


def batches_of(batch: int = 4) -> NumberedBatches[torch.Tensor]:
    return NumberedBatches(lambda number: torch.full((batch,), float(number)), 6, batch=batch)


def test_each_iteration_has_all_but_the_one_after_a_load() -> None:
    batches = batches_of()
    assert len(batches) == 6 and batches.state_dict() == {"samples": 0}
    assert [int(batch[0]) for batch in batches] == [0, 1, 2, 3, 4, 5]
    assert batches.state_dict() == {"samples": 24}
    batches.load_state_dict({"samples": 16})
    assert batches.state_dict() == {"samples": 16}
    assert [int(batch[0]) for batch in batches] == [4, 5]
    assert [int(batch[0]) for batch in batches] == [0, 1, 2, 3, 4, 5]


def test_a_position_within_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 6 samples and batches of 4\. Pass the batch s"):
        batches_of().load_state_dict({"samples": 6})


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_has_the_place_of_the_loop_and_not_that_of_its_thread(prefetch: int) -> None:
    loader = MpDeviceLoader(batches_of(), "cpu", prefetch=prefetch)
    seen, states = [], []
    for batch in loader:
        seen.append(int(batch[0]))
        states.append(loader.state_dict())
    for number, state in enumerate(states, start=1):
        assert state["source"] == {"samples": 4 * number}
        other = MpDeviceLoader(batches_of(), "cpu", prefetch=prefetch)
        other.load_state_dict(state)
        assert [int(batch[0]) for batch in other] == seen[number:]
