"""`scan_layers`: layers of one structure, called one after another, as one loop of the program."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.arguments import require_kind
from spmd_core.control_flow.operands import flatten
from spmd_core.errors import ControlFlowError
from spmd_core.modules.layer_loop import WrittenError, run_layers
from spmd_core.modules.layer_results import LayerResults
from spmd_core.modules.layer_stacks import stacked
from spmd_core.modules.layer_state import LayerState
from spmd_core.modules.one_by_one import called_one_by_one


def scan_layers(
    layers: Iterable[nn.Module], x: Any, /, *args: Any, per_layer: Any = None, **kwargs: Any
) -> Any:
    """Calls layers one after another, each with what the one before returned, as one loop.

    The program has the operations of one layer, whatever their number, and so takes as long to
    compile as one of a few layers. Computes what this does, gradients included:

        for i, layer in enumerate(layers):
            x = layer(x, *args, **kwargs)

    Python calls the first layer, once or twice, on tensors without values, in which it finds the
    parameters and buffers of each layer. Gradients go to each layer's own parameters; names,
    optimizers and checkpoints know nothing of the loop. A mark that a parameter has in all layers
    holds in the loop, for its gradient too; a layer that `fully_shard` was applied to is gathered
    in its own iteration. Random operations, such as dropout, draw other numbers in each layer. A
    tensor that all layers share stays one. What a layer writes in place to its own part of
    `per_layer`, such as a cache of keys and values, is written to the tensors there, without a
    gradient. Does not wait for the device.

    Args:
        layers: modules of the same class, such as an `nn.ModuleList`, that differ in the values of
            their parameters and buffers and in no other attribute that their forward reads. They
            write to no buffer.
        x: what the first layer gets: a tensor, or tensors in nested lists, tuples and dicts. Each
            layer returns the same structure, shapes and dtypes; or a tuple that begins with it.
        *args: further arguments, the same for each layer.
        per_layer: arguments that differ between layers: a dict is for keyword arguments, anything
            else for the one behind `x`. Tensors of shape `(number of layers, ...)`, in nested
            tuples and dicts, of which a layer gets its slice; or lists with one item for each
            layer, all of the same structure: tensors, numbers (of which a layer gets a tensor), or
            nested ones.
        **kwargs: keyword arguments, the same for each layer.

    Returns:
        What the last layer returns; `x` if there is no layer. If a layer returns a tuple
        `(x, *others)`, then `(x, *others)`, where each tensor of `others` has those of all layers,
        as a tensor of shape `(number of layers, ...)`.

    Raises:
        TypeError: a layer returns another structure, other shapes or other dtypes than it gets; or
            what is no tensor.
        WrapError: the layers differ in classes, in the names, shapes, dtypes or marks of their
            parameters and buffers, or in an attribute that forward reads.
        ControlFlowError: a layer writes to a buffer, reads a value on the host, or keeps a tensor
            that it computes. Or what it writes in place is a number of `per_layer`, requires a
            gradient, or shares memory with something else that the layers get.
        ValueError: an argument for each layer has not the number of layers.

    Example:
        >>> layers = [nn.Linear(4, 4).to("xla") for _ in range(3)]
        >>> scan_layers(layers, torch.ones(2, 4, device="xla")).shape
        torch.Size([2, 4])
    """
    modules = _modules(layers)
    if per_layer is not None and isinstance(per_layer, Mapping):
        both = [name for name in per_layer if name in kwargs]
        if both:
            raise TypeError(
                "an argument is the same for all layers or differs between them; got "
                f"{both[0]!r} in per_layer and as a keyword argument. Leave one of them out."
            )
    flatten(x, "the x of scan_layers")
    if not modules:
        return x
    parts, tree = pytree.tree_flatten(_stacks(per_layer, len(modules), "per_layer"))

    def call(layer: nn.Module, x: Any, own: Any) -> Any:
        if isinstance(per_layer, Mapping):
            return layer(x, *args, **own, **kwargs)
        return layer(x, *args, **kwargs) if per_layer is None else layer(x, own, *args, **kwargs)

    result = LayerResults((args, kwargs))
    called = called_one_by_one()
    if called is not None:
        called[tuple(modules)] = modules
        rows = []
        for index, layer in enumerate(modules):
            own = pytree.tree_unflatten([_of_layer(part, index) for part in parts], tree)
            x, others = result.split(x, call(layer, x, own), layer)
            rows.append(others)
        columns = [None if each[0] is None else torch.stack(each) for each in zip(*rows)]
        return result.joined(x, columns, len(modules))
    written: list[int] = []  # the parts that layers write in place

    def step(layer: nn.Module, x: Any, own: Sequence[Any], rows: Any) -> tuple[Any, Any]:
        given = [*own]
        for i, row in zip(written, rows):
            given[i] = row
        return result.split(x, call(layer, x, pytree.tree_unflatten(given, tree)), layer)

    seeds = torch.get_rng_state()
    while True:
        xs = [None if p is None or i in written else p.stack for i, p in enumerate(parts)]
        states = [parts[i].state() for i in written]
        try:
            x, others, stacks = run_layers(modules, step, x, xs, states=states)
            break
        except WrittenError as error:
            written += error.numbers
            torch.set_rng_state(seeds)
    for state, stack in zip(states, stacks):
        state.write(stack)
    return result.joined(x, others, len(modules))


@dataclass(frozen=True)
class _Part:
    """A tensor, or one for each layer, of which each layer gets its own.

    Attributes:
        stack: of shape `(number of layers, ...)`.
        owners: the tensors whose values it has; none if they are numbers.
        where: where it was, in errors.
    """

    stack: Any
    owners: tuple[torch.Tensor, ...]
    where: str

    def state(self) -> LayerState:
        """What layers write to.

        Raises:
            ControlFlowError: it consists of numbers.
        """
        if not self.owners:
            raise ControlFlowError(
                "layers write in place to tensors; got a write to the tensor of a number in "
                f"{self.where}. Give tensors there, or return the new value."
            )
        is_one, stack = self.owners[0] is self.stack, self.stack
        if is_one and torch.is_grad_enabled():
            stack = stack.clone()  # autograd may save it, and refuses what is written then
        return LayerState(stack, self.owners, is_one, self.where)


def _of_layer(part: _Part | None, index: int) -> torch.Tensor | None:
    """A layer's own tensor, to which what it writes in place is written."""
    if part is None:
        return None
    is_one = not part.owners or part.owners[0] is part.stack
    return part.stack[index] if is_one else part.owners[index]


