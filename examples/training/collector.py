"""Keeps Python's garbage collector from stopping a training loop for half a second.

torch, jax and a model are half a million objects, and a step's programs a hundred thousand. Once in
a while the collector goes through all of them, which takes as long as some small steps; with
several processes, all wait for the one that it stops. So what lives as long as the loop is exempt.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived() -> Iterator[None]:
    """Inside, the garbage collector does not examine objects that were alive before.

    Runs the collector first, so that no garbage keeps tensors and their device memory alive.
    Objects that were exempt before stay so, with those that the loop exempted: Python ends it only
    for all.

    Example:
        >>> with long_lived():
        ...     gc.get_freeze_count() > 0
        True
    """
    gc.collect()
    had_exempt = bool(gc.get_freeze_count())
    gc.freeze()
    try:
        yield
    finally:
        if not had_exempt:
            gc.unfreeze()


def exempt_new() -> None:
    """Inside of `long_lived`, collects, then exempts the objects made since, such as programs."""
    if gc.get_freeze_count():
        gc.collect()
        gc.freeze()
