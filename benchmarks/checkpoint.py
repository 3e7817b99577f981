"""What does a checkpoint cost a run: the step that saves, those behind it, the disk, the memory?

For states of several sizes (linear layers with AdamW, on eight emulated devices), beside what the
machine can do, measured in turns with it in the same run:

1. Stall: how long does `save` keep a step waiting, against a copy of the same blocks to memory that
   is there? Beside `torch.save` of gathered tensors, during which a step waits for everything, and
   torch.distributed.checkpoint's `async_save`.
2. Whole save: until a step is whole on the disk, against writing a file of as many bytes, with
   `fsync`.
3. Steps while a save goes on behind them, against steps without, and how long such a save takes: it
   rests, so that its work is spread over more steps, until it is waited for. Saves are at least 10
   steps apart. Beside it, the same steps while a thread writes a file of as many bytes.
4. Restore in a new process on another mesh, against reading a file of as many bytes: both from the
   disk, as the system is asked to forget its cache of both, and both into new memory.
5. CPU time of a whole save, against that of writing a file of as many bytes.
6. Memory of the process beside what it had before, in a save and in a restore, at its peak.

Question 2 is asked of saves that are waited for at once. Emulated devices compute on the cores that
write, so question 3 has the worst case: a step on an accelerator leaves the host's cores free. The
threads of a save have a lower priority than a step's, and write past the system's cache of files;
the one that writes a file has a step's priority, and writes through the cache, as programs do.

Run: python -m benchmarks.checkpoint
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.options import existing, whole
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=whole(), default=5, help="of each kind (default 5)")
    sizes = ("0.1", "0.6", "2.0")
    parser.add_argument(
        "--sizes", nargs="+", choices=sizes, default=sizes, help="of states, in GB (default: all)"
    )
    parser.add_argument(
        "--scratch",
        type=existing("folder"),
        default=Path(tempfile.gettempdir()),
        help="folder for the checkpoints (default: the system's for temporary files)",
    )
    parser.add_argument(
        "--only",
        choices=("save", "restore", "peers"),
        help="measure this on the one size and print JSON; the script uses this option",
    )
    args = parser.parse_args()

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp

import spmd_core as spmd
from benchmarks.memory import held_bytes

NUM_DEVICES, BATCH = 8, 64
NUM_ALONE = 10  # steps between two saves behind which others go on
PIECE_BYTES = 64 << 20
# Layers and their width, by size: 12 bytes a parameter.
SIZES = {"0.1": (2, 2048), "0.6": (3, 4096), "2.0": (10, 4096)}
# What is asked: of stall, whole save and restore over what the machine can do, of steps beside a
# save over steps alone, and of memory over the bytes of the state.
LIMITS = {
    "stall": 1.2,
    "save": 1.3,
    "steps": 1.1,
    "restore": 1.3,
    "save_memory": 1.3,
    "restore_memory": 0.3,
}
WORDS = {
    "stall": "the stall over a copy",
    "save": "the whole save over a file of as many bytes",
    "steps": "a step beside a save that rests over a step alone",
    "restore": "a restore on another mesh over reading a file of as many bytes",
    "save_memory": "memory beside the process in a save, over the bytes of the state",
    "restore_memory": "memory beside the process and the state in a restore, over its bytes",
    "floor": "Beside a thread that writes a file of as many bytes, a step over a step alone",
    "cpu": "CPU time of a whole save over that of a file of as many bytes",
    "again": "A restore over values that are there, which reads twice, over reading a file",
    "again_memory": "Its memory beside the process and the state",
}


# --- The run that is saved ------------------------------------------------------------------------


class Run:
    """A model of linear layers and its optimizer.

    Attributes:
        model, optimizer: its objects, which have no values yet.
    """

    def __init__(self, size: str, shape: tuple[int, ...], spec: tuple[Any, ...]) -> None:
        mesh = spmd.Mesh(range(NUM_DEVICES), shape, ("fsdp", "tensor")[: len(shape)])
        num_layers, width = SIZES[size]
        with torch.device("xla"):
            layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
            self._x = torch.ones(BATCH, width)
        self.model = nn.Sequential(*layers)
        for layer in layers:
            spmd.mark_sharding(layer.weight, mesh, spec)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        """A step, until the devices have done it."""
        self.model(self._x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        spmd.sync(wait=True)

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """All that lies on the devices."""
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        return [*self.model.parameters(), *(t for t in moments if t.device.type == "xla")]


# --- What the machine can do ----------------------------------------------------------------------


class Copies:
    """The blocks of a state, and memory for them that is there."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spmd.sync(wait=True)
        self._blocks = [
            np.asarray(shard.data)
            for tensor in tensors
            for shard in spmd.to_jax(tensor).addressable_shards
        ]
        self._memory = [np.zeros_like(block) for block in self._blocks]

    def seconds(self) -> float:
        """How long it takes to copy all."""

        def copy() -> None:
            for memory, block in zip(self._memory, self._blocks):
                np.copyto(memory, block)

        return timed(copy)


