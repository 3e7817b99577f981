"""Keeps the memory of CPU devices' programs mapped between runs.

XLA allocates the temporaries of a program anew in each run. glibc maps each allocation of more than
32 MiB by itself and returns it to the kernel when it is freed, so each page is cleared and mapped
again when the next run touches it. With larger thresholds, what one run frees serves the next one.
The threads of the devices share one arena for it: an arena of another thread consists of heaps of
64 MiB, each of which is unmapped when all of it is free. `benchmarks/page_faults.py` measures both.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# Of glibc's `mallopt`. A process keeps at most so much free memory at the end of each arena.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES, _DEFAULT_BYTES = 1 << 30, 1 << 17
_VARIABLES = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"),
    "MALLOC_ARENA_MAX",
)


# Guarded by: the GIL. Cleared by: never, as the thresholds of a process.
_is_raised = False


def keep_mapped() -> bool:
    """Raises glibc's thresholds for this process, and limits it to one arena.

    Nothing is changed if the environment sets one of them. Threads that have an arena keep it, so
    call this before the devices start.

    Returns:
        Whether it was done; False with another C library.
    """
    global _is_raised
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in _VARIABLES):
        _is_raised = bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)) and _set(_KEPT_BYTES)
    return _is_raised


@contextmanager
def returned_when_freed() -> Iterator[None]:
    """Inside, what is allocated and freed goes back to the kernel, as it does by default.

    For what replaces most of a process's memory, whose blocks would leave gaps between each other.
    """
    if _is_raised:
        _set(_DEFAULT_BYTES)
    try:
        yield
    finally:
        if _is_raised:
            _set(_KEPT_BYTES)


def _set(num_bytes: int) -> bool:
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, num_bytes) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
