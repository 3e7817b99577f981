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

from examples.resnet_spatial.config import TrainConfig, config_from, with_defaults
from examples.training.knobs import begin_command

if __name__ == "__main__":  # before the imports below, which take seconds
    begin_command(lambda: with_defaults(config_from(None, usage=__doc__)))

import spmd_core  # noqa: F401  before torchvision: see spmd_core.torch_backend.torchvision_ops

# isort: split
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.resnet_spatial import resolve, shardings
from examples.resnet_spatial.model import build_model
from examples.resnet_spatial.pictures import samples_picture
from examples.resnet_spatial.scores import evaluate
from examples.training import resume
from examples.training.average import MovingAverage
from examples.training.command import device_of, exit_code
from examples.training.journal import Journal
from examples.training.log import Report
from examples.training.one_program import one_program
from examples.training.schedule import decay_groups, warmup_and_cosine
from spmd_data import MpDeviceLoader


def run(config: TrainConfig) -> Report:
    """One training run, from images to report.

    Raises:
        UsageError, spmd.errors.MeshError: the options, the images, the saved run or the mesh cannot
            work. But for an image that cannot be read, raised before the model is built.
        SaveError: the run's state could not be written at its end.
    """
    config = with_defaults(config)
    first = resume.step_of(config)

    # --- Devices, mesh and data: before the model, so that a wrong path fails within seconds ------
    device, mesh = device_of(config), resolve.parsed_mesh(config)
    resume.check_writable(config)
    source = resolve.load_source(config)
    num_classes = len(source.class_names)
    input_sharding = shardings.batch_sharding(mesh) if mesh else None
    batches, eval_batches = (
        MpDeviceLoader(part, device, input_sharding=input_sharding)
        for part in resolve.batches(source, config)
    )

    # --- Model: single-device code ----------------------------------------------------------------
    torch.manual_seed(config.seed)
    order = torch.channels_last if config.channels_last else torch.contiguous_format
    model = build_model(config.model, num_classes=num_classes, order=order).to(device)
    average = MovingAverage(model, config.ema) if config.ema else None

    # --- Shardings: everything that many devices need ---------------------------------------------
    if mesh:
        shardings.replicate([model, *([average] if average else [])], mesh)

    # --- Optimizer --------------------------------------------------------------------------------
    groups = decay_groups(model.parameters(), config.weight_decay)
    m = config.momentum
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=m, nesterov=m > 0, foreach=True)
    scheduler = warmup_and_cosine(optimizer, config)

    # --- The run's record: log, figures, saved states; here a resumed run gets its state ----------
    parts: dict[str, resume.Stateful]
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    parts |= {"average": average} if average else {}
    work = resolve.work_of(config, model, num_classes=num_classes)
    journal = Journal(config, first, device=device, mesh=mesh, work=work, data=source, parts=parts)
    if config.log_dir:
        samples = source.train(0, config.batch, config.seed)
        journal.log.picture("images", samples_picture(*samples))

    # --- Step -------------------------------------------------------------------------------------
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    @one_program(config)
    def train(images_NCHW: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        with autocast:
            logits = model(images_NCHW.contiguous(memory_format=order))
        loss = F.cross_entropy(logits.float(), labels_N, label_smoothing=config.label_smoothing)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        optimizer.step()
        # Here and not before the backward: gradients that outlive their step would take memory.
        optimizer.zero_grad()
        if average:
            average.update(model)
        return loss.detach(), grad_norm

    # --- Loop -------------------------------------------------------------------------------------
    with journal, batches:
        for _, batch in journal.steps(batches):
            journal.add(*train(*batch))
            scheduler.step()
            if journal.evaluation_is_due():
                figures = evaluate(model, eval_batches, autocast)
                if average:
                    figures |= evaluate(average.model, eval_batches, autocast, prefix="ema_")
                journal.evaluated(**figures)
        return journal.finish()


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    return exit_code(lambda: run(config_from(argv, usage=__doc__)).exit_code)


if __name__ == "__main__":
    sys.exit(main())
