"""Storages and views: tensors that alias each other share one value, and see each other's writes.

A storage holds one value. A view is a chain of view operations over a storage. Invariants:

- A storage's `value` is always its current value, pending or computed.
- A view caches its last derived value together with the storage's version at that time. If the
  versions differ (in a new view, or after a write through another alias), the value is derived from
  the storage again.
- Every live storage whose value is pending is in the list of one thread, the one that recorded the
  value (`graph.recorders`), by weak reference: a value that no tensor holds any more is never
  computed. Where the value's program failed, it is in that thread's `failed` instead.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from spmd_core import source_lines
from spmd_core.config import config
from spmd_core.graph import recorders
from spmd_core.graph.placement import Placement
from spmd_core.graph.recorders import Recorder, lock
from spmd_core.graph.values import Entry, Spec, Value
from spmd_core.sharding.sharding import Sharding

_weak = weakref.ref
_this_thread = recorders.this_thread
_is_inference_mode = torch.is_inference_mode_enabled
# The next number for `data_ptr()`.
# Guarded by: the graph lock. Cleared by: never: addresses stay distinct.
_next_address = 1 << 40
# After how many new pending storages of a thread the dead ones are dropped from its list.
PENDING_BLOCK = 1024
# Called by the thread after that many, to notice a loop that never cuts. Set by
# `dispatch.automatic_cut`.
# Guarded by: imports. Cleared by: never.
on_pending_block: Callable[[Recorder], None] | None = None


class Storage:
    """One value shared by a tensor and its views.

    Attributes:
        value: the current value, pending or computed.
        spec: the spec of the whole storage.
        version: number of writes so far.
        sharding: the user's mark, or an inherited one; None where the partitioner may choose.
        committed: the value of the last successful cut.
        recorder: the thread that recorded the pending value, whose cuts compute it. None for a
            computed value; and where the program of the pending value failed, so that cuts leave it
            out until it is written or read.
        inference: whether its tensors are inference tensors, as those made in inference mode are.
        aliased: set once several tensors may have one version counter of autograd's: a view was
            made, or an alias such as by `detach()`.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "aliased",
        "committed",
        "inference",
        "recorder",
        "sharding",
        "spec",
        "value",
        "version",
    )

    committed: Value | None
    recorder: Recorder | None
    sharding: Sharding | None
    _address: int  # set by the first call of `address`
    aliased: bool  # set by the first view or alias
    offset = 0  # in elements; a view of the storage may begin elsewhere

    def __init__(self, value: Value, spec: Spec) -> None:
        self.value, self.spec = value, spec
        self.version = 0
        self.sharding = self.committed = None
        self.inference = _is_inference_mode()
        # Inlined `recorders.current`: this is the hot path.
        try:
            recorder = _this_thread.recorder
        except AttributeError:
            recorder = recorders.current()
        self.recorder = recorder
        storages = recorder.storages
        storages.append(_weak(self))
        if not len(storages) % PENDING_BLOCK:
            _prune(recorder)

    def write(self, value: Value) -> None:
        """Replaces the value; every view derives its own again when it is next read."""
        if value.data is not None:
            self.committed = value
            self.recorder = None
            value.owner = _weak(self)
        else:
            try:
                recorder = _this_thread.recorder
            except AttributeError:
                recorder = recorders.current()
            if self.recorder is not recorder or self.value.data is not None:
                self.recorder = recorder
                recorder.storages.append(_weak(self))
        self.value = value
        self.version += 1

    def request(self) -> None:
        """Makes this thread's next cut compute a pending storage, also after its program failed."""
        self.recorder = recorders.current()
        self.recorder.storages.append(_weak(self))

    def fail(self) -> None:
        """Excludes the pending value from cuts until it is read, as its program failed."""
        self.recorder = None
        recorders.current().failed.add(self)

    @staticmethod
    def of_leaf(spec: Spec, data: Any, placement: Placement) -> "Storage":
        """A storage over existing data; see `Value` for `data` and `placement`."""
        storage: Storage = Storage.__new__(Storage)
        storage.value = storage.committed = Value.leaf(spec, data, placement, _weak(storage))
        storage.spec, storage.version, storage.sharding, storage.recorder = spec, 0, None, None
        storage.inference = _is_inference_mode()
        return storage

    @property
    def storage(self) -> "Storage":
        return self


