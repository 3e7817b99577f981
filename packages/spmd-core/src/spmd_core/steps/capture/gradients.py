"""The gradients of a captured step's parameters: those that a call finds, and those it leaves.

Whether parameters have gradients decides what a step does. A loop that accumulates over two calls,
and then sets the gradients to None, does two things in turns, and each is captured. A tensor that
an earlier call gave to a parameter is given to it again, if nobody else has kept it.
"""

import functools
import itertools
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd_core.graph import parked
from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Spec
from spmd_core.sharding.sharding import Sharding
from spmd_core.steps.capture.versions import use_count
from spmd_core.tensor import changes
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap

Grads = Mapping[str, torch.Tensor | None]
_grad_of: Any = vars(torch._C.TensorBase)["grad"].__get__


class Change(Enum):
    """What becomes of a parameter's gradient in a call."""

    NONE = "it stays, with the same value or another one; or there is none"
    NEW = "it is another tensor"
    DROPPED = "it is set to None"


@dataclass(frozen=True)
class Pattern:
    """What a call finds and leaves.

    Attributes:
        paths: of the parameters.
        are_there: for each, whether it has a gradient before the call.
        changes: for each, what becomes of that.
    """

    paths: tuple[str, ...]
    are_there: tuple[bool, ...]
    changes: tuple[Change, ...]

    @staticmethod
    def of(before: Grads, after: Grads) -> "Pattern":
        """That of a recorded call, from the gradients by path before it and after it."""
        return Pattern(
            tuple(after),
            tuple(before.get(path) is not None for path in after),
            tuple(_change(before.get(path), grad) for path, grad in after.items()),
        )

    def agrees(self, other: "Pattern") -> bool:
        """Whether another call does the same: it sets the gradients that only one of both finds."""
        return self.paths == other.paths and all(
            old is new and (was_there == is_there or new is Change.NEW)
            for old, new, was_there, is_there in zip(
                self.changes, other.changes, self.are_there, other.are_there
            )
        )


def _change(before: torch.Tensor | None, after: torch.Tensor | None) -> Change:
    if before is after:
        return Change.NONE
    return Change.DROPPED if after is None else Change.NEW


