"""Keeps the memory of CPU devices' programs mapped between runs.

XLA allocates the temporaries of a program anew in each run. glibc maps each allocation of more than
32 MiB by itself and returns it to the kernel afterwards, which clears its pages again when the next
run touches them: a step of GPT-2 on 8 emulated devices with 79 MB on each took 70,000 page faults,
which was a tenth of its CPU time. With larger thresholds, what one run frees serves the next one.
"""

import ctypes
import os
import platform

# Of glibc's `mallopt`. A process keeps at most so much free memory at the end of each arena.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_mapped() -> bool:
    """Raises glibc's thresholds for this process, unless the environment sets one of them.

    Returns:
        Whether they are raised; False with another C library.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _VARIABLES):
        return False
    library = ctypes.CDLL(None)
    return all(
        library.mallopt(option, _KEPT_BYTES) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    )
