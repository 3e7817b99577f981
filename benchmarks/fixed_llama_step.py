"""Is the Llama recipe's step as fast as the same step as one hand-written jitted jax program?

The two programs are the recipe's model, plan, loss, clipping and AdamW (`examples/llama_tp`, preset
tiny, `--mesh fsdp=4,tensor=2 --sequence-parallel --loss-parallel`), captured as the recipe captures
it, and the step of jax_llama_step.py. Both run alternately in one process on the same emulated
devices, from the same weights on the same tokens. For what is measured see `paired_steps.py`.

There are two comparisons. The targets are those of the first one, with a jax program that makes
again in the backward what the recipe's step does. The second jax program keeps all of it, which
takes more memory; so the table has the temporaries of all three.

Run: python -m benchmarks.fixed_llama_step --rounds 20
"""

import argparse
import sys
from dataclasses import asdict, replace
from typing import Any

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish

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
    args = parser.parse_args()

import numpy as np
import torch
from torch import nn

import spmd_core as spmd
from benchmarks import jax_llama_step as reference
from benchmarks.paired_steps import Jitted, Recorded, compared
from examples.llama_tp import shardings
from examples.llama_tp.model import build_model, next_token_loss
from examples.training.schedule import decay_groups

MAX_CPU_RATIO = 0.95


class Ours(Recorded):
    """The recipe's step, at a constant learning rate, on one batch.

    Args:
        setup: sizes and mesh.
        capture: whether it is captured, as the recipe does it, or recorded at each call.
    """

    def __init__(self, setup: reference.Setup, *, capture: bool = True) -> None:
        preset = setup.model
        torch.manual_seed(0)
        model = build_model(preset, vocab_size=preset.vocab_size, positions=preset.seq)
        self.initial = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        model.to("xla")
        shape = (setup.fsdp, setup.tensor)
        mesh = spmd.Mesh(range(setup.num_devices), shape, (reference.FSDP, reference.TENSOR))
        shardings.parallelize(model, mesh, sequence_parallel=True, loss_parallel=True)
        parameters = [*model.parameters()]
        groups = decay_groups(parameters, reference.WEIGHT_DECAY)
        betas = (reference.BETA_1, reference.BETA_2)
        optimizer = torch.optim.AdamW(groups, lr=reference.LEARNING_RATE, betas=betas, fused=True)
        batch = [
            spmd.mark_sharding(torch.from_numpy(x).to("xla"), mesh, (reference.FSDP, None))
            for x in batch_of(setup)
        ]

        @spmd.compile(full_graph=True, name="train", capture=capture)
        def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = next_token_loss(model, ids, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, reference.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        super().__init__(lambda: step(*batch))


def batch_of(setup: reference.Setup) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and those that follow them: int64 (batch, seq)."""
    size = (setup.model.batch, setup.model.seq + 1)
    tokens = np.random.default_rng(1).integers(setup.model.vocab_size, size=size)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def measured(
    ours: Ours, setup: reference.Setup, args: argparse.Namespace, *, title: str
) -> tuple[Table, dict[str, Any]]:
    """One comparison, with the memory that temporaries take of a device."""
    step, state, batch = reference.build(setup, ours.initial, *batch_of(setup))
    table, data = compared(
        ours,
        Jitted(step, state, batch),
        title=title,
        rounds=args.rounds,
        burst=args.burst,
        max_cpu_ratio=MAX_CPU_RATIO,
    )
    mine = max(spmd.metrics.programs(), key=lambda program: program.executions).temp_bytes
    right = step.memory_analysis().temp_size_in_bytes  # type: ignore[attr-defined]
    data |= {"temp_bytes": mine, "reference_temp_bytes": right}
    row = ["temporaries of a device, MB", f"{mine / 1e6:.1f}", f"{right / 1e6:.1f}"]
    return replace(table, rows=[*table.rows, [*row, f"{mine / right:.3f}"]]), data


def main(args: argparse.Namespace) -> int:
    setup = reference.Setup()
    spmd.simulate(setup.num_devices)
    spmd.use_spmd()
    ours = Ours(setup)
    title = "The Llama step over fsdp x tensor = 4 x 2 emulated devices"
    table, data = measured(ours, setup, args, title=title)
    kept = replace(setup, keeps_nothing_gathered=False)
    second, more = measured(ours, kept, args, title="")
    rows = [[f"keeping all: {row[0]}", *row[1:]] for row in second.rows if row[3] != "-"]
    note = f"Against the jax program that keeps all: {second.notes[0]}"
    table = replace(table, rows=[*table.rows, *rows], notes=[*table.notes, note])
    data["keeping_all"] = {"setup": asdict(kept), **more}
    publish("fixed_llama_step", table, {"setup": asdict(setup)} | data, folder=args.out)
    return 0 if all(data["targets"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(args))
