"""Hooks at autograd's `AccumulateGrad` nodes, which no attribute of a tensor shows.

Such a node is made when it is needed, and lives only while a graph or the user has it. To keep one
alive would make hooks run that torch drops. But as long as one lives, it refers to its tensor: a
tensor to which torch has no other reference has no node, and no hooks there.
"""

from collections.abc import Sequence

import torch

from spmd_core.steps.capture.versions import use_count
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


class Accumulators:
    """The nodes at which the gradients of some tensors add up.

    Args:
        tensors: leaves that require gradients.
    """

    def __init__(self, tensors: Sequence[XLAShardedTensor]) -> None:
        self._tensors = [*tensors]
        self._ones = [1] * len(self._tensors)

    def hooked(self) -> XLAShardedTensor | None:
        """The first tensor whose node has a hook; None if there is none. Does not wait."""
        counts = [*map(use_count, self._tensors)]
        if counts == self._ones:
            return None
        return next(
            (
                tensor
                for tensor, count in zip(self._tensors, counts)
                if count != 1 and _has_hooks(tensor)
            ),
            None,
        )


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


def _nothing(*args: object) -> None:
    """A hook that does nothing."""
