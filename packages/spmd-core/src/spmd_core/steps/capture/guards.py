"""Whether all that a captured step reaches is as it was: compared before each captured call.

A step reaches tens of thousands of values. Their identities are compared, in C, but not all of them
in each call: those that a dict holds only if the dict has changed since, which its version tells,
and what tensors are, but for those that may get gradients, only if one has told of a change.
"""

import itertools
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from spmd_core.graph.storage import Storage
from spmd_core.steps.capture import contents, dict_versions
from spmd_core.steps.capture.accumulators import Accumulators
from spmd_core.steps.capture.dict_versions import DictVersions
from spmd_core.steps.capture.reachable import MISSING, Reached, held
from spmd_core.tensor import changes
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_handle_of = operator.attrgetter("_handle")
_code_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_requires_grad: Any = vars(torch._C.TensorBase)["requires_grad"].__get__
# Dicts that only change by methods of dict. The order of an OrderedDict changes by its own, which
# is nothing while it has one item.
_VERSIONED = (dict, defaultdict)


class Guards:
    """Whether what a walk found is still the same.

    Args:
        reached: what a walk found.
        live: paths of numbers of param_groups that may vary.
        storages: those whose marks are compared by someone else.
    """

    def __init__(
        self, reached: Reached, live: Collection[str] = (), storages: Collection[Storage] = ()
    ) -> None:
        free = {(id(mapping), key) for path in live for mapping, key in [reached.numbers[path]]}
        self._tensors = _Tensors(reached, storages)
        self._dicts, self._others = _mappings(reached, free)
        self._dict_versions = DictVersions([one.mapping for one in self._dicts])
        self._versions: Sequence[Any] = ()
        self._empty = [x for x in (*reached.mappings, *reached.sequences) if not x]
        self._sequences = [x for x in reached.sequences if x]
        self._sequence_sizes = [len(s) for s in self._sequences]
        self._sequence_values = [v for s in self._sequences for v in s]
        self._cells = [(cell, held(cell)) for cell in reached.cells]
        self._functions = reached.functions
        self._codes = [x for function in self._functions for x in _code_of(function)]
        self._contents = reached.contents
        self._objects = reached.objects
        self._classes = [*map(type, self._objects)]

    def hold(self) -> bool:
        """Whether all values are where they were. Does not wait."""
        same, chain = operator.is_, itertools.chain.from_iterable
        return (
            self._tensors.hold()
            and self._dicts_hold()
            and [*map(type, self._objects)] == self._classes
            and not any(self._empty)
            and [*map(len, self._sequences)] == self._sequence_sizes
            and all(map(same, chain(self._sequences), self._sequence_values))
            and all(other.holds() for other in self._others)
            and all(held(cell) is value for cell, value in self._cells)
            and all(map(same, chain(map(_code_of, self._functions)), self._codes))
            and all(contents.of("", x) == found for x, found in self._contents)
        )

    def require_grad(self, storages: Iterable[Storage]) -> bool:
        """Whether the tensors of some storages require gradients as they did."""
        return self._tensors.require_grad(storages)

    def _dicts_hold(self) -> bool:
        if not dict_versions.are_told():
            return all(one.holds() for one in self._dicts)
        # Before the dicts are looked at.
        versions = self._dict_versions.now()
        if versions == self._versions:
            return True
        for i in self._dict_versions.changed(self._versions, versions):
            if not self._dicts[i].holds():
                return False
        self._versions = versions
        return True


class _Mapping:
    """What must stay in a mapping.

    Attributes:
        mapping: the mapping, or what is read like one.
        keys: all its keys, in order; None if others may come and go.
        names: keys whose values must stay.
        values: their values.
        size: how many items it has; None if that may change.
        absent: keys that it must not get.
    """

    def __init__(self, mapping: Any) -> None:
        self.mapping = mapping
        self.keys: list[Any] | None = None
        self.names: list[Any] = []
        self.values: list[Any] = []
        self.size: int | None = None
        self.absent: set[Any] = set()

    def is_versioned(self) -> bool:
        """Whether it can only change with its version, as long as it holds."""
        kind = type(self.mapping)
        return kind in _VERSIONED or (kind is OrderedDict and self.size == 1)

    def holds(self) -> bool:
        """Whether that is so."""
        mapping, same = self.mapping, operator.is_
        if self.size is not None and len(mapping) != self.size:
            return False
        if self.keys is not None and not all(map(same, mapping, self.keys)):
            return False
        get = mapping.get
        for name, value in zip(self.names, self.values):
            if get(name, MISSING) is not value:
                return False
        return not self.absent or mapping.keys().isdisjoint(self.absent)


