"""The settings a user may change, with their defaults; nothing here has an effect until the device is first used."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def _default_cache_dir() -> str | None:
    """`SPMD_CACHE_DIR` (empty: no cache on disk), or a folder of the user's cache directory."""
    chosen = os.environ.get("SPMD_CACHE_DIR")
    if chosen is not None:
        return chosen or None
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "spmd-core" / "xla")


@dataclass
class Config:
    """Assign to the fields of `spmd_core.config` before the setting matters (each says when it is read)."""

    # Folder of JAX's persistent compilation cache; None switches it off. Read at the first compile.
    cache_dir: str | None = None
    # Compiled programs kept in memory; the one used longest ago is dropped first. Read at each compile.
    max_programs: int = 256
    # Distinct (op, shapes, static arguments) whose inferred results are kept. Read when a new one is met.
    max_op_entries: int = 200_000
    # Programs in flight on emulated CPU devices: XLA's collectives abort the process when very many wait for each other.
    max_in_flight_cpu: int = 8
    # Programs in flight on GPU and TPU: enough to hide the host, few enough that donated memory is given back soon.
    max_in_flight: int = 32
    # Asynchronous step closures that may wait for their thread; `sync()` then waits for one to end. Read when a step ends.
    max_async_closures: int = 4
    # An operation that would run on the host raises instead (also: the environment variable SPMD_STRICT=1, and `strict()` for a region).
    strict: bool = False


config = Config(cache_dir=_default_cache_dir(), strict=os.environ.get("SPMD_STRICT", "0") == "1")


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Inside, an operation that would run on the host raises `HostFallbackError`; with False it may, also under `SPMD_STRICT=1`.

    What is read on the host by its nature (`item()`, the number of elements that a mask selects) stays allowed.

    Example:
        >>> import torch, spmd_core as spmd
        >>> with spmd.strict():
        ...     total = torch.ones(3, device="xla").sum()
        >>> total.item()
        3.0
    """
    before, config.strict = config.strict, enabled
    try:
        yield
    finally:
        config.strict = before
