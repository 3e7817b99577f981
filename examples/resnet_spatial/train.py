"""Trains a ResNet on images that are split by rows and columns over a mesh, beside the batch.

    python -m examples.resnet_spatial.train --smoke
        a few steps on one device, in seconds
    python -m examples.resnet_spatial.train --smoke --devices 8 --mesh data=2,height=2,width=2
        the same on eight emulated devices: each has a quarter of half of the images
    python -m examples.resnet_spatial.train --data imagenet --mesh height=2,width=2 --dtype bf16
        ResNet-50 on a folder of images, on a machine with four accelerators
    python -m examples.resnet_spatial.train --smoke --device cpu
        eager torch, whose losses every mesh must reproduce
    python -m examples.resnet_spatial.train --max-batch
        the largest batch that fits, unsplit, by data and by space, with a curve; runs nothing

Legend: N images, C channels, H rows, W columns.
"""

from examples.resnet_spatial.config import config_from, with_defaults
from examples.training.knobs import check_command_line

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    check_command_line(lambda: with_defaults(config_from(None, usage=__doc__)[0]))

import spmd_core as spmd  # before torchvision: see spmd_core.torch_backend.torchvision_ops

# isort: split
import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from examples.resnet_spatial import max_batch, shardings
from examples.resnet_spatial.config import TrainConfig
from examples.resnet_spatial.data import Batches, DataError
from examples.resnet_spatial.model import build_model, forward_flops
from examples.resnet_spatial.pictures import samples_picture
from examples.resnet_spatial.resolve import load_source, parsed_mesh
from examples.training import resume
from examples.training.average import MovingAverage
from examples.training.collector import long_lived
from examples.training.command import exit_code, start_devices
from examples.training.host_values import on_host
from examples.training.log import Report, RunLog
from examples.training.meter import Meter
from examples.training.resume import SaveError
from examples.training.schedule import lr_factor
from examples.training.timing import StopOnInterrupt
from spmd_core.metrics import device_kind, device_peak
from spmd_data import MpDeviceLoader

# Losses are read this many steps late, so that the device never waits for Python to send the next
# step.
READ_LAG = 2