def _modules(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers in a list.

    Raises:
        TypeError: something else.
    """
    if isinstance(layers, nn.Module) and not hasattr(layers, "__iter__"):
        raise TypeError(
            f"scan_layers takes several modules; got one {type(layers).__name__}. "
            "Pass a ModuleList, Sequential or list of layers."
        )
    modules = list(layers)
    for module in modules:
        require_kind("each of the layers", module, nn.Module, write="a list of modules")
    return modules


def _stacks(given: Any, count: int, where: str) -> Any:
    """The arguments for each layer, with a `_Part` in place of each tensor and each list.

    Args:
        given: tensors, tuples, dicts and lists.
        count: the number of layers.
        where: where `given` was, in errors.

    Raises:
        ValueError: a tensor or a list has not one item for each layer.
        TypeError: something that cannot be stacked.
    """
    if isinstance(given, Mapping):
        return {key: _stacks(value, count, f"{where}[{key!r}]") for key, value in given.items()}
    if isinstance(given, tuple):
        return tuple(_stacks(value, count, f"{where}[{i}]") for i, value in enumerate(given))
    if isinstance(given, list):
        if len(given) != count:
            raise ValueError(
                f"a list of arguments has one item for each layer; got {len(given)} items in "
                f"{where} and {count} layers. Write a tuple for a structure of one layer's "
                "arguments."
            )
        return _stacked_items(given, where)
    if isinstance(given, torch.Tensor):
        if given.dim() == 0 or given.shape[0] != count:
            raise ValueError(
                "an argument for each layer has the layers along its first dim; got "
                f"{where} of shape {tuple(given.shape)} and {count} layers. Pass it without "
                "per_layer if it is the same for all."
            )
        return _Part(given, (given,), where)
    if given is None:
        return None
    raise TypeError(
        "arguments for each layer are tensors, or lists with one item for each layer, in nested "
        f"tuples and dicts; got {type(given).__name__} in {where}. Pass what is the same for all "
        "layers without per_layer."
    )


def _stacked_items(items: Sequence[Any], where: str) -> Any:
    """The parts of structures, one for each layer."""
    trees = [pytree.tree_flatten(item) for item in items]
    leaves, spec = trees[0]
    for index, (others, other_spec) in enumerate(trees):
        forms = [[_form(leaf) for leaf in some] for some in (leaves, others)]
        if other_spec != spec or forms[0] != forms[1]:
            raise ValueError(
                "the items of a list, one for each layer, are alike, as they are stacked; got "
                f"{forms[1]} for layer {index} and {forms[0]} for layer 0 in {where}. Convert "
                "them to one structure, shape and dtype."
            )
    columns = [[tree[0][i] for tree in trees] for i in range(len(leaves))]
    return pytree.tree_unflatten([_stacked_leaves(each, where) for each in columns], spec)


def _form(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return type(leaf).__name__


def _stacked_leaves(leaves: Sequence[Any], where: str) -> Any:
    if isinstance(leaves[0], torch.Tensor):
        return _Part(stacked(leaves, where), tuple(leaves), where)
    if isinstance(leaves[0], (bool, int, float)):
        return _Part(torch.tensor(leaves, device="xla"), (), where)
    if leaves[0] is None:
        return None
    raise TypeError(
        f"what differs between layers is a tensor or a number; got {type(leaves[0]).__name__} in "
        f"{where}. Pass what is the same for all layers without per_layer."
    )
