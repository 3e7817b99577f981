"""Is a train step in stock PyTorch as fast as the same step as one hand-written jitted jax program?

The two programs are Hugging Face's GPT-2 with marked parameters and torch.optim.AdamW, and the step
of jax_gpt2_step.py. Both run alternately in one process on the same emulated devices, from the same
weights on the same tokens. Reported are wall time, CPU time of all threads (less noisy than wall
time), the ratio within each pair of neighbouring measurements, and how long Python is busy with a
step whose program is already compiled.

Run: python -m benchmarks.fixed_step --rounds 20
"""

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.options import num_devices, whole
from benchmarks.report import Samples, Stopwatch, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--rounds", type=whole(), default=20, help="timed pairs of steps (default 20)"
    )
    parser.add_argument(
        "--burst",
        type=whole(0),
        default=4,
        help="steps in flight when throughput is measured; 0: not measured (default 4)",
    )
    parser.add_argument(
        "--devices", type=num_devices(), default=8, help="emulated devices (default 8)"
    )
    parser.add_argument(
        "--activation-marks",
        action="store_true",
        help="also mark the residual stream and the logits, along the batch",
    )
    args = parser.parse_args()

import jax
import numpy as np
import torch
from tqdm import trange

import spmd_core as spmd
from benchmarks import jax_gpt2_step as reference
from examples.gpt2.model import build_model
from examples.gpt2.presets import ModelPreset

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


class Ours:
    """The step in stock PyTorch under spmd_core."""

    def __init__(self, shape: reference.Shape, *, num_devices: int, mark_activations: bool) -> None:
        preset = ModelPreset(
            "fixed",
            shape.num_layers,
            shape.width,
            shape.num_heads,
            shape.vocabulary,
            shape.seq,
            shape.seq,
            shape.batch,
            1e-3,
        )
        torch.manual_seed(0)
        self.model = build_model(preset, vocab_size=shape.vocabulary, dropout=0.0)
        self.initial = {
            name: p.detach().numpy().copy() for name, p in self.model.named_parameters()
        }
        # The default that transformers uses, with a warning, for a configuration without a loss
        # type.
        self.model.loss_type = "ForCausalLM"
        self.model.to("xla")
        mesh = spmd.Mesh(range(num_devices), (num_devices,), (reference.AXIS,))
        for p in self.model.parameters():
            spmd.mark_sharding(p, mesh, reference.partition_spec(tuple(p.shape), num_devices))
        if mark_activations:
            self._mark_activations(mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        ids = torch.from_numpy(reference.random_tokens(shape)).long().to("xla")
        self.ids = spmd.mark_sharding(ids, mesh, (reference.AXIS, None))
        positions = torch.arange(shape.seq).expand(1, -1).contiguous()
        self.positions = positions.to("xla")
        self.tracing = Tracing()
        self.loss: torch.Tensor | None = None

    def _mark_activations(self, mesh: Any) -> None:
        """Splits the residual stream and the logits along the batch."""

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            spmd.mark_sharding(
                output if isinstance(output, torch.Tensor) else output[0],
                mesh,
                (reference.AXIS, None, None),
            )

        modules = dict(self.model.named_modules())
        for name in (
            "transformer.drop",
            "transformer.ln_f",
            "lm_head",
            *(f"transformer.h.{i}" for i in range(self.model.config.n_layer)),
        ):
            modules[name].register_forward_hook(hook)

    def step(self) -> None:
        """Records one step and sends it to the devices. Does not wait for them."""
        with Stopwatch() as recording:
            loss = self.model(input_ids=self.ids, labels=self.ids, position_ids=self.positions).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loss = loss.detach()
            del loss
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


class Reference:
    """The step as one jax program, with the interface of `Ours`."""

    def __init__(
        self, shape: reference.Shape, *, num_devices: int, parameters: dict[str, np.ndarray]
    ) -> None:
        self._step, self._state, self._batch = reference.build(
            num_devices, shape=shape, parameters=parameters
        )
        self._loss: Any = None

    def step(self) -> None:
        """Sends one step to the devices."""
        self._state, self._loss = self._step(self._state, self._batch)

    def wait(self) -> None:
        """Waits until the devices have finished."""
        jax.block_until_ready((self._state, self._loss))

    def read_loss(self) -> float:
        """The last step's loss."""
        return float(self._loss)


def timed(program: Ours | Reference, *, steps: int) -> tuple[Stopwatch, Stopwatch]:
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
    ours: Ours, theirs: Reference, *, rounds: int, burst: int
) -> tuple[Timing, Timing, list[float]]:
    """Runs both programs alternately.

    Returns both timings, and the relative difference of the losses for each round's step.
    """
    timings = {id(ours): Timing(), id(theirs): Timing()}
    differences = []
    for i in trange(rounds, desc="rounds", disable=None):
        pair: list[Ours | Reference] = [ours, theirs] if i % 2 == 0 else [theirs, ours]
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


def main(args: argparse.Namespace) -> int:
    spmd.simulate(args.devices)
    spmd.use_spmd()
    shape = reference.Shape()

    ours = Ours(shape, num_devices=args.devices, mark_activations=args.activation_marks)
    theirs = Reference(shape, num_devices=args.devices, parameters=ours.initial)
    for _ in trange(WARM_UP, desc="warm-up", disable=None):
        timed(ours, steps=1)
        timed(theirs, steps=1)
    compiles = spmd.metrics.counter("compiles")
    ours.tracing = Tracing()
    mine, right, differences = measure(ours, theirs, rounds=args.rounds, burst=args.burst)
    new_compiles = spmd.metrics.counter("compiles") - compiles
    num_ops = max((p for p in spmd.metrics.programs()), key=lambda p: p.executions).num_ops

    ratios = {"wall": paired_ratio(mine.wall, right.wall), "cpu": paired_ratio(mine.cpu, right.cpu)}
    if args.burst:
        ratios["burst_wall"] = paired_ratio(mine.burst_wall, right.burst_wall)
        ratios["burst_cpu"] = paired_ratio(mine.burst_cpu, right.burst_cpu)
    tracing = ours.tracing
    largest = max(differences)
    targets = {
        f"wall ratio at most {MAX_RATIO}": ratios["wall"]["median"] <= MAX_RATIO,
        f"CPU ratio at most {MAX_RATIO}": ratios["cpu"]["median"] <= MAX_RATIO,
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
    table = Table(
        f"The fixed GPT-2 step on {args.devices} emulated devices",
        ["", "PyTorch under spmd_core", "jitted jax", "ratio"],
        table_rows(
            *(mine, right, tracing), burst=args.burst, num_ops=num_ops, new_compiles=new_compiles
        ),
        notes,
    )
    data = {
        "shape": asdict(shape),
        "num_devices": args.devices,
        "activation_marks": args.activation_marks,
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
    publish("fixed_step", table, data, folder=args.out)
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main(args))
