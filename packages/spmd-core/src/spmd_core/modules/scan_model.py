"""`scan_model`: a model's stacks of layers run as loops; its code stays as it is."""

import copy
import copyreg
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

from torch import nn

from spmd_core.arguments import checked, require_kind
from spmd_core.errors import WrapError
from spmd_core.modules.alike import class_of, differences
from spmd_core.modules.layer_loop import require_alike
from spmd_core.modules.layer_stack import ATTRIBUTE, LayerStack
from spmd_core.modules.wrap_policies import has_forward

M = TypeVar("M", bound=nn.Module)
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@checked(loops=1)
def scan_model(
    model: M, path: str | Sequence[str] | None = None, *, loops: int = 1, undo: bool = False
) -> M:
    """Has the stacks of layers in a model run as loops of the program, in place.

    A stack is two or more layers, one behind the other in a `ModuleList`, `Sequential` or
    `ModuleDict`, that differ in nothing but the values of their parameters and buffers; a model may
    have several, as of an encoder and a decoder. Nothing else changes: the model calls its layers
    in a loop of its own, and has the same names, `state_dict()`, indices and hooks. The call of a
    stack's first layer records all of them as `scan_layers` does, and compiles one layer; the
    others return what they compute in that loop. What each layer returns can be used as before:
    hidden states and attentions that a model collects are right. Forward hooks of a layer see its
    own values; those that change them must be on all layers. `fully_shard`, plans, rules, marks,
    checkpointing and LoRA's adapters may come before or after.

    The model's loop passes on what a layer returns, and else the same arguments to all layers; a
    loop that does otherwise is an error that names what differs. If it ends early, the layers
    behind have gradients of zeros, and not None. Without gradients, a cache of keys and values that
    layers write in place is written in the loop: an object with a list `layers`, of which a layer
    finds its own by its number, such as Hugging Face's `StaticCache` after
    `early_initialization()`. Layers that get another object which they may change run one after
    another, with a warning; so do layers on the CPU, without one. A deep copy of the model has the
    loops, a pickle has not. A second call divides the stacks that it finds anew.

    In training, a loop has the gradients of all its layers and all that forward has saved for them
    at the same time. With `loops`, each has a part of the layers, and what the part saved is gone
    before the gradients of the next part are made.

    Args:
        model: a model, such as one of Hugging Face's. Its list of layers may have others before
            and behind those of a stack.
        path: the name of such a list in the model, or several; by default all
            with alike layers that have modules inside and are in no other such layer.
        loops: the number of loops, one behind the other, that a stack becomes; each has two layers
            or more. The square root of the number of layers takes little more memory than layers
            that run one after another, and compiles as many layers as there are loops.
        undo: whether the stacks go back to layers that run one after another.

    Returns:
        The model.

    Raises:
        WrapError: there is no stack, or no module of such a name.
        TypeError: not a module.
        ValueError: `loops` is less than 1.

    Example:
        >>> import torch
        >>> layers = [nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(4)]
        >>> model = scan_model(nn.Sequential(*layers).to("xla"))
        >>> model(torch.ones(1, 3, 8, device="xla")).shape
        torch.Size([1, 3, 8])
    """
    require_kind("model", model, nn.Module, write="a torch.nn.Module")
    if undo:
        for module in model.modules():
            _release(module)
        return model
    found = [*_all_stacks(model)] if path is None else [*_stacks_at(model, path)]
    for name, container, layers in found:
        for part in _parts(layers, loops):
            stack = LayerStack(name, container)
            for layer in part:
                layer.__dict__[ATTRIBUTE] = stack
                layer.__class__ = _scanned(class_of(layer))
    return model


