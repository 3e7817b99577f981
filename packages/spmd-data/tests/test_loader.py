"""Tests `MpDeviceLoader` in eager torch: order, end of data, exceptions, threads, arguments."""

import gc
import inspect
import itertools
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import spmd_data
import spmd_data.loader
from spmd_core.errors import DataError
from spmd_data import MpDeviceLoader


def transfer_threads() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.is_alive() and thread.name.startswith("spmd-data")
    ]


def wait_until(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


class Endless:
    """Yields 0, 1, 2, ... as tensors; counts them and records that its generator was closed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at, self.num_given, self.is_closed = fail_at, 0, False

    def __iter__(self) -> Iterator[torch.Tensor]:
        try:
            for index in itertools.count():
                if index == self.fail_at:
                    raise OSError(f"disk gone at batch {index}")
                self.num_given += 1
                yield torch.tensor(index)
        finally:
            self.is_closed = True


def test_public_names() -> None:
    names = {
        name
        for name, value in vars(spmd_data).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert names == {
        "Documents",
        "InputSharding",
        "MissingShardingError",
        "MpDeviceLoader",
        "OptionalKeys",
        "PackedSequences",
        "Packing",
        "ROW_MASK",
        "ShardedSampler",
        "Tail",
        "TokenCache",
        "TokenStream",
        "TransformedSamples",
        "UnevenBatch",
        "cached_tokens",
        "shard_dataset",
        "sharded_dataloader",
    }


def test_gives_every_batch_in_order_and_has_the_length_of_the_loader() -> None:
    x, y = torch.randn(40, 3), torch.arange(40)
    loader = MpDeviceLoader(DataLoader(TensorDataset(x, y), batch_size=4), "cpu")
    assert len(loader) == 10
    for _ in range(2):  # two epochs: each starts afresh
        batches = list(loader)
        assert torch.equal(torch.cat([batch[0] for batch in batches]), x)
        assert torch.equal(torch.cat([batch[1] for batch in batches]), y)


def test_shuffling_depends_on_the_seed_only() -> None:
    loader = MpDeviceLoader(DataLoader(torch.arange(64), batch_size=8, shuffle=True), "cpu")
    orders = []
    for _ in range(2):
        torch.manual_seed(3)
        orders.append(torch.cat(list(loader)))
    assert torch.equal(*orders)
    assert not torch.equal(orders[0], torch.arange(64))


def test_works_ahead_but_no_further_than_prefetch() -> None:
    source = Endless()
    with MpDeviceLoader(source, "cpu", prefetch=3) as loader:
        batches = iter(loader)
        assert next(batches) == 0
        # One was consumed, and three are ahead, in whatever stage.
        assert wait_until(lambda: source.num_given == 4)
        time.sleep(0.05)
        assert source.num_given == 4


def test_a_second_iteration_starts_afresh_and_ends_the_first() -> None:
    source = Endless()
    with MpDeviceLoader(source, "cpu") as loader:
        first = iter(loader)
        assert [next(first), next(first)] == [0, 1]
        second = iter(loader)
        assert source.is_closed
        assert wait_until(lambda: len(transfer_threads()) == 2)
        assert [next(second), next(second)] == [0, 1]
        with pytest.raises(
            RuntimeError, match=r"got next\(\) on one that has ended so\. Use the newest iterator"
        ):
            next(first)
        assert next(second) == 2  # the advice


def test_leaving_the_loop_ends_the_thread() -> None:
    source = Endless()
    loader = MpDeviceLoader(source, "cpu")
    for batch in loader:
        if batch == 3:
            break
    gc.collect()
    assert wait_until(lambda: source.is_closed and not transfer_threads())


def test_dropping_the_loader_ends_the_thread() -> None:
    source = Endless()
    batches = iter(MpDeviceLoader(source, "cpu"))
    assert next(batches) == 0
    del batches
    gc.collect()
    assert wait_until(lambda: source.is_closed and not transfer_threads())


def test_close_and_the_context_manager_end_the_thread_and_may_be_repeated() -> None:
    source = Endless()
    with MpDeviceLoader(source, "cpu") as loader:
        assert next(iter(loader)) == 0
    assert source.is_closed
    assert not transfer_threads()
    loader.close()
    loader.close()
    assert next(iter(loader)) == 0  # a closed loader can be iterated again
    loader.close()


@pytest.mark.parametrize("fail_at", [0, 1, 7])
def test_an_exception_of_the_loader_arrives_in_place_of_its_batch(fail_at: int) -> None:
    batches = iter(MpDeviceLoader(Endless(fail_at), "cpu"))
    assert [int(next(batches)) for _ in range(fail_at)] == list(range(fail_at))
    with pytest.raises(OSError, match=f"disk gone at batch {fail_at}") as caught:
        next(batches)
    assert any(
        frame.name == "__iter__" and "disk gone" in (frame.line or "")
        for frame in traceback.extract_tb(caught.value.__traceback__)
    )
    with pytest.raises(StopIteration):
        next(batches)
    assert wait_until(lambda: not transfer_threads())


@pytest.mark.parametrize(
    "error", [ValueError("bad batch"), StopIteration("bad batch"), SystemExit("bad batch")]
)
def test_an_exception_of_the_transfer_arrives_whatever_its_type(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise error

    batches = iter(MpDeviceLoader([torch.zeros(1), torch.zeros(1).as_subclass(Stubborn)], "cpu"))
    next(batches)
    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(expected) as caught:
        next(batches)
    assert error in (caught.value, caught.value.__cause__)


class Stateful(Endless):
    """Reports its position in `state_dict`, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self.num_given}


