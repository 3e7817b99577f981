"""A train step in stock PyTorch beside the same step as one jitted jax program, in turns."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import torch
from tqdm import trange

import spmd_core as spmd
from benchmarks.report import Samples, Stopwatch, Table, verdict

# Steps before timing: two compile (the first one makes the optimizer's state), two fill the
# allocators.
WARM_UP = 4
# Pause between steps: XLA's worker threads spin for a while after their work, which would count as
# CPU time of the next step.
SETTLE_S = 0.05
MAX_RATIO = 1.05
MAX_TRACING_S = 0.020
MAX_LOSS_DIFFERENCE = 1e-4


@dataclass
class Timing:
    """Measurements of one of the two programs, in seconds per step."""

    wall: Samples = field(default_factory=Samples)
    cpu: Samples = field(default_factory=Samples)
    # Wall time until Python is free again; the devices are idle at the start.
    host: Samples = field(default_factory=Samples)
    burst_wall: Samples = field(default_factory=Samples)  # with several steps in flight
    burst_cpu: Samples = field(default_factory=Samples)


@dataclass
class Tracing:
    """Times of Python's parts of one PyTorch step that starts with idle devices, in seconds."""

    recording: Samples = field(default_factory=Samples)  # forward, backward, optimizer; wall
    recording_cpu: Samples = field(default_factory=Samples)  # autograd's thread included
    dispatch: Samples = field(default_factory=Samples)  # sync(): flush, look up, enqueue; wall
    # CPU time of this thread only: meanwhile the devices' threads start to compute.
    dispatch_cpu: Samples = field(default_factory=Samples)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of Python in a step whose program is compiled, the median."""
        return self.recording_cpu.median + self.dispatch_cpu.median


class Recorded:
    """A step in stock PyTorch under spmd_core.

    Args:
        loss_of_step: records a step, and returns its loss without a gradient.
    """

    def __init__(self, loss_of_step: Callable[[], torch.Tensor]) -> None:
        self._loss_of_step = loss_of_step
        self.tracing = Tracing()
        self.loss: torch.Tensor | None = None

    def step(self) -> None:
        """Records one step and sends it to the devices. Does not wait for them."""
        with Stopwatch() as recording:
            self.loss = self._loss_of_step()
        thread_s = time.thread_time()
        with Stopwatch() as dispatch:
            spmd.sync()
        self.tracing.recording.add(recording.wall_s)
        self.tracing.recording_cpu.add(recording.cpu_s)
        self.tracing.dispatch.add(dispatch.wall_s)
        self.tracing.dispatch_cpu.add(time.thread_time() - thread_s)

    def wait(self) -> None:
        """Waits until the devices have finished."""
        spmd.sync(wait=True)

    def read_loss(self) -> float:
        """The last step's loss."""
        assert self.loss is not None
        return self.loss.item()


class Jitted:
    """The step as one jax program, with the interface of `Recorded`.

    Args:
        step: `step(state, *batch) -> (new state, loss)`.
        state, batch: its arguments, on the devices.
    """

    def __init__(self, step: Callable[..., Any], state: Any, batch: tuple[jax.Array, ...]) -> None:
        self._step, self._state, self._batch = step, state, batch
        self._loss: Any = None

    def step(self) -> None:
        """Sends one step to the devices."""
        self._state, self._loss = self._step(self._state, *self._batch)

    def wait(self) -> None:
        """Waits until the devices have finished."""
        jax.block_until_ready((self._state, self._loss))

    def read_loss(self) -> float:
        """The last step's loss."""
        return float(self._loss)


def timed(program: Recorded | Jitted, *, steps: int) -> tuple[Stopwatch, Stopwatch]:
    """Runs `steps` steps and waits after the last one.

    Returns the time until the devices were done, and the time until Python was free again.
    """
    with Stopwatch() as watch:
        with Stopwatch() as host:
            for _ in range(steps):
                program.step()
        program.wait()
    return watch, host


