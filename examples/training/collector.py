"""Keeps Python's garbage collector from what lives as long as the process or its training loop.

torch, jax and transformers are 800,000 objects, and a step's programs a hundred thousand. The
collector goes through them again and again while they are imported, and at the end of the process:
a third of the time of a start. In a loop, once in a while, that takes as long as some small steps;
with several processes, all wait for the one that it stops.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Whether `begin_imports` has paused the collector.
# Guarded by: the main thread, which imports. Cleared by: `end_imports`.
_is_paused = False


def begin_imports() -> None:
    """Until `end_imports`, nothing is collected; nor is anything at the end of the process.

    The imports leave 2 MB of garbage. An open file that only a cycle of objects refers to is not
    written at the end: close files.
    """
    global _is_paused
    _is_paused = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)  # registered before those of the libraries, so it runs after them


def end_imports() -> None:
    """Ends `begin_imports`; what was imported is exempt for good. Without it, does nothing."""
    global _is_paused
    if _is_paused:
        _is_paused = False
        gc.freeze()
        gc.enable()


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
