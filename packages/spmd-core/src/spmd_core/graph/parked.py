"""Storages whose data lies in one list, where captured steps read it and write it at each call.

A captured step gives thousands of storages their new data at each call. To visit each of them, with
its value, costs more than all the rest of the call. So a step *parks* them: the data of a storage,
or that of the storages whose values are the rows of a stack, moves to its `Spot` in `arrays`, and
each of them is a `Parked` until anything reads or writes its value, its version or its mark. Then
it has its value back, a new one, and each `Watcher` hears of it. While nothing does, a call
exchanges items of `arrays`, and no storage is touched. The watchers hear of its first view, too.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from spmd_core.graph.placement import Placement
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value

# By place: the data of what is parked there; None where nothing is.
# Guarded by: the graph lock; the end of a spot clears its item under the GIL.
# Cleared by: the end of the spots.
arrays: list[Any] = []
# The places of no spot.
# Guarded by: the GIL. Cleared by: the next spots.
_free: list[int] = []
# By the ids of their storages.
# Guarded by: the graph lock. Cleared by: the end of the spots.
_spots: "weakref.WeakValueDictionary[tuple[int, ...], Spot]" = weakref.WeakValueDictionary()
# Those of all captured steps, by their ids.
# Guarded by: the GIL. Cleared by: the end of the watchers.
_watchers: "weakref.WeakValueDictionary[int, Watcher]" = weakref.WeakValueDictionary()
# (the storages, the stack, where it lies, `Value.checked`): gives the storages its rows as values.
Restore = Callable[[Sequence[Storage], Any, Placement, Any], Any]


class Watcher:
    """Who hears of storages that got their values back, and of data that lies differently.

    Attributes:
        places: theirs, since the watcher last cleared it.
    """

    def __init__(self) -> None:
        self.places: set[int] = set()
        _watchers[id(self)] = self


class _Newest:
    """What is known of the programs that gave `arrays` its items.

    Attributes:
        checked: `Value.checked` for the values of all parked storages.
    """

    checked: Any = None


# Guarded by: the graph lock. Cleared by: never: each captured call sets it.
newest = _Newest()


class Spot:
    """Where the data of a storage lies while it is parked, or the stack of several of them.

    Attributes:
        place: its index in `arrays`.
        placement: where the data lies; None while nothing is parked here.
    """

    __slots__ = ("__weakref__", "_like", "_restore", "_storages", "place", "placement")

    def __init__(self, storages: Sequence[Storage], restore: Restore | None) -> None:
        self._storages = tuple(map(weakref.ref, storages))
        self._restore = restore
        self._like = storages[0].spec, storages[0].sharding
        self.placement: Placement | None = None
        if _free:
            self.place = _free.pop()
        else:
            self.place = len(arrays)
            arrays.append(None)

    def __del__(self, arrays: list[Any] = arrays, free: list[int] = _free) -> None:
        arrays[self.place] = None  # module globals are gone at the end of the process
        free.append(self.place)

    @property
    def is_taken(self) -> bool:
        """Whether its storages are parked here."""
        return self.placement is not None

    def park(self, array: Any, placement: Placement) -> None:
        """Parks its storages, or gives the parked ones another array; call it under `lock`.

        Args:
            array: the data on the devices, which nothing else has or will take over.
            placement: where that lies.
        """
        if self.placement is not placement:
            self.tell()
        arrays[self.place], self.placement = array, placement
        for reference in self._storages:
            storage = reference()
            if storage is None or (storage.__class__ is Parked and _value.__get__(storage) is self):
                continue
            give_back(storage)  # from another spot
            _set(storage, "__class__", Parked)  # first, for readers without the lock
            _value.__set__(storage, self)
            _committed.__set__(storage, None)
            _recorder.__set__(storage, None)

    def give_back(self) -> None:
        """Gives its storages their values, if they are parked here."""
        with lock:
            placement = self.placement
            if placement is None:
                return
            self.placement = None
            array, arrays[self.place] = arrays[self.place], None
            storages = [reference() or self._new() for reference in self._storages]
            if self._restore is None:
                value = Value.leaf(storages[0].spec, array, placement, None)
                if newest.checked is not None:
                    value.checked = newest.checked
                storages[0].write(value)
            else:
                self._restore(storages, array, placement, newest.checked)
            for storage in storages:  # last, for readers without the lock
                _set(storage, "__class__", Storage)
            self.tell()

    def _new(self) -> Storage:
        """A storage in place of that of a row, which is gone."""
        storage: Storage = Storage.__new__(Storage)
        (storage.spec, storage.sharding), storage.version = self._like, 0
        return storage

    def tell(self) -> None:
        """Has all watchers hear of it."""
        # `valuerefs` copies at once: another thread may capture a step meanwhile.
        for ref in _watchers.valuerefs():
            if (watcher := ref()) is not None:
                watcher.places.add(self.place)


def is_parked(storage: Storage) -> bool:
    """Whether a storage is parked at the moment."""
    return storage.__class__ is Parked


def spot_of(storages: Sequence[Storage], restore: Restore | None = None) -> Spot:
    """The spot of a storage, or of those whose values are the rows of a stack, in this order.

    Args:
        storages: one storage, or several.
        restore: of a stack, how the storages get its rows as values; else None.
    """
    key = tuple(map(id, storages))
    found = _spots.get(key)
    if found is None or any(r() is not s for r, s in zip(found._storages, storages)):
        found = _spots[key] = Spot(storages, restore)
    return found


def give_back(storage: Storage) -> None:
    """Gives a parked storage its value. Does nothing for another one."""
    if storage.__class__ is Parked:
        with lock:
            if storage.__class__ is Parked:
                spot = _value.__get__(storage)
                if spot.__class__ is Spot:  # else it is getting its value at the moment
                    spot.give_back()


_set = object.__setattr__
# What a captured step depends on.
_WATCHED = frozenset({"value", "version", "committed", "recorder", "sharding"})
_value: Any = Storage.__dict__["value"]
_committed: Any = Storage.__dict__["committed"]
_recorder: Any = Storage.__dict__["recorder"]


def _given_back(name: str) -> Any:
    """An attribute of a storage that gets its value back before the attribute is read."""
    slot = Storage.__dict__[name]

    def read(storage: Storage) -> Any:
        give_back(storage)
        return slot.__get__(storage)

    return property(read, slot.__set__)


class Parked(Storage):
    """A storage whose data lies in `arrays`; its slot `value` has the spot."""

    __slots__ = ()
    value = _given_back("value")
    version = _given_back("version")
    committed = _given_back("committed")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WATCHED:
            give_back(self)
            _set(self, name, value)
            return
        is_first_alias = name == "aliased" and not hasattr(self, name)
        _set(self, name, value)
        if is_first_alias:
            spot = _value.__get__(self)
            if spot.__class__ is Spot:  # else it is getting its value, which is told, too
                spot.tell()
