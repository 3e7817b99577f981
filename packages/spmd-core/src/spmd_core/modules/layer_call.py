"""The call of one layer of several: what it transforms, and its other arguments, compared."""

import enum
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# Arguments that a layer cannot change, or whose changes would be seen.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, type, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Tensor, nn.Module),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
)
State = tuple[Any, int]


def state_of(tensor: torch.Tensor) -> State:
    """What a write in place to a tensor changes."""
    if isinstance(tensor, XLAShardedTensor):
        return tensor._handle, tensor._handle.storage.version
    return None, 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer.

    Attributes:
        args: the positional ones.
        kwargs: the others.
        name: the keyword of `x`, what the layer transforms; None for the first positional one.
        others: what else it gets: for each leaf where it is, and the leaf.
        states: of these that are tensors, the state at the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str | None
    others: tuple[tuple[str, Any], ...]
    states: tuple[State | None, ...]

    @staticmethod
    def of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "LayerCall | None":
        """The call; None if the layer transforms no tensor of the device."""
        kind: Any = type(layer)  # mypy takes no class of modules for hashable
        names = _parameters(kind)
        name = None if args else names[0] if names else None
        x = args[0] if args else kwargs.get(name or "")
        tensors = [leaf for leaf in pytree.tree_leaves(x) if leaf is not None]
        if not tensors or not all(isinstance(t, XLAShardedTensor) for t in tensors):
            return None
        named = {
            **{_name(names, i): value for i, value in enumerate(args) if i > 0},
            **{key: value for key, value in kwargs.items() if key != name},
        }
        others = tuple(pair for key, value in named.items() for pair in _leaves(value, key))
        states = tuple(
            state_of(leaf) if isinstance(leaf, torch.Tensor) else None for _, leaf in others
        )
        return LayerCall(args, kwargs, name, others, states)

    @property
    def x(self) -> Any:
        """What the layer transforms."""
        return self.args[0] if self.name is None else self.kwargs[self.name]

    def with_x(self, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with another `x`."""
        if self.name is None:
            return (x, *self.args[1:]), self.kwargs
        return self.args, {**self.kwargs, self.name: x}

    def replaced(self, old: Any, new: Any) -> "LayerCall":
        """The call with another object in place of one that is an argument itself."""
        args = tuple(new if x is old else x for x in self.args)
        kwargs = {key: new if x is old else x for key, x in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)

    @property
    def unknown(self) -> str | None:
        """An argument that the layer may change, such as a cache, in words."""
        return next(
            (f"{where}, a {type(x).__name__}" for where, x in self.others if not _is_plain(x)), None
        )

    @property
    def cache(self) -> Any:
        """The one argument that the layer may change; None if there are several, or inside others.

        Call it if there is an `unknown` one.
        """
        found = [x for _, x in self.others if not _is_plain(x)]
        is_one = all(x is found[0] for x in found)
        own = [x for x in (*self.args, *self.kwargs.values()) if x is found[0]]
        return found[0] if is_one and len(own) == len(found) else None

    def difference(self, later: "LayerCall") -> str | None:
        """Where a later call gets something else, but for `x`."""
        mine, its = dict(self.others), dict(later.others)
        for where in (*its, *mine):
            if where not in mine or where not in its or not _is_same(mine[where], its[where]):
                return where
        for (where, _), before, now in zip(self.others, self.states, later.states):
            if before != now:
                return f"{where}, which was written to in between"
        return None


@functools.lru_cache(maxsize=1024)
def _parameters(kind: Any) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _name(names: tuple[str, ...], position: int) -> str:
    return names[position] if position < len(names) else f"argument {position + 1}"


def _leaves(tree: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested tuples, lists and dicts, and the empty ones; each with its place."""
    if isinstance(tree, (tuple, list)) and tree:
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{where}[{i}]")
    elif type(tree) in (dict, OrderedDict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{where}[{key!r}]")
    else:
        yield where, type(tree) if isinstance(tree, (tuple, list, dict)) else tree


def _is_plain(x: Any) -> bool:
    return isinstance(x, _PLAIN)


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, (torch.Tensor, nn.Module)) or type(a) is not type(b) or not _is_plain(a):
        return False
    return bool(a == b)
