"""Modules that run as one: how they differ, and a guard against reading what differs.

A loop over layers calls the first of them with the tensors of each. It computes what the layers
compute one after another if they differ in nothing else that their forward reads. Which attributes
that are is only known when it reads them: a layer's number, for instance, is often there and seldom
read. So an attribute that differs is refused when it is read.
"""

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from spmd_core.errors import WrapError

# The lists in which recurrent modules have their parameters again; `other_tensors` replaces
# the one that forward reads.
_LISTS_OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")
_TENSORS_AND_MODULES = {"_parameters", "_buffers", "_modules", *_LISTS_OF_PARAMETERS}
_SHOWN = (bool, int, float, complex, str, type(None), torch.dtype)
_MISSING = object()

# For a module, attributes with the error that reading one raises.
Differences = dict[nn.Module, dict[str, str]]
# For a module, attributes with what reading one returns.
Numbers = Mapping[nn.Module, Mapping[str, Any]]


def differences(modules: Sequence[nn.Module], unread: Collection[str] = ()) -> Differences:
    """For each submodule of the first module, its attributes that others have otherwise.

    Args:
        modules: at least one. Their parameters and buffers are not compared.
        unread: attributes of these modules themselves that are not compared either.

    Raises:
        WrapError: they have submodules of other names or classes.
    """
    found: Differences = {}
    first = dict(modules[0].named_modules())
    for index, module in enumerate(modules[1:], start=1):
        others = dict(module.named_modules())
        for name in {**first, **others}:
            kinds = [_name_of_class(each.get(name)) for each in (first, others)]
            if not _of_one_class(first.get(name), others.get(name)):
                raise WrapError(
                    "layers that run as one have submodules of the same names and classes; got "
                    f"{name or 'the layer itself'}, which is {kinds[1]} in layer {index} and "
                    f"{kinds[0]} in layer 0. Build them alike, or call them one after another."
                )
        pairs = {id(first[name]): others[name] for name in first}
        for name, one in first.items():
            if one is not others[name]:
                for key, text in _attributes(one, others[name], pairs):
                    if not name and key in unread:
                        continue
                    where = f"{name}.{key}".lstrip(".")
                    found.setdefault(one, {}).setdefault(
                        key,
                        "layers that run as one differ in no attribute that their forward reads, "
                        f"but for parameters and buffers; got a read of {where}, which is "
                        f"{text[1]} in layer {index} and {text[0]} in layer 0. Make it equal, or "
                        "a buffer, or call the layers one after another.",
                    )
    return found


@contextmanager
def guarded(
    found: Mapping[nn.Module, Mapping[str, str]], numbers: Numbers = MappingProxyType({})
) -> Iterator[None]:
    """Inside, reading one of these attributes raises WrapError.

    Args:
        found: what `differences` returned.
        numbers: what reading some of them returns instead.
    """
    classes: dict[nn.Module, Any] = {module: type(module) for module in found}
    try:
        for module, kind in classes.items():
            refused, own = found[module], numbers.get(module)
            module.__class__ = (
                _guarded_class(kind, refused, own)
                if own
                else _refusing_class(kind, tuple(refused.items()))
            )
        yield
    finally:
        for module, kind in classes.items():
            module.__class__ = kind


@functools.lru_cache(maxsize=1024)
def _refusing_class(kind: Any, refused: tuple[tuple[str, str], ...]) -> Any:
    """As `_guarded_class`, without numbers: each step has the same, and a class is slow to make."""
    return _guarded_class(kind, dict(refused), {})


def _guarded_class(kind: Any, refused: Mapping[str, str], numbers: Mapping[str, Any]) -> Any:
    def read(self: nn.Module, name: str) -> Any:
        if name in numbers:
            return numbers[name]
        if name in refused:
            raise WrapError(refused[name])
        return kind.__getattribute__(self, name)

    names = {"__getattribute__": read, "__module__": kind.__module__}
    return type(kind)(kind.__name__, (kind,), names)


