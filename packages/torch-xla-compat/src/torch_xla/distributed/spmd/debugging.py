"""Prints shardings as tables of devices."""

from typing import Any

import torch

from spmd_core.debugging import visualize
from torch_xla import _XLAC


def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> Any:
    """`spmd_core.visualize_sharding`: prints and returns a table for the text of a sharding."""
    return visualize.visualize_sharding(
        sharding, use_color=use_color, scale=scale, min_width=min_width, max_width=max_width
    )


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Any) -> Any:
    """`spmd_core.visualize_tensor_sharding`: prints and returns a table for a tensor's sharding."""
    return visualize.visualize_tensor_sharding(t, **kwargs)


def construct_v1_sharding_str(t: torch.Tensor) -> str:
    """The text of a tensor's sharding that lists every device id, the only form used here."""
    return _XLAC._get_xla_sharding_spec(t)
