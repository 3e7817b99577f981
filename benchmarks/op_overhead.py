"""How many microseconds of Python does it take to record one operation?

Each operation is recorded many times without gradients, with all caches warm and without running a
program, so the figures are the cost of tracing alone. It is this thread's CPU time, so that what
other processes do counts little. The figure is the best of the repeats, as they only add to it; the
median stands beside it.

The floor is the cost of any recorder in Python: torch's dispatch to a subclass that only makes the
tensor of the result. It takes turns with the operations, as machines differ; the last column is
each operation's best divided by the floor.

Run: python -m benchmarks.op_overhead
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.options import whole
from benchmarks.report import Samples, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--count", type=whole(), default=1000, help="operations per repeat (default 1000)"
    )
    parser.add_argument("--repeats", type=whole(), default=30, help="repeats (default 30)")
    args = parser.parse_args()

import torch
from tqdm import trange

import spmd_core as spmd
from benchmarks.single_operations import OPERATIONS, SIZE, VIEWS

MAX_US, MAX_VIEW_US = 8.0, 5.0


@dataclass(frozen=True)
class Case:
    """One operation.

    `make` creates tensors and returns a function without arguments that records the operation once.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    max_us: float = MAX_US


def device_tensor(*size: int) -> torch.Tensor:
    return torch.ones(*size).to("xla")


class Bare(torch.Tensor):
    """A wrapper subclass whose operations make a result of one fixed shape and record nothing."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return bare()


def bare() -> torch.Tensor:
    """A `Bare` tensor."""
    shape = torch.Size((SIZE, SIZE))
    return torch.Tensor._make_wrapper_subclass(
        Bare, shape, (SIZE, 1), 0, None, torch.float32, torch.strided, torch.device("xla:0")
    )


def floor() -> Callable[[], object]:
    """An operation that only makes its result."""
    x, y = bare(), bare()
    return lambda: x + y


def cases() -> list[Case]:
    """All operations, with what each may take."""
    return [
        Case(name, partial(make, device_tensor), MAX_VIEW_US if name in VIEWS else MAX_US)
        for name, make in OPERATIONS.items()
    ]


def measure(cases: Sequence[Case], *, count: int, repeats: int) -> dict[str, Samples]:
    """CPU seconds per recorded operation, once per repeat; the cases take turns."""
    samples = {case.name: Samples() for case in cases}
    with torch.no_grad():
        for repeat in trange(repeats + 1, desc="repeats", disable=None):
            for case in cases:
                # On fresh tensors, so that a chain of in-place operations does not grow over the
                # repeats.
                record = case.make()
                start = time.thread_time()
                for _ in range(count):
                    record()
                seconds = (time.thread_time() - start) / count
                if repeat:  # the first repeat fills the caches
                    samples[case.name].add(seconds)
    return samples


def main(args: argparse.Namespace) -> int:
    spmd.simulate(1)
    compiles, executions = spmd.metrics.counter("compiles"), spmd.metrics.counter("executions")

    floors = Case("floor", floor)
    measured = measure([floors, *cases()], count=args.count, repeats=args.repeats)
    of_floor = measured.pop(floors.name)
    floor_s = of_floor.min
    if (spmd.metrics.counter("compiles"), spmd.metrics.counter("executions")) != (
        compiles,
        executions,
    ):
        raise RuntimeError(
            "a program ran inside the timed loop, so the figures are not those of recording; "
            "lower --count."
        )

    most = {case.name: case.max_us for case in cases()}
    holds = {name: samples.min * 1e6 <= most[name] for name, samples in measured.items()}
    rows = [
        [
            name,
            f"{s.min * 1e6:.2f}",
            f"{s.median * 1e6:.2f}",
            f"{most[name]:.0f}",
            verdict(holds[name]),
            f"{s.min / floor_s:.2f}",
        ]
        for name, s in measured.items()
    ]
    notes = [
        f"{args.count} operations in a repeat, {args.repeats} repeats, no gradients, "
        f"tensors of {SIZE} x {SIZE} float32.",
        f"The floor, an operation that records nothing: {floor_s * 1e6:.2f} us.",
    ]
    table = Table(
        "Recording one operation",
        ["operation", "best, us", "median, us", "at most, us", "holds", "over the floor"],
        rows,
        notes,
    )
    data = {
        "us": {
            name: {
                "best": s.min * 1e6,
                "median": s.median * 1e6,
                "samples": [seconds * 1e6 for seconds in s.values],
            }
            for name, s in measured.items()
        },
        "target_us": most,
        "floor_us": floor_s * 1e6,
        "floor_samples_us": [seconds * 1e6 for seconds in of_floor.values],
    }
    publish("op_overhead", table, data, folder=args.out)
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main(args))
