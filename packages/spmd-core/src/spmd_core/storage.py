"""What tensors share: a storage holds one value, views are chains over it, and a write through any view reaches every other.

Invariants. A storage's `value` is always its current value, pending or computed. A view caches the value it last derived together with
the storage's version; after a write through another alias the versions differ and the view is derived again from the storage. Every
storage whose value is pending is listed, weakly, in `_pending`: what nobody holds any more is never computed.
"""

import threading
import weakref
from typing import Any

from spmd_core.graph import Entry, Spec, Value
from spmd_core.sharding import Sharding

# Recording and cutting exclude each other: a cut must see whole operations only. Reentrant, as a host read inside an operation cuts.
lock = threading.RLock()
_pending: list["weakref.ref[Storage]"] = []
_weak = weakref.ref


class Storage:
    """One value shared by a tensor and its views. `sharding` is the user's mark (or inherited), None where the partitioner may choose.

    `committed` is the value of the last successful cut: where a program fails, the storage returns to it.
    """

    __slots__ = ("__weakref__", "committed", "sharding", "spec", "value", "version")

    def __init__(self, value: Value, spec: Spec) -> None:
        self.value, self.spec = value, spec
        self.version = 0
        self.sharding: Sharding | None = None
        self.committed: Value | None = None
        _pending.append(_weak(self))
        if not len(_pending) & 0x3FFF:
            _prune()

    def write(self, value: Value) -> None:
        """Replaces the value; every view derives itself again when it is next read."""
        if value.data is not None:
            self.committed = value
            value.owner = _weak(self)
        elif self.value.data is not None:
            _pending.append(_weak(self))
        self.value = value
        self.version += 1

    def request(self) -> None:
        """Lists a pending storage again, after a program that should have computed it failed."""
        _pending.append(_weak(self))

    @staticmethod
    def of_leaf(spec: Spec, data: Any, placement: Any) -> "Storage":
        """A storage over data that is already there."""
        storage: Storage = Storage.__new__(Storage)
        storage.value = storage.committed = Value.leaf(spec, data, placement, _weak(storage))
        storage.spec, storage.version, storage.sharding = spec, 0, None
        return storage

    @property
    def storage(self) -> "Storage":
        return self


def take_pending() -> list[Storage]:
    """The live storages whose value is pending, in the order in which they became so; the list starts anew."""
    live = list(dict.fromkeys(s for ref in _pending if (s := ref()) is not None and s.value.data is None))
    _pending.clear()
    return live


def _prune() -> None:
    """Forgets dead storages, so that a long loop without a cut holds no memory for what it dropped."""
    _pending[:] = [ref for ref in _pending if ref() is not None]


class View:
    """A chain of view operations over a storage: `chain[-1](...chain[0](storage.value))`."""

    __slots__ = ("chain", "sharding", "spec", "storage", "value", "version")

    def __init__(self, storage: Storage, chain: tuple[Entry, ...], spec: Spec, value: Value) -> None:
        self.storage, self.chain, self.spec, self.value = storage, chain, spec, value
        self.version = storage.version
        self.sharding: Sharding | None = None

    def current(self) -> Value:
        """The view's value, derived again if the storage was written since."""
        storage = self.storage
        if self.version != storage.version or (self.value.data is None and storage.value.data is not None and self.sharding is None):
            value = storage.value
            for entry in self.chain:
                value = Value(entry, (value,), ())
            self.value, self.version = value, storage.version
        return self.value

    def intermediate_values(self) -> list[Value]:
        """The storage's value and each value along the chain but the last."""
        values = [self.storage.value]
        for entry in self.chain[:-1]:
            values.append(Value(entry, (values[-1],), ()))
        return values


Handle = Storage | View


def read(handle: Handle) -> Value:
    """The handle's current value."""
    return handle.value if isinstance(handle, Storage) else handle.current()
