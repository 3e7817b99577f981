"""A recipe's train step, sharded by marks, and single operations: a program for torch_xla 2.9.

It knows torch_xla's names alone, so that it runs under torch_xla itself and under torch-xla-compat;
`other_systems.py` runs both. CPU_NUM_DEVICES says how many devices are emulated: as many as the
recipe's mesh has.

Run: CPU_NUM_DEVICES=4 PJRT_DEVICE=CPU python
         benchmarks/systems/torch_xla_program.py --results FILE
"""

import argparse
import importlib
import json
import time
from typing import Any

import step_options

if __name__ == "__main__":  # before the imports below, which take seconds
    args = step_options.read(__doc__, ["gpt2", "resnet", "llama"])

import jobs
import numpy as np
import timing
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr


def main(args: argparse.Namespace) -> None:
    xr.use_spmd()
    device = torch_xla.device()
    start = time.perf_counter()
    job = importlib.import_module(f"{args.recipe}_step").job(args)
    found = {
        "version": torch_xla.__version__,
        "torch": torch.__version__,
        **trained(job, args.steps, device, start),
    }
    if args.recipe == "gpt2":
        found["us"] = recorded(device)
    args.results.write_text(json.dumps(found, indent=1) + "\n")


def trained(job: jobs.Job, steps: int, device: torch.device, start: float) -> dict[str, Any]:
    """Losses of all steps, seconds from `start` to the first, the parts of each measured one."""
    sizes = tuple(job.axes.values())
    mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), sizes, tuple(job.axes))
    model = job.model.to(device)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()  # torch_xla's `to` unties them
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.ndim:  # a number is replicated as it is
            xs.mark_sharding(tensor, mesh, job.spec(name, tensor))
    optimizer = job.optimizer(model.parameters())
    batch = [tensor.to(device) for tensor in job.batch]
    for tensor, spec in zip(batch, job.batch_specs):
        xs.mark_sharding(tensor, mesh, spec)

    names = ("wall_s", "cpu_s", "record_s", "dispatch_s")
    found: dict[str, Any] = {"losses": [], **{name: [] for name in names}}
    for number in range(timing.NUM_WARM + steps):
        time.sleep(timing.SETTLE_S)
        wall, cpu = time.perf_counter(), time.process_time()
        loss = job.loss(model, *batch)
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
        if number >= timing.NUM_WARM:
            for name, sample in zip(names, samples):
                found[name].append(sample)
    return found


def recorded(device: torch.device) -> dict[str, float]:
    """Microseconds of CPU time to record one operation without gradients."""
    with torch.no_grad():
        return timing.best_us(lambda *size: torch.ones(*size).to(device))


if __name__ == "__main__":
    main(args)
