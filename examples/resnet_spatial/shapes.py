"""Draws images of eight kinds of shapes, at random places and sizes, in random colors, with noise.

Legend: N images, S rows and columns.
"""

import math

import torch

# By its distance from the center (x, y relative to the size, r = max-norm or Euclidean) each kind
# says which pixels it covers.
KINDS = ("disc", "ring", "square", "frame", "triangle", "plus", "cross", "stripes")


def draw(num: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random shapes, all that is random from `generator`.

    Args:
        num: images (N).
        size: rows and columns (S), at least 16.
        generator: on the CPU.

    Returns:
        Images, float32 of shape (N, 3, S, S) with mean 0 and deviation 1 roughly, and their kinds,
        int64 of shape (N,): places in `KINDS`.
    """

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(num, *shape, generator=generator)

    kinds_N = torch.randint(len(KINDS), (num,), generator=generator)
    radius = uniform(0.22, 0.36, 1, 1)
    at = torch.linspace(0.5 / size, 1 - 0.5 / size, size)
    x_NSS = (at.view(1, 1, size) - uniform(0.4, 0.6, 1, 1)) / radius
    y_NSS = (at.view(1, size, 1) - uniform(0.4, 0.6, 1, 1)) / radius
    turn = uniform(-0.2, 0.2, 1, 1)
    x_NSS, y_NSS = (
        x_NSS * turn.cos() - y_NSS * turn.sin(),
        x_NSS * turn.sin() + y_NSS * turn.cos(),
    )
    covered_NSS = torch.zeros(num, size, size, dtype=torch.bool)
    for kind, mask_NSS in enumerate(_masks(x_NSS, y_NSS)):
        of_kind = (kinds_N == kind).view(num, 1, 1)
        covered_NSS = torch.where(of_kind, mask_NSS, covered_NSS)
    back = uniform(-1.2, 1.2, 3, 1, 1)
    away = torch.where(back > 0, -1.0, 1.0) * uniform(0.8, 1.6, 3, 1, 1)
    images_NCSS = torch.where(covered_NSS[:, None], back + away, back)
    noise = torch.randn(images_NCSS.shape, generator=generator)
    return images_NCSS + 0.2 * noise, kinds_N


def _masks(x_NSS: torch.Tensor, y_NSS: torch.Tensor) -> list[torch.Tensor]:
    """For each kind the pixels that it covers, from coordinates in which its radius is 1."""
    round_NSS, box_NSS = torch.hypot(x_NSS, y_NSS), torch.maximum(x_NSS.abs(), y_NSS.abs())
    inside = box_NSS < 1
    thin = 0.33
    return [
        round_NSS < 1,
        (round_NSS < 1) & (round_NSS > 0.6),
        box_NSS < 0.9,
        (box_NSS < 0.9) & (box_NSS > 0.55),
        (y_NSS < 0.7) & (y_NSS > math.sqrt(3) * x_NSS.abs() - 1),
        inside & ((x_NSS.abs() < thin) | (y_NSS.abs() < thin)),
        inside & (((x_NSS - y_NSS).abs() < 0.45) | ((x_NSS + y_NSS).abs() < 0.45)),
        inside & (torch.remainder(y_NSS * 1.5, 1) < 0.5),
    ]
