"""ResNet-18's train step, with images split by batch, rows and columns, and weights replicated."""

import argparse

import jobs
import numpy as np
import torch
import torch.nn.functional as F

NUM_CLASSES = 100
AXES = {"data": 2, "height": 2, "width": 2}


def job(args: argparse.Namespace) -> jobs.Job:
    """torchvision's ResNet-18 over float32 images (batch, 3, image, image), by SGD with momentum.

    Batch norm's statistics are those of the whole batch.
    """
    # Here, as its compiled part may be built for another torch than that of spmd_core's process.
    from torchvision.models import resnet18  # noqa: PLC0415

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    images = random.standard_normal((args.batch, 3, args.image, args.image), np.float32)
    labels = random.integers(NUM_CLASSES, size=args.batch)
    return jobs.Job(
        axes=AXES,
        model=resnet18(num_classes=NUM_CLASSES),
        batch=(torch.from_numpy(images), torch.from_numpy(labels)),
        batch_specs=(("data", None, "height", "width"), ("data",)),
        spec=lambda name, tensor: (None,) * tensor.ndim,
        loss=lambda model, images, labels: F.cross_entropy(model(images), labels),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    )
