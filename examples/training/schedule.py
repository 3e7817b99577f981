"""The learning rate over a run: linear warm-up, then a cosine."""

import math


def lr_factor(step: int, *, steps: int, warmup: int, floor: float) -> float:
    """The learning rate at a step, counted from 0, as a fraction of the peak.

    It rises linearly over `warmup` steps, then falls along a cosine to `floor`.

    Example:
        >>> [round(lr_factor(step, steps=6, warmup=2, floor=0.1), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
