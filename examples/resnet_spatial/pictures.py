"""Draws training images for TensorBoard."""

import math

import numpy as np
import torch

MOST = 16  # images of a picture


def samples_picture(images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> np.ndarray:
    """The first images of a batch side by side, by label: uint8 of shape (height, width, 3)."""
    chosen = images_NCHW[labels_N[:MOST].argsort()].float()
    low, high = chosen.amin((1, 2, 3), keepdim=True), chosen.amax((1, 2, 3), keepdim=True)
    scaled = ((chosen - low) / (high - low).clamp_min(1e-6) * 255).byte()
    columns = math.isqrt(len(scaled) - 1) + 1
    rows = -(-len(scaled) // columns)
    blank = scaled.new_zeros(rows * columns - len(scaled), *scaled.shape[1:])
    grid = torch.cat([scaled, blank]).unflatten(0, (rows, columns))
    picture = grid.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    return picture.numpy()
