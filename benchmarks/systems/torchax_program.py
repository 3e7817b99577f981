"""GPT-2's train step, sharded by placed weights, and single operations, as a program for torchax.

It knows torchax, jax and optax alone: torchax is another way to run torch on jax, whose tensors
compute at once, and whose train step is a function of its weights that `jax.jit` compiles.
`other_systems.py` runs it beside `torch_xla_program.py`, whose step it computes.

Run: XLA_FLAGS=--xla_force_host_platform_device_count=4 python
         benchmarks/systems/torchax_program.py --results FILE
"""

import argparse
import json
import time
from typing import Any

import step_options

if __name__ == "__main__":  # before the imports below, which take seconds
    args = step_options.read(__doc__, ["gpt2"])

import gpt2_step
import jax
import numpy as np
import optax
import timing
import torch
import torch.nn.functional as F
import torchax
from torchax import interop, train


def main(args: argparse.Namespace) -> None:
    found = {
        "version": torchax.__version__,
        "torch": torch.__version__,
        **trained(args),
        "us": computed(),
    }
    args.results.write_text(json.dumps(found, indent=1) + "\n")


def trained(args: argparse.Namespace) -> dict[str, Any]:
    """Losses of all steps, seconds until the first, and the time of each measured one."""
    start = time.perf_counter()
    num_devices = jax.device_count()
    mesh = jax.make_mesh((num_devices,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    model, tokens = gpt2_step.model_and_tokens(args)
    positions = torch.arange(args.seq)[None]

    def placed(tensor: torch.Tensor, spec: tuple[str | None, ...]) -> torch.Tensor:
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        return interop.torch_view(jax.device_put(tensor.detach().numpy(), sharding))

    weights = {
        name: placed(p, gpt2_step.partition_spec(tuple(p.shape), num_devices))
        for name, p in model.named_parameters()
    }
    buffers = {name: placed(b, ()) for name, b in model.named_buffers()}
    ids, positions = placed(tokens, ("fsdp", None)), placed(positions, ())
    optimizer = optax.adamw(1e-3, weight_decay=1e-2)  # torch.optim.AdamW's defaults otherwise
    state = interop.call_jax(optimizer.init, weights)

    def forward(weights: Any, buffers: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        ids, positions = inputs
        named = {"input_ids": ids, "position_ids": positions}
        return torch.func.functional_call(model, {**weights, **buffers}, (), named).logits

    def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    step = interop.jax_jit(
        train.make_train_step(forward, loss_of, optimizer),
        kwargs_for_jax_jit={"donate_argnums": (0, 2)},
    )
    found: dict[str, Any] = {"losses": [], "wall_s": [], "cpu_s": []}
    for number in range(timing.NUM_WARM + args.steps):
        time.sleep(timing.SETTLE_S)
        wall, cpu = time.perf_counter(), time.process_time()
        loss, weights, state = step(weights, buffers, state, (ids, positions), ids)
        jax.block_until_ready(interop.jax_view((loss, weights, state)))
        samples = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        found["losses"].append(float(interop.jax_view(loss)))
        if number == 0:
            found["first_loss_s"] = time.perf_counter() - start
        if number >= timing.NUM_WARM:
            for name, sample in samples.items():
                found[name].append(sample)
    return found


def computed() -> dict[str, float]:
    """Microseconds to send one operation, which torchax computes at once; the best of repeats."""

    def make(*size: int) -> torch.Tensor:
        return interop.torch_view(jax.device_put(np.ones(size, np.float32)))

    with torchax.default_env(), torch.no_grad():
        return timing.best_us(make)


if __name__ == "__main__":
    main(args)
