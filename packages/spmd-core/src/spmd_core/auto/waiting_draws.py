"""Weights that are drawn on the device wait until their shardings are known.

A model that is built on the device is drawn by programs that read nothing but numbers. Under
`use_spmd(auto=True)` these do not run at a `sync()` before the first step, but wait for its search,
for which the weights are inputs. Then each device draws its shards alone.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.metrics.flops import entry_flops
from spmd_core.program import execution, leaves
from spmd_core.program.cut_guard import this_thread
from spmd_core.program.planning import collect


class WaitingDraws:
    """Pending values that the first search takes as inputs, with the storages that had them."""

    def __init__(self) -> None:
        self._storages: dict[Value, weakref.ref[Storage]] = {}

    def keep_back(self, live: list[Storage], wanted: Storage | None) -> list[Storage]:
        """Notes those that nothing but numbers decides, which stay pending; returns the others.

        Args:
            live: the pending storages of a cut without a product.
            wanted: one that is about to be read, and does not wait.
        """
        now = []
        for storage in live:
            if storage is not wanted and _is_drawn(storage):
                self._storages[storage.value] = weakref.ref(storage)
                storage.request()
            else:
                now.append(storage)
        return now

    def __contains__(self, value: Value) -> bool:
        return value in self._storages

    def pending(self) -> dict[Value, Storage]:
        """Those that still wait and that a tensor refers to."""
        found = {value: ref() for value, ref in self._storages.items() if value.data is None}
        return {value: storage for value, storage in found.items() if storage is not None}

    def clear(self) -> None:
        """Forgets all, after the search."""
        self._storages.clear()


@contextmanager
def as_inputs(draws: Mapping[Value, Storage]) -> Iterator[None]:
    """Inside, plans take these pending values for inputs that lie on the host.

    They are what their storages had before the step, so that the state that the step creates for
    them is an input, as it is where the program runs.
    """
    before = {storage: storage.committed for storage in draws.values()}
    for value, storage in draws.items():
        value.data, value.owner = _WAITING, weakref.ref(storage)
        value.placement = leaves.host_placement(storage.sharding)
        storage.committed = value
    try:
        yield
    finally:
        for storage, committed in before.items():
            storage.committed = committed
        for value in draws:
            value.data = None
            del value.owner, value.placement


def draw(draws: Mapping[Value, Storage]) -> None:
    """Computes these values with the shardings that their storages have now. Does not wait."""
    drawn = {}
    for value, storage in draws.items():
        drawn[value] = storage
        if storage.value is not value:  # a step has updated it since
            drawn[value] = Storage(value, value.spec)
            drawn[value].sharding = storage.sharding
    guard, this_thread.cut_guard = this_thread.cut_guard, None  # no program of a region's step
    try:
        execution.compute_apart([*drawn.values()])
    finally:
        this_thread.cut_guard = guard
    for value, storage in draws.items():
        if value.data is None:  # a constant, which was made as another leaf
            made = drawn[value].value
            value.settle(made.data, made.placement, None)
            if drawn[value] is storage:
                storage.write(value)
        value.owner, storage.committed = weakref.ref(storage), value


_WAITING = object()  # the data of an input that is not drawn yet


def _is_drawn(storage: Storage) -> bool:
    nodes, read = collect([storage])
    return (
        storage.value.parent is None
        and not read
        and not any(x.entry.border is not None or entry_flops(x.entry) for x in nodes)
    )
