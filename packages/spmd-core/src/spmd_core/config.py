"""The settings a user may change, with their defaults; nothing here has an effect until the device is first used."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CompilerOption = str | bool | int | float


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
    # Recorded operations keep the line of the user's program and the module that they come from, and compiled programs name them. Costs tens of
    # microseconds for each operation, and programs of their own (also: SPMD_SOURCE_LINES=1, and `debugging.source_lines()` for a region).
    record_source_lines: bool = False
    # XLA's own options, by XLA's names, such as {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}, which takes less memory on
    # emulated devices. Read at each cut; a program compiled with other options is another program. XLA_FLAGS sets them for the whole process.
    compiler_options: dict[str, CompilerOption] = field(default_factory=dict)
    # Say on stderr why a program was compiled, after the first so many programs of the process, which are expected (also: SPMD_EXPLAIN_RECOMPILES=3).
    # None: never. Read at each compile.
    explain_recompiles_after: int | None = None


def _number_of_programs() -> int | None:
    """`SPMD_EXPLAIN_RECOMPILES`, a number of programs; empty or absent: None."""
    chosen = os.environ.get("SPMD_EXPLAIN_RECOMPILES", "")
    if chosen and not chosen.isdecimal():
        raise ValueError(
            f"SPMD_EXPLAIN_RECOMPILES is the number of programs that need no explanation; got {chosen!r}. Set it to 1 or more, or unset it."
        )
    return int(chosen) if chosen else None


config = Config(
    cache_dir=_default_cache_dir(),
    strict=os.environ.get("SPMD_STRICT", "0") == "1",
    record_source_lines=os.environ.get("SPMD_SOURCE_LINES", "0") == "1",
    explain_recompiles_after=_number_of_programs(),
)


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
