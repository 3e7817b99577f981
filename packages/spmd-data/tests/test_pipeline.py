"""Tests the stages and their threads: order, bounds, exceptions, what is left behind, stalls."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from spmd_core.errors import DataError
from spmd_data import MpDeviceLoader
from spmd_data.counters import Counters
from spmd_data.pipeline import Pipeline
from spmd_data.placement import Placed

pytestmark = pytest.mark.filterwarnings(
    # Workers are forked while jax's threads wait; they use nothing of jax.
    "ignore:os.fork:RuntimeWarning",
    "ignore:This process .* is multi-threaded:DeprecationWarning",
)


def wait_until(condition: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def left_behind() -> list[Any]:
    """Threads and processes of loaders, and files in shared memory."""
    return [
        *(thread for thread in threading.enumerate() if thread.name.startswith("spmd-data")),
        *multiprocessing.active_children(),
        *Path("/dev/shm").glob(f"*torch_{os.getpid()}_*"),
    ]


class Numbers(Dataset):
    """Samples 0, 1, 2, ... until one that fails."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise OSError(f"no sample {index}")
        return torch.full((1000,), index)


def pipeline(source: Iterator[Any], place: Any = None, **options: Any) -> Pipeline:
    made = Pipeline(
        source,
        lambda batch, noted: batch,
        place or (lambda batch: Placed(batch, 0)),
        **{
            "after_read": lambda: None,
            "prefetch": 4,
            "transfer_threads": 1,
            "counters": Counters(),
            "reuses_memory": False,
            "stall_s": 60.0,
            **options,
        },
    )
    made.start()
    return made


def test_several_threads_keep_the_order() -> None:
    together = threading.Barrier(3)  # each needs two others that transfer at the same time

    def place(batch: int) -> Placed:
        together.wait(20)
        time.sleep(0.01 * (batch % 3 == 0))
        return Placed(batch, 0)

    pipe = pipeline(iter(range(12)), place, transfer_threads=3)
    assert [pipe.get().batch for _ in range(12)] == list(range(12))
    assert pipe.get().is_end
    with pytest.raises(StopIteration):
        pipe.get()
    assert wait_until(lambda: not left_behind())


def test_a_source_that_reuses_its_memory_waits_for_the_transfer() -> None:
    memory = [0]

    def source() -> Iterator[list[int]]:
        for memory[0] in range(6):
            yield memory

    def place(batch: list[int]) -> Placed:
        time.sleep(0.02)
        return Placed([*batch], 0)

    pipe = pipeline(source(), place, reuses_memory=True)
    assert [pipe.get().batch for _ in range(6)] == [[i] for i in range(6)]
    assert pipe.get().is_end


@pytest.mark.parametrize(("prefetch", "most"), [(0, 1), (1, 2), (3, 4)])
def test_no_more_batches_live_than_are_prefetched_and_used(prefetch: int, most: int) -> None:
    live: list[weakref.ref[torch.Tensor]] = []

    def source() -> Iterator[torch.Tensor]:
        for _ in range(20):
            made = torch.zeros(10)
            live.append(weakref.ref(made))
            yield made
            del made

    seen = []
    with MpDeviceLoader(source(), "cpu", prefetch=prefetch) as loader:
        for batch in loader:
            time.sleep(0.002)
            seen.append(sum(ref() is not None for ref in live))
            del batch
    # The generator itself holds the batch that it yielded last.
    assert len(seen) == 20 and max(seen) <= most + 1


def test_a_batch_that_fails_in_transfer_raises_in_its_place() -> None:
    def place(batch: int) -> Placed:
        if batch == 2:
            raise OSError("the device is gone")
        time.sleep(0.01)  # the later ones are done first
        return Placed(batch, 0)

    pipe = pipeline(iter(range(9)), place, transfer_threads=3)
    assert [pipe.get().batch, pipe.get().batch] == [0, 1]
    with pytest.raises(OSError, match="the device is gone") as caught:
        pipe.get()
    assert "place" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(StopIteration):
        pipe.get()
    assert wait_until(lambda: not left_behind())


def test_what_is_noted_of_a_batch_may_fail() -> None:
    def after_read() -> None:
        raise OSError("no state")

    for prefetch in (0, 2):
        pipe = pipeline(iter(range(3)), after_read=after_read, prefetch=prefetch)
        with pytest.raises(OSError, match="no state"):
            pipe.get()


def test_an_exception_in_a_worker_arrives_in_its_place_and_nothing_is_left() -> None:
    loader = MpDeviceLoader(DataLoader(Numbers(13), batch_size=4, num_workers=2), "cpu")
    batches = iter(loader)
    assert [int(next(batches)[0, 0]) for _ in range(3)] == [0, 4, 8]
    with pytest.raises(OSError, match=r"(?s)__getitem__.*no sample 13"):  # the worker's traceback
        next(batches)
    # Although the exception, which holds the frames of torch's iterator, is still there.
    assert wait_until(lambda: not left_behind())


