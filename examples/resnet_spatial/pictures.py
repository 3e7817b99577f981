"""Draws training images for TensorBoard, and the memory of batches as a curve."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def memory_curves(
    path: Path, points: Mapping[str, Sequence[tuple[int, float]]], *, limit_gib: float, title: str
) -> None:
    """Writes an image of a device's memory over the batch, a line for each mesh.

    Args:
        path: of the image.
        points: by the mesh's name, (images in a step, GiB of a device).
        limit_gib: drawn across.
        title: above.
    """
    import matplotlib  # noqa: PLC0415  (slow to import, and only this picture needs it)

    matplotlib.use("Agg")  # files only: there may be no display
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, curves = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for name, found in points.items():
        batches, memory = zip(*sorted(found))
        (line,) = curves.plot(batches, memory, marker="o", label=name)
        fitting = [b for b, gib in found if gib <= limit_gib]
        if fitting:
            curves.axvline(max(fitting), color=line.get_color(), linestyle=":")
            curves.annotate(
                f"{max(fitting)}", (max(fitting), 0), color=line.get_color(), ha="right"
            )
    curves.axhline(limit_gib, color="black", linestyle="--", label=f"{limit_gib:g} GiB")
    curves.set(
        xlabel="images in a step, over all devices",
        ylabel="peak memory of a device, GiB",
        title=title,
        ylim=(0, 1.6 * limit_gib),
        xlim=(0, None),
    )
    curves.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
