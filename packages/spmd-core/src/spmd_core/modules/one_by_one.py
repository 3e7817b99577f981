"""`one_by_one`: a context in which layers that run as one loop are called one after another.

A search of shardings reads operations and no loops, so it records a step in this form.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

Layers = dict[object, Sequence[nn.Module]]
"""The layers of each loop, by what stands for the loop."""

# Guarded by: the context. Cleared by: the end of `one_by_one`.
_called: ContextVar[Layers | None] = ContextVar("one_by_one", default=None)


@contextmanager
def one_by_one() -> Iterator[Layers]:
    """Inside, the layers of all loops run one by one; gives the layers of those that are called.

    Of this thread and context.
    """
    called: Layers = {}
    token = _called.set(called)
    try:
        yield called
    finally:
        _called.reset(token)


def called_one_by_one() -> Layers | None:
    """What `one_by_one` gives, to be filled; None outside of it."""
    return _called.get()
