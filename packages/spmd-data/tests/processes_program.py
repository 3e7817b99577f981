"""What each of several processes does in `test_processes.py`.

`python processes_program.py FOLDER PORT PROCESS PROCESSES` joins the others, reads its part of an
epoch through a loader, and writes what it found to `FOLDER/PROCESS.pt`.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

import spmd_core as spmd
from spmd_data import MpDeviceLoader

NUM_SAMPLES, BATCH = 44, 16


class Strided(Sampler[int]):
    """Every k-th place of a global order: a stand-in for `ShardedSampler`."""

    def __init__(self, num_parts: int, part: int) -> None:
        self.num_parts, self.part, self.epoch, self.start = num_parts, part, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"format": 1, "epoch": self.epoch, "samples": self.start, "source": {"seed": 0}}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.start = state["epoch"], state["samples"]

    def __len__(self) -> int:
        return (NUM_SAMPLES - self.start) // self.num_parts

    def __iter__(self) -> Any:
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        yield from order[self.start + self.part :: self.num_parts].tolist()


def loader_of(num_parts: int, part: int, **options: Any) -> MpDeviceLoader:
    """Batches of samples and labels, of this part, as parts of global tensors."""
    mesh = spmd.Mesh(range(8), (8,), ("data",))
    data = TensorDataset(torch.arange(2 * NUM_SAMPLES).reshape(-1, 2), torch.arange(NUM_SAMPLES))
    return MpDeviceLoader(
        DataLoader(data, batch_size=BATCH // num_parts, sampler=Strided(num_parts, part)),
        "xla",
        input_sharding=spmd.ShardingSpec(mesh, ("data", None), minibatch=True),
        **options,
    )


def read_together(process: int) -> list[tuple[float, ...]]:
    """Sums of the batches of two loaders, whose threads have them in opposite order."""
    mesh = spmd.Mesh(range(8), (8,), ("data",))
    spec = spmd.ShardingSpec(mesh, ("data",), minibatch=True)

    def batches(number: int) -> Any:
        time.sleep(0.5 * (number == process))
        yield from (torch.ones(8, number + columns) for columns in range(1, 4))

    loops = [iter(MpDeviceLoader(batches(n), "xla", input_sharding=spec)) for n in range(2)]
    return [tuple(spmd.to_cpu(t).sum().item() for t in pair) for pair in zip(*loops)]


def leave_early(process: int) -> float:
    """How long it takes to leave a loop whose thread waits for one that has not come."""
    mesh = spmd.Mesh(range(8), (8,), ("data",))
    spec = spmd.ShardingSpec(mesh, ("data",), minibatch=True)
    may_go_on = threading.Event()

    def batches() -> Any:
        yield torch.zeros(8)
        if process:
            may_go_on.wait(60)
        yield torch.zeros(16)

    loader = MpDeviceLoader(batches(), "xla", input_sharding=spec)
    for _ in loader:
        time.sleep(1.0)  # process 0 compares the second batch, which process 1 does not have
        break
    start = time.monotonic()
    if not process:
        loader.close()
    took_s = time.monotonic() - start
    may_go_on.set()
    loader.close()
    return took_s


def end_apart(process: int) -> str:
    """What process 1 is told, whose data ends before that of process 0."""
    mesh = spmd.Mesh(range(8), (8,), ("data",))
    spec = spmd.ShardingSpec(mesh, ("data",), minibatch=True)
    loader = MpDeviceLoader([torch.zeros(8)] * (3 - process), "xla", input_sharding=spec)
    try:
        for number, _ in enumerate(loader):
            if number == 2:
                break
    except spmd.errors.DataError as error:
        return str(error)
    return ""


def main(folder: Path, port: str, process: int, processes: int) -> None:
    spmd.simulate(8 // processes)
    spmd.distributed.initialize(f"127.0.0.1:{port}", processes, process, timeout_s=120)
    spmd.use_spmd()
    found: dict[str, Any] = {"batches": [], "states": []}
    for transfer_threads in (1, 3):
        loader = loader_of(
            processes, process, uneven_batch="pad", prefetch=4, transfer_threads=transfer_threads
        )
        for x, y, mask in loader:
            found["batches"].append(spmd.to_cpu([x, y, mask]))
            found["states"].append(loader.state_dict())
    found["dropped"] = len(list(loader_of(processes, process, uneven_batch="drop")))
    found["together"] = read_together(process)
    found["left_after_s"] = leave_early(process)
    found["end"] = end_apart(process)
    mesh = spmd.Mesh(range(8), (8,), ("data",))
    spec = spmd.ShardingSpec(mesh, ("data",), minibatch=True)
    other = {"x": torch.zeros(8), "y" if process else "z": torch.zeros(8)}
    try:
        list(MpDeviceLoader([other], "xla", input_sharding=spec))
    except spmd.errors.DataError as error:
        found["refusal"] = str(error)
    torch.save(found, folder / f"{process}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]))