def run(config: TrainConfig) -> Report:
    """One training run, from images to report.

    Raises:
        KnobError, DataError, ResumeError, spmd.MeshError: the options, the images, the saved run or
            the mesh cannot work. But for an image that cannot be read, raised before the model is
            built.
        SaveError: the run's state could not be written at its end.
    """
    config = with_defaults(config)
    on_xla = config.device == "xla"
    saved = resume.read(config) if config.resume else None

    # --- Mesh -------------------------------------------------------------------------------------
    if on_xla:
        start_devices(config.devices)
    mesh = parsed_mesh(config)
    device = spmd.device() if on_xla else torch.device("cpu")
    axes = {str(name): size for name, size in mesh.shape().items()} if mesh else {}
    num_devices = mesh.size() if mesh else 1
    resume.check_writable(
        {
            "--checkpoint": config.checkpoint.replace("{step}", "0"),
            "--results": config.results,
        }
    )

    # --- Data: before the model, so that a wrong path fails within seconds ------------------------
    source = load_source(config)
    num_classes = len(source.class_names)

    # --- Model: single-device code ----------------------------------------------------------------
    torch.manual_seed(config.seed)
    order = torch.channels_last if config.channels_last else torch.contiguous_format
    model = build_model(config.model, num_classes=num_classes).to(memory_format=order).to(device)
    average = MovingAverage(model, config.ema) if config.ema else None
    num_params = sum(p.numel() for p in model.parameters())

    # --- Shardings: everything that many devices need ---------------------------------------------
    input_sharding = None
    if mesh:
        shardings.replicate([model, *([average.model] if average else [])], mesh)
        input_sharding = shardings.batch_sharding(mesh)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    # --- Optimizer --------------------------------------------------------------------------------
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, foreach=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, steps=config.steps, warmup=config.warmup, floor=0.0)
    )

    # --- Where the run begins ---------------------------------------------------------------------
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    parts |= {"average": average.model} if average else {}
    first = resume.restore(saved, data=source.identity, parts=parts) if saved else 0
    train_batches = Batches(
        lambda index: source.train(index, config.batch, config.seed), config.steps, first
    )
    eval_batches = Batches(
        lambda index: source.evaluation(index, config.batch), config.eval_batches
    )

    def save(step: int) -> None:
        if on_xla:
            spmd.sync()  # ends the step: its program is the same as that of a step without a save
        if spmd.is_planning():
            return
        path = config.checkpoint.replace("{step}", str(step))
        resume.save(path, step=step, config=config, data=source.identity, parts=parts)
        run_log.say(f"step {step:5d}  saved to {path}")

    # --- Loop -------------------------------------------------------------------------------------
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    peak = device_peak(device, mesh, dtype=dtype)
    run_log = RunLog(
        log_dir=config.log_dir,
        num_steps=config.steps,
        first_step=first,
        shows_progress=config.progress,
    )
    run_log.settings(dataclasses.asdict(config))
    if mesh:
        run_log.mesh(mesh)
    if config.log_dir:
        run_log.picture("images", samples_picture(*source.train(0, config.batch, config.seed)))
    run_log.say(f"data   {source.summary}")
    run_log.say(
        f"model  {config.model}, {num_params:,} parameters, "
        f"on {num_devices} {config.device} device(s) {axes or ''}"
    )
    if config.resume:
        run_log.say(resume.said(config, saved, lr=scheduler.get_last_lr()[0]))
    report = Report(
        config=dataclasses.asdict(config),
        num_params=num_params,
        num_devices=num_devices,
        device_kind=device_kind(device),
        mesh=axes,
        resumed_at=first,
        peak_flops=peak.flops_per_s,
        peak_source=peak.source,
    )
    flops = forward_flops(config.model, num_classes=num_classes, image_size=config.image_size)
    meter = Meter(
        report,
        items_per_step=config.batch,
        unit="images",
        flops_per_item={"3 x forward": 3 * flops},
        run_log=run_log,
        log_every=config.log_every,
        lag=READ_LAG if on_xla else 0,
        on_xla=on_xla,
    )
    start = time.perf_counter()

    with (
        contextlib.closing(run_log),
        StopOnInterrupt() as interrupt,
        long_lived(),
        MpDeviceLoader(train_batches, device, input_sharding=input_sharding) as batches,
    ):
        # On the XLA device, the loader's next batch first sends the previous step to the device.
        # None where a finished run is resumed.
        rest = itertools.islice(batches, config.steps - first)
        for step, (images_NCHW, labels_N) in enumerate(rest, start=first + 1):
            with autocast:
                logits = model(images_NCHW.contiguous(memory_format=order))
            loss = F.cross_entropy(logits.float(), labels_N, label_smoothing=config.label_smoothing)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            # Here and not before the backward: gradients that outlive their step would take memory.
            optimizer.zero_grad()
            if average:
                average.update(model, step - 1)

            meter.add(step, loss.detach(), grad_norm, lr)
            if config.eval_batches and (
                step == config.steps or (config.eval_every and step % config.eval_every == 0)
            ):
                if on_xla:
                    spmd.sync()  # ends the step: the evaluation is a program of its own
                meter.read(up_to=step)
                figures = {}
                for name, net in {"": model, "ema_": average.model if average else None}.items():
                    if net is not None:
                        loader = MpDeviceLoader(eval_batches, device, input_sharding=input_sharding)
                        found = evaluate(net, loader, autocast)
                        figures |= {f"{name}{figure}": value for figure, value in found.items()}
                meter.evaluated(step, **figures)
            else:
                meter.read_due()
            if config.save_every and step % config.save_every == 0 and step < config.steps:
                try:
                    save(step)
                except SaveError as error:  # the disk may have space by the next save
                    run_log.say(f"error: {error} The run goes on.")
            if interrupt.ends_run():
                run_log.say(f"interrupted: ending after step {step} of {config.steps}")
                break
        if on_xla:
            spmd.sync()
        if spmd.is_planning():
            return report  # there are no values to write
        meter.read(up_to=config.steps)
        if config.checkpoint and first < config.steps:
            save(step)
        report = meter.finished(
            wall_s=time.perf_counter() - start, interrupted=interrupt.has_ended_run
        )
        run_log.finish(report)
    if config.results:
        report.write(config.results)
    return report


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: MpDeviceLoader, autocast: torch.autocast
) -> dict[str, float]:
    """Mean loss, and the shares of images whose label is the first, or among the first 5, guesses.

    With the running statistics. Waits for the device.
    """
    is_training = model.training
    model.eval()
    sums = []
    for images_NCHW, labels_N in batches:
        with autocast:
            logits = model(images_NCHW).float()
        guesses = logits.topk(min(5, logits.shape[1])).indices
        hits = guesses == labels_N[:, None]
        loss = F.cross_entropy(logits, labels_N)
        sums.append(torch.stack([loss, hits[:, 0].float().mean(), hits.float().sum(1).mean()]))
    model.train(is_training)
    loss, top1, top5 = on_host(torch.stack(sums).mean(0))
    return {"loss": loss, "top1": top1, "top5": top5}


# --- The command line -----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""

    def command() -> bool:
        config, search = config_from(argv, usage=__doc__)
        if search is not None:
            max_batch.run(search, with_defaults(config))
            return False
        return run(config).interrupted

    return exit_code(command, usage=(DataError,), failed=(max_batch.CompileError,))


if __name__ == "__main__":
    sys.exit(main())
