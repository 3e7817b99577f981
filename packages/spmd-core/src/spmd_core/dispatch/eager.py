"""Eager mode: each operation is executed when it is recorded, in a program of its own, so that an error shows at its line. For debugging.

The router is exchanged for one that cuts after each call from outside of it, and stays as it is while the mode is off. Operations that torch composes
of others are cut once, at their end. What does not go through the router waits for the next operation or read: empty tensors,
attention and layer norm (`composite`), `call_jax` and marks.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spmd_core.dispatch import router
from spmd_core.program import execution
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


class _Depth(threading.local):
    inside = False


_depth = _Depth()
_lazy: Any = None  # the router that the mode replaced; None while it is off


def _route_and_cut(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if _depth.inside:
        return router.route(cls, func, types, args, kwargs)
    _depth.inside = True
    try:
        result = router.route(cls, func, types, args, kwargs)
    finally:
        _depth.inside = False
    execution.cut()
    return result


def is_eager_mode() -> bool:
    """Whether each operation is executed when it is recorded."""
    return _lazy is not None


def eager_mode(enable: bool) -> None:
    """Turns eager mode on or off, for every thread. What is pending is computed when it goes on.

    Each operation is one program, compiled once for its shapes, and started without waiting; views and in-place updates are as always. A step is many
    times slower than one that is recorded whole.
    """
    global _lazy
    if enable and _lazy is None:
        execution.cut()
        _lazy = XLAShardedTensor.__dict__["__torch_dispatch__"]
        XLAShardedTensor.__torch_dispatch__ = classmethod(_route_and_cut)  # type: ignore[assignment, method-assign]
    elif not enable and _lazy is not None:
        XLAShardedTensor.__torch_dispatch__, _lazy = _lazy, None  # type: ignore[method-assign]


@contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Inside, eager mode is on or off; after it, as before."""
    before = is_eager_mode()
    eager_mode(enable)
    try:
        yield
    finally:
        eager_mode(before)
