"""Is the Llama recipe's step as fast as the same step as one hand-written jitted jax program?

The two programs are the recipe's model, plan, loss, clipping and AdamW (`examples/llama_tp`, preset
tiny, `--mesh fsdp=4,tensor=2 --sequence-parallel --loss-parallel`), and the step of
jax_llama_step.py. Both run alternately in one process on the same emulated devices, from the same
weights on the same tokens. For what is measured see `paired_steps.py`.

Run: python -m benchmarks.fixed_llama_step --rounds 20
"""

import argparse
import sys
from dataclasses import asdict

from benchmarks.options import whole
from benchmarks.report import argument_parser, publish

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
    """The recipe's step, at a constant learning rate, on one batch."""

    def __init__(self, setup: reference.Setup) -> None:
        super().__init__(self._recorded)
        preset = setup.model
        torch.manual_seed(0)
        model = build_model(preset, vocab_size=preset.vocab_size, positions=preset.seq)
        self.initial = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        self.model = model.to("xla")
        shape = (setup.fsdp, setup.tensor)
        mesh = spmd.Mesh(range(setup.num_devices), shape, (reference.FSDP, reference.TENSOR))
        shardings.parallelize(self.model, mesh, sequence_parallel=True, loss_parallel=True)
        self.parameters = [*self.model.parameters()]
        groups = decay_groups(self.parameters, reference.WEIGHT_DECAY)
        betas = (reference.BETA_1, reference.BETA_2)
        self.optimizer = torch.optim.AdamW(
            groups, lr=reference.LEARNING_RATE, betas=betas, foreach=True
        )
        self.ids, self.labels = (
            spmd.mark_sharding(torch.from_numpy(x).to("xla"), mesh, (reference.FSDP, None))
            for x in batch_of(setup)
        )

    def _recorded(self) -> torch.Tensor:
        loss = next_token_loss(self.model, self.ids, self.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, reference.MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def batch_of(setup: reference.Setup) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and those that follow them: int64 (batch, seq)."""
    size = (setup.model.batch, setup.model.seq + 1)
    tokens = np.random.default_rng(1).integers(setup.model.vocab_size, size=size)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def main(args: argparse.Namespace) -> int:
    setup = reference.Setup()
    spmd.simulate(setup.num_devices)
    spmd.use_spmd()
    ours = Ours(setup)
    theirs = Jitted(*reference.build(setup, ours.initial, *batch_of(setup)))
    table, data = compared(
        ours,
        theirs,
        title="The Llama step over fsdp x tensor = 4 x 2 emulated devices",
        rounds=args.rounds,
        burst=args.burst,
        max_cpu_ratio=MAX_CPU_RATIO,
    )
    publish("fixed_llama_step", table, {"setup": asdict(setup)} | data, folder=args.out)
    return 0 if all(data["targets"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(args))
