"""Where the inputs of a captured program come from at each call, and where its results go."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from spmd_core.errors import CaptureError
from spmd_core.graph.stacks import StackStorage
from spmd_core.graph.storage import Handle, Link, Storage, View
from spmd_core.graph.values import Value, origin_of
from spmd_core.program.planning import CutPlan
from spmd_core.runtime import buffers
from spmd_core.sharding.sharding import Sharding
from spmd_core.steps.capture.reachable import Reached
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_MOST_CONSTANT_BYTES = 1 << 20


class Kind(Enum):
    """What an input or a result of a captured program belongs to."""

    ARGUMENT = "a tensor among the arguments of the call"
    STATE = "a tensor that the step reaches, and that lives on"
    GRADIENT = "the gradient that a parameter has before the call"
    NEW_GRADIENT = "the gradient that the call gives a parameter"
    CONSTANT = "data from the host, the same in each call"
    RESULT = "a tensor that the call returns"
    STACK = "tensors that the step reaches, whose data lies in one array"


@dataclass(frozen=True)
class Binding:
    """What one input or result belongs to.

    Attributes:
        kind: as above.
        index: of an argument, and of a result among the tensors that the call returns; else 0.
        path: of state, where the step reaches the tensor; of a gradient, its parameter.
        storage: of state.
        data: of a constant: its elements.
        rows: of a stack: the storages of its rows.
    """

    kind: Kind
    index: int = 0
    path: str = ""
    storage: Storage | None = None
    data: np.ndarray | None = None
    rows: tuple[Storage, ...] = ()

    def agrees(self, other: "Binding") -> bool:
        """Whether two calls bind alike."""
        if self.kind is not other.kind or self.index != other.index:
            return False
        if self.kind is Kind.STATE:
            return self.storage is other.storage
        if self.kind in (Kind.GRADIENT, Kind.NEW_GRADIENT):
            return self.path == other.path
        if self.kind is Kind.STACK:
            return self.rows == other.rows
        if self.data is None or other.data is None:
            return True
        return self.data.dtype == other.data.dtype and (self.data.tobytes() == other.data.tobytes())


@dataclass(frozen=True)
class Owned:
    """The storages of what a step reaches, each with a path.

    Attributes:
        tensors: of the tensors.
        grads: of the gradients of these, with the path of the parameter.
    """

    tensors: Mapping[Storage, str]
    grads: Mapping[Storage, str]

    @staticmethod
    def of(reached: Reached) -> "Owned":
        """Those of what was reached."""
        tensors: dict[Storage, str] = {}
        grads: dict[Storage, str] = {}
        for path, tensor in reached.tensors.items():
            tensors.setdefault(tensor._handle.storage, path)
        for path, grad in reached.grads.items():
            if isinstance(grad, XLAShardedTensor):
                grads.setdefault(grad._handle.storage, path)
        return Owned(tensors, grads)

    def __contains__(self, storage: Storage) -> bool:
        return storage in self.tensors or storage in self.grads


def of_leaves(
    plan: CutPlan, arguments: Sequence[Storage], before: Owned, after: Owned
) -> list[Binding]:
    """Where the program's inputs come from.

    Args:
        plan: the program's, which was started.
        arguments: the storages of the tensors among the arguments.
        before: what the step reached before the call.
        after: what it reached after the call: state may begin in it.

    Raises:
        CaptureError: an input is a tensor that the step cannot be seen to reach.
    """
    found = []
    state, born = before.tensors, after.tensors
    stacks = {stack.value: stack.storages() for stack, _ in plan.stacked.rows.values()}
    for leaf in plan.leaves:
        owner = leaf.owner() if leaf.owner is not None else None
        rows = [s for s in stacks.get(leaf, ()) if s is not None]
        if rows and len(rows) == len(stacks[leaf]) and all(s in before or s in born for s in rows):
            found.append(Binding(Kind.STACK, rows=tuple(rows)))
        elif owner is not None and owner in state:
            found.append(Binding(Kind.STATE, path=state[owner], storage=owner))
        elif owner is not None and owner in before.grads:
            found.append(Binding(Kind.GRADIENT, path=before.grads[owner]))
        elif owner is not None and owner in arguments:
            found.append(Binding(Kind.ARGUMENT, list(arguments).index(owner)))
        elif owner is not None and owner in born:
            found.append(Binding(Kind.STATE, path=born[owner], storage=owner))
        else:
            del owner
            found.append(Binding(Kind.CONSTANT, data=_data(leaf)))
    return found


def _is_kept(leaf: Value) -> bool:
    """Whether some tensor has this value, and not only garbage."""
    if leaf.owner is None or leaf.owner() is None:
        return False
    gc.collect()
    return leaf.owner() is not None


def _data(leaf: Value) -> np.ndarray | None:
    """The elements of an input that is nobody's; None if the program took over its buffer."""
    if _is_kept(leaf):
        raise CaptureError(
            "the tensors that a captured step reads are its arguments, or reached from its function"
            " by attributes, globals and closures, or constants that nothing keeps; got one that"
            f" something keeps, {leaf.spec!r}{_made_at(leaf)}. Pass it as an argument; if the step"
            " makes and returns it, return its clone()."
        )
    if leaf.spec.num_bytes > _MOST_CONSTANT_BYTES:
        raise CaptureError(
            "the tensors that a captured step reads are its arguments, or reached from its function"
            f" by attributes, globals and closures; got another one, {leaf.spec!r}{_made_at(leaf)}."
            " Pass it as an argument."
        )
    if leaf.data.is_deleted():
        return None
    return np.asarray(buffers.download(leaf.data, leaf.spec.shape).reshape(-1).view(torch.uint8))


