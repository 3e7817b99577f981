"""Reads device tensors on the host, also in a plan, which computes no values."""

import math
from typing import Any

import torch

import spmd_core as spmd


def on_host(tensor: torch.Tensor) -> Any:
    """A float for a scalar, a list for a vector. Waits for the device.

    A plan computes no values. There the step ends, as a read would end it, and each value is NaN.
    """
    if spmd.is_planning():
        spmd.sync()
        return torch.full(tensor.shape, math.nan).tolist()
    return tensor.tolist()
