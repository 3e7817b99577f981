"""Tests positions and resume: after a state, the next batch is the next batch, exactly once."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from spmd_core.errors import DataError
from spmd_data import MpDeviceLoader

N = 22  # samples; a batch has 4, so the last one has 2


class Numbers(Dataset):
    """Samples 0, 1, 2, ...; remembers which were loaded in this process."""

    def __init__(self, length: int = N) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.loaded.append(index)
        return {"x": torch.tensor(index), "nested": [torch.tensor([index] * 2), "text"]}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(N)


class Strided(torch.utils.data.Sampler[int]):
    """A stand-in for `ShardedSampler`: every `num_parts`-th place of a global order."""

    def __init__(self, num_parts: int = 1, part: int = 0, *, seed: int = 0, num: int = 24) -> None:
        self.num_parts, self.part, self.epoch, self.start = num_parts, part, 0, 0
        self._source = {"num_samples": num, "batch_size": 4, "seed": seed}

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"format": 1, "epoch": self.epoch, "samples": self.start, "source": self._source}

    def load_state_dict(self, state: Any) -> None:
        assert state["format"] == 1 and state["source"] == self._source
        self.epoch, self.start = state["epoch"], state["samples"]

    def __len__(self) -> int:
        return (self._source["num_samples"] - self.start) // self.num_parts

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(100 * self._source["seed"] + self.epoch)
        order = torch.randperm(self._source["num_samples"], generator=generator)
        yield from order[self.start + self.part :: self.num_parts].tolist()


class Stateful:
    """Counts in the object that it returns as its state."""

    def __init__(self) -> None:
        self._state = {"next": 0}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._state["next"] < 6:
            self._state["next"] += 1
            yield torch.tensor([self._state["next"]])
        self._state["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state = state


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def indexed(**options: Any) -> Callable[[], DataLoader]:
    return lambda: DataLoader(Numbers(), **({"batch_size": 4} | options))


INDEXED = {
    "in order": indexed(),
    "shuffled": indexed(shuffle=True),
    "shuffled, last batch dropped": indexed(shuffle=True, drop_last=True),
    "two workers": indexed(shuffle=True, num_workers=2),
    "workers that persist": indexed(shuffle=True, num_workers=1, persistent_workers=True),
    "no batches": indexed(shuffle=True, batch_size=None),
    "a generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=seeded()),
    "a sampler's generator": lambda: DataLoader(
        Numbers(),
        batch_size=4,
        sampler=RandomSampler(range(N), replacement=True, generator=seeded()),
    ),
    "weighted": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0, 2.0] * 11, N)
    ),
    "a batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(SubsetRandomSampler(range(N)), 4, False)
    ),
    "a batch sampler without a sampler": lambda: DataLoader(
        Numbers(), batch_sampler=[[1, 2, 3], [4], [5, 6]] * 2
    ),
    "sharded": lambda: DataLoader(Numbers(24), batch_size=4, sampler=Strided()),
    "sharded, workers": lambda: DataLoader(
        Numbers(24), batch_size=4, sampler=Strided(), num_workers=2
    ),
}
READ = {
    "a list": lambda: list(torch.arange(N).split(4)),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a generator function": lambda: (torch.tensor([i]) for i in range(6)),
}


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        assert batch["nested"][0].flatten().tolist()[::2] == flat([batch["x"].tolist()])
        return batch["x"].tolist()
    return batch.tolist()


def flat(batches: list[Any]) -> list[int]:
    return [i for batch in batches for i in (batch if isinstance(batch, list) else [batch])]


def stored(state: Any) -> Any:
    """The state as read from a file, which holds no objects of classes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


pytestmark = pytest.mark.filterwarnings(
    # Workers are forked while jax's threads wait; they use nothing of jax.
    "ignore:os.fork:RuntimeWarning",
    "ignore:This process .* is multi-threaded:DeprecationWarning",
)


@pytest.mark.parametrize("name", INDEXED)
def test_the_order_is_that_of_the_plain_data_loader(name: str) -> None:
    torch.manual_seed(1)
    source = INDEXED[name]()
    expected = [plain(batch) for batch in source]
    after = torch.rand(1)
    torch.manual_seed(1)
    given = INDEXED[name]()
    sampler = given.sampler
    with MpDeviceLoader(given, "cpu") as loader:
        assert [plain(batch) for batch in loader] == expected
    assert torch.equal(after, torch.rand(1)), "the draws of torch's generator are the same"
    assert given.sampler is sampler and plain(next(iter(given))) is not None