class Installed:
    """The gradients that parameters have or had, of all captured calls with these parameters.

    Attributes:
        parameters: those that require gradients, or may have any.
        tensors: the newest gradient of each that is known, also after a captured call dropped it.
        storages: of these.
        ids: of the storages.
        num_changes: how often one of them became another.
    """

    def __init__(self, parameters: Sequence[XLAShardedTensor]) -> None:
        self.parameters = [*parameters]
        nothing = _nothing()
        self.tensors: list[XLAShardedTensor] = [nothing] * len(self.parameters)
        self.storages: list[Storage] = [nothing._handle.storage] * len(self.parameters)
        self.ids: set[int] = set()
        self.num_changes = 0

    def now(self) -> list[torch.Tensor | None]:
        """The present gradient of each parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return [*map(_grad_of, self.parameters)]

    def adopt(self, number: int, tensor: XLAShardedTensor) -> None:
        """Makes a tensor the newest gradient of a parameter."""
        storage = tensor._handle.storage
        self.ids.discard(id(self.storages[number]))
        self.ids.add(id(storage))
        self.tensors[number], self.storages[number] = tensor, storage
        self.num_changes += 1
        changes.watch(tensor)

    def references(self, chosen: Sequence[bool]) -> tuple[list[int], list[int], list[int]]:
        """How many references Python has to chosen gradients and their storages, and torch."""
        compress = itertools.compress
        return (
            [*map(sys.getrefcount, compress(self.tensors, chosen))],
            [*map(sys.getrefcount, compress(self.storages, chosen))],
            [*map(use_count, compress(self.tensors, chosen))],
        )


@dataclass(frozen=True)
class Form:
    """What the program needs a gradient to be that it reads or writes.

    Attributes:
        spec: of its storage.
        sharding: of its storage.
        placement: where it lies, if the call makes it.
    """

    spec: Spec
    sharding: Sharding | None
    placement: Placement | None = None

    def fits(self, storage: Storage) -> bool:
        """Whether a storage has this form."""
        return storage.spec is self.spec and storage.sharding is self.sharding


class Gradients:
    """The gradients of a captured call.

    Args:
        installed: those of all captured calls with the same parameters.
        patterns: of the two recorded calls, which agree.
        forms: by number of the parameter, of each gradient that the call reads or writes.
        fixed: by number, the storage of a gradient that the step also reaches in another way, or
            whose data is in a stack: it must be this one.
        state: the storages of the step's other state: no other gradient may have one of these.
    """

    def __init__(
        self,
        installed: Installed,
        patterns: Sequence[Pattern],
        *,
        forms: Mapping[int, Form],
        fixed: Mapping[int, Storage],
        state: set[Storage],
    ) -> None:
        self.installed = installed
        self._patterns = [[*pattern.are_there] for pattern in patterns]
        self.forms, self._fixed, self._state = forms, fixed, state
        self._are_there = self._patterns[0]  # now
        self._new = [change is Change.NEW for change in patterns[0].changes]
        self._dropped = [change is Change.DROPPED for change in patterns[0].changes]
        self._has_new, self._has_dropped = any(self._new), any(self._dropped)
        self._sets_new = False  # by `prepare`: whether a parameter gets another tensor
        # When they were looked at: `installed.num_changes`, and the changes of all tensors.
        self._known, self._num_told = -1, -1

    def is_found(self, are_there: list[bool]) -> bool:
        """Whether calls like the recorded ones find gradients just where these say."""
        return are_there in self._patterns

    def fit(self, now: Sequence[torch.Tensor | None]) -> bool:
        """Whether the parameters have the gradients that the call needs.

        Args:
            now: `installed.now()`.
        """
        there, same = self._are_there, operator.is_
        found = [*map(operator.is_not, now, itertools.repeat(None))]
        if found != there:
            if found not in self._patterns:
                return False
            self._are_there = there = found
            self._known = -1
        own = itertools.compress(self.installed.tensors, there)
        told = changes.changes.count
        is_known = self._known == self.installed.num_changes and self._num_told == told
        if is_known and all(map(same, itertools.compress(now, there), own)):
            return True
        if not self._are_right(now):
            return False
        self._num_told = told
        for n, grad in enumerate(now):
            if isinstance(grad, XLAShardedTensor) and grad is not self.installed.tensors[n]:
                self.installed.adopt(n, grad)
        return True

    def _are_right(self, now: Sequence[torch.Tensor | None]) -> bool:
        """Whether each gradient has the form that the call needs, and a storage of its own."""
        found: set[Storage] = set()
        for n, grad in enumerate(now):
            if grad is None:
                continue
            if not isinstance(grad, XLAShardedTensor) or grad.requires_grad:
                return False
            storage = grad._handle.storage
            if n in self._fixed:
                if self._fixed[n] is not storage:
                    return False
            elif storage in found or storage in self._state:
                return False
            found.add(storage)
            if n in self.forms and not (grad._handle is storage and self.forms[n].fits(storage)):
                return False
        return True

    def is_there(self, number: int) -> bool:
        """Whether a parameter has a gradient before the call."""
        return self._are_there[number]

    def take_renewed(self) -> bool:
        """Whether gradients have other storages than when this was last called."""
        before, self._known = self._known, self.installed.num_changes
        return before != self._known

    def prepare(self) -> bool:
        """Makes new tensors for the gradients that the call sets, where others have the old ones.

        Call it after the program was started: their storages have no data yet.

        Returns:
            Whether there are any.
        """
        if not self._has_new:
            return False
        shared = self._shared(self._new)
        there = itertools.compress(self._are_there, self._new)
        self._sets_new = bool(shared) or not all(there)
        for n in shared:
            form = self.forms[n]
            assert form.placement is not None
            self.installed.adopt(n, _without_data(form.spec, form.placement, form.sharding))
        return bool(shared)

    def set(self) -> None:
        """Sets the gradients that the call sets, once their storages have their data."""
        if not self._sets_new and not self._has_dropped:
            return
        installed = self.installed
        kept = {*self._shared(self._dropped)} if self._has_dropped else set()
        now = installed.now()
        for n in itertools.compress(range(len(now)), self._new):
            if now[n] is not installed.tensors[n]:
                installed.parameters[n].grad = installed.tensors[n]
        for n in itertools.compress(range(len(now)), self._dropped):
            installed.parameters[n].grad = None
            if n not in kept:
                _free(installed.storages[n])

    def _shared(self, chosen: Sequence[bool]) -> list[int]:
        """The numbers of those of the chosen gradients that somebody else may have.

        Python counts references to objects; torch counts those of its own, such as by what
        autograd saves for a backward, and a parameter's to its gradient.
        """
        found = self.installed.references(chosen)
        kinds = _references_if_unshared(False), _references_if_unshared(True)
        own = [kinds[is_there] for is_there in itertools.compress(self._are_there, chosen)]
        expected = tuple([*of] for of in zip(*own))
        if found == expected:
            return []
        numbers = itertools.compress(range(len(chosen)), chosen)
        return [n for n, a, b in zip(numbers, zip(*found), zip(*expected)) if a != b]


def _free(storage: Storage) -> None:
    """Frees the data of a gradient that nobody has."""
    if parked.is_parked(storage):
        spot = parked.spot_of([storage])
        if spot.placement is not None:
            spot.park(_lost(), spot.placement)


@functools.cache
def _lost() -> jax.Array:
    """An array without data: reading it is an error."""
    array = jnp.zeros(())
    array.delete()
    return array


def _without_data(spec: Spec, placement: Placement, sharding: Sharding | None) -> XLAShardedTensor:
    """A tensor whose data is not there yet."""
    storage = Storage.of_leaf(spec, _lost(), placement)
    storage.sharding = sharding
    return wrap(storage)


@functools.cache
def _nothing() -> XLAShardedTensor:
    """Stands for a gradient that is not there; it counts as one that others have."""
    return _without_data(Spec.contiguous((), torch.float32), Placement.of(None, None), None)


@functools.cache
def _references_if_unshared(is_there: bool) -> tuple[int, int, int]:
    """What `Installed.references` finds for a gradient that only it has, and a parameter."""
    spec, nowhere = Spec.contiguous((), torch.float32), Placement.of(None, None)
    parameter = _without_data(spec, nowhere, None)
    installed = Installed([parameter])
    installed.adopt(0, _without_data(spec, nowhere, None))
    if is_there:
        parameter.grad = installed.tensors[0]
    (tensor,), (storage,), (use,) = installed.references([True])
    return tensor, storage, use
