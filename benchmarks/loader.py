"""How long does a train step wait for its batch?

The same steps on a batch that is on the devices already, on batches from memory, and on batches
whose source waits for half of a step, as a disk or a network would. `MpDeviceLoader` fetches the
next batch while the devices compute: then all three take the same time. Rounds take turns.

Run: python -m benchmarks.loader --rounds 5
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from tqdm import trange

import spmd_core as spmd
from benchmarks.report import Samples, Table, argument_parser, publish
from spmd_data import MpDeviceLoader

WIDTH, BATCH, LAYERS = 1024, 1024, 4


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


class Training:
    """A stack of linear layers, split over the devices, with its optimizer."""

    def __init__(self, num_devices: int) -> None:
        mesh = spmd.Mesh(range(num_devices), (num_devices,), ("data",))
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to("xla")
        spmd.shard_module(self.model, {".*": ()}, mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True)
        self.sharding = spmd.ShardingSpec(mesh, ("data", None))

    def step(self, x: torch.Tensor) -> None:
        """Records a step."""
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resident(self, num_steps: int) -> float:
        """Seconds of a step on one batch that is on the devices."""
        (x,) = MpDeviceLoader(Source(1, 0.0), "xla", input_sharding=self.sharding)
        spmd.sync(wait=True)
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step(x)
            spmd.sync()
        spmd.sync(wait=True)
        return (time.perf_counter() - start) / num_steps

    def loaded(self, num_steps: int, wait_s: float) -> float:
        """Seconds of a step on batches from a source; the first one is waited for before."""
        source: Any = Source(num_steps + 1, wait_s)
        start = 0.0
        for number, x in enumerate(MpDeviceLoader(source, "xla", input_sharding=self.sharding)):
            if number == 1:
                spmd.sync(wait=True)
                start = time.perf_counter()
            self.step(x)
        spmd.sync(wait=True)
        return (time.perf_counter() - start) / num_steps


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--devices", type=int, default=4, help="emulated devices (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all kinds (default 5)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round (default 10)")
    args = parser.parse_args()
    spmd.simulate(args.devices)
    spmd.use_spmd()
    training = Training(args.devices)
    training.resident(4)  # compiles
    training.loaded(2, 0.0)
    wait_s = training.resident(4) / 2
    found = {name: Samples() for name in ("on the devices", "from memory", "after a wait")}
    for _ in trange(args.rounds, desc="rounds", disable=None):
        found["on the devices"].add(training.resident(args.steps))
        found["from memory"].add(training.loaded(args.steps, 0.0))
        found["after a wait"].add(training.loaded(args.steps, wait_s))
    least = found["on the devices"].median
    rows = [
        [name, f"{s.median * 1e3:.1f} ms", f"{s.min * 1e3:.1f} ms", f"{s.median / least:.3f}"]
        for name, s in found.items()
    ]
    table = Table(
        "A train step, by where its batch comes from",
        ["batch", "step, median", "min", "of that on the devices"],
        rows,
        [
            f"Batches of {BATCH} x {WIDTH} float32, {args.devices} emulated devices. The wait is "
            f"{wait_s * 1e3:.1f} ms for each batch."
        ],
    )
    data = {"step_s": {n: s.values for n, s in found.items()}, "wait_s": wait_s}
    publish("loader", table, data, folder=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
