"""Where automatic sharding, an upper folder, takes part in the plans of cuts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from spmd_core.graph.recorders import lock

Plan = TypeVar("Plan")
# While automatic sharding is on: calls the function given, which makes the plan of a cut
# (`planning.CutPlan`), again after it has marked tensors.
# Guarded by: the graph lock. Cleared by: `use_spmd()`.
search: Callable[[Callable[[], Any]], Any] | None = None


def searched(planned: Callable[[], Plan]) -> Plan:
    """A plan, with the shardings that automatic sharding finds, if it is on."""
    if search is None:
        return planned()
    made: Plan = search(planned)
    return made


@contextmanager
def paused() -> Iterator[None]:
    """Inside, programs run as their marks say, such as those that measure a device."""
    global search
    with lock:
        before, search = search, None
    try:
        yield
    finally:
        with lock:
            search = before
