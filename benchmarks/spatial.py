"""How many bytes move, and how long does it take, when the positions of images are split?

Each operation of ResNet-50, forward and with both gradients, and a whole train step, over emulated
devices that split the rows, or rows and columns, of images. Before: the forms of
`ops/kernels/windows.py`, which XLA's partitioner splits. After: devices exchange halos by
themselves (`ops/kernels/halos.py`). The arithmetic is what has to cross the borders of the blocks:
the rows that windows read beyond their block, once forward and once backward, in float32. For the
train step it is that of blocks that divide all stages: 125,216 elements for an image and a border,
forward.

Run: python -m benchmarks.spatial
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Stopwatch, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--no-step", action="store_true", help="leave the train step out")
    args = parser.parse_args()

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import spmd_core as spmd  # isort: skip  (before torchvision)
from torchvision.models import resnet50  # isort: skip
from spmd_core.program import compile_cache, pipeline
from spmd_core.program.passes.image_layouts import image_layouts

AXES = ("height", "width")
MESHES = {"height=2": (2, 1), "height=4": (4, 1), "height=2,width=2": (2, 2)}
BATCH, RUNS = 4, 3
# Around the arithmetic: corners, and rows that some devices of an uneven split need and others not.
MARGIN = 1.2


@dataclass(frozen=True)
class Case:
    """One operation of ResNet-50.

    Attributes:
        channels, size: of the images, which are square.
        outs, kernel, stride: of the windows; `outs` 0 is a pooling.
        compute: the result, from images and weight.
    """

    channels: int
    size: int
    outs: int
    kernel: int
    stride: int
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def halo_bytes(self, shape: Sequence[int]) -> float:
        """The most that a device receives for a batch whose rows and columns the mesh splits.

        Counted from the definition of the windows: forward, the elements that a block of results
        reads outside of the same device's block of the input; backward, for a convolution, the
        elements of the gradient that read its input and are another device's. A pooling returns
        gradients of what it read. Blocks have the size of the largest, and a block that has
        neighbors on one side only receives as much as one between two, as programs are the same on
        all devices.
        """
        num = -(-self.size // self.stride)
        halos = [self._halos(num, count) for count in shape]
        forward = _frame([-(-self.size // n) for n in shape], [h[0] for h in halos])
        per_element = BATCH * 4
        if not self.outs:
            return 2.0 * forward * self.channels * per_element
        backward = _frame([-(-num // n) for n in shape], [h[1] for h in halos])
        return float((forward * self.channels + backward * self.outs) * per_element)

    def _halos(self, num: int, count: int) -> tuple[int, int]:
        """The most rows before and after a block that it reads: of the input, of the gradient."""
        block, block_out = -(-self.size // count), -(-num // count)
        reads = {
            (r, r * self.stride + k - self.kernel // 2)
            for r in range(num)
            for k in range(self.kernel)
        }
        reads = {(r, row) for r, row in reads if 0 <= row < self.size}
        rows = [{row - i * block for r, row in reads if r // block_out == i} for i in range(count)]
        results = [
            {r - i * block_out for r, row in reads if row // block == i} for i in range(count)
        ]
        return _outside(rows, block), _outside(results, block_out)


def _outside(wanted: Sequence[set[int]], block: int) -> int:
    """The most rows before the block, and the most behind it, that any device wants."""
    before = max(max((-row for row in rows), default=0) for rows in wanted)
    after = max(max((row - block + 1 for row in rows), default=0) for rows in wanted)
    return max(before, 0) + max(after, 0)


def _frame(block: Sequence[int], halos: Sequence[int]) -> int:
    """The elements around a block, corners included."""
    return math.prod(n + h for n, h in zip(block, halos)) - math.prod(block)


def _convolution(channels: int, size: int, outs: int, kernel: int, stride: int) -> Case:
    def compute(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, stride=stride, padding=kernel // 2)

    return Case(channels, size, outs, kernel, stride, compute)


CASES = {
    "conv 7x7/2, 3 x 224": _convolution(3, 224, 64, 7, 2),
    "max pool 3x3/2, 64 x 112": Case(64, 112, 0, 3, 2, lambda x, w: F.max_pool2d(x, 3, 2, 1)),
    "mean pool 3x3/2, 64 x 112": Case(64, 112, 0, 3, 2, lambda x, w: F.avg_pool2d(x, 3, 2, 1)),
    "conv 1x1/1, 64 x 56": _convolution(64, 56, 256, 1, 1),
    "conv 3x3/1, 64 x 56": _convolution(64, 56, 64, 3, 1),
    "conv 3x3/2, 128 x 56": _convolution(128, 56, 128, 3, 2),
    "conv 1x1/2, 256 x 56": _convolution(256, 56, 512, 1, 2),
    "conv 3x3/2, 256 x 28": _convolution(256, 28, 256, 3, 2),
    "conv 3x3/1, 256 x 14": _convolution(256, 14, 256, 3, 1),
    "conv 3x3/2, 512 x 14": _convolution(512, 14, 512, 3, 2),
    "conv 3x3/1, 512 x 7": _convolution(512, 7, 512, 3, 1),
}


@contextmanager
def without_halos() -> Iterator[None]:
    """Programs that are lowered inside leave windows to the partitioner."""
    passes = pipeline.PASSES
    pipeline.PASSES = tuple(p for p in passes if p is not image_layouts)
    try:
        yield
    finally:
        pipeline.PASSES = passes


def _moved(program: Any) -> dict[str, float]:
    """Bytes that a device receives in one run, by the kind of collective."""
    total: dict[str, float] = {}
    for c in spmd.debugging.collectives(program=program):
        total[c.kind] = total.get(c.kind, 0) + c.result_bytes * (c.executions or 1)
    return total


def measure(case: Case, mesh: spmd.Mesh) -> dict[str, Any]:
    """The bytes of the forward and of both gradients, and the CPU time of all."""
    spec = (None, None, *AXES)
    torch.manual_seed(0)
    x = spmd.mark_sharding(
        torch.randn(BATCH, case.channels, case.size, case.size).to("xla"), mesh, spec
    )
    w = torch.randn(case.outs or 1, case.channels, case.kernel, case.kernel).to("xla")
    spmd.sync(wait=True)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            out = spmd.mark_sharding(case.compute(x, w), mesh, spec)
        spmd.sync(wait=True)
        return out

    def both() -> list[torch.Tensor]:
        images, weight = x.detach().requires_grad_(), w.detach().requires_grad_(case.outs > 0)
        out = spmd.mark_sharding(case.compute(images, weight), mesh, spec)
        wanted = [images, weight] if case.outs else [images]
        grads = [*torch.autograd.grad(out, wanted, out.detach() * 0.5)]
        spmd.mark_sharding(grads[0], mesh, spec)
        spmd.sync(wait=True)
        return [out, *grads]

    forward()
    alone = _moved(spmd.metrics.programs()[-1])
    both()
    whole = _moved(spmd.metrics.programs()[-1])
    times = []
    for _ in range(RUNS):
        with Stopwatch() as watch:
            both()
        times.append(watch.cpu_s)
    return {
        "forward": alone,
        "whole": whole,
        "cpu_ms": 1e3 * statistics.median(times),
    }


def measure_step(mesh: spmd.Mesh) -> dict[str, Any]:
    """The bytes and the CPU time of a train step of ResNet-50."""
    torch.manual_seed(0)
    model = resnet50().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = spmd.mark_sharding(torch.randn(BATCH, 3, 224, 224).to("xla"), mesh, (None, None, *AXES))
    labels = torch.arange(BATCH).to("xla")
    times = []
    for step in range(4):
        with Stopwatch() as watch:
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            spmd.sync(wait=True)
        if step >= 2:
            times.append(watch.cpu_s)
    return {"whole": _moved(spmd.metrics.programs()[-1]), "cpu_ms": 1e3 * min(times)}


def _exchanged(moved: dict[str, float]) -> float:
    """All but sums, which split batches have too."""
    return sum(num for kind, num in moved.items() if kind != "all-reduce")


def _cells(before: dict[str, Any], after: dict[str, Any], limit: float) -> list[str]:
    def kinds(found: dict[str, Any]) -> str:
        gathers = any(kind not in ("all-reduce", "collective-permute") for kind in found["whole"])
        return f"{_exchanged(found['whole']) / 1e3:,.1f} kB" + (", gathers" if gathers else "")

    return [
        f"{limit / 1e3:,.1f} kB",
        kinds(before),
        kinds(after),
        f"{before['cpu_ms']:,.1f} ms",
        f"{after['cpu_ms']:,.1f} ms",
    ]


def step_arithmetic(shape: Sequence[int]) -> float:
    """What devices exchange in a step of ResNet-50: 125,216 elements an image, and back."""
    borders = sum(n / math.prod(shape) for n in shape if n > 1)
    return 2.0 * 125_216 * 4 * BATCH * borders


def holds(after: dict[str, Any], limit: float) -> bool:
    """Whether only halos move, and no more than the arithmetic says."""
    only_halos = set(after["whole"]) <= {"all-reduce", "collective-permute"}
    return only_halos and _exchanged(after["whole"]) <= MARGIN * limit


def main(args: argparse.Namespace) -> int:
    spmd.config.cache_dir = None
    spmd.simulate(max(math.prod(shape) for shape in MESHES.values()))
    spmd.use_spmd()
    rows: list[list[str]] = []
    data: dict[str, Any] = {}
    reached = []
    steps = [] if args.no_step else ["train step of ResNet-50, 224 x 224"]
    for name, shape in MESHES.items():
        mesh = spmd.Mesh(np.arange(math.prod(shape)), shape, AXES)
        for case in tqdm([*CASES, *steps], desc=name, disable=None):

            def run(case: str = case, mesh: spmd.Mesh = mesh) -> dict[str, Any]:
                return measure(CASES[case], mesh) if case in CASES else measure_step(mesh)

            compile_cache.clear()
            with without_halos():
                before = run()
            compile_cache.clear()  # the key is the same
            after = run()
            limit = CASES[case].halo_bytes(shape) if case in CASES else step_arithmetic(shape)
            reached.append(holds(after, limit))
            data[f"{case}, {name}"] = {"before": before, "after": after, "arithmetic": limit}
            rows.append([case, name, *_cells(before, after, limit), verdict(reached[-1])])
    notes = [
        f"A batch of {BATCH} on emulated devices, float32. Bytes of the results of all collectives "
        "but sums, on one device: forward and both gradients in one program. `gathers`: some are "
        "no permutes. CPU time of all devices together: on emulated devices it shows work that is "
        "done twice, not the time on real ones.",
        f"Holds: nothing but halos moves, and at most {MARGIN} times the arithmetic.",
    ]
    columns = ["operation, channels x size", "mesh", "arithmetic", "moved before", "moved after"]
    columns += ["CPU before", "CPU after", "holds"]
    publish(
        "spatial",
        Table("Images split by rows and columns", columns, rows, notes),
        {"cases": data},
        folder=args.out,
    )
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main(args))
