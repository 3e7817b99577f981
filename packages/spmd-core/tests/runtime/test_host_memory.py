"""Freed temporaries of CPU programs stay mapped, unless the environment says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

# Allocates 64 MiB, touches it and frees it, ten times: the page faults of the last nine.
_PROGRAM = """
import ctypes, resource
from spmd_core.runtime import host_memory
print(host_memory.keep_mapped())
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def touch():
    address = library.malloc(64 << 20)
    ctypes.memset(address, 1, 64 << 20)
    library.free(address)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(9):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(**variables: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    raised, faults = done.stdout.split()
    return raised, int(faults)


def test_freed_memory_serves_the_next_allocation() -> None:
    raised, faults = _run()
    assert raised == "True" and faults < 1000


def test_variables_of_the_user_win() -> None:
    raised, faults = _run(MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    assert raised == "False"
    assert faults > 9 * 100  # of 4 KiB, or of huge pages
