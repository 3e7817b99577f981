"""The state of a captured program: parked storages, whose data each call exchanges in one list."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_core.graph import parked
from spmd_core.graph.parked import Spot
from spmd_core.graph.placement import Placement
from spmd_core.graph.stacks import Row, Stack
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.program import stacked_state
from spmd_core.program.leaves import array_of, convert
from spmd_core.program.lost import refuse_lost

# An input or a result: a unit, and where it lies.
Lies = tuple[int, Placement]


@dataclass(frozen=True)
class Unit:
    """What is one input, or one result, or both.

    Attributes:
        storages: returns the storage, or those whose values are the rows of a stack, in order.
            A gradient has other storages in later calls.
        is_stack: whether it is a stack.
    """

    storages: Callable[[], Sequence[Storage]]
    is_stack: bool = False

    def spot(self) -> Spot:
        """Where it lies while it is parked."""
        return parked.spot_of(self.storages(), stacked_state.store if self.is_stack else None)

    def can_be_read(self) -> bool:
        """Whether `value` can make it what a program reads, while it is not parked."""
        return all(storage.value.placement.manual is None for storage in self.storages())

    def value(self, target: Placement) -> Value:
        """Its value, while it is not parked.

        A stack is made of its rows if others than a captured call wrote some of them, and a row of
        another stack gets an array of its own.

        Args:
            target: where a program needs it.
        """
        storages = self.storages()
        stack = stack_of(storages) if self.is_stack else None
        if stack is not None:
            return stack.value
        for storage in storages:
            refuse_lost(storage.value)
        if self.is_stack:
            return stacked_state.restack(storages, target).value
        value = storages[0].value
        if value.data.__class__ is Row:
            value.data = array_of(value)
        return value


class State:
    """The units that a program reads and writes, parked from its first call on.

    Args:
        units: all of them. The index of a unit here is its number.
        reads: what the program reads, in the order of its inputs.
        writes: what it writes, in the order of its results.
    """

    def __init__(self, units: Sequence[Unit], reads: Sequence[Lies], writes: Sequence[Lies]):
        self._units, self._reads, self._writes = units, reads, writes
        self._watcher = parked.Watcher()
        self._unit_at: dict[int, int] = {}  # by place
        # Those that are not parked, or were given back since the last call.
        self._unparked = set(range(len(units)))
        # The inputs that are copied for each call, as their mark has other devices.
        self._copied: list[tuple[int, int, Placement]] = []
        self._read = getter(())
        self._spots: list[Spot] = []  # of the units
        self._places: list[int] = []  # of what is written
        self._is_steady = False

    def rebind(self, units: Sequence[int]) -> None:
        """Notes that units have other storages than in the last call."""
        self._unparked.update(units)

    def unparked(self) -> set[int]:
        """The units that anything may have read, written or marked since the last call."""
        if self._watcher.places:
            places, self._watcher.places = self._watcher.places, set()
            self._unparked.update(self._unit_at[p] for p in places if p in self._unit_at)
        if self._copied:
            return self._unparked.union(unit for _, unit, _ in self._copied)
        return self._unparked

    def can_be_read(self) -> bool:
        """Whether the program can read all state that is not parked."""
        unparked = self.unparked()
        if not unparked:
            return True
        units = [self._units[n] for n, _ in self._reads if n in unparked]
        return all(unit.spot().is_taken or unit.can_be_read() for unit in units)

    def arrays(self) -> list[Any]:
        """The program's inputs that are state, in their order. Call it under the graph lock.

        Raises:
            ProgramError: the data of one is lost.
        """
        if self._watcher.places or self._unparked:
            self._park()
        found = [*self._read(parked.arrays)]
        for i, n, target in self._copied:
            found[i] = _array(self._units[n], target)
        return found

    def _park(self) -> None:
        """Parks what the program reads, if it lies as the program needs it."""
        self._spots = spots = [unit.spot() for unit in self._units]
        self._copied = []
        for i, (n, target) in enumerate(self._reads):
            spot = spots[n]
            if spot.placement is target:
                continue
            spot.give_back()
            array = _array(self._units[n], target)
            if self._units[n].value(target).placement is target:
                spot.park(array, target)
            else:
                self._copied.append((i, n, target))
        self._read = getter([spots[n].place for n, _ in self._reads])
        self._places = [spots[n].place for n, _ in self._writes]
        self._unit_at = {spot.place: n for n, spot in enumerate(spots)}
        self._unparked, self._watcher.places, self._is_steady = set(), set(), False

    def store(self, arrays: Sequence[Any]) -> None:
        """Gives the storages their new data, after `arrays`, under the same lock.

        Args:
            arrays: the program's results, in their order.
        """
        if self._is_steady and not self._watcher.places and not self._unparked:
            items = parked.arrays
            for place, array in zip(self._places, arrays):
                items[place] = array
            return
        for n in self._unparked:  # by `rebind`, since `arrays`
            self._spots[n] = self._units[n].spot()
        for (n, placement), array in zip(self._writes, arrays):
            self._spots[n].park(array, placement)
        # From here on, nothing is given back without the watcher.
        self._is_steady = not self._unparked

    def give_back(self) -> None:
        """Gives all storages their values."""
        for unit in self._units:
            unit.spot().give_back()


def _array(unit: Unit, target: Placement) -> Any:
    """The data of a unit that is not parked, as a program needs it."""
    value = unit.value(target)
    refuse_lost(value)
    return convert(value, target)


def stack_of(storages: Sequence[Storage]) -> Stack | None:
    """The stack whose rows, all of them in order, are the values of these storages."""
    first = storages[0].value.data
    if first.__class__ is not Row or len(first.stack.owners) != len(storages):
        return None
    stack: Stack = first.stack
    for i, storage in enumerate(storages):
        row = storage.value.data
        if row.__class__ is not Row or row.stack is not stack or row.index != i:
            return None
    return stack


def getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function of a sequence: its items at these indices."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda items: tuple(items[i] for i in indices)
