"""Progress of long compilations, as a line on the terminal with the time that the last one took.

The seconds of earlier compilations are stored in the folder of compiled
programs, by the program's name. The name has the numbers of operations and inputs, so that a step
has the same name in every run.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spmd_core import files, progress
from spmd_core.config import config

QUIET_S = 5.0  # a shorter compilation is neither shown nor kept
_FILE = "compile_seconds.json"
_MAX_KEPT = 256


@contextmanager
def shown(name: str, num_ops: int, num_devices: int) -> Iterator[None]:
    """Around a compilation: a line on the terminal, once it has taken `QUIET_S` seconds.

    Args:
        name: the program's name.
        num_ops: the number of its operations.
        num_devices: the number of its devices.

    Example of the line:
        compiling spmd_5930ops_148in: 5,930 operations, 24 s so far, 41 s last time
    """
    key, start = f"{name} on {num_devices}", time.perf_counter()
    with progress.shown(
        f"compiling {name}: {num_ops:,} operations", quiet_s=QUIET_S, last=lambda: _last(key)
    ):
        yield
    seconds = time.perf_counter() - start
    if seconds >= QUIET_S:
        _keep(key, seconds)


def _last(key: str) -> str:
    before = _kept().get(key)
    return "" if before is None else f", {before:.0f} s last time"


def _path() -> Path | None:
    return None if config.cache_dir is None else Path(config.cache_dir) / _FILE


def _kept() -> dict[str, float]:
    """The seconds by program; empty if the file is missing or damaged (`_keep` replaces it)."""
    path = _path()
    try:
        found = json.loads(path.read_text("utf-8")) if path is not None else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: s for name, s in found.items() if isinstance(s, (int, float))}


def _keep(key: str, seconds: float) -> None:
    path = _path()
    if path is None or not path.parent.is_dir():
        return
    kept = _kept()
    kept.pop(key, None)
    newest = [*kept.items(), (key, round(seconds, 1))][-_MAX_KEPT:]
    with suppress(OSError):  # the folder may be read-only; then only the line lacks a figure
        files.write_text(path, json.dumps(dict(newest), indent=0))
