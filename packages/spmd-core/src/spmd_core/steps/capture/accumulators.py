"""What backwards of a captured step meet outside of it: hooks, and graphs of earlier operations.

No attribute of a tensor shows the hooks at its `AccumulateGrad` node. Such a node is made when it
is needed, and lives only while a graph or the user has it. To keep one alive would make hooks run
that torch drops. But as long as one lives, it refers to its tensor: a tensor to which torch has no
other reference has no node, and no hooks there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from spmd_core.steps.capture.reachable import Reached
from spmd_core.steps.capture.versions import Shared
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


class Accumulators:
    """The nodes at which the gradients of some tensors add up.

    Args:
        tensors: leaves that require gradients.
    """

    def __init__(self, tensors: Sequence[XLAShardedTensor]) -> None:
        self._shared = Shared(tensors)

    def hooked(self) -> XLAShardedTensor | None:
        """The first tensor whose node has a hook; None if there is none. Does not wait."""
        return next(filter(_has_hooks, self._shared.found()), None)


def _has_hooks(tensor: XLAShardedTensor) -> bool:
    """Whether the tensor's node has hooks, if it lives.

    torch does not show them; but all of a kind are in one dict, to which a handle of any leads.
    """
    with torch.enable_grad(), torch._C._DisableTorchDispatch():
        alias = torch.ops.aten.alias.default(tensor)
    node = alias.grad_fn.next_functions[0][0]
    for register in (node.register_hook, node.register_prehook):
        own = register(_nothing)
        hooks = own.hooks_dict_ref()
        own.remove()
        if hooks:
            return True
    return False


def has_hooks(tensor: XLAShardedTensor) -> bool:
    """Whether the tensor itself has hooks."""
    return tensor.requires_grad and bool(
        tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    )


def hooked(reached: Reached, arguments: Sequence[XLAShardedTensor]) -> str | None:
    """Where hooks are that no replay would run, in words; None if there are none.

    Args:
        reached: what the step reaches.
        arguments: the tensors among its arguments.
    """
    for i, tensor in enumerate(arguments):
        if has_hooks(tensor):
            return f"tensor {i} of its arguments has a hook; register it inside of the step"
    leaves = [path for path in reached.trained if reached.tensors[path].is_leaf]
    found = Accumulators([reached.tensors[path] for path in leaves]).hooked()
    if found is None:
        return None
    path = next(path for path in leaves if reached.tensors[path] is found)
    return (
        f"a hook is registered at the AccumulateGrad node of {path}, which lives as long as "
        "something keeps it; register it on the tensor: register_hook or "
        "register_post_accumulate_grad_hook"
    )


@contextmanager
def entering(arguments: Sequence[XLAShardedTensor], found: list[str]) -> Iterator[None]:
    """Inside, notes in words where a backward goes on in the graph that made an argument.

    Args:
        arguments: the tensors among the arguments of a step.
        found: gets the words.
    """

    def noting(i: int) -> Callable[..., None]:
        return lambda *args: found.append(
            f"its backward goes on in the graph that made tensor {i} of its arguments, which is "
            "another one in each call; pass its detach(), or compute it inside of the step"
        )

    nodes = [(i, t.grad_fn) for i, t in enumerate(arguments)]
    handles = [node.register_prehook(noting(i)) for i, node in nodes if node is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nothing(*args: object) -> None:
    """A hook that does nothing."""
