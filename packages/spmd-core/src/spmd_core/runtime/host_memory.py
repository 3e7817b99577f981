"""Keeps the memory of CPU devices' programs mapped between runs.

XLA allocates the temporaries of a program anew in each run. glibc maps each allocation of more than
32 MiB by itself and returns it to the kernel when it is freed, so each page is cleared and mapped
again when the next run touches it. With larger thresholds, what one run frees serves the next one.
Threads of XLA that run before then have arenas of their own, which others share that start later.
These consist of heaps of 64 MiB. A heap is unmapped when all of it is free and the one before it
has less room than the padding, so this is larger than a heap. A block of more than 64 MiB does not
fit a heap and is still mapped anew in each run. One arena for all threads, from their start on,
would keep it; but they would wait for each other whenever they allocate: programs compile, and
programs with small blocks run, more slowly.
`benchmarks/page_faults.py` measures what kept memory gains.
"""

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Of glibc's `mallopt`. A process keeps at most so much free memory at the end of each arena; the
# padding, by which an arena grows more than is asked for, is not touched, so it takes no memory.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_KEPT = {_M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: 1 << 30, _M_TOP_PAD: 1 << 27}
_DEFAULT = dict.fromkeys(_KEPT, 1 << 17)
_VARIABLES = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"),
    *("MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX"),
)


# Guarded by: the GIL. Cleared by: never, as the thresholds of a process.
_is_raised = False


def keep_mapped() -> bool:
    """Raises glibc's thresholds for this process, and limits it to one arena.

    Nothing is changed if the environment sets one of them. Threads that have an arena keep it, and
    those that start later share all arenas there are.

    Returns:
        Whether it was done; False with another C library.
    """
    global _is_raised
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in _VARIABLES):
        _is_raised = bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)) and _set(_KEPT)
    return _is_raised


@contextmanager
def returned_when_freed() -> Iterator[None]:
    """Inside, what is allocated and freed goes back to the kernel, as it does by default.

    For what replaces most of a process's memory, whose blocks would leave gaps between each other.
    """
    if _is_raised:
        _set(_DEFAULT)
    try:
        yield
    finally:
        if _is_raised:
            _set(_KEPT)


def _set(options: Mapping[int, int]) -> bool:
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, num_bytes) for option, num_bytes in options.items())
