"""Does a train step ever wait for its batch, and what does the loader cost?

Five questions, each with a target:

1. A source that takes 0.8 of a step for each batch: how much of a step does the loop wait?
2. A DataLoader with 4 worker processes, which take 3 steps for each batch: the same.
3. Host to device: how many bytes a second, against `jax.device_put` with the same sharding?
4. How much CPU time does the loader take for a batch of 4 tensors?
5. Do memory, threads and file descriptors grow over 10,000 steps? (On Linux.)

For 1 and 2, steps on a batch that is on the devices, steps through the loader, and steps that read
their batch themselves (`prefetch=0`) take turns. A step is a small program and a wait, by which all
steps last the same time: the devices emulated on busy cores do not. Sources wait, too. For 3, the
two take turns. On the CPU, `jax.device_put` shares the memory of an array that begins at a multiple
of 64 bytes, and moves nothing; the loader must not, as the batch's owner may write to it. So
`device_put` gets an array that begins elsewhere, which it copies.

Run: python -m benchmarks.loader --rounds 5
"""

import argparse
import gc
import os
import resource
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import num_devices, whole
from benchmarks.report import Samples, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--devices", type=num_devices(), default=4, help="emulated devices (default 4)"
    )
    parser.add_argument("--rounds", type=whole(), default=5, help="rounds of all kinds (default 5)")
    parser.add_argument("--steps", type=whole(), default=10, help="steps of a round (default 10)")
    parser.add_argument(
        "--many-steps", type=whole(), default=10_000, help="steps of question 5 (default 10000)"
    )
    parser.add_argument(
        "--questions",
        nargs="+",
        type=int,
        choices=range(1, 6),
        default=range(1, 6),
        metavar="NUMBER",
        help="those that are asked, such as 1 3 (default: all)",
    )
    args = parser.parse_args()

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import trange

import spmd_core as spmd
from spmd_data import MpDeviceLoader

WIDTH, BATCH, LAYERS = 256, 256, 2
WARM_UP = 4  # steps of a round before its clock starts
MOST_WAIT, LEAST_RATE, MOST_CPU_MS, MOST_GROWTH = 0.03, 0.9, 0.5, 0.01


class Source:
    """Batches of random numbers that were drawn before, each after a wait of some seconds."""

    def __init__(self, num_steps: int, wait_s: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(4)]
        self._num_steps, self._wait_s = num_steps, wait_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(self._num_steps):
            time.sleep(self._wait_s)
            yield self._batches[step % len(self._batches)]


class Slow(Dataset[torch.Tensor]):
    """One batch per sample, each after a wait of some seconds."""

    def __init__(self, num_steps: int, wait_s: float) -> None:
        self._num_steps, self._wait_s = num_steps, wait_s

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._wait_s)
        return torch.full((BATCH, WIDTH), float(index % 4))


@dataclass
class Found:
    """One kind of round: seconds of a step, and the part of its time that the loop waited."""

    step: Samples = field(default_factory=Samples)
    wait: list[float] = field(default_factory=list)


class Training:
    """A stack of linear layers, split over the devices, with its optimizer."""

    def __init__(self, num_devices: int) -> None:
        self.mesh = spmd.Mesh(range(num_devices), (num_devices,), ("data",))
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to("xla")
        spmd.shard_module(self.model, {".*": ()}, self.mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True)
        self.sharding = spmd.ShardingSpec(self.mesh, ("data", None))

    def step(self, x: torch.Tensor) -> None:
        """Records a step."""
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed_step(self, x: torch.Tensor, step_s: float) -> None:
        """Carries out a step and waits for its devices, then until it has lasted `step_s`."""
        start = time.perf_counter()
        self.step(x)
        spmd.sync(wait=True)
        time.sleep(max(0.0, step_s - (time.perf_counter() - start)))

    def resident(self, num_steps: int, step_s: float) -> float:
        """Seconds of a step on one batch that is on the devices."""
        (x,) = MpDeviceLoader(Source(1, 0.0), "xla", input_sharding=self.sharding)
        spmd.sync(wait=True)
        start = time.perf_counter()
        for _ in range(num_steps):
            self.timed_step(x, step_s)
        return (time.perf_counter() - start) / num_steps

    def loaded(
        self, source: Iterable[Any], found: Found, *, step_s: float, prefetch: int
    ) -> MpDeviceLoader:
        """Adds the time of a step on batches from a source, after a warm-up."""
        loader = MpDeviceLoader(source, "xla", input_sharding=self.sharding, prefetch=prefetch)
        start, waited_s, num_steps = 0.0, 0.0, 0
        with loader:
            for number, x in enumerate(loader):
                if number == WARM_UP:
                    start, waited_s = time.perf_counter(), loader.counters()["wait_s"]
                self.timed_step(x, step_s)
                num_steps = number + 1 - WARM_UP
            took_s = time.perf_counter() - start
            waited_s = loader.counters()["wait_s"] - waited_s
        found.step.add(took_s / num_steps)
        found.wait.append(waited_s / took_s)
        return loader