def _name_of_class(module: nn.Module | None) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"


def class_of(module: nn.Module) -> Any:
    """A module's class without what `scan_model` has made of it."""
    return getattr(type(module), "scanned_class", type(module))


def _of_one_class(a: nn.Module | None, b: nn.Module | None) -> bool:
    if type(a) is type(b):
        return True
    # Each parametrized module has a class of its own.
    if a is None or b is None or class_of(a).__bases__ != class_of(b).__bases__:
        return False
    return parametrize.is_parametrized(a) and parametrize.is_parametrized(b)


def _attributes(
    a: nn.Module, b: nn.Module, pairs: Mapping[int, nn.Module]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """The attributes in which two modules differ, each with both values in words."""
    mine, others = a.__dict__, b.__dict__
    absent = () if mine.keys() == others.keys() else others.keys() - mine.keys()
    for key in (*mine, *absent):
        values = [mine.get(key, _MISSING), others.get(key, _MISSING)]
        if values[0] is values[1] or _are_empty(*values) or key in _TENSORS_AND_MODULES:
            continue
        if "_hooks" in key and all(isinstance(value, dict) for value in values):
            # Their keys are numbers that no other hook has.
            values = [list(value.values()) for value in values]
        if not _equal(values[0], values[1], pairs, set()):
            yield key, (_text(values[0]), _text(values[1]))


def _are_empty(a: Any, b: Any) -> bool:
    """Whether both are empty tables of hooks, as most attributes of modules are."""
    return a.__class__ is OrderedDict and b.__class__ is OrderedDict and not a and not b


def _text(value: Any) -> str:
    """A value in words, without a read on the host."""
    if value is _MISSING:
        return "missing"
    if isinstance(value, list) and all(isinstance(each, _SHOWN) for each in value):
        return repr(value)
    return repr(value) if isinstance(value, _SHOWN) else f"another {type(value).__name__}"


def _equal(a: Any, b: Any, pairs: Mapping[int, nn.Module], seen: set[tuple[int, int]]) -> bool:
    """Whether two values do the same; False where that is unknown.

    Args:
        a: of the first module.
        b: of the other one.
        pairs: for the id of each submodule of the first module, that of the other.
        seen: the pairs of objects whose attributes are being compared.
    """
    if a is b or pairs.get(id(a)) is b is not None or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b) or isinstance(a, nn.Module):
        return False

    def all_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(some) == len(others) and all(
            _equal(x, y, pairs, seen) for x, y in zip(some, others)
        )

    if isinstance(a, torch.Tensor):
        return a.device.type == b.device.type == "cpu" and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return all_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all_equal([*a.values()], [b[key] for key in a])
    if isinstance(a, weakref.ref):
        return _equal(a(), b(), pairs, seen)
    if isinstance(a, types.MethodType):
        return all_equal((a.__func__, a.__self__), (b.__func__, b.__self__))
    if isinstance(a, functools.partial):
        return all_equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, types.CellType):
        return all_equal(*([*_contents(cell)] for cell in (a, b)))
    if isinstance(a, types.FunctionType):
        parts = [(f.__defaults__, f.__kwdefaults__, f.__closure__) for f in (a, b)]
        seen.add((id(a), id(b)))
        return a.__code__ is b.__code__ and all_equal(*parts)
    if type(a).__eq__ is not object.__eq__ and not is_dataclass(a):  # theirs may read tensors
        return (a == b) is True
    if hasattr(a, "__dict__"):
        seen.add((id(a), id(b)))
        return _equal(vars(a), vars(b), pairs, seen)
    return False


def _contents(cell: types.CellType) -> Iterator[Any]:
    """The value of a closure's variable; nothing if it has none yet."""
    try:
        yield cell.cell_contents
    except ValueError:  # Python's way to say that the cell is empty
        return
