"""Eager mode, for debugging: each operation runs when it is recorded, so errors show at its line.

While the mode is on, another `__torch_dispatch__` calls the router and cuts after each outermost
call; while it is off, the router runs unchanged. Operations that torch composes of others are cut
once, at their end. What does not go through the router runs with the next operation or read: empty
tensors, attention and layer norm (`dispatch.composite`), `call_jax` and marks.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spmd_core.arguments import checked
from spmd_core.dispatch import router
from spmd_core.graph import recorders
from spmd_core.program import execution
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


class _ThreadState(threading.local):
    inside = False


# Whether this thread is inside of a call in eager mode.
# Guarded by: thread-local storage. Cleared by: the end of each call.
_thread = _ThreadState()
# The `__torch_dispatch__` that the mode replaced; None while the mode is off.
# Guarded by: the GIL; one mode for all threads. Cleared by: eager_mode(False).
_replaced_dispatch: Any = None


def _route_and_cut(
    cls: type[XLAShardedTensor],
    func: torch._ops.OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if _thread.inside or recorders.current().inside is not None:
        return router.route(cls, func, types, args, kwargs)
    _thread.inside = True
    try:
        result = router.route(cls, func, types, args, kwargs)
    finally:
        _thread.inside = False
    execution.cut()
    return result


def is_eager_mode() -> bool:
    """Whether each operation is executed when it is recorded."""
    return _replaced_dispatch is not None


@checked()
def eager_mode(enable: bool) -> None:
    """Turns eager mode on or off, for all threads. Turning it on computes what is pending.

    Each operation is a program of its own, compiled once for its shapes and started without
    waiting; views and in-place updates work as always. A step is many times slower than one that is
    a single program.
    """
    global _replaced_dispatch
    if enable and _replaced_dispatch is None:
        execution.cut()
        _replaced_dispatch = XLAShardedTensor.__dict__["__torch_dispatch__"]
        XLAShardedTensor.__torch_dispatch__ = classmethod(_route_and_cut)  # type: ignore[assignment, method-assign]
    elif not enable and _replaced_dispatch is not None:
        XLAShardedTensor.__torch_dispatch__, _replaced_dispatch = _replaced_dispatch, None  # type: ignore[method-assign]


@checked()
@contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Inside, eager mode is on or off; afterwards it is as before."""
    before = is_eager_mode()
    eager_mode(enable)
    try:
        yield
    finally:
        eager_mode(before)
