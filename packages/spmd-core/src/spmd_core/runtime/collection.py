"""Keeps Python's garbage collector from running where it would keep something waiting."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Inside, Python's garbage collector is off; a block inside of another changes nothing.

    A collection looks at all objects of a program, which takes ten milliseconds and more.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
