"""`reset()`: the modes, settings and queues of the process as they were when the tests began.

Caches stay (compiled programs, recorded calls, interned values): they decide no result.
`python scripts/mutable_state.py` lists all mutable state, with what takes it back.
"""

import copy
import dataclasses
import logging
from typing import Any

import spmd_core as spmd
from spmd_core import source_lines
from spmd_core.debugging import recompile_warnings
from spmd_core.dispatch import automatic_cut, shape_reads
from spmd_core.graph import storage
from spmd_core.program import automatic, cut_guard, growing_sizes, index_checks
from spmd_core.runtime import stopping
from spmd_core.steps import closures, compile

_CONFIG = {
    field.name: copy.copy(getattr(spmd.config, field.name))
    for field in dataclasses.fields(spmd.config)
}


def reset() -> None:
    """Undoes what a test set and did not take back. Drops step closures that still wait."""
    for name, value in _CONFIG.items():
        setattr(spmd.config, name, copy.copy(value))
    spmd.set_global_mesh(None)
    spmd.eager_mode(False)
    cut_guard.this_thread.cut_guard = None
    cut_guard.this_thread.in_place_of_cut = None
    automatic.search = None
    automatic_cut.reset()
    growing_sizes.clear()
    recompile_warnings.clear()
    storage.take_failed()
    index_checks.forget()
    closures._waiting.clear()
    compile._keys_of_name.clear()
    shape_reads._warned.clear()
    source_lines._forward.clear()
    stopping.reset()
    spmd.metrics.reset()
    free_logging()


def free_logging() -> None:
    """Gives logging's lock back, which an interrupt may have left taken; other threads wait for it.

    CPython 3.11 takes it before the `try` that gives it back.
    """
    lock: Any = logging._lock  # type: ignore[attr-defined]
    while lock._is_owned():
        lock.release()
