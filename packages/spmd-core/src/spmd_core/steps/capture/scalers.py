"""`torch.amp.GradScaler` in steps: what it keeps from call to call, and what it reads on the host.

Its scale and the count behind its growth are tensors, which `update()` writes in place. What it
knows of each optimizer is a dict that lasts from `unscale_()` or `step()` to `update()`, which
makes another one: that it is empty before each call is all that is compared.
"""

import sys
from types import CodeType, FrameType
from typing import Any

import torch

STATES = "_per_optimizer_states"
"""The attribute with what a scaler knows of each optimizer."""

_READS: CodeType = torch.amp.GradScaler._maybe_opt_step.__code__
ADVICE = (
    " A GradScaler reads whether all gradients are finite, but for optimizers that look "
    "themselves: write SGD, Adam, AdamW or Adagrad with fused=True."
)


def num_states(scaler: torch.amp.GradScaler) -> int:
    """Of how many optimizers a scaler knows something: of none between two steps."""
    states: dict[int, Any] = vars(scaler).get(STATES, {})  # a scaler with enabled=False has none
    return len(states)


def is_reading() -> bool:
    """Whether it is a scaler that reads a value on the host now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _READS:
            return True
        frame = frame.f_back
    return False
