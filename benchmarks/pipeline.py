"""How idle are a pipeline's stages, and how much memory does it take, by schedule and microbatches?

Transformer blocks in p stages beside two parts of the batch, on emulated devices. Microbatches have
one size, so more of them are a larger batch.

Bubble, measured: the FLOPs that the compiler counts in a step's program, against those of the same
blocks without a pipeline, where each device has a part of the batch. What the pipeline's program
has more of is what stages compute while they have nothing to do. A program that computes again in
backward is compared with one that does so too: 1f1b all blocks of a stage, from the stage's input,
and the blocks under `checkpoint_module` each from its own. Bubble, formula: (p-1) / (v·m + p-1)
with m microbatches and v rounds.

Run: python -m benchmarks.pipeline
"""

import argparse
import dataclasses
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.options import whole
from benchmarks.report import Samples, Stopwatch, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--microbatches", type=whole(), nargs="+", default=[4, 8, 16], help="(default 4 8 16)"
    )
    args = parser.parse_args()

import torch
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd

WIDTH, NUM_HEADS, LENGTH, NUM_BLOCKS = 64, 4, 64, 8
NUM_DEVICES, DATA = 8, 2
ROWS = 4  # of a microbatch, on one device
MAX_DEVIATION = 0.03  # of a measured bubble from the formula's
MAX_GROWTH = 1.2  # of 1f1b's temporaries, from the fewest to the most microbatches
STEPS = 3


@dataclass(frozen=True)
class Variant:
    """A way to run the blocks in stages.

    Attributes:
        name: in the table.
        schedule: as for `spmd.pipeline`.
        rounds: likewise.
        is_checkpointed: whether blocks are computed again in backward.
    """

    name: str
    schedule: str
    rounds: int = 1
    is_checkpointed: bool = False


VARIANTS = (
    Variant("gpipe", "gpipe"),
    Variant("gpipe, blocks checkpointed", "gpipe", is_checkpointed=True),
    Variant("1f1b", "1f1b"),
    Variant("circular, 2 rounds", "circular", rounds=2),
)


class Block(nn.Module):
    """A transformer block of tensors (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def blocks(*, again: int = 0) -> nn.Sequential:
    """The model, on device `xla`; `again` blocks together are computed again in backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    if again > 1:
        model = nn.Sequential(*(model[i : i + again] for i in range(0, NUM_BLOCKS, again)))
    for part in model if again else ():
        spmd.checkpoint_module(part)
    return model.to("xla")


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that costs little beside the blocks."""
    return model(x).square().mean()


def measure(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Runs some steps; the record of their program, with the CPU time of a step in seconds."""
    gc.collect()
    spmd.sync(wait=True)
    spmd.metrics.reset()
    samples = Samples()
    for _ in range(STEPS + 1):
        with Stopwatch() as watch:
            loss = (
                spmd.pipeline_loss(loss_of, model, x) if _is_pipeline(model) else loss_of(model, x)
            )
            loss.backward()
            spmd.sync(wait=True)
        samples.add(watch.cpu_s)
        model.zero_grad()
    record = max(spmd.metrics.programs(), key=lambda program: program.executions)
    kept = ("num_ops", "trace_s", "compile_s", "flops", "temp_bytes", "peak_bytes")
    figures = {name: getattr(record, name) for name in kept}
    return {**figures, "cpu_s": Samples(samples.values[1:]).min, "loss": loss.item()}


def _is_pipeline(model: nn.Module) -> bool:
    return any(isinstance(module, spmd.Pipeline) for module in model.modules())


def batch(mesh: spmd.Mesh, m: int) -> torch.Tensor:
    """The same numbers for any mesh, split over its axis `data`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(m * ROWS * DATA, LENGTH, WIDTH, generator=generator)
    return spmd.mark_sharding(x.to("xla"), mesh, ("data",))


def measured(stages: int, microbatches: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each variant and number of microbatches."""
    rows = []
    for m in microbatches:
        whole = spmd.Mesh(range(NUM_DEVICES), (NUM_DEVICES,), ("data",))
        per_stage = NUM_BLOCKS // stages
        plain = {n: measure(blocks(again=n), batch(whole, m)) for n in (0, 1, per_stage)}
        mesh = spmd.Mesh(range(NUM_DEVICES), (stages, DATA), ("pipe", "data"))
        for variant in VARIANTS:
            model = blocks(again=int(variant.is_checkpointed))
            pipe = spmd.pipeline(
                model,
                mesh,
                num_microbatches=m,
                schedule=variant.schedule,
                rounds=variant.rounds,
                batch_axes=("data",),
            )
            found = measure(model, batch(mesh, m))
            again = per_stage if variant.schedule == "1f1b" else int(variant.is_checkpointed)
            reference = plain[again]
            rows.append(
                {
                    **dataclasses.asdict(variant),
                    "microbatches": m,
                    "bubble_measured": 1 - reference["flops"] / found["flops"],
                    "bubble_formula": (stages - 1) / (variant.rounds * m + stages - 1),
                    "bubble_of_runs": (pipe.num_runs - pipe.num_useful_runs) / pipe.num_runs,
                    "plain_cpu_s": reference["cpu_s"],
                    "loss_deviation": abs(found["loss"] - reference["loss"]),
                    **found,
                }
            )
            print(rows[-1], file=sys.stderr)
    return rows


def main(args: argparse.Namespace) -> int:
    # A program from the cache on disk lacks the compiler's full analysis.
    spmd.config.cache_dir = None
    spmd.simulate(NUM_DEVICES)
    spmd.use_spmd()
    stages = NUM_DEVICES // DATA
    rows = measured(stages, args.microbatches)

    temporaries = [row["temp_bytes"] for row in rows if row["name"] == "1f1b"]
    targets = {
        f"each measured bubble is within {MAX_DEVIATION} of the formula's": all(
            abs(row["bubble_measured"] - row["bubble_formula"]) <= MAX_DEVIATION for row in rows
        ),
        f"the temporaries of 1f1b grow by less than a factor of {MAX_GROWTH:g}": max(temporaries)
        < MAX_GROWTH * min(temporaries),
        "each loss is that without a pipeline to 1e-5": all(
            row["loss_deviation"] < 1e-5 for row in rows
        ),
    }
    table = Table(
        f"{NUM_BLOCKS} blocks in {stages} stages, beside {DATA} parts of the batch",
        (
            "schedule",
            "microbatches",
            "bubble, measured",
            "formula",
            "peak of a device",
            "CPU time of a step",
            "without a pipeline",
            "operations",
            "compile",
        ),
        [
            [
                row["name"],
                str(row["microbatches"]),
                f"{row['bubble_measured']:.3f}",
                f"{row['bubble_formula']:.3f}",
                f"{row['peak_bytes'] / 1e6:.2f} MB",
                f"{row['cpu_s']:.2f} s",
                f"{row['plain_cpu_s']:.2f} s",
                f"{row['num_ops']:,}",
                f"{row['trace_s'] + row['compile_s']:.1f} s",
            ]
            for row in sorted(rows, key=lambda row: row["name"])
        ],
        [f"{verdict(holds)}: {target}." for target, holds in targets.items()],
    )
    publish(
        "pipeline", table, {"stages": stages, "rows": rows, "targets": targets}, folder=args.out
    )
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main(args))