def test_the_end_leaves_nothing() -> None:
    loader = MpDeviceLoader(DataLoader(Numbers(), batch_size=4, num_workers=2), "cpu")
    assert len(list(loader)) == 10 and not left_behind()


def test_leaving_the_loop_leaves_nothing() -> None:
    loader = MpDeviceLoader(DataLoader(Numbers(), batch_size=4, num_workers=2), "cpu")
    for _ in loader:
        assert len(left_behind()) >= 3
        break
    assert wait_until(lambda: not left_behind())


def test_an_exception_in_the_step_leaves_nothing() -> None:
    loader = MpDeviceLoader(DataLoader(Numbers(), batch_size=4, num_workers=1), "cpu")

    def train() -> None:
        for _ in loader:
            raise ValueError("the step failed")

    with pytest.raises(ValueError, match="the step failed"):
        train()
    gc.collect()
    # The traceback, which pytest has let go, held the loop's frame, and this the iterator.
    assert wait_until(lambda: not left_behind())


def test_a_collected_loader_leaves_nothing() -> None:
    loader = MpDeviceLoader(DataLoader(Numbers(), batch_size=4, num_workers=1), "cpu")
    batches = iter(loader)
    next(batches)
    del loader, batches
    gc.collect()
    assert wait_until(lambda: not left_behind())


@pytest.mark.slow  # torch looks for dead workers every 5 s
def test_a_worker_that_is_killed_is_an_error() -> None:
    loader = MpDeviceLoader(DataLoader(Numbers(), batch_size=1, num_workers=1), "cpu")
    batches = iter(loader)

    def kill_and_go_on() -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGKILL)
        list(batches)

    # By chance torch sees the dead worker, or the batch that it has not handed over is missing.
    with pytest.raises((RuntimeError, OSError)) as caught:
        kill_and_go_on()
    said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert re.search(r"DataLoader worker \(pid.* \d+", "\n".join(said))
    loader.close()
    assert wait_until(lambda: not left_behind())


INTERRUPTED = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
from spmd_core.errors import DataError
from spmd_data import MpDeviceLoader

class Slow(Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((1000,), index)

for number, _ in enumerate(MpDeviceLoader(DataLoader(Slow(), batch_size=4, num_workers=2), "cpu")):
    if number == 2:
        print("running", flush=True)
"""


@pytest.mark.slow  # torch looks for dead workers every 5 s
def test_ctrl_c_leaves_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the workers too
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors
    assert "Fatal Python error" not in errors
    with pytest.raises(ProcessLookupError):  # no process of its group is left
        os.killpg(process.pid, 0)
    assert not list(Path("/dev/shm").glob(f"*torch_{process.pid}_*"))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stalled_source_warns_once(prefetch: int) -> None:
    def stalling() -> Iterator[int]:
        for index in range(3):
            time.sleep(0.1)
            yield index

    loader = MpDeviceLoader(stalling(), "cpu", prefetch=prefetch, stall_warning_s=0.02)
    with pytest.warns(
        RuntimeWarning,
        match=r"got none within 0\.\d s, in the stage of reading from the wrapped loader\. Look at",
    ) as caught:
        assert list(loader) == [0, 1, 2]
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_stalled_transfer_warns() -> None:
    def place(batch: int) -> Placed:
        time.sleep(0.1)
        return Placed(batch, 0)

    pipe = pipeline(iter(range(1)), place, stall_s=0.02)
    with pytest.warns(RuntimeWarning, match="in the stage of transfer to the device"):
        assert pipe.get().batch == 0
    pipe.stop()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_empty_source_is_an_error(prefetch: int) -> None:
    loader = MpDeviceLoader([], "cpu", prefetch=prefetch)
    batches = iter(loader)
    with pytest.raises(
        DataError, match=r"one batch; got none from a list. Look at its dataset and sampler"
    ):
        next(batches)
    assert list(batches) == []
    nothing: DataLoader[int] = DataLoader([], batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"got none from a DataLoader\. Look"):
        list(MpDeviceLoader(nothing, "cpu", prefetch=prefetch))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exhausted_source_is_an_error(prefetch: int) -> None:
    loader = MpDeviceLoader((torch.zeros(2) for _ in range(3)), "cpu", prefetch=prefetch)
    assert len(list(loader)) == 3
    with pytest.raises(
        DataError,
        match=r"got none from a generator, an iterator, which gives its batches once \(this is "
        r"iteration 2\)\. Wrap what makes a new one at each iter\(\): a list",
    ):
        list(loader)
