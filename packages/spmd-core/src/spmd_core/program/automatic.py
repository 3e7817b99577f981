"""Where automatic sharding, an upper folder, takes part in cuts and their plans."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value

Plan = TypeVar("Plan")


class Search(Protocol):
    """Automatic sharding while it is on.

    Attributes:
        folds_layers: whether repeated layers become loops with the shardings that were found; not
            before the first search.
    """

    folds_layers: bool

    def __call__(
        self,
        planned: Callable[[], Any],
        complete: Callable[[Any], Any],
        one_by_one: Callable[[], Any],
        /,
    ) -> Any:
        """The plan of a cut (`planning.CutPlan`).

        Args:
            planned: makes it, again after tensors were marked.
            complete: makes that of a new program from it, with all stacks.
            one_by_one: makes it with layers one by one, as they were recorded, to be searched.
        """

    def ready(self, live: list[Storage], wanted: Storage | None) -> list[Storage]:
        """The storages that a cut computes now. Others wait, or were computed meanwhile.

        Args:
            live: all that are pending.
            wanted: one that is about to be read; None for none.
        """

    def waits(self, value: Value, /) -> bool:
        """Whether a pending value is computed apart, before the program that will read it."""


# Guarded by: the graph lock. Cleared by: `use_spmd()`.
search: Search | None = None


def searched(
    planned: Callable[[], Plan],
    complete: Callable[[Plan], Plan],
    one_by_one: Callable[[], Plan],
) -> Plan:
    """A plan, with the shardings that automatic sharding finds, if it is on (see `Search`)."""
    if search is None:
        return planned()
    made: Plan = search(planned, complete, one_by_one)
    return made


def ready(live: list[Storage], wanted: Storage | None) -> list[Storage]:
    """The storages of a cut that it computes; all without automatic sharding."""
    return live if search is None or not live else search.ready(live, wanted)


def is_input(value: Value) -> bool:
    """Whether a value is an input of the program that reads it: data, or what waits for it."""
    return value.data is not None or (search is not None and search.waits(value))


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