def measure(
    ours: Recorded, theirs: Jitted, *, rounds: int, burst: int
) -> tuple[Timing, Timing, list[float]]:
    """Runs both programs alternately.

    Returns both timings, and the relative difference of the losses for each round's step.
    """
    timings = {id(ours): Timing(), id(theirs): Timing()}
    differences = []
    for i in trange(rounds, desc="rounds", disable=None):
        pair: list[Recorded | Jitted] = [ours, theirs] if i % 2 == 0 else [theirs, ours]
        for program in pair:
            time.sleep(SETTLE_S)
            watch, host = timed(program, steps=1)
            timings[id(program)].host.add(host.wall_s)
            timings[id(program)].wall.add(watch.wall_s)
            timings[id(program)].cpu.add(watch.cpu_s)
        mine, right = ours.read_loss(), theirs.read_loss()
        differences.append(abs(mine - right) / abs(right))
    # Tracing leaves bursts out: there the devices compete with Python for the cores.
    tracing, ours.tracing = ours.tracing, Tracing()
    for i in trange(max(rounds // burst, 2) if burst else 0, desc="bursts", disable=None):
        pair = [ours, theirs] if i % 2 == 0 else [theirs, ours]
        for program in pair:
            watch, _ = timed(program, steps=burst)
            timings[id(program)].burst_wall.add(watch.wall_s / burst)
            timings[id(program)].burst_cpu.add(watch.cpu_s / burst)
    ours.tracing = tracing
    return timings[id(ours)], timings[id(theirs)], differences


def paired_ratio(mine: Samples, right: Samples) -> dict[str, float]:
    """Median and quartiles of the ratios between measurements taken next to each other."""
    ratios = [a / b for a, b in zip(mine.values, right.values, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {"median": median, "first_quartile": low, "third_quartile": high}


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def table_rows(
    mine: Timing, right: Timing, tracing: Tracing, *, burst: int, num_ops: int, new_compiles: int
) -> list[list[str]]:
    """The table: what was measured, for this package, for jax, and the ratio.

    Args:
        mine, right: the times of the two programs.
        tracing: of this package's step.
        burst: steps in flight when throughput was measured; 0: it was not.
        num_ops: recorded operations of a step.
        new_compiles: compiles after the warm-up.
    """

    def both(label: str, mine: Samples, right: Samples) -> list[str]:
        median = paired_ratio(mine, right)["median"]
        return [label, ms(mine.median), ms(right.median), f"{median:.3f}"]

    def least(label: str, mine: Samples, right: Samples) -> list[str]:
        return [label, ms(mine.min), ms(right.min), f"{mine.min / right.min:.3f}"]

    def alone(label: str, value: str) -> list[str]:
        return [label, value, "-", "-"]

    rows = [
        both("step, waited for: wall, median ms", mine.wall, right.wall),
        least("step, waited for: wall, min ms", mine.wall, right.wall),
        both("step, waited for: CPU, median ms", mine.cpu, right.cpu),
        least("step, waited for: CPU, min ms", mine.cpu, right.cpu),
    ]
    if burst:
        label = f"step, {burst} in flight:"
        rows += [
            both(f"{label} wall, median ms", mine.burst_wall, right.burst_wall),
            both(f"{label} CPU, median ms", mine.burst_cpu, right.burst_cpu),
        ]
    busy = "Python busy with a step"
    compiles = spmd.metrics.counter("compiles")
    return [
        *rows,
        [
            f"{busy} ({num_ops} ops): wall, median ms",
            ms(mine.host.median),
            ms(right.host.median),
            "-",
        ],
        [f"{busy}: wall, min ms", ms(mine.host.min), ms(right.host.min), "-"],
        alone(f"{busy}: CPU, median ms", ms(tracing.cpu_s)),
        alone(
            "  recording: wall, CPU, median ms",
            f"{ms(tracing.recording.median)}, {ms(tracing.recording_cpu.median)}",
        ),
        alone(
            "  sync(): wall, CPU, median ms",
            f"{ms(tracing.dispatch.median)}, {ms(tracing.dispatch_cpu.median)}",
        ),
        ["compiles in all, after warm-up", f"{compiles}, {new_compiles}", "1, 0", "-"],
    ]


def compared(
    ours: Recorded, theirs: Jitted, *, title: str, rounds: int, burst: int, max_cpu_ratio: float
) -> tuple[Table, dict[str, Any]]:
    """Measures both in turns.

    Returns:
        The table, and the data for the result file; its `targets` say which are reached.
    """
    for _ in trange(WARM_UP, desc="warm-up", disable=None):
        timed(ours, steps=1)
        timed(theirs, steps=1)
    compiles = spmd.metrics.counter("compiles")
    ours.tracing = Tracing()
    mine, right, differences = measure(ours, theirs, rounds=rounds, burst=burst)
    new_compiles = spmd.metrics.counter("compiles") - compiles
    num_ops = max((p for p in spmd.metrics.programs()), key=lambda p: p.executions).num_ops

    ratios = {"wall": paired_ratio(mine.wall, right.wall), "cpu": paired_ratio(mine.cpu, right.cpu)}
    if burst:
        ratios["burst_wall"] = paired_ratio(mine.burst_wall, right.burst_wall)
        ratios["burst_cpu"] = paired_ratio(mine.burst_cpu, right.burst_cpu)
    tracing = ours.tracing
    largest = max(differences)
    targets = {
        f"wall ratio at most {MAX_RATIO}": ratios["wall"]["median"] <= MAX_RATIO,
        f"CPU ratio at most {max_cpu_ratio}": ratios["cpu"]["median"] <= max_cpu_ratio,
        f"tracing at most {MAX_TRACING_S * 1e3:.0f} ms of CPU": tracing.cpu_s <= MAX_TRACING_S,
        "no compile after warm-up": new_compiles == 0,
        f"losses within {MAX_LOSS_DIFFERENCE:g} of the reference (largest {largest:.1e})": largest
        <= MAX_LOSS_DIFFERENCE,
    }
    quartiles = {
        name: f"{ratio['first_quartile']:.3f} to {ratio['third_quartile']:.3f}"
        for name, ratio in ratios.items()
    }
    notes = [
        "Ratios are the median over pairs of neighbouring measurements; "
        f"quartiles of the wall ratio {quartiles['wall']}, of the CPU ratio {quartiles['cpu']}.",
        *(f"{verdict(holds)}: {target}" for target, holds in targets.items()),
    ]
    rows = table_rows(
        *(mine, right, tracing), burst=burst, num_ops=num_ops, new_compiles=new_compiles
    )
    table = Table(title, ["", "PyTorch under spmd_core", "jitted jax", "ratio"], rows, notes)
    data = {
        "ratios": ratios,
        "ours_s": {name: samples["values"] for name, samples in asdict(mine).items()},
        "reference_s": {name: samples["values"] for name, samples in asdict(right).items()},
        "tracing_s": {name: samples["values"] for name, samples in asdict(tracing).items()},
        "num_ops": num_ops,
        "compiles": spmd.metrics.counter("compiles"),
        "compiles_after_warm_up": new_compiles,
        "largest_relative_loss_difference": largest,
        "targets": targets,
    }
    return table, data