@functools.cache
def random_piece() -> np.ndarray:
    """What files are written of."""
    return np.random.default_rng(0).integers(0, 255, PIECE_BYTES, np.uint8)


def written(path: Path, num_bytes: int) -> float:
    """How long it takes to write a file and have it on the disk.

    The one before is there until then, as a step is until the next is whole: so neither is written
    into the pages of the system's cache that its predecessor has just left.
    """
    piece, new = random_piece(), path.with_name(f"{path.name}.new")

    def write() -> None:
        with new.open("wb", buffering=0) as file:
            for start in range(0, num_bytes, PIECE_BYTES):
                file.write(piece[: num_bytes - start].data)
            os.fsync(file.fileno())

    seconds = timed(write)
    new.replace(path)
    return seconds


def read(path: Path) -> float:
    """How long it takes to read a file from the disk into memory that the process did not have."""
    forget(path)

    def everything() -> None:
        memory = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(memory), PIECE_BYTES):
                file.readinto(memory[start : start + PIECE_BYTES].data)

    return timed(everything)


def forget(path: Path) -> None:
    """Has the system drop what it keeps of a file, or of all files of a folder."""
    for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(call: Callable[[], object]) -> float:
    """The wall time of a call, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def grown(into: dict[str, float], name: str) -> Iterator[None]:
    """Notes by how many bytes the process's memory grew inside, at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now
    before = held_bytes()
    yield
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:"))
    into[name] = max(into.get(name, 0), peak - before)


# --- Measurements, each in a process of its own ---------------------------------------------------


