"""How images, weights and statistics are sharded over mesh axes data, height and width."""

from collections.abc import Iterable

from torch import nn

import spmd_core as spmd

# What each dim of a batch of images (N, C, H, W) is split over.
IMAGES_NCHW = ("data", None, "height", "width")


def batch_sharding(mesh: spmd.Mesh) -> spmd.ShardingSpec:
    """The sharding of images; labels of shape (N,) take its first entry, the batch's."""
    axes = mesh.shape()
    return spmd.ShardingSpec(mesh, tuple(axis if axis in axes else None for axis in IMAGES_NCHW))


def replicate(models: Iterable[nn.Module], mesh: spmd.Mesh) -> None:
    """Replicates all weights and running statistics.

    Gradients and batch norm's statistics are sums over all images and all their positions. The
    partitioner makes these sums over the devices, as the program is written for the global tensors.
    """
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            spmd.mark_sharding(tensor, mesh, ())
