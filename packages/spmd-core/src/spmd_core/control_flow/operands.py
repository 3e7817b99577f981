"""What loops and branches take and return: trees of tensors, checked and flattened."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from spmd_core.errors import ControlFlowError, DeviceMismatchError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.graph.subgraphs import ControlEntry, Subgraph
from spmd_core.graph.values import OpResult, Value
from spmd_core.manual.region import current_region
from spmd_core.recording import random_stream
from spmd_core.recording.functions import FunctionRecording, refuse_tangent
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap

# Odd, near 2**32 divided by the golden ratio: positions of nested loops do not meet in 32 bits.
_MIX = 0x9E3779B1


class Tree:
    """The structure of nested lists, tuples and dicts with tensors, and None where there is none.

    Attributes:
        spec: torch's, whose leaves are the tensors and Nones.
        is_tensor: of each leaf, whether it is a tensor.
    """

    def __init__(self, spec: Any, is_tensor: Sequence[bool]) -> None:
        self.spec, self.is_tensor = spec, tuple(is_tensor)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tree)
            and self.spec == other.spec
            and self.is_tensor == other.is_tensor
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        filled = ["*" if is_tensor else None for is_tensor in self.is_tensor]
        return repr(pytree.tree_unflatten(filled, self.spec)).replace("'*'", "tensor")

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """The tree with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if is_tensor else None for is_tensor in self.is_tensor]
        return pytree.tree_unflatten(leaves, self.spec)


def flatten(tree: Any, what: str) -> tuple[list[XLAShardedTensor], Tree]:
    """The tensors of a tree, and its structure; `what` names the tree in errors.

    Raises:
        DeviceMismatchError: a tensor on another device.
        TypeError: a leaf is neither a tensor nor None.
        ControlFlowError: a tensor with a tangent, or of a transform of torch.func.
    """
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{what} consists of tensors, in nested lists, tuples and dicts; "
                f"got {type(leaf).__name__} {leaf!r}. "
                "Write torch.tensor(value, device='xla') for a number, or None for nothing."
            )
        if leaf is not None and is_functorch_wrapped_tensor(leaf):
            raise ControlFlowError(
                "loops and branches are not transformed by torch.func (grad, jvp, vmap); "
                f"got a tensor of a transform in {what}. Take gradients with torch.autograd.grad, "
                "and give tensors a batch dim in place of vmap."
            )
        if leaf is not None and not isinstance(leaf, XLAShardedTensor):
            raise DeviceMismatchError(
                f"{what} consists of tensors on device 'xla'; got one of shape "
                f"{tuple(leaf.shape)} on {leaf.device}. Move it first: t = t.to('xla')."
            )
        if leaf is not None:
            refuse_tangent(leaf)
    tensors = [leaf for leaf in leaves if leaf is not None]
    return tensors, Tree(spec, [leaf is not None for leaf in leaves])


def results_of(
    recording: FunctionRecording, tree: Any, what: str
) -> tuple[list[XLAShardedTensor], Tree]:
    """As `flatten`, of what a function has returned, while it is recorded."""
    return flatten(pytree.tree_map(recording.inside, tree), what)


def require_like(
    what: str,
    given: tuple[Sequence[XLAShardedTensor], Tree],
    wanted: tuple[Sequence[XLAShardedTensor], Tree],
    of: str,
) -> None:
    """Raises TypeError unless tensors have the structure, shapes and dtypes of others.

    Args:
        what: the tensors, in errors.
        given: the tensors and their structure.
        wanted: those that they should be like.
        of: where these come from.
    """
    (tensors, tree), (others, other_tree) = given, wanted
    if tree != other_tree:
        raise TypeError(
            f"{what} has the structure of {of}, as it takes its place; "
            f"got {tree!r} for {other_tree!r}. Return the same lists, tuples and dicts."
        )
    for tensor, other in zip(tensors, others):
        mine, right = tensor._handle.spec, other._handle.spec
        if (mine.shape, mine.dtype) != (right.shape, right.dtype):
            raise TypeError(
                f"{what} has the shapes and dtypes of {of}, as it takes its place; "
                f"got {mine!r} for {right!r}. Convert one of them: .to(dtype), reshape, expand."
            )


def refuse_region(name: str) -> None:
    """Raises ControlFlowError inside of a manual region."""
    if current_region.get() is not None:
        raise ControlFlowError(
            f"{name} takes whole tensors; got a call inside of shard_map. "
            "Call shard_map inside of its function."
        )


@dataclass(frozen=True)
class Key:
    """What an entry that runs subgraphs is made from. Its integers are none of a tensor's sizes."""

    name: str
    subgraphs: tuple[Subgraph, ...]
    settings: tuple[Any, ...] = ()


@contextmanager
def active(recording: FunctionRecording, index: XLAShardedTensor | None = None) -> Iterator[None]:
    """Inside, this thread records the function, whose random operations draw others in each run.

    Args:
        recording: of the function.
        index: 0-dim int64, other in each run; None for a function that runs once.
    """
    around = random_stream.position.make  # of the function around this one

    def position() -> torch.Tensor:
        # Made where a random operation needs it: other functions do not depend on it.
        if around is None:
            assert index is not None
            return index
        return around() if index is None else around() * _MIX + index

    with recording.active():
        if index is None and around is None:
            yield
        else:
            with random_stream.mixing(position):
                yield


def record(
    entry: ControlEntry, operands: Sequence[Value], numbers: Sequence[Any]
) -> tuple[XLAShardedTensor, ...]:
    """Records an operation that runs subgraphs; its results."""
    with lock:
        node = Value(entry, tuple(operands), list(numbers))
        return tuple(wrap(Storage(OpResult(node, i), spec)) for i, spec in enumerate(entry.outs))
