"""What does it cost that programs check their indices, in a step of GPT-2 and in a small lookup?

Each loop runs twice in one process, with `config.check_indices` and without, in alternating order
on the same emulated devices, from the same weights on the same tokens. Reported are the ratios of
neighbouring steps, and what is counted: checks, collectives, and whether every loss is the same to
the last bit. Compile times are of programs that no cache on disk has.

Run: python -m benchmarks.index_checks --rounds 30
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.options import num_devices, whole
from benchmarks.report import Samples, Stopwatch, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--rounds", type=whole(), default=30, help="timed pairs of steps (default 30)"
    )
    parser.add_argument(
        "--devices", type=num_devices(), default=8, help="emulated devices (default 8)"
    )
    args = parser.parse_args()

import jax
import torch
from tqdm import trange

import spmd_core as spmd
from benchmarks import jax_gpt2_step as reference
from benchmarks.fixed_step import Ours
from benchmarks.paired_steps import paired_ratio
from spmd_core.program import compile_cache

WARM_UP = 4
# Of the median ratio, which moves by noise alone.
MAX_RATIO = 1.05


class Lookups:
    """A lookup in a small table and its update: a program with little else than the check."""

    ROWS, WIDTH, IDS = 4096, 64, (64, 32)

    def __init__(self, num_devices: int) -> None:
        torch.manual_seed(0)
        mesh = spmd.Mesh(range(num_devices), (num_devices,), ("data",))
        table = torch.nn.Embedding(self.ROWS, self.WIDTH).to("xla")
        self._table = spmd.mark_sharding(table.weight, mesh, (None, None))
        ids = torch.randint(self.ROWS, self.IDS).to("xla")
        self._ids = spmd.mark_sharding(ids, mesh, ("data", None))

    def step(self) -> None:
        """Records one step and sends it to the devices. Does not wait for them."""
        found = torch.nn.functional.embedding(self._ids, self._table)
        (gradient,) = torch.autograd.grad(found.square().mean(), self._table)
        with torch.no_grad():
            self._table.sub_(gradient, alpha=0.1)
        self._loss = found.detach().square().mean()
        spmd.sync()

    def read_loss(self) -> float:
        """The last step's loss."""
        return self._loss.item()


@dataclass
class Side:
    """A loop with the checks, or without.

    Attributes:
        loop: has `step()` and `read_loss()`.
        checks: whether it checks.
        wall: the time of each step until its loss was read, in seconds.
        cpu: the same of all threads.
        losses: what was read.
        compile_s: the time to compile the step's program.
        num_checks: of the step's program.
        collectives: of the same program.
    """

    loop: Any
    checks: bool
    wall: Samples = field(default_factory=Samples)
    cpu: Samples = field(default_factory=Samples)
    losses: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    num_checks: int = 0
    collectives: int = 0

    def step(self) -> None:
        """One step, and the read of its loss."""
        spmd.config.check_indices = self.checks
        with Stopwatch() as watch:
            self.loop.step()
            self.losses.append(self.loop.read_loss())
        self.wall.add(watch.wall_s)
        self.cpu.add(watch.cpu_s)

    def warm_up(self) -> None:
        """Compiles the step's programs; the last of them is the step's."""
        for _ in range(WARM_UP):
            self.step()
        program = compile_cache.newest()
        assert program is not None
        self.compile_s = program.record.trace_s + program.record.compile_s
        self.num_checks = len(program.index_checks)
        text = program.compiled_text()
        kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
        self.collectives = sum(text.count(f" {kind}(") for kind in kinds)
        self.wall, self.cpu = Samples(), Samples()


def measure(make: Callable[[], Any], rounds: int) -> tuple[Side, Side]:
    """Both sides of a loop, measured alternately."""
    on, off = Side(make(), True), Side(make(), False)
    for side in (on, off):
        side.warm_up()
    for i in trange(rounds, desc="rounds", disable=None):
        for side in (on, off) if i % 2 == 0 else (off, on):
            side.step()
    spmd.config.check_indices = True
    return on, off


def report(on: Side, off: Side) -> dict[str, Any]:
    """The figures of one loop."""
    return {
        "wall_ratio": paired_ratio(on.wall, off.wall),
        "cpu_ratio": paired_ratio(on.cpu, off.cpu),
        "step_ms": [statistics.median(side.wall.values) * 1e3 for side in (on, off)],
        "compile_s": [on.compile_s, off.compile_s],
        "checks": [on.num_checks, off.num_checks],
        "collectives": [on.collectives, off.collectives],
        "same_losses": on.losses == off.losses,
    }


def main(args: argparse.Namespace) -> int:
    spmd.simulate(args.devices)
    spmd.use_spmd()
    jax.config.update("jax_enable_compilation_cache", False)
    shape = reference.Shape()
    loops: dict[str, Callable[[], Any]] = {
        f"GPT-2, {shape.num_layers} layers": lambda: Ours(
            shape, num_devices=args.devices, mark_activations=False
        ),
        f"{Lookups.IDS[0] * Lookups.IDS[1]} lookups and an update": lambda: Lookups(args.devices),
    }
    found = {name: report(*measure(make, args.rounds)) for name, make in loops.items()}
    reached = all(
        r["wall_ratio"]["median"] <= MAX_RATIO
        and r["same_losses"]
        and r["collectives"][0] <= r["collectives"][1] + 1
        for r in found.values()
    )

    def interval(ratio: dict[str, float]) -> str:
        return (
            f"{ratio['median']:.3f} ({ratio['first_quartile']:.3f}-{ratio['third_quartile']:.3f})"
        )

    rows = [
        [
            name,
            f"{r['step_ms'][0]:.1f}, {r['step_ms'][1]:.1f}",
            interval(r["wall_ratio"]),
            interval(r["cpu_ratio"]),
            f"{r['compile_s'][0]:.2f}, {r['compile_s'][1]:.2f}",
            str(r["checks"][0]),
            f"{r['collectives'][0]}, {r['collectives'][1]}",
            verdict(r["same_losses"]),
        ]
        for name, r in found.items()
    ]
    table = Table(
        "Programs that check their indices, and programs that do not",
        [
            "step",
            "ms with, without",
            "ratio of wall time (quartiles)",
            "ratio of CPU time",
            "s to compile with, without",
            "checks",
            "collectives with, without",
            "same losses",
        ],
        rows,
        [
            f"{args.devices} emulated devices, {args.rounds} pairs of steps, each with the read of "
            "its loss. Targets: a median ratio of wall time of at most "
            f"{MAX_RATIO}, losses equal to the last bit, at most one collective more: "
            f"{verdict(reached)}."
        ],
    )
    data = {"devices": args.devices, "rounds": args.rounds, "reached": reached, "loops": found}
    publish("index_checks", table, data, folder=args.out)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main(args))
