"""Calls that eager torch refuses, and what both devices say to them."""

from collections.abc import Callable
from typing import Any

import torch


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str) -> torch.Tensor:
    """Ones, which serve as values and as weights."""
    return torch.ones(shape, dtype=dtype, device=device)


def raised(call: Callable[[str], Any], device: str) -> Exception | None:
    """What the call raises on a device."""
    try:
        call(device)
    except Exception as error:  # its type and its words are what is compared
        return error
    return None


def same_refusal(call: Callable[[str], Any]) -> None:
    """Asserts that both devices raise the same error."""
    right, mine = raised(call, "cpu"), raised(call, "xla")
    assert right is not None and mine is not None
    assert type(mine) is type(right) and str(mine) == str(right)


def square(device: str) -> torch.Tensor:
    """Rows whose elements all differ."""
    return torch.arange(9.0, device=device).view(3, 3) + 1
