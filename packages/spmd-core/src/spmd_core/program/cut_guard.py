"""What a region of the user's program, such as `steps.compile`, requires of the cuts inside it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from spmd_core.graph.storage import Storage
from spmd_core.program.compile_cache import Key
from spmd_core.program.planning import CutPlan
from spmd_core.program.program import Program
from spmd_core.program.small_state import CapturedCall


@dataclass(frozen=True)
class CutGuard:
    """What a region of the user's program (`steps.compile`) requires of the cuts inside it.

    Attributes:
        label: the prefix of the names of programs that are compiled inside.
        before_cut: called before a cut; if it raises, everything stays pending.
        before_program: called with the program's key, before the program is looked up or compiled;
            if it raises, the cut has failed.
        after_program: called with the same key once the program is compiled; not called for a
            program that cannot be compiled.
        after_start: of a step that is captured: called with the plan and the program, once it was
            started and its results are those of the storages. Else None.
        call: returns the call of a step that is captured; None for any other region.
    """

    label: str
    before_cut: Callable[[], None]
    before_program: Callable[[Key], None]
    after_program: Callable[[Key], None]
    after_start: Callable[[CutPlan, Program], None] | None = None
    call: Callable[[], CapturedCall | None] = lambda: None


class _ThreadState(threading.local):
    """The state of a thread on which its cuts depend.

    Attributes:
        cut_guard: set and reset by the region (`steps.compile`); None outside of any region.
        in_place_of_cut: while a step is recorded that must not run (`auto.recorded_step`): called
            in place of each cut with the storage that is about to be read, if any. Else None.
    """

    cut_guard: CutGuard | None = None
    in_place_of_cut: Callable[[Storage | None], None] | None = None


# What a region of `compile` requires of the cuts of its thread.
# Guarded by: thread-local storage. Cleared by: the end of the region.
this_thread = _ThreadState()