def test_without_prefetch_the_wrapped_loader_is_never_read_ahead() -> None:
    source = Stateful(fail_at=3)
    loader = MpDeviceLoader(source, "cpu", prefetch=0)
    assert wait_until(lambda: not transfer_threads())  # those of the test before
    for index, batch in zip(range(3), loader):
        assert (
            int(batch) == index
            and source.state_dict() == {"num_given": index + 1}
            and not transfer_threads()
        )
    with pytest.raises(OSError, match="disk gone at batch 3"):
        list(loader)


def test_an_iteration_without_prefetch_is_closed_by_the_next() -> None:
    source = Stateful()
    loader = MpDeviceLoader(source, "cpu", prefetch=0)
    first = iter(loader)
    assert int(next(first)) == 0
    second = iter(loader)
    assert source.is_closed and int(next(second)) == 0
    with pytest.raises(
        RuntimeError,
        match=r"an iteration ends when its loader is closed or iterated again"
        r".*Use the newest iterator",
    ):
        next(first)
    source.is_closed = False
    del second  # a loop that is left early
    gc.collect()
    assert source.is_closed


def test_what_cannot_be_iterated_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match=r"a loader gives batches .*; got 5, of type int\. Pass"):
        MpDeviceLoader(5, "cpu")  # type: ignore[arg-type]


def test_a_loader_that_does_not_come_back_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd_data.loader, "_JOIN_TIMEOUT_S", 0.05)
    waits, release = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        yield 0
        waits.set()
        release.wait(10)

    loader = MpDeviceLoader(slow(), "cpu")
    assert next(iter(loader)) == 0 and waits.wait(10)
    with pytest.warns(
        RuntimeWarning,
        match=r"got none within 0\.05 s of closing the iteration\. Its thread ends with that batch",
    ):
        loader.close()
    release.set()
    assert wait_until(lambda: not transfer_threads())


@pytest.mark.parametrize(
    ("name", "what", "least"),
    [
        ("prefetch", "batches", 0),
        ("transfer_threads", "threads", 1),
        ("batches_per_execution", "batches", 1),
    ],
)
@pytest.mark.parametrize("below", [1, 2, 0.5])
def test_counts_are_checked(name: str, what: str, least: int, below: float) -> None:
    for value in (least - below, True):
        with pytest.raises(
            DataError,
            match=rf"{name} must be a whole number of {what}, at least {least}; got {value!r}\. "
            rf"Pass for instance {name}=2\.",
        ):
            MpDeviceLoader([], "cpu", **{name: value})
    MpDeviceLoader([], "cpu", **{name: 2})


def test_the_limit_of_stalls_is_checked() -> None:
    with pytest.raises(
        DataError, match=r"stall_warning_s must be .* more than 0; got 0\. Pass float\('inf'\)"
    ):
        MpDeviceLoader([], "cpu", stall_warning_s=0)
    for limit_s in (float("inf"), 1e30, 10**18):
        assert list(MpDeviceLoader([1], "cpu", stall_warning_s=limit_s)) == [1]


def test_the_policy_for_uneven_batches_is_checked() -> None:
    with pytest.raises(
        DataError, match=r"must be one of 'keep', 'drop', 'pad', 'error'; got 'cut'"
    ):
        MpDeviceLoader([], "cpu", uneven_batch="cut")
    MpDeviceLoader([], "cpu", uneven_batch="drop")