def _mappings(
    reached: Reached, free: Collection[tuple[int, Any]]
) -> tuple[list[_Mapping], list[_Mapping]]:
    """What must stay in dicts that have versions, and in all others."""
    found: dict[int, _Mapping] = {}

    def of(mapping: Any) -> _Mapping:
        return found.setdefault(id(mapping), _Mapping(mapping))

    for mapping in reached.mappings:
        if mapping:
            one = of(mapping)
            one.size, one.keys = len(mapping), [*mapping]
            one.names += mapping
            one.values += mapping.values()
    for named in reached.named:
        kept = [
            (n, v) for n, v in zip(named.names, named.values) if (id(named.mapping), n) not in free
        ]
        if kept:
            one = of(named.mapping)
            one.names += [n for n, _ in kept]
            one.values += [v for _, v in kept]
    for sized in reached.sized:
        of(sized).size = len(sized)
    for mapping, names in reached.absent.values():
        if names:
            of(mapping).absent |= names
    dicts = [one for one in found.values() if one.is_versioned()]
    return dicts, [one for one in found.values() if not one.is_versioned()]


class _Tensors:
    """What tensors on the device must stay, beside their values."""

    def __init__(self, reached: Reached, storages: Collection[Storage]) -> None:
        self._tensors = [*reached.tensors.values()]
        for tensor in self._tensors:
            changes.watch(tensor)
        self._trained = {id(reached.tensors[path]) for path in reached.trained}
        self._parameters = [reached.tensors[path] for path in reached.grads]
        self._parameters_trained = [id(t) in self._trained for t in self._parameters]
        self._handles = [t._handle for t in self._tensors]
        self._hooked = [t for t in self._tensors if id(t) in self._trained]
        self._hooks = [x for t in self._hooked for x in _hooks_of(t)]
        self._accumulators = Accumulators([t for t in self._hooked if t.is_leaf])
        self._attributes = [t.__dict__ for t in reached.attributed]
        self._num_attributes = [*map(len, self._attributes)]
        own = (t._handle.storage for t in self._tensors)
        self._marked = [s for s in dict.fromkeys(own) if s not in storages]
        self._marks = [s.sharding for s in self._marked]
        self._of_storage: dict[Storage, list[XLAShardedTensor]] = {}
        for tensor in self._tensors:
            self._of_storage.setdefault(tensor._handle.storage, []).append(tensor)
        self._num_changes = -1  # when all were compared

    def hold(self) -> bool:
        """Whether they are what they were."""
        same = operator.is_
        with torch._C.DisableTorchFunctionSubclass():
            trained = [*map(_requires_grad, self._parameters)]
        if trained != self._parameters_trained or self._accumulators.hooked() is not None:
            return False
        if [*map(len, self._attributes)] != self._num_attributes:
            return False
        if not all(s.sharding is mark for s, mark in zip(self._marked, self._marks)):
            return False
        count = changes.changes.count
        if count == self._num_changes:
            return True
        if not (
            all(map(same, map(_handle_of, self._tensors), self._handles))
            and self._are_trained(self._tensors)
            and all(
                map(same, itertools.chain.from_iterable(map(_hooks_of, self._hooked)), self._hooks)
            )
        ):
            return False
        self._num_changes = count
        return True

    def require_grad(self, storages: Iterable[Storage]) -> bool:
        """Whether the tensors of some storages require gradients as they did."""
        return all(self._are_trained(self._of_storage.get(storage, ())) for storage in storages)

    def _are_trained(self, tensors: Sequence[XLAShardedTensor]) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return all(_requires_grad(t) == (id(t) in self._trained) for t in tensors)
