"""Loops on the device: `fori_loop` over numbers, and torch's own `while_loop`."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import while_loop as while_loop

from spmd_core import control_flow


def fori_loop(
    lower: int | torch.Tensor,
    upper: int | torch.Tensor,
    body_fun: Callable[..., Any],
    *init: Any,
) -> Any:
    """Calls `body_fun` once for each integer from `lower` up to and without `upper`, on the device.

    See `spmd_core.control_flow.fori_loop`.

    Args:
        lower: the first integer: a number, or an integer tensor of one element.
        upper: the integer behind the last one.
        body_fun: (*values) -> the next values; or, with one parameter more than there are values,
            (i, *values) -> the next values.
        *init: the first values.

    Returns:
        The last values: a tuple, or one tensor if there is one.

    Raises:
        TypeError: a bound is no integer, or `body_fun` changes the values' shapes or dtypes.
    """
    takes_number = _num_parameters(body_fun) == len(init) + 1

    def step(i: torch.Tensor, values: Any) -> Any:
        results = body_fun(*((i, *values) if takes_number else values))
        return results if isinstance(results, tuple) else (results,)

    first, last = (
        b.reshape(()) if isinstance(b, torch.Tensor) and b.numel() == 1 else b
        for b in (lower, upper)
    )
    values = control_flow.fori_loop(first, last, step, tuple(init))
    return values[0] if len(init) == 1 else values


def _num_parameters(function: Callable[..., Any]) -> int | None:
    """How many arguments by position a function takes; None if any number."""
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in by_position for kind in kinds)