@pytest.mark.parametrize("name", [*INDEXED, *READ, "stateful"])
@pytest.mark.parametrize("consumed", [0, 1, 4])
def test_the_next_batch_is_the_next_batch(name: str, consumed: int) -> None:
    make = (INDEXED | READ | {"stateful": Stateful})[name]
    torch.manual_seed(1)
    with MpDeviceLoader(make(), "cpu", prefetch=3, transfer_threads=2) as loader:
        batches = iter(loader)
        first = [plain(next(batches)) for _ in range(consumed)]
        state = stored(loader.state_dict())
        rest = [plain(batch) for batch in batches]
    assert state["batches"] == consumed and state["epoch"] == 0
    torch.manual_seed(2)  # another process: the order does not come from its seed
    outside = torch.get_rng_state()
    resumed_from = make()
    with MpDeviceLoader(resumed_from, "cpu", prefetch=3) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict()["batches"] == consumed
        if name in READ and consumed:
            with pytest.warns(
                RuntimeWarning, match=rf"has no position to go to, so {consumed} batches are read"
            ):
                batches = iter(loader)
        else:
            batches = iter(loader)
        assert [plain(batch) for batch in batches] == rest
        if name in INDEXED and consumed:
            assert torch.equal(torch.get_rng_state(), outside)
            assert state["samples"] == len(flat(first))
            if resumed_from.num_workers == 0:
                loaded = resumed_from.dataset.loaded
                assert loaded == flat(rest), "what was passed over was not loaded"
        assert loader.state_dict()["epoch"] == 1 and loader.state_dict()["batches"] == 0


@pytest.mark.parametrize("name", ["shuffled", "a generator", "sharded", "stateful"])
def test_epochs_go_on_after_a_resume(name: str) -> None:
    make = (INDEXED | {"stateful": Stateful})[name]

    def epochs(loader: MpDeviceLoader, num: int) -> list[Any]:
        return [[plain(batch) for batch in loader] for _ in range(num)]

    torch.manual_seed(1)
    loader = MpDeviceLoader(make(), "cpu")
    expected = epochs(loader, 4)
    assert name == "stateful" or expected[0] != expected[1]
    torch.manual_seed(1)
    loader = MpDeviceLoader(make(), "cpu")
    assert epochs(loader, 1) == expected[:1]
    batches = iter(loader)
    assert [plain(next(batches)) for _ in range(2)] == expected[1][:2]
    state, random = stored(loader.state_dict()), torch.get_rng_state()
    assert (state["epoch"], state["batches"]) == (1, 2)
    loader.close()
    torch.set_rng_state(random)  # as a program restores it with its checkpoint
    resumed = MpDeviceLoader(make(), "cpu")
    resumed.load_state_dict(state)
    assert epochs(resumed, 3) == [expected[1][2:], *expected[2:]]


