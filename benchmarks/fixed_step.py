"""Is a train step in stock PyTorch as fast as the same step as one hand-written jitted jax program?

The two programs are Hugging Face's GPT-2 with marked parameters and torch.optim.AdamW, and the step
of jax_gpt2_step.py. Both run alternately in one process on the same emulated devices, from the same
weights on the same tokens. Reported are wall time, CPU time of all threads (less noisy than wall
time), the ratio within each pair of neighbouring measurements, and how long Python is busy with a
step whose program is already compiled.

Run: python -m benchmarks.fixed_step --rounds 20
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.options import num_devices, whole
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
    parser.add_argument(
        "--devices", type=num_devices(), default=8, help="emulated devices (default 8)"
    )
    parser.add_argument(
        "--activation-marks",
        action="store_true",
        help="also mark the residual stream and the logits, along the batch",
    )
    args = parser.parse_args()

import torch

import spmd_core as spmd
from benchmarks import jax_gpt2_step as reference
from benchmarks.paired_steps import Jitted, Recorded, compared
from examples.gpt2.model import build_model
from examples.gpt2.presets import ModelPreset

MAX_CPU_RATIO = 1.05


class Ours(Recorded):
    """GPT-2's step in stock PyTorch."""

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
        super().__init__(self._recorded)

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

    def _recorded(self) -> torch.Tensor:
        loss = self.model(input_ids=self.ids, labels=self.ids, position_ids=self.positions).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main(args: argparse.Namespace) -> int:
    spmd.simulate(args.devices)
    spmd.use_spmd()
    shape = reference.Shape()
    ours = Ours(shape, num_devices=args.devices, mark_activations=args.activation_marks)
    step, state, batch = reference.build(args.devices, shape=shape, parameters=ours.initial)
    table, data = compared(
        ours,
        Jitted(step, state, (batch,)),
        title=f"The fixed GPT-2 step on {args.devices} emulated devices",
        rounds=args.rounds,
        burst=args.burst,
        max_cpu_ratio=MAX_CPU_RATIO,
    )
    setting = {
        "shape": asdict(shape),
        "num_devices": args.devices,
        "activation_marks": args.activation_marks,
    }
    publish("fixed_step", table, setting | data, folder=args.out)
    return 0 if all(data["targets"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(args))
