"""Functions that are called again, for gradients: they must record the same again.

A function reads what it closes over at each call. In a later one, a variable of a loop in Python
has its last value, and the gradient would be that of another function.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.errors import ControlFlowError
from spmd_core.graph.subgraphs import Subgraph
from spmd_core.graph.values import Value
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@dataclass
class Record:
    """What functions have recorded.

    Attributes:
        subgraphs: their operations.
        numbers: the scalar inputs of these.
        closed_over: the tensors from outside.
        constants: the tensors of the host that they have made, and other values from outside.
    """

    subgraphs: Sequence[Subgraph]
    numbers: Sequence[Any]
    closed_over: Sequence[XLAShardedTensor]
    constants: Sequence[Any]

    @staticmethod
    def of(
        subgraphs: Sequence[Subgraph],
        numbers: Sequence[Any],
        closed_over: Sequence[XLAShardedTensor],
        outer: Sequence[Value],
    ) -> "Record":
        """The record, made before a program uploads what the functions have made on the host."""
        constants = [x.data if isinstance(x.data, torch.Tensor) else x for x in outer]
        return Record(subgraphs, numbers, closed_over, constants)

    def require_same(
        self, again: "Record", what: str, *, by: str = "gradients of gradients"
    ) -> None:
        """Raises ControlFlowError unless another call has recorded the same.

        Args:
            again: what it has recorded.
            what: the functions, in errors.
            by: what calls them again, in errors.
        """
        pairs = (
            ("operations", map(_operations, self.subgraphs), map(_operations, again.subgraphs)),
            ("numbers", map(repr, self.numbers), map(repr, again.numbers)),
            ("tensors from outside", self.closed_over, again.closed_over),
            ("constants", self.constants, again.constants),
        )
        for name, before, now in pairs:
            mine, other = list(before), list(now)
            if len(mine) != len(other) or not all(map(_is_same, mine, other)):
                raise ControlFlowError(
                    f"{by} call {what} again, which must compute the same; "
                    f"got other {name} than at the first call, as of a variable that was closed "
                    "over and has changed. Bind it when the function is made: "
                    "lambda c, x, w=w: ..., or functools.partial."
                )


def _operations(subgraph: Subgraph) -> Any:
    return subgraph.parameters, subgraph.nodes, subgraph.outputs


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, XLAShardedTensor) and isinstance(b, XLAShardedTensor):
        return a._handle is b._handle
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(_bytes(a), _bytes(b))
    return bool(a == b)


def _bytes(constant: torch.Tensor) -> torch.Tensor:
    return constant.reshape(-1).view(torch.uint8)


def under_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which also later runs under the autocast of now."""
    options: Any = {
        "dtype": torch.get_autocast_dtype("xla"),
        "enabled": torch.is_autocast_enabled("xla"),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with torch.autocast("xla", **options):
            return function(*args)

    return call