def take_pending() -> list[Storage]:
    """The storages of `pending`, which are now in no thread's list."""
    mine = recorders.cut_here()
    live = _live(mine)
    for recorder in mine:
        recorder.storages.clear()
    for storage in live:
        storage.recorder = mine[0]
    return live


def pending() -> list[Storage]:
    """The live storages that this thread's next cut computes, in the order of their addition.

    They stay pending. Those whose program failed are not among them.
    """
    return _live(recorders.cut_here())


def pending_elsewhere() -> list[Storage]:
    """The live storages with a pending value that other threads' cuts compute."""
    return _live(recorders.elsewhere())


def _live(of: list[Recorder]) -> list[Storage]:
    return list(
        dict.fromkeys(
            s
            for recorder in of
            for ref in recorder.storages
            if (s := ref()) is not None and s.recorder is recorder and s.value.data is None
        )
    )


def failed() -> list[Storage]:
    """The live storages of all threads whose pending value's program failed, which stay so."""
    return _failed([*recorders.cut_here(), *recorders.elsewhere()])


def take_failed() -> list[Storage]:
    """Forgets the live storages whose program failed in this thread, and returns them.

    Those of threads that have ended are among them.
    """
    mine = recorders.cut_here()
    found = _failed(mine)
    for recorder in mine:
        recorder.failed.clear()
    return found


def _failed(of: list[Recorder]) -> list[Storage]:
    # To look into a weak set takes longer than to see that it is empty.
    return [
        s for r in of if r.failed for s in r.failed if s.recorder is None and s.value.data is None
    ]


def _prune(recorder: Recorder) -> None:
    """Forgets dead storages, so that a long loop without a cut does not grow the list."""
    recorder.storages[:] = [ref for ref in recorder.storages if ref() is not None]
    if on_pending_block is not None and recorder.inside is None:
        on_pending_block(recorder)


class Link:
    """One view operation of a chain, with all arguments fixed.

    All views made by the same call on bases of one spec share one link.

    Attributes:
        entry: the operation. Its `view_write` is set by `recording.views`, or at the first write by
            `recording.writes`.
        numbers: the entry's numbers: positions that are inputs of the program, not constants of it.
        call: the overload and its arguments without the base, as torch itself would be called.
        spec: the view's spec.
        offset: where the view begins in its base, in elements of the view.
        scale: bytes per element of the base and of the view, or None if they are equal.
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
        """Where the view begins in the storage, in elements of the view.

        Args:
            base_offset: where the base begins in the storage, in elements of the base.
        """
        return self.offset + (
            base_offset if self.scale is None else base_offset * self.scale[0] // self.scale[1]
        )


class View:
    """A chain of view operations over a storage: the last link, and the handle that it applies to.

    The value is derived when it is first read, and again after a write through another alias. Its
    origin is the line that made the view, not the line that reads it.
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
        storage.aliased = True
        self.spec = link.spec
        self.version = -1  # no value yet
        self.sharding: Sharding | None = None
        self.value: Value
        if config.record_source_lines:
            self.origin = source_lines.origin()

    def current(self) -> Value:
        """The view's value; derived again if the storage was written since the last call."""
        version = self.storage.version
        if self.version == version:
            return self.value
        # A loop, as a chain may be longer than Python's recursion limit.
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
        """The views from the storage (exclusive) to this one (inclusive)."""
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
    """A number that identifies the location of the handle's first element, for `data_ptr()`.

    Two handles have the same number if and only if they begin at the same location of one storage.
    No memory lies there: programs compare `data_ptr()` to find tied weights.
    """
    global _next_address
    storage = handle.storage
    with lock:
        if not hasattr(storage, "_address"):
            storage._address = _next_address
            _next_address += -(-max(storage.spec.num_bytes, 1) // 512) * 512
    return storage._address + handle.offset * handle.spec.dtype.itemsize
