"""Finds the user's names of tensors: parameters, buffers, gradients, and optimizer state.

Tensors do not store their names, so names cost nothing until an error needs them. They are then
looked up in all modules and optimizers of the process.
"""

import gc
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from spmd_core.graph.storage import Storage


def names() -> dict[Storage, str]:
    """The names of tensors on the device, such as `GPT.h.0.attn.weight`, by storage.

    The gradient of a parameter is `the gradient of GPT.wte.weight`, and optimizer state is
    `exp_avg of GPT.wte.weight`.
    """
    found: dict[Storage, str] = {}
    of_parameter: dict[int, str] = {}
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    for one in instances((nn.Module, torch.optim.Optimizer)):
        (modules if issubclass(type(one), nn.Module) else optimizers).append(one)
    for module in _roots(modules):
        root = type(module).__name__
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            name = f"{root}.{path}"
            of_parameter.setdefault(id(tensor), name)
            _add(found, tensor, name)
            if tensor.is_leaf and tensor.grad is not None:
                _add(found, tensor.grad, f"the gradient of {name}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = of_parameter.get(id(parameter), "a parameter of no module")
                for key, value in optimizer.state.get(parameter, {}).items():
                    _add(found, value, f"{key} of {owner}")
    return found


def parameters() -> dict[Storage, torch.Tensor]:
    """The parameters and buffers of all modules that are on the device, by storage."""
    found: dict[Storage, torch.Tensor] = {}
    for module in roots():
        for tensor in (*module.parameters(), *module.buffers()):
            handle = getattr(tensor, "_handle", None)
            if handle is not None:
                found.setdefault(handle.storage, tensor)
    return found


def roots() -> list[nn.Module]:
    """The models of the process: modules that are not submodules of another module."""
    return _roots(instances((nn.Module,)))


def _add(found: dict[Storage, str], tensor: Any, name: str) -> None:
    handle = getattr(tensor, "_handle", None)
    if handle is not None:
        found.setdefault(handle.storage, name)


def _roots(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are not submodules of another module."""
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def instances(kinds: Iterable[type]) -> list[Any]:
    """All objects of these classes and of those derived from them.

    A process has millions of objects, so no Python code runs for each of them. Types are compared
    by identity: a proxy's `__class__` and a type's `__hash__` may import a module, or raise.
    """
    wanted = {id(kind): kind for kind in kinds}
    pending = list(wanted.values())
    while pending:
        derived: type
        for derived in type.__subclasses__(pending.pop()):
            if id(derived) not in wanted:
                wanted[id(derived)] = derived
                pending.append(derived)
    objects = _objects()
    return list(itertools.compress(objects, map(wanted.__contains__, map(id, map(type, objects)))))


def _objects() -> list[Any]:
    """All objects that the garbage collector tracks, frozen ones included.

    Training loops freeze long-lived objects (`gc.freeze`), which `gc.get_objects` then leaves out.
    """
    is_exempt = gc.get_freeze_count() > 0
    if is_exempt:
        gc.unfreeze()
    objects = gc.get_objects()
    if is_exempt:
        gc.freeze()
    return objects
