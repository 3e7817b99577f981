"""Class indices of a floating dtype, which PyTorch/XLA's losses accept and eager torch refuses."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from spmd_core import releases
from spmd_core.dispatch import router
from spmd_core.recording import schema

_LOSSES = (
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    "aten.nll_loss_backward.default",
    "aten.nll_loss2d_backward.default",
)


def accept_float_targets() -> None:
    """Makes the losses of class indices accept targets of a floating dtype, as whole numbers."""
    for func in releases.overloads(dict.fromkeys(_LOSSES)):
        router.wrap(func, partial(_with_int_target, func))


def _with_int_target(func: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    position = schema.of(func).names.index("target")

    def loss(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args[position].is_floating_point():
            args = (*args[:position], args[position].long(), *args[position + 1 :])
        return handler(args, kwargs)

    return loss