def save(size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """All questions but 4: what a save costs."""
    run = Run(size, (NUM_DEVICES,), ("fsdp", None))
    for _ in range(2):
        run.step()
    num_bytes = sum(t.nbytes for t in run.tensors())
    found: dict[str, Any] = {"bytes": num_bytes}
    samples = defaultdict[str, list[float]](list)
    with spmd.CheckpointManager(folder / "runs") as manager:
        # The first save takes the memory that all later ones use again.
        with grown(found, "memory_bytes"):
            found["first_stall_s"] = timed(lambda: manager.save(0, run.state()))
            manager.wait()
        copies = Copies(run.tensors())
        copies.seconds()
        random_piece()
        for step in range(1, rounds + 1):
            samples["copy_s"].append(copies.seconds())
            start = time.process_time()
            samples["file_s"].append(written(folder / "file", num_bytes))
            samples["file_cpu_s"].append(time.process_time() - start)
            start, start_cpu = time.perf_counter(), time.process_time()
            manager.save(step, run.state())
            samples["stall_s"].append(time.perf_counter() - start)
            manager.wait()
            samples["save_s"].append(time.perf_counter() - start)
            samples["save_cpu_s"].append(time.process_time() - start_cpu)
            shutil.rmtree(folder / "runs" / str(step - 1))
        del copies
        for step in range(rounds + 1, 2 * rounds + 1):
            samples["alone_s"] += [timed(run.step) for _ in range(NUM_ALONE)]
            manager.save(step, run.state())
            beside(run, functools.partial(is_missing, manager, step), samples, "beside")
            manager.wait()
            shutil.rmtree(folder / "runs" / str(step - 1))
            writing = threading.Thread(target=written, args=(folder / "file", num_bytes))
            writing.start()
            beside(run, writing.is_alive, samples, "floor")
    return found | samples


def is_missing(manager: spmd.CheckpointManager, step: int) -> bool:
    """Whether a step is not whole on the disk yet."""
    return manager.latest() != step


def beside(
    run: Run, goes_on: Callable[[], bool], samples: dict[str, list[float]], name: str
) -> None:
    """Steps while something goes on: how long each takes, and how many there are."""
    count, start = 0, time.perf_counter()
    while goes_on():
        run.step()
        count += 1
    seconds = time.perf_counter() - start
    samples[f"{name}_s"].append(seconds / max(1, count))
    samples[f"{name}_num"].append(count)
    samples[f"{name}_whole_s"].append(seconds)


def restore(size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Questions 4 and 6: what a restore on another mesh costs."""
    found: dict[str, Any] = {"read_s": [], "restore_s": [], "again_s": []}
    held = 0
    with spmd.CheckpointManager(folder / "runs", async_=False) as manager:
        torch.ones(8, device="xla").sum().item()  # starts the runtime
        for _ in range(rounds):
            found["read_s"].append(read(folder / "file"))
            run = Run(size, (2, 4), ("tensor", "fsdp"))
            for name in ("restore", "again"):
                # Again: over values that are there, as of a run that goes back to an earlier step.
                forget(folder / "runs")
                with grown(found, f"{name}_grown_bytes"):
                    start = time.perf_counter()
                    manager.restore(run.state())
                    found[f"{name}_s"].append(time.perf_counter() - start)
            held = sum(t.nbytes for t in run.tensors())
            del run
    # Emulated devices hold the restored state in this process.
    found["restore_memory_bytes"] = max(0, found.pop("restore_grown_bytes") - held)
    found["again_memory_bytes"] = found.pop("again_grown_bytes")
    return found


def peers(size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Question 1 and 2 of torch's own."""
    run = Run(size, (NUM_DEVICES,), ("fsdp", None))
    for _ in range(2):
        run.step()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {"gathered_s": [], "dcp_stall_s": [], "dcp_save_s": []}

    def gathered() -> None:
        state = {name: part.state_dict() for name, part in run.state().items()}
        with (folder / "gathered").open("wb") as file:
            torch.save(spmd.to_cpu(state), file)
            os.fsync(file.fileno())

    for number in range(rounds):
        found["gathered_s"].append(timed(gathered))
        state = {name: part.state_dict() for name, part in run.state().items()}
        start = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=folder / f"dcp{number}")
        found["dcp_stall_s"].append(time.perf_counter() - start)
        future.result()
        found["dcp_save_s"].append(time.perf_counter() - start)
        shutil.rmtree(folder / f"dcp{number}")
    distributed.destroy_process_group()
    return found


def measure(kind: str, size: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One of these in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--only", kind, "--sizes", size]
    command += ["--rounds", str(args.rounds), "--scratch", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What `LIMITS` names, of one size."""
    saved, restored, num_bytes = found["save"], found["restore"], found["save"]["bytes"]

    def over(ours: list[float], theirs: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(ours, theirs))

    alone = statistics.median(saved["alone_s"])
    return {
        "stall": over(saved["stall_s"], saved["copy_s"]),
        "save": over(saved["save_s"], saved["file_s"]),
        "steps": statistics.median(saved["beside_s"]) / alone,
        "floor": statistics.median(saved["floor_s"]) / alone,
        "cpu": over(saved["save_cpu_s"], saved["file_cpu_s"]),
        "restore": over(restored["restore_s"], restored["read_s"]),
        "again": over(restored["again_s"], restored["read_s"]),
        "save_memory": saved["memory_bytes"] / num_bytes,
        "restore_memory": restored["restore_memory_bytes"] / num_bytes,
        "again_memory": restored["again_memory_bytes"] / num_bytes,
    }


def added_s(saved: dict[str, Any], name: str = "beside") -> float:
    """How much longer the steps of one save take than as many without it, in seconds."""
    alone = statistics.median(saved["alone_s"])
    return statistics.median(
        (each - alone) * count for each, count in zip(saved[f"{name}_s"], saved[f"{name}_num"])
    )


def main(args: argparse.Namespace) -> int:
    if args.only:
        spmd.simulate(NUM_DEVICES)
        spmd.use_spmd()
        call = {"save": save, "restore": restore, "peers": peers}[args.only]
        print(json.dumps(call(args.sizes[0], args.rounds, args.scratch)))
        return 0
    cases = {}
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            cases[size] = {
                kind: measure(kind, size, args, Path(scratch))
                for kind in ("save", "restore", "peers")
            }
    found = {size: ratios(case) for size, case in cases.items()}

    def ms(case: dict[str, Any], kind: str, key: str) -> str:
        return f"{statistics.median(case[kind][key]) * 1e3:,.0f} ms"

    rows = [
        [
            f"{size} GB",
            *(ms(case, "save", key) for key in ("copy_s", "stall_s", "file_s", "save_s")),
            *(
                ms(case, "save", key)
                for key in ("alone_s", "beside_s", "beside_whole_s", "floor_s")
            ),
            *(ms(case, "restore", key) for key in ("read_s", "restore_s", "again_s")),
            *(ms(case, "peers", key) for key in ("gathered_s", "dcp_stall_s", "dcp_save_s")),
        ]
        for size, case in cases.items()
    ]
    notes = []
    for name, limit in LIMITS.items():
        values = [each[name] for each in found.values()]
        notes.append(
            f"{verdict(max(values) <= limit)}: {WORDS[name]}, asked at most {limit}: "
            + ", ".join(f"{value:.2f}" for value in values)
            + "."
        )
    notes += [
        f"{WORDS[name]}: " + ", ".join(f"{each[name]:.2f}" for each in found.values()) + "."
        for name in ("floor", "cpu", "again", "again_memory")
    ]
    notes.append(
        "What a save adds to the steps behind which it goes on: "
        + ", ".join(f"{added_s(case['save']):.2f} s" for case in cases.values())
        + "; a file of as many bytes: "
        + ", ".join(f"{added_s(case['save'], 'floor'):.2f} s" for case in cases.values())
        + ". Emulated devices and writes share the cores; an accelerator's steps leave them free."
    )
    notes.append(
        "The first save of a run takes its memory, which all later ones use again: its stall is "
        + ", ".join(f"{case['save']['first_stall_s']:.2f} s" for case in cases.values())
        + "."
    )
    columns = ["state", "copy", "stall", "file, fsync", "whole save", "step alone"]
    columns += ["step beside a save", "save beside steps", "step beside a file", "read", "restore"]
    columns += ["restore over values", "torch.save, gathered", "DCP async: stall", "DCP: whole"]
    title = f"A checkpoint on {NUM_DEVICES} emulated devices: medians of {args.rounds}"
    publish(
        "checkpoint",
        Table(title, columns, rows, notes),
        {"num_devices": NUM_DEVICES, "cases": cases, "ratios": found},
        folder=args.out,
    )
    is_all = all(each[name] <= limit for each in found.values() for name, limit in LIMITS.items())
    return 0 if is_all else 1


if __name__ == "__main__":
    sys.exit(main(args))
