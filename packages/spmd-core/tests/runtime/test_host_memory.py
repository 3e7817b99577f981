"""Freed temporaries of CPU programs stay mapped, unless the environment says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

# Allocates 64 MiB, touches it and frees it, ten times: the page faults of the last nine.
_PROGRAM = """
import ctypes, resource, threading
from spmd_core.runtime import host_memory
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
has_arena, is_turn = threading.Event(), threading.Event()
def early():  # has an arena before the process is limited to one
    library.free(library.malloc(1 << 16))
    has_arena.set()
    is_turn.wait()
    run()
other = threading.Thread(target=early)
other.start()
has_arena.wait()
print(host_memory.keep_mapped())
def touch():
    address = library.malloc(64 << 20)
    ctypes.memset(address, 1, 64 << 20)
    library.free(address)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(9):
        touch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touch()
print(faults())
with host_memory.returned_when_freed():
    print(faults())
touch()
print(faults())
def touch():  # as a device's thread does
    addresses = [library.malloc(20 << 20) for _ in range(8)]
    for address in addresses:
        ctypes.memset(address, 1, 20 << 20)
    for address in addresses:
        library.free(address)
def run():
    touch()
    print(faults())
thread = threading.Thread(target=run)
thread.start()
thread.join()
is_turn.set()
other.join()
"""


def _run(**variables: str) -> tuple[str, list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    raised, *faults = done.stdout.split()
    return raised, [int(n) for n in faults]


MANY = 9 * 30  # a page has 4 KiB, or 2 MiB: at least 32 pages are touched each time


def test_freed_memory_serves_the_next_allocation_but_where_it_is_returned() -> None:
    raised, (kept, returned, again, in_thread, in_own_arena) = _run()
    assert raised == "True"
    assert kept < MANY < returned
    assert again < MANY
    assert in_thread < MANY
    assert in_own_arena < MANY


@pytest.mark.parametrize(
    "variable",
    [
        ("MALLOC_MMAP_THRESHOLD_", str(1 << 20)),
        ("MALLOC_ARENA_MAX", "8"),
        ("MALLOC_TOP_PAD_", "1024"),
    ],
)
def test_variables_of_the_user_win(variable: tuple[str, str]) -> None:
    raised, faults = _run(**dict([variable]))
    assert raised == "False"
    assert min(faults) > MANY
