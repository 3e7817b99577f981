"""Trains a ResNet on images that are split by rows and columns over a mesh, beside the batch.

    python -m examples.resnet_spatial.train --smoke
        a few steps on one device, in seconds
    python -m examples.resnet_spatial.train --smoke --devices 8 --mesh data=2,height=2,width=2
        the same on eight emulated devices: each has a quarter of half of the images
    python -m examples.resnet_spatial.train --data imagenet --mesh height=2,width=2 --dtype bf16
        ResNet-50 on a folder of images, on a machine with four accelerators
    python -m examples.resnet_spatial.train --smoke --device cpu
        eager torch, whose losses every mesh must reproduce

Legend: N images, C channels, H rows, W columns.
"""

from examples.resnet_spatial.config import config_from, with_defaults
from examples.training.knobs import check_command_line

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    check_command_line(lambda: with_defaults(config_from(None, usage=__doc__)))

import spmd_core  # noqa: F401  before torchvision: see spmd_core.torch_backend.torchvision_ops

# isort: split
import math
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from examples.resnet_spatial import shardings
from examples.resnet_spatial.config import TrainConfig
from examples.resnet_spatial.data import DataError
from examples.resnet_spatial.model import build_model, forward_flops
from examples.resnet_spatial.pictures import samples_picture
from examples.resnet_spatial.resolve import batches, load_source, parsed_mesh
from examples.training import resume
from examples.training.average import MovingAverage
from examples.training.command import device_of, exit_code
from examples.training.host_values import on_host
from examples.training.journal import Journal
from examples.training.log import Report
from examples.training.schedule import decay_groups, warmup_and_cosine
from spmd_data import MpDeviceLoader


def run(config: TrainConfig) -> Report:
    """One training run, from images to report; one function, to read as the experiment.

    Raises:
        KnobError, DataError, ResumeError, spmd.errors.MeshError: the options, the images, the saved
            run or the mesh cannot work. But for an image that cannot be read, raised before the
            model is built.
        SaveError: the run's state could not be written at its end.
    """
    config = with_defaults(config)
    saved = resume.read(config)

    # --- Devices, mesh and data: before the model, so that a wrong path fails within seconds ------
    device, mesh = device_of(config), parsed_mesh(config)
    resume.check_writable(config)
    source = load_source(config)
    num_classes = len(source.class_names)
    first = saved["step"] if saved else 0
    train_batches, eval_batches = batches(source, config, first=first)

    # --- Model: single-device code ----------------------------------------------------------------
    torch.manual_seed(config.seed)
    order = torch.channels_last if config.channels_last else torch.contiguous_format
    model = build_model(config.model, num_classes=num_classes).to(memory_format=order).to(device)
    average = MovingAverage(model, config.ema) if config.ema else None
    num_params = sum(p.numel() for p in model.parameters())

    # --- Shardings: everything that many devices need ---------------------------------------------
    if mesh:
        shardings.replicate([model, *([average.model] if average else [])], mesh)
    input_sharding = shardings.batch_sharding(mesh) if mesh else None
    loader = partial(MpDeviceLoader, device=device, input_sharding=input_sharding)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    # --- Optimizer --------------------------------------------------------------------------------
    optimizer = torch.optim.SGD(
        decay_groups(model.parameters(), config.weight_decay),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        foreach=True,
    )
    scheduler = warmup_and_cosine(optimizer, steps=config.steps, warmup=config.warmup)

    # --- The run's record: log, figures, saved states; here a resumed run gets its state ----------
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    parts |= {"average": average.model} if average else {}
    flops = forward_flops(config.model, num_classes=num_classes, image_size=config.image_size)
    journal = Journal(
        *(config, saved),
        device=device,
        mesh=mesh,
        model=config.model,
        num_params=num_params,
        items_per_step=config.batch,
        unit="images",
        flops_per_item={"3 x forward": 3 * flops},
        data=source,
        parts=parts,
    )
    if config.log_dir:
        samples = source.train(0, config.batch, config.seed)
        journal.log.picture("images", samples_picture(*samples))

    # --- Loop -------------------------------------------------------------------------------------
    with journal, loader(train_batches) as loaded:
        for step, (images_NCHW, labels_N) in journal.steps(loaded):
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

            journal.add(step, loss.detach(), grad_norm, lr)
            if journal.evaluates_after(step):
                figures = evaluate(model, loader(eval_batches), autocast)
                if average:
                    found = evaluate(average.model, loader(eval_batches), autocast)
                    figures |= {f"ema_{name}": value for name, value in found.items()}
                journal.evaluated(step, **figures)
            journal.save_if_due(step)
            if journal.ends_after(step):
                break
        return journal.finish()


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    return exit_code(lambda: run(config_from(argv, usage=__doc__)).interrupted, usage=(DataError,))


if __name__ == "__main__":
    sys.exit(main())