def _parts(layers: Sequence[nn.Module], loops: int) -> list[Sequence[nn.Module]]:
    """Layers in parts of two or more that differ by one at most, at most as many as `loops`."""
    count = min(loops, len(layers) // 2)
    ends = [i * len(layers) // count for i in range(count + 1)]
    return [layers[first:end] for first, end in pairwise(ends)]


def _all_stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """The stacks that are in no layer of another one, with the names of their lists."""
    found = False
    reasons: list[str] = []
    pending: list[tuple[str, nn.Module]] = [("", model)]
    seen = {model}
    while pending:
        name, module = pending.pop(0)
        runs = []
        for run in _runs(name, module, reasons):
            if _is_elementary(run[0]):
                kind = class_of(run[0]).__name__
                reasons.append(
                    f"{len(run)} layers of {name or 'the model'!r} are one {kind} each: write "
                    f"scan_model(model, {name!r}) to scan them all the same."
                )
            else:
                runs.append(run)
        for run in runs:
            found = True
            yield name, module, run
        seen.update(layer for run in runs for layer in run)
        for key, child in module.named_children():
            if child not in seen:
                seen.add(child)
                pending.append((f"{name}.{key}" if name else key, child))
    if not found:
        raise _none_found(f"a {type(model).__name__}", reasons)


def _stacks_at(
    model: nn.Module, path: str | Sequence[str]
) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """The stacks in lists of these names."""
    modules = dict(model.named_modules())
    for name in [path] if isinstance(path, str) else path:
        require_kind("path", name, str, write="the name of a ModuleList, such as 'model.layers'")
        module = modules.get(name)
        if not isinstance(module, _LISTS):
            lists = [n for n, m in modules.items() if isinstance(m, _LISTS)]
            got = "none" if module is None else f"a {type(module).__name__}"
            raise WrapError(
                "path is the name of a ModuleList, Sequential or ModuleDict, as in "
                f"named_modules(); got {name!r}, which is {got} of {type(model).__name__}. "
                f"Give one of {lists}."
            )
        reasons: list[str] = []
        runs = [*_runs(name, module, reasons)]
        if not runs:
            raise _none_found(repr(name), reasons)
        for run in runs:
            yield name, module, run


def _none_found(where: str, reasons: Sequence[str]) -> WrapError:
    return WrapError(
        "a stack is two or more layers, one behind the other in a ModuleList, Sequential or "
        "ModuleDict, of one class, with a forward, and with parameters and buffers of the same "
        f"names, shapes and dtypes; got none in {where}. "
        f"{''.join(f'{reason} ' for reason in reasons[:3])}Call "
        "spmd.scan_layers in the model's code for layers that are elsewhere."
    )


def _runs(name: str, container: nn.Module, reasons: list[str]) -> Iterator[list[nn.Module]]:
    """The longest runs of alike layers in a list; adds why two of them are not alike."""
    if not isinstance(container, _LISTS):
        return
    run: list[nn.Module] = []
    seen: set[nn.Module] = set()
    for key, layer in container._modules.items():
        reason = "it has no forward" if layer is None or not has_forward(layer) else None
        if reason is None and layer in seen:
            reason = "it comes twice"
        if reason is None and run:
            reason = _difference(run[0], layer)
        if reason is not None and (run or len(container) == 1 or not seen):
            reasons.append(f"In {name or 'the model'!r}, of {key}: {reason}")
        if reason is not None:
            if len(run) > 1:
                yield run
            run = []
        if layer is not None and has_forward(layer) and layer not in seen:
            run.append(layer)
            seen.add(layer)
    if len(run) > 1:
        yield run


def _difference(first: nn.Module, layer: nn.Module) -> str | None:
    """Why two layers are not alike; None if they are."""
    if (
        class_of(first) is not class_of(layer)
        and class_of(first).__name__ != class_of(layer).__name__
    ):
        return f"it is a {type(layer).__name__} behind a {type(first).__name__}."
    try:
        tensors = [dict((*m.named_parameters(), *m.named_buffers())) for m in (first, layer)]
        require_alike(tensors[0], tensors[1], 1)
        differences([first, layer])
    except WrapError as error:
        return str(error)
    return None


def _is_elementary(layer: nn.Module) -> bool:
    """Whether a layer is one of torch's own without modules inside, such as `Linear`."""
    return not layer._modules and class_of(layer).__module__.startswith("torch.nn")


def _release(layer: nn.Module) -> None:
    """Gives a layer its own class back."""
    if ATTRIBUTE in layer.__dict__:
        del layer.__dict__[ATTRIBUTE]
        layer.__class__ = class_of(layer)


@functools.lru_cache(maxsize=1024)
def _scanned(kind: Any) -> type[nn.Module]:
    """A class of modules that are called as layers of a stack."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stack: LayerStack | None = self.__dict__.get(ATTRIBUTE)
        run = functools.partial(kind.__call__, self)
        return run(*args, **kwargs) if stack is None else stack.call(self, run, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:  # a pickle has the layer as it was
        with _of_class(self, kind):
            parts: Any = self.__reduce_ex__(protocol)
        function, arguments, state, *rest = parts
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            # The pickler refuses that for an object that is of another class by now.
            function, arguments = copyreg._reconstructor, (kind, object, None)  # type: ignore[attr-defined]
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != ATTRIBUTE}
        return (function, arguments, state, *rest)

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        with _of_class(self, kind):
            result = copy.deepcopy(self, memo)
        result.__class__ = made
        return result

    names = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__deepcopy__": deep_copy,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "scanned_class": kind,
    }
    made: type[nn.Module] = type(kind)(kind.__name__, (kind,), names)
    return made


@contextmanager
def _of_class(layer: nn.Module, kind: type[nn.Module]) -> Iterator[None]:
    """Inside, the layer is of another class."""
    own = type(layer)
    layer.__class__ = kind
    try:
        yield
    finally:
        layer.__class__ = own
