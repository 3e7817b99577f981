"""`scan_model`: layers that a model calls one after another run as one loop of the program."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from torch import nn

from spmd_core.arguments import require_kind
from spmd_core.errors import WrapError
from spmd_core.modules.alike import differences
from spmd_core.modules.layer_calls import LayerGroup

M = TypeVar("M", bound=nn.Module)
_CALLED_AS = "_called_as"  # the attribute of a layer with its group and its index in it
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def scan_model(model: M) -> M:
    """Makes the layers that a model calls one after another run as one loop of the program.

    Layers are those of one structure that follow each other in a `ModuleList`, `Sequential` or
    `ModuleDict`; layers inside of layers stay as they are. Nothing else in the user's code changes:
    names, `state_dict()`, optimizers, hooks and the model's own forward are as before. The program
    has the operations of one layer, so it takes as long to compile as that of a few layers; see
    `scan_layers`, by which the loop is computed, for what holds in it.

    The model's code decides what is computed: where each layer gets what the one before returned,
    and the same further arguments, all of them run as one loop when the last one is called. Where
    it does something else, such as a read of one layer's result, or a cache that layers write to,
    the layers are called one after another, with a warning for each reason; the counter
    `layers_called_apart` counts such calls. Only a result of a layer before the last one that is
    used after the loop is an error. Does not wait for the device.

    Args:
        model: the model, on any device; on others than `xla` it runs as before. Calling this again
            changes nothing.

    Returns:
        The model.

    Raises:
        WrapError: no layers of one structure follow each other in the model.
        TypeError: something that is no module.

    Example:
        >>> import torch
        >>> layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        >>> model = scan_model(torch.nn.Sequential(*layers)).to("xla")
        >>> model(torch.ones(2, 4, device="xla")).shape
        torch.Size([2, 4])
    """
    require_kind("model", model, nn.Module, write="the model")
    groups = list(_groups(model, ""))
    if not groups:
        raise WrapError(
            "scan_model looks for layers of one class and structure, with parameters, that follow "
            "each other in a ModuleList, Sequential or ModuleDict; got a "
            f"{type(model).__name__} without any. Call spmd.scan_layers(layers, x) where they are "
            "called."
        )
    for name, layers in groups:
        if any(_CALLED_AS in layer.__dict__ for layer in layers):
            continue
        group = LayerGroup(layers, f"the {len(layers)} layers of {name}")
        for index, layer in enumerate(layers):
            layer.__dict__[_CALLED_AS] = group, index
            kind: Any = type(layer)
            layer.__class__ = _called_in_turn(kind)
    return model


def _groups(module: nn.Module, path: str) -> Iterator[tuple[str, list[nn.Module]]]:
    """The layers of each loop, with the name of what they are in."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    taken: set[int] = set()
    if isinstance(module, _CONTAINERS):
        for layers in _runs([child for _, child in children]):
            taken.update(map(id, layers))
            yield path or type(module).__name__, layers
    for name, child in children:
        if id(child) not in taken:
            yield from _groups(child, f"{path}.{name}".lstrip("."))


def _runs(modules: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """The longest runs of at least two modules of one structure."""
    run: list[nn.Module] = []
    for module in modules:
        if run and module not in run and _are_alike(run[0], module):
            run.append(module)
            continue
        if len(run) > 1:
            yield run
        run = [module] if next(module.parameters(), None) is not None else []
    if len(run) > 1:
        yield run


def _are_alike(first: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have submodules of the same classes, and tensors of the same forms."""
    forms = [
        [(name, t.shape, t.dtype) for name, t in (*m.named_parameters(), *m.named_buffers())]
        for m in (first, other)
    ]
    if forms[0] != forms[1]:
        return False
    try:
        differences([first, other])
    except WrapError:
        return False
    return True


@lru_cache(maxsize=256)
def _called_in_turn(kind: Any) -> Any:
    """The class of layers of this class whose calls may run as one loop."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        group, index = self.__dict__[_CALLED_AS]
        return group.call(index, super(made, self).__call__, args, kwargs)

    made = type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    return made