def waits(
    training: Training, *, questions: Collection[int], rounds: int, steps: int
) -> tuple[list[list[str]], dict[str, Any]]:
    """Those of questions 1 and 2 that are asked."""
    training.resident(4, 0.0)  # compiles
    step_s = max(0.1, 4 * training.resident(10, 0.0))
    num, one, many = WARM_UP + steps, 0.8 * step_s, 3 * step_s

    def workers(num_batches: int) -> DataLoader[torch.Tensor]:
        return DataLoader(Slow(num_batches, many), batch_size=None, num_workers=4)

    kinds: dict[str, Any] = {}
    if 1 in questions:
        kinds["0.8 of a step"] = lambda: (Source(num, one), 2)
        kinds["0.8 of a step, read in the step"] = lambda: (Source(num, one), 0)
    if 2 in questions:
        kinds["3 steps, 4 workers"] = lambda: (workers(num + 4), 4)
        kinds["3 steps, read in the step"] = lambda: (Source(WARM_UP + 3, many), 0)
    resident = Samples()
    found = {name: Found() for name in kinds}
    reports = {}
    for _ in trange(rounds, desc="rounds", disable=None):
        resident.add(training.resident(steps, step_s))
        for name, make in kinds.items():
            source, prefetch = make()
            reports[name] = training.loaded(
                source, found[name], step_s=step_s, prefetch=prefetch
            ).report()
    rows = [["on the devices", f"{resident.median * 1e3:.0f} ms", "", "", ""]]
    for name, kind in found.items():
        wait = statistics.median(kind.wait)
        is_ours = "read in" not in name
        rows.append(
            [
                f"source of {name}",
                f"{kind.step.median * 1e3:.0f} ms",
                f"{wait:.1%}",
                f"{MOST_WAIT:.0%}" if is_ours else "",
                verdict(wait <= MOST_WAIT) if is_ours else "",
            ]
        )
    data = {
        "resident_step_s": resident.values,
        "step_s": step_s,
        "source_s": {"0.8 of a step": one, "3 steps": many},
        "kinds": {n: {"step_s": k.step.values, "wait_share": k.wait} for n, k in found.items()},
    }
    if 1 in questions:
        print(reports["0.8 of a step"])
    return rows, data


def throughput(training: Training, *, rounds: int) -> tuple[list[str], dict[str, Any]]:
    """Question 3."""
    hosts = [torch.randn(4096, 2048) for _ in range(4)]
    arrays = [_elsewhere(host.numpy()) for host in hosts]
    mesh = jax.make_mesh(
        (training.mesh.size(),), ("data",), devices=jax.devices()[: training.mesh.size()]
    )
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    ours, theirs = Samples(), Samples()
    for number in range(4 * rounds + 1):
        start = time.perf_counter()
        for _ in MpDeviceLoader(hosts, "xla", input_sharding=training.sharding, prefetch=0):
            pass
        mine_s = time.perf_counter() - start
        start = time.perf_counter()
        for array in arrays:
            jax.device_put(array, sharding).block_until_ready()
        theirs_s = time.perf_counter() - start
        if number:  # the first one warms up
            ours.add(mine_s)
            theirs.add(theirs_s)
    num_bytes = sum(host.nbytes for host in hosts)
    rate = statistics.median(b / a for a, b in zip(ours.values, theirs.values))
    row = [
        "bytes a second to the devices, against `jax.device_put`",
        f"{num_bytes / ours.median / 1e9:.1f} GB/s",
        f"{rate:.2f}",
        f"at least {LEAST_RATE}",
        verdict(rate >= LEAST_RATE),
    ]
    return row, {"ours_s": ours.values, "device_put_s": theirs.values, "bytes": num_bytes}


