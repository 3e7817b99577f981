"""Collectives between replicas that autograd differentiates, as those of `xla_model` are here."""

from typing import Any

import torch

from spmd_core.arguments import checked
from torch_xla._upstream import refused
from torch_xla.core import xla_model


@checked()
def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Any = None
) -> torch.Tensor:
    """`xla_model.all_reduce` of one tensor."""
    result: torch.Tensor = xla_model.all_reduce(reduce_type, value, scale, groups)
    return result


@checked()
def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`xla_model.all_gather` over all replicas."""
    return xla_model.all_gather(value, dim)


nms = refused(
    "functions.nms",
    "is a fixed-size form of non-maximum suppression",
    "Use torchvision.ops.nms.",
)
distributed_mm = refused(
    "functions.distributed_mm",
    "multiplies by a matrix whose rows are split over replicas",
    "Mark the matrix with mark_sharding and multiply.",
)
