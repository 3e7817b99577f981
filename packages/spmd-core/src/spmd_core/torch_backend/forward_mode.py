"""Forward-mode AD by dual tensors (`torch.autograd.forward_ad`) of what torch cannot differentiate.

torch has no forward derivative of a backend's own `linear`. So while a dual level is open, `linear`
is composed of operations that have one, as on the CPU.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

_enter, _exit = forward_ad.enter_dual_level, forward_ad.exit_dual_level
# The registration that holds while a level is open; torch drops it with the library.
# Guarded by: the GIL. Cleared by: the end of the level.
_composed: list[torch.library.Library] = []


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return torch.ops.aten.linear.default.decompose(x, weight, bias)


def _enter_dual_level() -> int:
    level: int = _enter()
    if not _composed:
        library = torch.library.Library("aten", "IMPL")
        library.impl("linear", _linear, "AutogradXLA")
        _composed.append(library)
    return level


def _exit_dual_level(*, level: int | None = None) -> None:
    _exit(level=level)
    if forward_ad._current_level < 0 and _composed:
        _composed.pop()._destroy()


def install() -> None:
    """Makes torch's functions that open and close a level install and remove the composition."""
    forward_ad.enter_dual_level = _enter_dual_level
    forward_ad.exit_dual_level = _exit_dual_level