def _elsewhere(data: np.ndarray) -> np.ndarray:
    """The same values in memory that does not begin at a multiple of 64 bytes."""
    memory = np.empty(data.nbytes + 64, np.uint8)
    start = (16 - memory.ctypes.data) % 64
    moved = memory[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    moved[...] = data
    return moved


def overhead(training: Training, *, rounds: int) -> tuple[list[str], dict[str, Any]]:
    """Question 4."""
    batch = {name: torch.randn(64, 128) for name in "abcd"}
    cpu_ms = []
    for _ in range(rounds + 1):
        loader = MpDeviceLoader(
            (batch for _ in range(1000)), "xla", input_sharding=training.sharding
        )
        start = time.process_time()
        for _ in loader:
            pass
        cpu_ms.append(time.process_time() - start)
    median = statistics.median(cpu_ms[1:])  # 1,000 batches: seconds are milliseconds of one
    row = [
        "CPU time of the loader, a batch of 4 tensors",
        f"{median:.2f} ms",
        "",
        f"{MOST_CPU_MS} ms",
        verdict(median <= MOST_CPU_MS),
    ]
    return row, {"cpu_ms": cpu_ms[1:]}


def leaks(training: Training, *, steps: int) -> tuple[list[str], dict[str, Any]]:
    """Question 5: a small step on each batch, in ten iterations."""
    batches = [torch.randn(64, 128) for _ in range(4)]
    held = []
    for epoch in range(11):
        num = steps // 10
        total: Any = 0.0
        for x in MpDeviceLoader(
            (batches[i % 4] for i in range(num)), "xla", input_sharding=training.sharding
        ):
            total = (x * 2).sum()
        total.item()
        gc.collect()
        if epoch:  # the first one warms up
            held.append([_resident_bytes(), threading.active_count(), _num_files()])
    growth = held[-1][0] / held[0][0] - 1
    is_flat = growth <= MOST_GROWTH and held[-1][1:] == held[0][1:]
    row = [
        f"growth of memory over {steps * 9 // 10:,} steps; threads; files",
        f"{growth:.2%}; {held[0][1]} to {held[-1][1]}; {held[0][2]} to {held[-1][2]}",
        "",
        f"{MOST_GROWTH:.0%}; 0; 0",
        verdict(is_flat),
    ]
    return row, {"rss_threads_files": held}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main(args: argparse.Namespace) -> int:
    # The workers are forked while jax's threads wait, and use nothing of jax.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    warnings.filterwarnings("ignore", "This DataLoader will create 4", UserWarning)
    spmd.simulate(args.devices)
    spmd.use_spmd()
    training = Training(args.devices)
    rows, data = waits(training, questions=args.questions, rounds=args.rounds, steps=args.steps)
    others: dict[int, tuple[str, Callable[[], tuple[list[str], dict[str, Any]]]]] = {
        3: ("throughput", lambda: throughput(training, rounds=args.rounds)),
        4: ("overhead", lambda: overhead(training, rounds=args.rounds)),
        5: ("leaks", lambda: leaks(training, steps=args.many_steps)),
    }
    more = {name: ask() for number, (name, ask) in others.items() if number in args.questions}
    rows += [row for row, _ in more.values()]
    source_s = data["source_s"]
    table = Table(
        "A train step and its batch",
        ["what", "measured", "waited, or ratio", "target", "holds"],
        rows,
        [
            f"Batches of {BATCH} x {WIDTH} float32, {args.devices} emulated devices, medians. A "
            f"step lasts {data['step_s'] * 1e3:.0f} ms; the sources wait "
            f"{source_s['0.8 of a step'] * 1e3:.0f} and {source_s['3 steps'] * 1e3:.0f} ms for "
            f"each batch. The first {WARM_UP} steps of a round are not counted. `jax.device_put` "
            "gets an array that it must copy; of others it would share the memory."
        ],
    )
    publish(
        "loader", table, {**data, **{name: found for name, (_, found) in more.items()}},
        folder=args.out,
    )  # fmt: skip
    return int(any(row[-1] == verdict(False) for row in rows))


if __name__ == "__main__":
    sys.exit(main(args))
