"""The mesh and the images that the options of a ResNet run ask for."""

import spmd_core as spmd
from examples.resnet_spatial.config import TrainConfig
from examples.resnet_spatial.data import Batches, Fake, Folder, Shapes, Source
from examples.resnet_spatial.presets import MESH_AXES
from examples.resnet_spatial.shapes import KINDS
from examples.resnet_spatial.shardings import axis_size
from examples.training.command import mesh_of
from examples.training.knobs import KnobError


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh, or None for one device.

    Raises:
        KnobError: an axis has another name, or images do not fit the axes.
        spmd.errors.MeshError: the text is not a mesh, or the mesh does not fit the devices.
    """
    if not config.mesh:
        return None
    mesh = mesh_of(config.mesh, spmd.global_runtime_device_count(), num_emulated=config.devices)
    unknown = [axis for axis in mesh.shape() if axis not in MESH_AXES]
    if unknown:
        raise KnobError(
            f"mesh axes must be among {', '.join(MESH_AXES)}; got {unknown} in {config.mesh!r}. "
            "Rename them."
        )
    num_parts = axis_size(mesh, "data")
    if config.batch % num_parts:
        nearest = max(1, round(config.batch / num_parts)) * num_parts
        raise KnobError(
            f"--batch must divide by the mesh axis data; got {config.batch} for data={num_parts}. "
            f"Pass for instance --batch {nearest}."
        )
    for axis in ("height", "width"):
        num_rows = axis_size(mesh, axis)
        if num_rows > config.image_size:
            raise KnobError(
                f"each device must have a part of an image: --image-size must be at least the mesh "
                f"axis {axis}; got {config.image_size} for {axis}={num_rows}. Pass --image-size "
                f"{num_rows} or more, or a smaller axis."
            )
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


def batches(source: Source, config: TrainConfig, *, first: int) -> tuple[Batches, Batches]:
    """The batches of training, from the one after `first` on, and those of an evaluation."""
    return (
        Batches(lambda index: source.train(index, config.batch, config.seed), config.steps, first),
        Batches(lambda index: source.evaluation(index, config.batch), config.eval_batches),
    )


def num_classes(config: TrainConfig) -> int:
    """The number of classes of synthetic data."""
    return len(KINDS) if config.data == "shapes" else config.classes
