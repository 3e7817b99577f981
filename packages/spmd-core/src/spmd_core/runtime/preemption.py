"""A program that a scheduler ends: at SIGTERM all processes save after one step, and exit."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spmd_core.runtime import stopping

EXIT_PREEMPTED = os.EX_TEMPFAIL
"""75, which sysexits.h has for what is to be tried again: saved, and to be started again."""


class Preemption:
    """What `on_preemption` gives its block."""

    def __init__(self, save: Callable[[], object]) -> None:
        self._save = save

    def check(self) -> None:
        """Ends the program here if a process was asked to stop: saves, then exits with code 75.

        Call it at the end of each step, in every process; before a save that is due in the same
        step. All processes save and exit after the same step. Does not wait for the devices; after
        a request it waits up to a second for the other processes.

        Raises:
            SystemExit: with code 75, when the state is saved.
            Exception: what `save` raised.
        """
        if stopping.should_stop():
            self._save()
            raise SystemExit(EXIT_PREEMPTED)


@contextmanager
def on_preemption(save: Callable[[], object], *, deadline_s: float = 30.0) -> Iterator[Preemption]:
    """Inside, SIGTERM has all processes save after the same step, and exit with code 75.

    SIGTERM is the notice by which schedulers take a machine back: SLURM, Kubernetes, the
    preemptible machines of clouds. It may come to one process or to all. A program that learns of
    it in another way calls `spmd.distributed.request_stop()`, to the same effect.

    Outside of the main thread, where Python allows no handlers, signals are left alone.

    Args:
        save: saves the state, and returns when it is on the disk.
        deadline_s: how long after a SIGTERM the process may be inside of the block. Then it says so
            and ends with code 1, whatever it does: a step that does not end, or a slow save.

    Raises:
        ValueError, TypeError: `deadline_s` is no positive number.

    Example:
        >>> saved = []
        >>> try:
        ...     with on_preemption(lambda: saved.append(step)) as preemption:
        ...         for step in range(1000):
        ...             if step == 3:
        ...                 signal.raise_signal(signal.SIGTERM)
        ...             preemption.check()  # in every process, after each step
        ... except SystemExit as end:
        ...     print("saved", saved, "code", end.code)
        saved [3] code 75
    """
    with stopping.handled([signal.SIGTERM], deadline_s=deadline_s):
        yield Preemption(save)