def test_a_state_after_the_last_batch_gives_nothing_and_then_the_next_epoch() -> None:
    loader = MpDeviceLoader(DataLoader(Numbers(4), batch_size=2), "cpu")
    states = [loader.state_dict() for _ in loader]
    resumed = MpDeviceLoader(DataLoader(Numbers(4), batch_size=2), "cpu")
    resumed.load_state_dict(states[-1])
    assert list(resumed) == [] and resumed.state_dict()["epoch"] == 1
    assert len(list(resumed)) == 2


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 4)])
def test_another_number_of_processes_sees_every_sample_once(before: int, after: int) -> None:
    def loaders(num: int) -> list[MpDeviceLoader]:
        return [
            MpDeviceLoader(
                DataLoader(Numbers(24), batch_size=4 // num, sampler=Strided(num, part)), "cpu"
            )
            for part in range(num)
        ]

    (whole,) = loaders(1)
    expected = [sorted(plain(batch)) for batch in whole]
    first = loaders(before)
    iterations = [iter(loader) for loader in first]
    seen = [sorted(flat([plain(next(each)) for each in iterations])) for _ in range(2)]
    states = [stored(loader.state_dict()) for loader in first]
    assert all(state == states[0] for state in states) and states[0]["samples"] == 8
    resumed = loaders(after)
    for loader in resumed:
        loader.load_state_dict(states[0])
    seen += [sorted(flat([plain(batch) for batch in together])) for together in zip(*resumed)]
    assert seen == expected and sorted(flat(seen)) == list(range(24))
    for loader in (*first, *resumed):
        loader.close()


# torchdata sets a "vital", which newer releases of torch warn of.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdatas_loader_is_prefetched_and_resumed() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> MpDeviceLoader:
        return MpDeviceLoader(
            stateful.StatefulDataLoader(
                Numbers(), batch_size=4, shuffle=True, num_workers=1, generator=seeded()
            ),
            "cpu",
            prefetch=3,
        )

    expected = [[plain(batch) for batch in loader] for loader in [make()] * 2]
    for consumed in (0, 2):
        with make() as loader:
            batches = iter(loader)
            assert [plain(next(batches)) for _ in range(consumed)] == expected[0][:consumed]
            state = stored(loader.state_dict())
        with make() as loader:
            loader.load_state_dict(state)
            assert [plain(batch) for batch in loader] == expected[0][consumed:]
            assert [plain(batch) for batch in loader] == expected[1]


def test_without_prefetch_the_state_is_asked_for_when_it_is_wanted() -> None:
    loader = MpDeviceLoader(Stateful(), "cpu", prefetch=0)
    first = iter(loader)
    assert loader.state_dict()["source"] == {"next": 0}
    assert next(first) == 1 and loader.state_dict()["source"] == {"next": 1}
    resumed = MpDeviceLoader(Stateful(), "cpu", prefetch=0)
    resumed.load_state_dict(loader.state_dict())
    assert [plain(batch) for batch in resumed] == [[2], [3], [4], [5], [6]]
    assert resumed.state_dict()["epoch"] == 1


def test_a_state_that_cannot_be_asked_for_is_an_error() -> None:
    class Adapter(Stateful):
        def state_dict(self) -> Any:
            raise AttributeError("the wrapped loader has no state_dict")

    with pytest.raises(
        DataError,
        match=r"got an AttributeError from that of a Adapter: the wrapped .*\. Pass prefetch=0",
    ):
        iter(MpDeviceLoader(Adapter(), "cpu"))
    assert len(list(MpDeviceLoader(Adapter(), "cpu", prefetch=0))) == 6  # the advice


def test_a_state_of_other_data_is_refused() -> None:
    state = MpDeviceLoader(INDEXED["a generator"](), "cpu").state_dict()
    for other, name, now, then in (
        (DataLoader(Numbers(9), 4, shuffle=True, generator=seeded()), "num_samples", 9, N),
        (DataLoader(Numbers(), 5, shuffle=True, generator=seeded()), "batch_size", 5, 4),
        (DataLoader(Numbers(), 4, shuffle=True, generator=seeded(6)), "seed of the loader", 6, 5),
    ):
        with pytest.raises(
            DataError,
            match=rf"goes on with the data that it began with; got .*{name} {now}.*, and in the "
            rf"saved state .*{name} {then}.*\. Give the dataset, sampler and batch size",
        ):
            MpDeviceLoader(other, "cpu").load_state_dict(state)
    with pytest.raises(DataError, match=r"got num_batches 1, and in the saved state num_batches 6"):
        MpDeviceLoader([1], "cpu").load_state_dict(
            MpDeviceLoader(READ["a list"](), "cpu").state_dict()
        )


def test_a_state_of_another_kind_of_loader_is_refused() -> None:
    state = MpDeviceLoader(INDEXED["in order"](), "cpu").state_dict()
    with pytest.raises(
        DataError,
        match=r"from a state of its own kind; got format 1 and kind 'indexed' for a loader of "
        r"format 1 and kind 'read'\. Wrap the same kind",
    ):
        MpDeviceLoader([], "cpu").load_state_dict(state)
    with pytest.raises(DataError, match="got format 2 and kind 'indexed'"):
        MpDeviceLoader(INDEXED["in order"](), "cpu").load_state_dict({**state, "format": 2})
    with pytest.raises(DataError, match=r"got one without batches, source\. Pass what state_dict"):
        MpDeviceLoader(INDEXED["in order"](), "cpu").load_state_dict(
            {key: state[key] for key in ("format", "kind", "epoch")}
        )


@pytest.mark.filterwarnings("ignore:a generator has no position:RuntimeWarning")
def test_a_position_outside_of_the_epoch_is_refused() -> None:
    for make in (INDEXED["in order"], READ["a generator function"]):
        loader = MpDeviceLoader(make(), "cpu")
        loader.load_state_dict({**loader.state_dict(), "batches": 7})
        with pytest.raises(
            DataError, match=r"must lie in the epoch; got 7 batches of an .* 6\. Give the data"
        ):
            iter(loader)
