"""Tests `ShardedSampler`: disjoint, exhaustive, alike for any number of parts, at any place."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import spmd_core as spmd
from spmd_core.errors import DataError
from spmd_data import ShardedSampler, Tail
from spmd_data.sampler import process_part


def global_batches(num_parts: int, num_samples: int, **options: Any) -> list[list[int]]:
    """The samples of each global batch, sorted, from all parts' batches."""
    samplers = [
        ShardedSampler(num_samples, num_parts=num_parts, part=part, **options)
        for part in range(num_parts)
    ]
    rows = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(row) for row in rows]
    size = samplers[0].local_batch_size
    return [
        sorted(sample for row in rows for sample in row[start : start + size])
        for start in range(0, len(rows[0]), size)
    ]


@given(
    st.integers(1, 400),
    st.integers(1, 6),
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=2),
    st.sampled_from([Tail.DROP, Tail.PAD]),
    st.booleans(),
)
def test_batches_are_alike_for_any_number_of_parts(
    n: int, per_part: int, counts: list[int], tail: Tail, shuffle: bool
) -> None:
    options = {"batch_size": 12 * per_part, "tail": tail, "shuffle": shuffle, "seed": 5}
    if tail is Tail.DROP and n < 12 * per_part:
        return
    one, other = (global_batches(count, n, **options) for count in counts)
    assert one == other
    samples = [sample for batch in one for sample in batch]
    if tail is Tail.DROP:
        assert len(samples) == n - n % (12 * per_part) == len(set(samples))
    else:
        assert set(samples) == set(range(n))
        assert len(samples) % (12 * per_part) == 0
        assert len(samples) - n < 12 * per_part


def test_an_order_longer_than_a_chunk_is_whole() -> None:
    n = 50_000
    rows = [
        list(ShardedSampler(n, batch_size=16, num_parts=4, part=part, seed=1)) for part in range(4)
    ]
    assert sorted(sample for row in rows for sample in row) == list(range(n))
    whole = list(ShardedSampler(n, batch_size=16, seed=1))
    assert [whole[part::4] for part in range(4)] == rows


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sampler = ShardedSampler(100, batch_size=10)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    assert first == again != list(sampler)
    assert first != list(ShardedSampler(100, batch_size=10, seed=1))
    assert list(ShardedSampler(100, batch_size=10, shuffle=False)) == list(range(100))


@given(st.integers(0, 10), st.sampled_from([(1, 2), (2, 1), (4, 2), (2, 4), (1, 4)]))
def test_going_on_with_another_number_of_parts(steps: int, counts: tuple[int, int]) -> None:
    before, after = counts
    options: dict[str, Any] = {"batch_size": 8, "seed": 3}
    whole = ShardedSampler(83, **options)
    whole.set_epoch(2)
    expected = list(whole)[8 * steps :]
    saved = ShardedSampler(83, num_parts=before, part=before - 1, **options)
    saved.set_epoch(2)
    state = saved.state_dict() | {"samples": 8 * steps}
    found = []
    for part in range(after):
        sampler = ShardedSampler(83, num_parts=after, part=part, **options)
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    assert sorted(sample for row in found for sample in row) == sorted(expected)
    assert found[0] == expected[::after]


def test_the_mask_marks_the_samples_that_are_repeated() -> None:
    for num_parts in (1, 2, 4):
        masks, rows = [], []
        for part in range(num_parts):
            sampler = ShardedSampler(
                10, batch_size=8, num_parts=num_parts, part=part, tail="pad", seed=1
            )
            rows += list(sampler)
            masks.append(sampler.row_mask(0, len(sampler)))
        mask = np.concatenate(masks)
        assert mask.sum() == 10
        assert sorted(np.array(rows)[mask].tolist()) == list(range(10))


def test_a_dataset_smaller_than_a_batch_is_repeated() -> None:
    sampler = ShardedSampler(3, batch_size=8, tail="pad", shuffle=False)
    assert list(sampler) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_torch_loader_takes_it() -> None:
    samples = list(range(100, 122))
    sampler = ShardedSampler(samples, batch_size=8, num_parts=2, part=0, shuffle=False)
    loader = DataLoader(samples, batch_size=sampler.local_batch_size, sampler=sampler)
    assert [batch.tolist() for batch in loader] == [[100, 102, 104, 106], [108, 110, 112, 114]]


@pytest.mark.one_device
def test_the_part_of_this_process(mesh: spmd.Mesh) -> None:
    sampler = ShardedSampler.of_mesh(16, mesh, "data", batch_size=8)
    assert (sampler.num_parts, sampler.part, len(sampler)) == (1, 0, 16)
    assert ShardedSampler.of_mesh(16, mesh, None, batch_size=8).num_parts == 1
    with pytest.raises(spmd.errors.PartitionSpecError, match="rows"):
        ShardedSampler.of_mesh(16, mesh, "rows", batch_size=8)


