"""A hash of what plans and searches depend on beside what is planned: sources, versions, flags."""

import functools
import hashlib
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

_VERSIONS = ("torch", "jax", "jaxlib", "libtpu", "scipy")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def digest(more: Iterable[Path] = ()) -> str:
    """A hash of this package's sources, the compilers' versions and the flags that they read.

    Args:
        more: further files whose content counts.
    """
    found = hashlib.sha256(_of_package())
    for name in _FLAGS:
        found.update(f"{name} {os.environ.get(name, '')}".encode())
    for path in more:
        found.update(path.read_bytes())
    return found.hexdigest()


@functools.cache
def _of_package() -> bytes:
    found = hashlib.sha256()
    for name in _VERSIONS:
        try:
            found.update(f"{name} {metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:
            found.update(f"{name} none".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.digest()
