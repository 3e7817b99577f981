"""The mesh, the images and the work of a step that the options of a ResNet run ask for."""

from torch import nn

import spmd_core as spmd
from examples.resnet_spatial.config import TrainConfig, check_mesh
from examples.resnet_spatial.data import Batch, Fake, Folder, Shapes, Source
from examples.resnet_spatial.model import forward_flops
from examples.resnet_spatial.shapes import KINDS
from examples.training.batches import NumberedBatches
from examples.training.command import mesh_of
from examples.training.meter import Work


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh; None for one device, and for a mesh that is found.

    Raises:
        KnobError: the text is not a mesh, or the mesh does not fit emulated devices, the batch or
            the images.
        spmd.errors.MeshError: the mesh does not fit the devices.
    """
    if not config.named_mesh:
        return None
    mesh = mesh_of(config.mesh, spmd.global_runtime_device_count(), num_emulated=config.devices)
    check_mesh(config, mesh.shape())
    return mesh


def load_source(config: TrainConfig) -> Source:
    """Where the images come from.

    Raises:
        DataError: a folder has no images.
    """
    if config.data == "fake":
        return Fake(config.image_size, config.classes)
    if config.data == "shapes":
        return Shapes(config.image_size)
    return Folder(
        config.data,
        config.image_size,
        workers=config.workers,
        skips_unreadable=config.skip_unreadable,
    )


def batches(
    source: Source, config: TrainConfig
) -> tuple[NumberedBatches[Batch], NumberedBatches[Batch]]:
    """The batches of a run, and those of an evaluation."""
    batch, seed = config.batch, config.seed
    return (
        NumberedBatches(lambda i: source.train(i, batch, seed), config.steps, batch=batch),
        NumberedBatches(lambda i: source.evaluation(i, batch), config.eval_batches, batch=batch),
    )


def num_classes(config: TrainConfig) -> int:
    """The number of classes of synthetic data."""
    return len(KINDS) if config.data == "shapes" else config.classes


def work_of(config: TrainConfig, model: nn.Module, *, num_classes: int) -> Work:
    """What a step of a model computes."""
    num_params = sum(p.numel() for p in model.parameters())
    flops = forward_flops(config.model, num_classes=num_classes, image_size=config.image_size)
    return Work(config.model, num_params, config.batch, "images", {"3 x forward": 3 * flops})