def test_processes_of_a_pod(mesh: spmd.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device in a process of its own."""
    count = mesh.size()
    monkeypatch.setattr(
        spmd.distributed, "device_attributes", lambda: [{"process_index": i} for i in range(count)]
    )
    monkeypatch.setattr(spmd.distributed, "process_index", lambda: count - 1)
    sampler = ShardedSampler.of_mesh(64, mesh, ("data",), batch_size=8 * count)
    assert (sampler.num_parts, sampler.part) == (count, count - 1)
    if count > 1:
        few = spmd.Mesh(range(1), (1,), ("data",))
        with pytest.raises(DataError, match=r"has none in Mesh.* Take devices of every process"):
            ShardedSampler.of_mesh(64, few, "data", batch_size=8)


# ---- Errors: each test follows the message's advice ----------------------------------------------


def test_a_rest_under_the_policy_error() -> None:
    with pytest.raises(
        DataError, match=r"a multiple of 8, .*; got 21, which leaves 5\. .*'drop'.*'pad'.*'error'"
    ):
        ShardedSampler(21, batch_size=8, tail="error")
    assert len(ShardedSampler(24, batch_size=8, tail="error")) == 24
    assert len(ShardedSampler(21, batch_size=8, tail="drop")) == 16
    assert len(ShardedSampler(21, batch_size=8, tail="pad")) == 24


def test_an_unknown_policy() -> None:
    with pytest.raises(DataError, match=r"one of 'drop', 'pad', 'error'; got 'keep'"):
        ShardedSampler(8, batch_size=8, tail="keep")


def test_no_samples() -> None:
    with pytest.raises(DataError, match=r"from 1 to 1,099,511,627,776 samples; got 0"):
        ShardedSampler([], batch_size=8)


def test_fewer_samples_than_a_batch() -> None:
    with pytest.raises(DataError, match=r"got 5 samples for a batch of 8\. Pass a smaller"):
        ShardedSampler(5, batch_size=8)
    assert len(ShardedSampler(5, batch_size=5)) == 5


def test_a_batch_that_the_parts_do_not_divide() -> None:
    with pytest.raises(DataError, match=r"got 10 for 4 parts\. Pass for instance 8"):
        ShardedSampler(100, batch_size=10, num_parts=4)
    assert len(ShardedSampler(100, batch_size=8, num_parts=4)) == 24


def test_a_part_out_of_range() -> None:
    with pytest.raises(DataError, match=r"one of 0 to num_parts - 1; got part 2 of 2"):
        ShardedSampler(8, batch_size=8, num_parts=2, part=2)


@pytest.mark.parametrize("other", [{"seed": 1}, {"batch_size": 4}, {"dataset": 17}])
def test_a_state_of_other_data(other: dict[str, int]) -> None:
    options = {"dataset": 16, "batch_size": 8, "seed": 0}
    state = ShardedSampler(**options | other).state_dict()  # type: ignore[arg-type]
    sampler = ShardedSampler(**options)  # type: ignore[arg-type]
    ((name, value),) = other.items()
    name = "num_samples" if name == "dataset" else name
    with pytest.raises(DataError, match=rf"the data that it began with; got {name}.*{value}"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"format": 2, "epoch": 0, "samples": 0, "source": {}}])
def test_what_is_no_state(state: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"the state of a sampler has format 1"):
        ShardedSampler(16, batch_size=8).load_state_dict(state)


@pytest.mark.parametrize("samples", [5, 24])
def test_a_place_within_a_batch(samples: int) -> None:
    sampler = ShardedSampler(16, batch_size=8)
    with pytest.raises(DataError, match=rf"whole batch of 8 samples, up to 16; got {samples}"):
        sampler.load_state_dict(sampler.state_dict() | {"samples": samples})


def test_states_and_rows_that_no_sampler_has() -> None:
    sampler = ShardedSampler(8, batch_size=2)
    state = sampler.state_dict()
    for change in ({"epoch": "x"}, {"epoch": -1}, {"samples": -8}, {"samples": 2.0}):
        with pytest.raises(
            DataError, match=r"counts its \w+ from 0 on; got .*\. Pass what state_d"
        ):
            sampler.load_state_dict({**state, **change})
    with pytest.raises(DataError, match=r"has a source, a dict; got 5\. Pass what state_dict\(\)"):
        sampler.load_state_dict({**state, "source": 5})
    assert sampler.state_dict() == state
    for start, count in ((0, 9), (8, 1), (10**15, 10**15)):
        with pytest.raises(DataError, match=r"an epoch has 8 rows in this part; got .*\. Ask for"):
            sampler.row_mask(start, count)
    assert sampler.row_mask(0, 8).all()


def test_a_mesh_of_devices_that_are_not_there_is_named(num_devices: int) -> None:
    mesh = spmd.Mesh(range(2 * num_devices), (2 * num_devices,), ("data",))
    with pytest.raises(spmd.errors.MeshError, match="start the program with at least"):
        process_part(mesh, "data")
