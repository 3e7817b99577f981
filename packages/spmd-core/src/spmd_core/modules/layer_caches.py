"""Caches that a model hands to its layers, of which each layer writes its own part in place.

Such a cache, as `past_key_values` of Hugging Face's models, has a list `layers` of objects, and a
layer finds its own by a number that it has, such as `layer_idx`. In a loop the first layer gets a
copy of the cache, whose list has one object, with rows of stacks in place of the tensors that
differ between layers; and its number is a stand-in, which serves to find that object alone.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.errors import ControlFlowError
from spmd_core.modules.alike import Differences, Numbers
from spmd_core.modules.layer_call import State, state_of
from spmd_core.modules.layer_state import LayerState
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# What the attributes of a cache consist of, beside tensors: values that nobody can change.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)


class LayerCaches:
    """The parts of a cache that the layers of a loop write.

    Args:
        cache: the object.
        layers: the layers.
        found: how they differ.

    Attributes:
        states: what the layers write.
        numbers: what the first layer's modules have in place of their numbers.

    Raises:
        ControlFlowError: it is another kind of object; the message says in what.
    """

    def __init__(self, cache: Any, layers: Sequence[nn.Module], found: Differences) -> None:
        self._cache = cache
        self.numbers, of_layers = _numbers(layers, found)
        parts = vars(cache).get("layers") if hasattr(cache, "__dict__") else None
        if not isinstance(parts, list) or not all(0 <= i < len(parts) for i in of_layers):
            raise ControlFlowError("it has no list `layers` with an object for each layer")
        self._require_plain({key: x for key, x in vars(cache).items() if key != "layers"})
        self._numbers, self._parts = of_layers, [parts[i] for i in of_layers]
        trees = [pytree.tree_flatten(_attributes(part)) for part in self._parts]
        self._leaves, self._tree = trees[0]
        if any(type(p) is not type(parts[0]) for p in self._parts) or any(
            tree != self._tree for _, tree in trees
        ):
            raise ControlFlowError("the objects of its layers have other classes or attributes")
        self._states: dict[int, LayerState] = {}  # by position among the leaves
        self._before: list[list[State]] = []
        for i, column in enumerate(zip(*(leaves for leaves, _ in trees))):
            self._add(i, column)
        self.states = [*self._states.values()]

    @staticmethod
    def _require_plain(values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if any(not isinstance(x, _PLAIN) for x in pytree.tree_leaves(value)):
                raise ControlFlowError(f"its attribute {key} is a {type(value).__name__}")

    def _add(self, position: int, column: Sequence[Any]) -> None:
        """Adds one leaf of the attributes of each layer's object."""
        first = column[0]
        are_tensors = all(isinstance(x, XLAShardedTensor) for x in column)
        if are_tensors and len({*map(id, column)}) == len(column):
            state = LayerState.of_layers(column, "a cache of the layers")
            self._states[position] = state
            self._before.append([state_of(x) for x in column])
        elif not (are_tensors and all(x is first for x in column)) and not all(
            isinstance(x, _PLAIN) and type(x) is type(first) and x == first for x in column
        ):
            raise ControlFlowError(
                f"the objects of its layers have a {type(first).__name__} that may change, or "
                "differ in more than the values of tensors on device xla"
            )

    def in_loop(self, rows: Sequence[torch.Tensor]) -> "CacheInLoop":
        """What the first layer gets in place of the cache.

        Args:
            rows: of the states.
        """
        leaves = [*self._leaves]
        for i, row in zip(self._states, rows):
            leaves[i] = row
        return CacheInLoop(self._cache, self._parts[0], pytree.tree_unflatten(leaves, self._tree))

    def write(self, index: int, rows: Sequence[Sequence[torch.Tensor]]) -> None:
        """Writes what one layer has written. Does not wait.

        Args:
            index: the layer's position.
            rows: for each state, what the loop has left of it, layer by layer.

        Raises:
            ControlFlowError: something else wrote there since the loop.
        """
        part = vars(self._cache)["layers"][self._numbers[index]]
        leaves = pytree.tree_leaves(vars(part))
        for i, before, new in zip(self._states, self._before, rows):
            owner = self._states[i].owners[index]
            is_there = part is self._parts[index] and leaves[i] is owner
            if not is_there or state_of(owner) != before[index]:
                raise ControlFlowError(
                    "the caches of layers that run as one loop are written by these layers alone, "
                    f"from the call of the first one on; got another write to that of layer "
                    f"{index}. Write before or after the layers."
                )
            owner.copy_(new[index])


