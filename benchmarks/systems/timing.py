"""How the programs of this folder time steps and single operations."""

import runpy
import time
from collections.abc import Callable
from pathlib import Path

import torch

NUM_WARM = 4  # steps: the first makes the optimizer's state, and two or three programs compile
SETTLE_S = 0.05  # XLA's threads spin for a while after their work
COUNT, REPEATS = 1000, 10  # of single operations
OPERATIONS = Path(__file__).parents[1] / "single_operations.py"


def best_us(make: Callable[..., torch.Tensor]) -> dict[str, float]:
    """This thread's CPU time of each of `single_operations.py`, in us: the best of the repeats.

    Args:
        make: a tensor of ones of these sizes on the device.
    """
    operations = runpy.run_path(str(OPERATIONS))["OPERATIONS"]
    found: dict[str, float] = {}
    for _ in range(REPEATS):
        for name, of in operations.items():
            record = of(make)
            start = time.thread_time()
            for _ in range(COUNT):
                record()
            us = (time.thread_time() - start) / COUNT * 1e6
            found[name] = min(us, found.get(name, us))
            del record
    return found
