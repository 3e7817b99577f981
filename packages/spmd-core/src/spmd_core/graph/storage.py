"""What tensors share: a storage holds one value, views are chains over it, and a write through any view reaches every other.

Invariants. A storage's `value` is always its current value, pending or computed. A view caches the value it last derived together with
the storage's version; where the versions differ, for a new view and after a write through another alias, it is derived from the storage. Every
storage whose value is pending is listed, weakly, in `_pending`: what nobody holds any more is never computed.
"""

import threading
import weakref
from typing import Any

from spmd_core import source_lines
from spmd_core.config import config
from spmd_core.graph.values import Entry, Spec, Value
from spmd_core.sharding.sharding import Sharding

# Recording and cutting exclude each other: a cut must see whole operations only. Reentrant, as a host read inside an operation cuts.
lock = threading.RLock()
_pending: list["weakref.ref[Storage]"] = []
_weak = weakref.ref
_next_address = 1 << 40


class Storage:
    """One value shared by a tensor and its views. `sharding` is the user's mark (or inherited), None where the partitioner may choose.

    `committed` is the value of the last successful cut: where a program fails, the storage returns to it.
    """

    __slots__ = ("__weakref__", "_address", "committed", "sharding", "spec", "value", "version")

    _address: int  # set when somebody asks
    offset = 0  # a storage begins at its own beginning; a view may begin elsewhere

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
    live = list(
        dict.fromkeys(s for ref in _pending if (s := ref()) is not None and s.value.data is None)
    )
    _pending.clear()
    return live


def _prune() -> None:
    """Forgets dead storages, so that a long loop without a cut holds no memory for what it dropped."""
    _pending[:] = [ref for ref in _pending if ref() is not None]


class Link:
    """One view operation of a chain, with every argument fixed: the same for all views made by the same call on bases of one spec.

    Attributes:
        entry: the operation, whose `view_write` puts a written view back; made lazily by `aliasing`.
        numbers: the entry's numbers, where a position is an input of the program and not part of it.
        call: the overload and its arguments without the base, as torch itself would be called.
        spec: of the view.
        offset: where the view begins in its base, in elements of the view.
        scale: bytes of one element of the base and of the view, where they differ.
    """

    __slots__ = ("call", "entry", "numbers", "offset", "scale", "spec")

    def __init__(
        self,
        entry: Entry,
        call: tuple[Any, ...],
        offset: int,
        *,
        numbers: tuple[int, ...] = (),
        base: Spec,
    ) -> None:
        self.entry, self.call, self.numbers, self.offset = entry, call, numbers, offset
        self.spec = entry.spec
        sizes = (base.dtype.itemsize, self.spec.dtype.itemsize)
        self.scale = None if sizes[0] == sizes[1] else sizes

    def begins_at(self, base_offset: int) -> int:
        """Where the view begins in the storage, in its own elements."""
        return self.offset + (
            base_offset if self.scale is None else base_offset * self.scale[0] // self.scale[1]
        )


class View:
    """A chain of view operations over a storage: each view holds its last link and the handle that this is a view of.

    The value is derived when it is first asked for, and again after a write through another alias. Its origin is the view's, not that of who asks.
    """

    __slots__ = (
        "__weakref__",
        "base",
        "link",
        "offset",
        "origin",
        "sharding",
        "spec",
        "storage",
        "value",
        "version",
    )

    def __init__(self, base: "Handle", storage: Storage, link: Link, offset: int) -> None:
        self.base, self.storage, self.link, self.offset = base, storage, link, offset
        self.spec = link.spec
        self.version = -1  # no value yet
        self.sharding: Sharding | None = None
        self.value: Value
        if config.record_source_lines:
            self.origin = source_lines.origin()

    def current(self) -> Value:
        """The view's value, derived if the storage was written since it last was."""
        version = self.storage.version
        if self.version == version:
            return self.value
        # A loop, as a chain may be longer than Python's recursion.
        stale = [self]
        handle = self.base
        while handle.__class__ is View and handle.version != version:
            stale.append(handle)
            handle = handle.base
        value = handle.value
        for view in reversed(stale):
            value = view.value = Value(view.link.entry, (value,), view.link.numbers)
            view.version = version
            if config.record_source_lines and hasattr(view, "origin"):
                value.origin = view.origin
        return value

    def chain(self) -> list["View"]:
        """The views from the storage to this one."""
        views: list[View] = []
        handle: Handle = self
        while isinstance(handle, View):
            views.append(handle)
            handle = handle.base
        return views[::-1]


Handle = Storage | View


def read(handle: Handle) -> Value:
    """The handle's current value."""
    return handle.value if isinstance(handle, Storage) else handle.current()


def address(handle: Handle) -> int:
    """A number for where the handle's first element lies: equal for tensors that begin at one place of one storage, and for no others.

    There is no memory behind it. It is what programs that look for tied weights by `data_ptr()` need.
    """
    global _next_address
    storage = handle.storage
    if not hasattr(storage, "_address"):
        storage._address = _next_address
        _next_address += -(-max(storage.spec.num_bytes, 1) // 512) * 512
    return storage._address + handle.offset * handle.spec.dtype.itemsize
