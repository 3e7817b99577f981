"""A layer's own forward hooks, called outside of the loop that runs the layer.

Hooks that only look at what goes into a layer and comes out, such as those that collect hidden
states, are called for each layer with its own values. Those that change it must run in the loop.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# The attributes of a module in which it has them.
TABLES = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def any_of(layer: nn.Module) -> bool:
    """Whether a layer has such hooks."""
    return bool(layer._forward_pre_hooks or layer._forward_hooks)


def change_arguments(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Calls the hooks before a layer's forward; whether one returns other arguments."""
    changed = False
    for key, hook in [*layer._forward_pre_hooks.items()]:
        with_kwargs = key in layer._forward_pre_hooks_with_kwargs
        found: Any = hook(layer, args, kwargs) if with_kwargs else hook(layer, args)
        changed |= found is not None and found is not args
    return changed


def change_result(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> bool:
    """Calls the hooks behind a layer's forward; whether one returns another result."""
    changed = False
    for key, hook in [*layer._forward_hooks.items()]:
        with_kwargs = key in layer._forward_hooks_with_kwargs
        given: Any = (layer, args, kwargs, result) if with_kwargs else (layer, args, result)
        found = hook(*given)
        changed |= found is not None and found is not result
    return changed


@contextmanager
def without(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer has no such hooks."""
    own = layer.__dict__
    tables = {name: own[name] for name in TABLES}
    try:
        own.update({name: OrderedDict() for name in TABLES})
        yield
    finally:
        own.update(tables)