class CacheInLoop:
    """A copy of a cache, which has the first layer's object alone.

    Attributes:
        cache: the copy.
    """

    def __init__(self, cache: Any, part: Any, attributes: dict[str, Any]) -> None:
        self._part, self.cache = copy.copy(part), copy.copy(cache)
        self._part.__dict__ = {**attributes}
        self.cache.__dict__["layers"] = _OwnPart(self._part)
        self._before = self._values()

    def _values(self) -> tuple[Any, Any]:
        return pytree.tree_flatten((vars(self.cache), vars(self._part)))

    def check(self) -> None:
        """Raises ControlFlowError if the layer has assigned something to it."""
        leaves, tree = self._values()
        before, tree_before = self._before
        if tree != tree_before or any(a is not b for a, b in zip(leaves, before)):
            raise ControlFlowError(
                "it assigns attributes, as it makes or replaces tensors; one that has its tensors "
                "from the beginning and writes to them in place, such as a StaticCache after "
                "early_initialization(), can be in a loop"
            )


class _OwnPart:
    """A list of the objects of all layers, of which a layer can get its own."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getitem__(self, number: Any) -> Any:
        if not isinstance(number, LayerNumber):
            raise ControlFlowError(f"a layer asks for the object of layer {number!r}")
        return self._part

    def __len__(self) -> NoReturn:
        raise ControlFlowError("a layer asks how many layers there are, or goes over them")


class LayerNumber:
    """Stands for the numbers of all layers: a layer finds its own object in a cache by it."""

    __slots__ = ("_refused",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, refused: str) -> None:
        self._refused = refused


def _refuse(self: LayerNumber, *_: Any) -> NoReturn:
    raise ControlFlowError(self._refused)


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "index", "int", "float", "str", "repr"),
    *("format", "neg", "pos", "abs", "invert", "round", "hash"),
    *(
        f"{side}{name}"
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or"),
            *("xor", "lshift", "rshift"),
        )
        for side in ("", "r")
    ),
):
    setattr(LayerNumber, f"__{_name}__", _refuse)


def _numbers(layers: Sequence[nn.Module], found: Differences) -> tuple[Numbers, list[int]]:
    """What stands for the layers' numbers, and these.

    Raises:
        ControlFlowError: they have none, or several.
    """
    numbers: dict[nn.Module, dict[str, LayerNumber]] = {}
    all_values: set[tuple[int, ...]] = set()
    modules = [dict(layer.named_modules()) for layer in layers]
    for name, module in modules[0].items():
        for key, refused in found.get(module, {}).items():
            values = tuple(each[name].__dict__.get(key) for each in modules)
            if all(type(x) is int for x in values) and len({*values}) == len(values):
                numbers.setdefault(module, {})[key] = LayerNumber(refused)
                all_values.add(values)
    if len(all_values) != 1:
        raise ControlFlowError(f"the layers have {len(all_values)} kinds of numbers, and not one")
    return numbers, [*all_values.pop()]


def _attributes(part: Any) -> dict[str, Any]:
    """The attributes of an object.

    Raises:
        ControlFlowError: not all of them can be seen.
    """
    if isinstance(part, nn.Module) or not hasattr(part, "__dict__"):
        raise ControlFlowError(f"the object of a layer is a {type(part).__name__}")
    if any("__slots__" in vars(kind) and vars(kind)["__slots__"] for kind in type(part).__mro__):
        raise ControlFlowError(f"the object of a layer, a {type(part).__name__}, has slots")
    return vars(part)