def _made_at(leaf: Value) -> str:
    origin = origin_of(leaf)
    return "" if origin is None else f", made at {origin}"


def of_results(
    plan: CutPlan,
    arguments: Sequence[Storage],
    before: Owned,
    after: Owned,
    returned: Sequence[Any],
) -> list[Binding]:
    """Where the program's results go.

    Args:
        plan: the program's, which was started.
        arguments: the storages of the tensors among the arguments.
        before: what the step reached before the call.
        after: what it reached after the call.
        returned: what the call returned.

    Raises:
        CaptureError: a tensor that the call made lives on, and is not returned; or one that is
            returned is none of these.
    """
    state, born = before.tensors, after.tensors
    results: dict[Storage, int] = {}
    for i, tensor in enumerate(returned):
        if isinstance(tensor, XLAShardedTensor):
            results.setdefault(tensor._handle.storage, i)
    live = [r for s in plan.live for r in (s.rows if isinstance(s, StackStorage) else [s])]
    known = {*live, *arguments}
    if strange := next(
        (s for s in results if s not in known and s not in before and s not in after), None
    ):
        raise CaptureError(
            "a tensor that a captured step returns is a result of its program, an argument, or "
            f"state; got a constant, {strange.spec!r}. Return its clone()."
        )
    found = []
    for storage in plan.live:
        if isinstance(storage, StackStorage):
            found.append(_of_stack(storage, before, after))
        elif storage in state:
            found.append(Binding(Kind.STATE, path=state[storage], storage=storage))
        elif storage in before.grads:
            found.append(Binding(Kind.GRADIENT, path=before.grads[storage]))
        elif storage in arguments:
            found.append(Binding(Kind.ARGUMENT, list(arguments).index(storage)))
        elif storage in after.grads:
            found.append(Binding(Kind.NEW_GRADIENT, path=after.grads[storage]))
        elif storage in born:
            found.append(Binding(Kind.STATE, path=born[storage], storage=storage))
        elif storage in results:
            found.append(Binding(Kind.RESULT, results[storage]))
        else:
            raise _kept_by_something(storage)
    return found


def _of_stack(stack: StackStorage, before: Owned, after: Owned) -> Binding:
    """Where a result that is a stack goes."""
    for storage in stack.rows:
        if storage not in before and storage not in after:
            raise _kept_by_something(storage)
    return Binding(Kind.STACK, rows=tuple(stack.rows))


def _kept_by_something(storage: Storage) -> CaptureError:
    return CaptureError(
        "a tensor that a captured step makes is returned, or forgotten by its end; got one "
        f"that something keeps, {storage.spec!r}{_made_at(storage.value)}. Return it."
    )


@dataclass(frozen=True)
class Chain:
    """A chain of views without the storage below, so that it keeps no data."""

    views: tuple[tuple[Link, int, Sharding | None], ...]

    @staticmethod
    def of(handle: Handle) -> "Chain":
        """That of a handle; empty for a storage."""
        views = handle.chain() if isinstance(handle, View) else []
        return Chain(tuple((view.link, view.offset, view.sharding) for view in views))

    def over(self, storage: Storage) -> Handle:
        """The same views of another storage."""
        handle: Handle = storage
        for link, offset, sharding in self.views:
            handle = View(handle, storage, link, offset)
            handle.sharding = sharding
        return handle
