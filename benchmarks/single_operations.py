"""The operations whose recording is timed: each by a function that makes its operands.

Imports torch alone: other systems' interpreters run this file, too.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

SIZE = 256  # of each dim
Make: TypeAlias = Callable[..., torch.Tensor]  # a tensor of ones of these sizes on the device
Record: TypeAlias = Callable[[], object]  # records the operation once


def _add(make: Make) -> Record:
    x, y = make(SIZE, SIZE), make(SIZE, SIZE)
    return lambda: x + y


def _mul(make: Make) -> Record:
    x = make(SIZE, SIZE)
    return lambda: x * 0.5


def _mm(make: Make) -> Record:
    x, y = make(SIZE, SIZE), make(SIZE, SIZE)
    return lambda: torch.mm(x, y)


def _softmax(make: Make) -> Record:
    x = make(SIZE, SIZE)
    return lambda: torch.softmax(x, -1)


def _layer_norm(make: Make) -> Record:
    x, weight, bias = make(SIZE, SIZE), make(SIZE), make(SIZE)
    return lambda: F.layer_norm(x, (SIZE,), weight, bias)


def _view(make: Make) -> Record:
    x = make(SIZE, SIZE)
    return lambda: x.view(-1)


def _transpose(make: Make) -> Record:
    x = make(SIZE, SIZE)
    return lambda: x.t()


def _add_in_place(make: Make) -> Record:
    x, y = make(SIZE, SIZE), make(SIZE, SIZE)
    return lambda: x.add_(y)


OPERATIONS: dict[str, Callable[[Make], Record]] = {
    "add": _add,
    "mul by a number": _mul,
    "mm": _mm,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "view": _view,
    "transpose": _transpose,
    "add_": _add_in_place,
}
VIEWS = ("view", "transpose")
