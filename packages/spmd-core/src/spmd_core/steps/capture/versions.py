"""Which tensors get a new version when a captured call writes them: autograd compares versions.

A step writes thousands of tensors of an optimizer's state, and a new version of one costs a third
of all that its call costs otherwise. Only what something shares with autograd needs one: a tensor
that autograd, or a `ctx.save_for_backward`, has saved, or whose view or `detach()` may be saved.
"""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import torch

from spmd_core.graph.storage import Storage
from spmd_core.steps.capture.reachable import Reached
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# How many references torch's own code has to a tensor; Python's are one.
use_count: Any = vars(torch._C.TensorBase)["_use_count"]


class Shared:
    """Which of some tensors torch's own code has, too: as a rule, none.

    All are asked each time. That a thread has made no node of a graph since would not do: another
    one may have, also one that has recorded nothing on this device.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Iterable[XLAShardedTensor]) -> None:
        self._tensors = [*tensors]

    def found(self) -> list[XLAShardedTensor]:
        """Those that are shared at the moment. Does not wait."""
        counts = [*map(use_count, self._tensors)]
        if sum(counts) == len(counts):
            return []
        return [tensor for tensor, count in zip(self._tensors, counts) if count != 1]


class Versions:
    """The versions of what a captured call writes.

    Args:
        reached: what the step reaches.
        written: the storages that the call writes, of state that is no gradient.
    """

    def __init__(self, reached: Reached, written: Collection[Storage]) -> None:
        over = [t for t in reached.tensors.values() if t._handle.storage in written]
        attributed = {id(t) for t in reached.attributed}
        self._always: list[XLAShardedTensor] = []
        # The state of an optimizer, which is in no graph as a rule.
        self._alone: dict[Storage, list[XLAShardedTensor]] = {}
        for tensor in over:
            storage = tensor._handle.storage
            if tensor.is_inference():
                continue
            if id(tensor) in attributed or hasattr(storage, "aliased"):
                self._always.append(tensor)
            else:
                self._alone.setdefault(storage, []).append(tensor)
        self._bind()

    def _bind(self) -> None:
        self._shared = Shared(itertools.chain.from_iterable(self._alone.values()))

    def outdated(self, touched: Iterable[Storage]) -> list[XLAShardedTensor]:
        """The tensors that must get a new version in this call.

        Args:
            touched: the storages that something may have read or aliased since the last call.
        """
        if not self._alone:
            return [*self._always]
        found: list[XLAShardedTensor] = []
        for storage in touched:
            tensors = self._alone.get(storage, ())
            found += tensors
            if tensors and hasattr(storage, "aliased"):
                self._always += self._alone.pop(storage)
                self._bind()
        return [*self._always, *found, *self._shared.found()]
