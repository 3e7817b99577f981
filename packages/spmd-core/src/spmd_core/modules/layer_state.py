"""What layers of a loop write in place: for each of them its own part, such as a cache's tensors.

In the loop it is a stack that is carried from layer to layer, and each layer gets its row. What the
layers have written goes back to the tensors that they would have written one after another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from spmd_core.errors import ControlFlowError
from spmd_core.graph.storage import Storage
from spmd_core.modules.layer_stacks import rows_of, stacked
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@dataclass(frozen=True)
class LayerState:
    """Tensors to which layers write, each to its own part.

    Attributes:
        stack: their values, of shape `(number of layers, ...)`.
        owners: the tensors: one for each layer, or one for all of that shape.
        is_one: whether it is one for all.
        where: what it is, in errors.
    """

    stack: XLAShardedTensor
    owners: tuple[torch.Tensor, ...]
    is_one: bool
    where: str

    @staticmethod
    def of_layers(tensors: Sequence[torch.Tensor], where: str) -> "LayerState":
        """That of tensors, one for each layer.

        Raises:
            WrapError, DeviceMismatchError, ControlFlowError: as `stacked`.
        """
        return LayerState(stacked(tensors, where), tuple(tensors), False, where)

    def write(self, new: torch.Tensor) -> None:
        """Writes the new values of all layers. Does not wait.

        Args:
            new: the stack of them.
        """
        if self.is_one:
            self.owners[0].copy_(new)
            return
        for owner, row in zip(self.owners, rows_of(new), strict=True):
            owner.copy_(row)


def check_states(states: Sequence[LayerState], others: Iterable[XLAShardedTensor]) -> None:
    """Raises ControlFlowError if states require gradients, or share memory.

    Args:
        states: what the layers write.
        others: what else the layers get.
    """
    seen: set[Storage] = {x._handle.storage for x in others}
    for state in states:
        for owner in state.owners:
            if owner.requires_grad and torch.is_grad_enabled():
                raise no_gradient(f"of {state.where}, which requires one")
            assert isinstance(owner, XLAShardedTensor)
            if owner._handle.storage in seen:
                raise shared_memory(owner, f"{state.where}")
            seen.add(owner._handle.storage)


def no_gradient(what: str) -> ControlFlowError:
    """The error for a write that autograd would follow; `what` says what was written."""
    return ControlFlowError(
        "what layers that run as one loop write in place has no gradient; got a write "
        f"{what}. Call the layers under torch.no_grad(), write its detach(), or return the new "
        "value."
    )


def shared_memory(tensor: XLAShardedTensor, where: str) -> ControlFlowError:
    """The error for a tensor that layers write, and read or write in another way, too."""
    return ControlFlowError(
        "what layers that run as one loop write in place shares its memory with nothing else that "
        f"they read or write; got {tensor._handle.spec!r}, of {where}, which does. Pass a clone() "
        "of what is only read, or call the layers one after another."
    )
