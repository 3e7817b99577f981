"""What the layers of a loop return: the next `x`, and others, which the loop stacks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.control_flow.operands import flatten, require_like


class LayerResults:
    """What layers return: the next `x`, and others, which are stacked.

    A tensor among the others that is one of the arguments for all layers is not stacked.

    Args:
        arguments: those for all layers, nested.
    """

    def __init__(self, arguments: Any) -> None:
        leaves = pytree.tree_leaves(arguments)
        self._arguments = {id(t): t for t in leaves if isinstance(t, torch.Tensor)}
        self._spec: Any = None
        self._same: list[torch.Tensor | None] = []

    def split(self, x: Any, returned: Any, layer: nn.Module) -> tuple[Any, list[Any]]:
        """The next `x`, and the tensors to stack.

        Args:
            x: what the layer got.
            returned: what it returned.
            layer: the layer.

        Raises:
            TypeError: the layer did not return something like `x`.
        """
        name = type(layer).__name__
        given = flatten(x, "the x of scan_layers")
        tree = pytree.tree_structure(x)
        others: tuple[Any, ...] | None = None
        if (
            pytree.tree_structure(returned) != tree
            and isinstance(returned, tuple)
            and returned
            and pytree.tree_structure(returned[0]) == tree
        ):
            returned, others = returned[0], tuple(returned[1:])
        what = f"what a layer of a loop returns (here a {name})"
        require_like(what, flatten(returned, what), given, "what it gets")
        leaves, self._spec = pytree.tree_flatten(others)
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    "what a layer of a loop returns behind x is stacked, and so consists of "
                    f"tensors; got {type(leaf).__name__} from a {name}. Leave it out, or call the "
                    "layers one after another."
                )
        self._same = [self._arguments.get(id(leaf)) for leaf in leaves]
        return returned, [leaf for leaf, same in zip(leaves, self._same) if same is None]

    def joined(self, x: Any, stacks: Sequence[torch.Tensor | None], count: int) -> Any:
        """What `count` layers return, of the last `x` and the stacks."""
        given = iter(stacks)
        leaves = [
            next(given) if same is None else same.unsqueeze(0).expand(count, *same.shape)
            for same in self._same
        ]
        others = pytree.tree_unflatten(leaves, self._spec)
        return x if others is None else (x, *others)

    def one(self, x: Any, stacks: Sequence[torch.Tensor], index: int) -> Any:
        """What layer `index` returns, of the `x` that it returns and the stacks of all layers."""
        given = iter(stacks)
        leaves = [_row(next(given), index) if same is None else same for same in self._same]
        others = pytree.tree_unflatten(leaves, self._spec)
        return x if others is None else (x, *others)


def _row(stack: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if stack is None else stack[index]
