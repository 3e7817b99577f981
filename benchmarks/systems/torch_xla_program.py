"""GPT-2's train step, sharded by marks, and single operations, as a program for torch_xla 2.9.

It knows torch_xla's names alone, so that it runs under torch_xla itself and under torch-xla-compat;
`other_systems.py` runs both. CPU_NUM_DEVICES says how many devices are emulated.

Run: CPU_NUM_DEVICES=4 PJRT_DEVICE=CPU python
         benchmarks/systems/torch_xla_program.py --results FILE
"""

import argparse
import json
import time
from typing import Any

import step_options

if __name__ == "__main__":  # before the imports below, which take seconds
    args = step_options.parser(__doc__).parse_args()

import gpt2_step
import numpy as np
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr


def main(args: argparse.Namespace) -> None:
    xr.use_spmd()
    device = torch_xla.device()
    found = {
        "version": torch_xla.__version__,
        "torch": torch.__version__,
        **trained(args, device),
        "us": recorded(device),
    }
    args.results.write_text(json.dumps(found, indent=1) + "\n")


def trained(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Losses of all steps, seconds until the first, and the parts of each measured one."""
    start = time.perf_counter()
    num_devices = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(num_devices), (num_devices,), ("fsdp",))
    model, tokens = gpt2_step.model_and_tokens(args)
    model.to(device)
    model.tie_weights()  # torch_xla's `to` unties them
    for p in model.parameters():
        xs.mark_sharding(p, mesh, gpt2_step.partition_spec(tuple(p.shape), num_devices))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = tokens.to(device)
    xs.mark_sharding(ids, mesh, ("fsdp", None))
    positions = torch.arange(args.seq)[None].to(device)

    names = ("wall_s", "cpu_s", "record_s", "dispatch_s")
    found: dict[str, Any] = {"losses": [], **{name: [] for name in names}}
    for number in range(gpt2_step.NUM_WARM + args.steps):
        time.sleep(gpt2_step.SETTLE_S)
        wall, cpu = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        recorded_at, thread = time.perf_counter(), time.thread_time()
        torch_xla.sync()
        dispatch_s = time.thread_time() - thread
        xm.wait_device_ops()
        samples = (
            time.perf_counter() - wall,
            time.process_time() - cpu,
            recorded_at - wall,
            dispatch_s,
        )
        found["losses"].append(loss.item())
        if number == 0:
            found["first_loss_s"] = time.perf_counter() - start
        if number >= gpt2_step.NUM_WARM:
            for name, sample in zip(names, samples):
                found[name].append(sample)
    return found


def recorded(device: torch.device) -> dict[str, float]:
    """Microseconds of CPU time to record one operation without gradients."""
    with torch.no_grad():
        return gpt2_step.best_us(lambda *size: torch.ones(*size).to(device))


if __name__ == "__main__":
    main(args)
