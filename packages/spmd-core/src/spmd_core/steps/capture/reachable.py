"""What a function can reach: the Python values and the tensors that its next call may depend on.

A walk begins at the function and follows what the user's code names: closures, defaults, globals,
classes, and attributes of the user's objects. Of modules, optimizers and other libraries' objects
it follows all attributes; the code of libraries is taken as constant. `guards` compares what was
found before each captured call.
"""

import contextvars
import functools
import os
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spmd_core.errors import CaptureError
from spmd_core.steps.capture import code_names, contents, scalers
from spmd_core.steps.capture.code_names import is_users
from spmd_core.steps.capture.module_hooks import GLOBAL_HOOKS, unread
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, attributes_of

MOST_VALUES = 200_000
MISSING = object()
_CONTENTS = " (contents)"
_SEQUENCES = (list, tuple, set, frozenset, deque)
ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, types.CodeType, np.generic,
    types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
# The classes of torch whose objects are walked.
_OWNERS = (
    torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)  # fmt: skip
# What objects of other classes of these packages hold does not change what a step computes, but
# for those modules of Python's own whose objects hold what the user puts there.
_FOLLOWED = frozenset({"types", "argparse", "collections", "enum", "queue", "threading", "weakref"})
_CONSTANT = (
    frozenset({"torch", "jax", "jaxlib", "numpy", "spmd_core", *sys.stdlib_module_names})
    - _FOLLOWED
)
_CALLABLES = (
    types.FunctionType, types.MethodType, functools.partial, type, types.MappingProxyType,
)  # fmt: skip
_PLAIN = (dict, OrderedDict, defaultdict, Counter, types.MappingProxyType, *_SEQUENCES)


@dataclass(frozen=True)
class Named:
    """Some values of a mapping: a module's globals, an object's attributes, a param_group."""

    mapping: Any
    names: tuple[Any, ...]
    values: tuple[Any, ...]


@dataclass(eq=False)
class Reached:
    """What a walk found, by path, such as `model.h.0.p`.

    Attributes:
        values: every value.
        tensors: the tensors on the device, each once.
        grads: the gradients of parameters and of others of these that have or may get one, by the
            path of the tensor; None where there is none.
        trained: the paths of the tensors that require gradients.
        attributed: those of the tensors whose attributes matter: not the state of an optimizer.
        numbers: the numbers of param_groups, each as its mapping and its key there.
        mappings: those whose keys and values must stay.
        sequences: those whose items must stay.
        named: of other mappings, the values that must stay.
        sized: what must keep its length.
        absent: names that mappings must not get; by the id of the mapping.
        cells: the variables of closures.
        functions: the user's.
        objects: those whose class must stay.
        contents: arrays and the like, each with what it contains.
        generators: torch's, each with its state.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, XLAShardedTensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    attributed: list[XLAShardedTensor] = field(default_factory=list)
    numbers: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    mappings: list[dict[Any, Any]] = field(default_factory=list)
    sequences: list[Collection[Any]] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)
    sized: list[Collection[Any]] = field(default_factory=list)
    absent: dict[int, tuple[Any, set[Any]]] = field(default_factory=dict)
    cells: list[types.CellType] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)
    generators: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)

    def number(self, path: str) -> Any:
        """The number of a param_group, as it is at the moment."""
        mapping, key = self.numbers[path]
        return mapping.get(key)

    def has_tensors_of(self, other: "Reached") -> bool:
        """Whether the tensors are those that were reached otherwise, at the same paths."""
        mine, others = self.tensors, other.tensors
        return len(mine) == len(others) and all(
            others.get(path) is tensor for path, tensor in mine.items()
        )


def walk(function: Any, arguments: Sequence[Any] = (), names: Iterable[str] = ()) -> Reached:
    """What a function reaches, from objects among its arguments, too.

    Args:
        function: the function.
        arguments: objects among its arguments.
        names: those of attributes that libraries are known to read.

    Raises:
        CaptureError: it reaches what cannot be seen to be the same: an iterator, a large array, or
            too much.
    """
    names = set(names)
    while True:
        found = _Walk(names)
        found.visit("", function)
        for i, value in enumerate(arguments):
            found.visit(f"argument {i}", value)
        found.finish()
        if found.names == names:
            return found.reached
        names = found.names


def difference(before: Reached, after: Reached, *, but_numbers: bool = False) -> str | None:
    """The first path whose value is another one, with both; None if all are the same.

    Args:
        before: what was reached.
        after: what was reached later.
        but_numbers: whether numbers of param_groups may differ.
    """
    free = before.numbers.keys() & after.numbers.keys() if but_numbers else ()
    for path, value in after.values.items():
        if path in free:
            continue
        old = before.values.get(path, MISSING)
        if old is not value and not _are_equal(old, value):
            return f"{path} is {_text(value)} in place of {_text(old)}"
    gone = next((path for path in before.values if path not in after.values), None)
    if gone is not None:
        return f"{gone} is gone"
    other = next(iter(before.trained ^ after.trained), None)
    if other is not None:
        is_trained = other in after.trained
        return f"{other}.requires_grad is {is_trained} in place of {not is_trained}"
    other = next(iter(before.grads.keys() ^ after.grads.keys()), None)
    return None if other is None else f"{other}.grad is there in one of both"


def written_on_host(before: Reached, after: Reached) -> str | None:
    """Where the first array, tensor of the CPU or generator is that contains something else."""
    return next(
        (
            path.removesuffix(_CONTENTS)
            for path, found in after.values.items()
            if path.endswith(_CONTENTS) and before.values.get(path, found) != found
        ),
        None,
    )


def _are_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, ATOMS) and bool(a == b)


def _text(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)[:60] if isinstance(value, ATOMS) else f"an object of {type(value).__name__}"


class _Walk:
    """One walk, with the names of attributes that the user's functions are known to use."""

    def __init__(self, names: Iterable[str]) -> None:
        self.reached, self.names, self._known = Reached(), set(names), set(names)
        self._seen: set[int] = set()
        self._groups: set[int] = set()
        self._of_optimizers: set[int] = set()  # tensors of their state
        self._forwards: set[type] = set()  # classes whose `forward` is noted
        self._waiting: deque[tuple[str, Any]] = deque()
        self._kept: list[Any] = []  # made by the walk: an id stays one object's

    def finish(self) -> None:
        """Visits what is waiting, and what that leads to."""
        if {"environ", "getenv"} & self._known:
            self._wait([("os.environ", vars(os.environ)["_data"])])
        while self._waiting:
            self.visit(*self._waiting.popleft())

    def visit(self, path: str, value: Any) -> None:
        """Notes a value, and has what it holds visited."""
        values = self.reached.values
        while values.get(path, value) is not value:
            path += "'"  # another variable of this name
        values[path] = value
        if len(values) > MOST_VALUES:
            raise CaptureError(
                f"a captured step compares all that it reaches, at most {MOST_VALUES:,} values; "
                f"got more, the last at {path}. Pass what the step needs as arguments."
            )
        if isinstance(value, type):
            for base in value.__mro__:
                if not _is_library_class(base):
                    self._class(base.__qualname__, base)
            return
        if isinstance(value, ATOMS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, torch.Generator):
            self.reached.generators.append((value, value.get_state()))
        elif contents.has(value):
            self._contents(path, value)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._mapping(path, value)
            self._object(path, value)
        elif isinstance(value, _SEQUENCES):
            self.reached.sequences.append(value)
            self._wait((f"{path}[{i}]", item) for i, item in enumerate(value))
            self._object(path, value)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self._wait([(f"{path}.__self__" if path else "self", value.__self__)])
            self._wait([(f"{path}.__func__", value.__func__)])
        elif isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            self._wait((f"{path}.{name}", part) for name, part in parts.items())
        elif isinstance(value, types.ModuleType):
            if not _is_library_module(value):
                self._some(path, vars(value), sorted(self._known & vars(value).keys()))
        elif isinstance(value, (contextvars.ContextVar, weakref.ReferenceType)):
            read = value if isinstance(value, weakref.ReferenceType) else value.get
            self._some(path, self._view(lambda name: read()), ["()"])
        elif isinstance(value, threading.local):
            self._some(path, self._view(lambda name: getattr(value, name, MISSING)), vars(value))
        elif hasattr(type(value), "__next__"):
            raise CaptureError(
                "a captured step gets what varies as its arguments; got an iterator, of type "
                f"{type(value).__name__}, at {path}. Take the item outside, and pass it."
            )
        else:
            self._object(path, value)

    def _wait(self, items: Iterable[tuple[str, Any]]) -> None:
        self._waiting.extend(items)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        reached = self.reached
        if not isinstance(tensor, XLAShardedTensor):
            self._contents(path, tensor)
            return
        reached.tensors[path] = tensor
        if tensor.requires_grad:
            reached.trained.add(path)
        if tensor.is_leaf:
            grad = tensor.grad
            is_parameter = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
            if is_parameter or grad is not None:
                reached.grads[path] = grad
        if id(tensor) not in self._of_optimizers:
            reached.attributed.append(tensor)
        if attributes := attributes_of(tensor):
            self._some(path, tensor.__dict__, sorted(attributes))
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (hooks := getattr(tensor, name, None)) is not None:
                self._wait([(f"{path}.{name}", hooks)])

    def _contents(self, path: str, value: Any) -> None:
        """Notes what an array and the like contains; the step may write there."""
        found = contents.of(path, value)
        self.reached.contents.append((value, found))
        self.reached.values[path + _CONTENTS] = found

    def _view(self, read: Callable[[str], Any]) -> "_View":
        self._kept.append(view := _View(read))
        return view

    def _mapping(self, path: str, mapping: Any) -> None:
        items = [(f"{path}[{_key(key, i)}]", key) for i, key in enumerate(mapping)]
        if id(mapping) in self._groups:
            for at, key in items:
                if type(mapping[key]) in (int, float):
                    self.reached.numbers[at] = (mapping, key)
            self._some(path, mapping, tuple(mapping), [at for at, _ in items])
            self.reached.sized.append(mapping)
            return
        self.reached.mappings.append(mapping)
        self._wait((at, mapping[key]) for at, key in items)

    def _some(
        self, path: str, mapping: Any, names: Iterable[Any], paths: Iterable[str] | None = None
    ) -> None:
        """Notes some of a mapping's values, by name."""
        names = tuple(names)
        if not names:
            return
        values = tuple(mapping.get(name, MISSING) for name in names)
        self.reached.named.append(Named(mapping, names, values))
        at = paths or [f"{path}.{name}" if path else str(name) for name in names]
        self._wait((p, value) for p, value in zip(at, values) if value is not MISSING)

    def _absent(self, mapping: Any, names: Iterable[Any]) -> None:
        """Notes which of some names a mapping does not have."""
        found = self.reached.absent.setdefault(id(mapping), (mapping, set()))[1]
        found.update(name for name in names if name not in mapping)

    def _function(self, path: str, function: types.FunctionType) -> None:
        if path and _is_library(function):
            self._decorator(path, function)
            return
        used = code_names.names(function.__code__)
        self.names |= used
        self.reached.functions.append(function)
        self._some("", function.__globals__, sorted(used & function.__globals__.keys()))
        self._absent(function.__globals__, used)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self.reached.cells.append(cell)
            if (value := held(cell)) is not MISSING:
                self._wait([(name, value)])
        self._wait([(f"{path}.__defaults__", function.__defaults__)])
        self._wait([(f"{path}.__kwdefaults__", function.__kwdefaults__)])
        attributes, read = vars(function), {*self._known, "__wrapped__"}
        self._some(path, attributes, sorted(read & attributes.keys()))
        self._absent(attributes, read)

    def _decorator(self, path: str, function: types.FunctionType) -> None:
        """What a library made of functions of the user's, such as by `torch.no_grad()`."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        inside = [(name, held(cell)) for name, cell in cells]
        self._wait(
            (f"{path}.{name}", value)
            for name, value in [*vars(function).items(), *inside]
            if isinstance(value, _CALLABLES)
        )

    def _object(self, path: str, value: Any) -> None:
        kind = type(value)
        has_attributes = hasattr(value, "__dict__")
        attributes: dict[str, Any] = vars(value) if has_attributes else {}
        if "__wrapped__" in attributes:
            self._wait([(f"{path}.__wrapped__", attributes["__wrapped__"])])
        root = kind.__module__.partition(".")[0]
        if kind in _PLAIN or (root in _CONSTANT and not isinstance(value, _OWNERS)):
            return
        of_user = not _is_library_class(kind)
        self.reached.objects.append(value)
        self.reached.values[f"{path}.__class__"] = kind
        if isinstance(value, torch.optim.Optimizer):
            self._groups |= {id(group) for group in value.param_groups}
            states = (s.values() for s in value.state.values() if isinstance(s, dict))
            self._of_optimizers |= {
                id(x) for items in states for x in items if isinstance(x, torch.Tensor)
            }
        if isinstance(value, _OWNERS) and id(GLOBAL_HOOKS) not in self._seen:
            self._seen.add(id(GLOBAL_HOOKS))
            self._wait(GLOBAL_HOOKS)
        if isinstance(value, torch.nn.Module):
            for name in ("_parameters", "_buffers", "_modules"):
                part = attributes[name]
                self._seen.add(id(part))
                self.reached.mappings.append(part)
                self._wait((f"{path}.{key}", item) for key, item in part.items())
            self._seen |= {id(attributes[name]) for name in unread(attributes, self._known)}
            self._forward(kind)
        is_named = (
            of_user and not isinstance(value, _OWNERS) and not code_names.DYNAMIC & self._known
        )
        if not has_attributes:
            pass
        elif is_named:
            self._some(path, attributes, sorted(self._known & attributes.keys()))
            self._absent(attributes, self._known)
        else:
            apart = {scalers.STATES} if isinstance(value, torch.amp.GradScaler) else ()
            self._some(path, attributes, [name for name in attributes if name not in apart])
            self.reached.sized.append(attributes)
        if isinstance(value, torch.amp.GradScaler):
            count = self._view(lambda name: scalers.num_states(value))
            self._some(path, count, [f"len({scalers.STATES})"])
        if slots := [name for base in kind.__mro__ for name in _slots(base)]:
            self._some(path, self._view(lambda name: getattr(value, name, MISSING)), slots)
        if of_user:
            self.visit(kind.__qualname__, kind)

    def _forward(self, kind: type) -> None:
        """Notes the method that some libraries replace in the classes of others."""
        for base in kind.__mro__:
            if "forward" in vars(base) and _is_library_class(base) and base not in self._forwards:
                self._forwards.add(base)
                members = vars(base)
                self._kept.append(members)
                self._some(base.__qualname__, members, ["forward"])

    def _class(self, path: str, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        noted = []
        for name, member in vars(kind).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            function = getattr(function, "func", function)
            if isinstance(function, types.FunctionType):
                noted.append(name)
                if function is not member:
                    self._wait([(f"{path}.{name}", function)])
            elif name in self._known and not name.startswith("__"):
                noted.append(name)
        self._some(path, vars(kind), noted)
        members = vars(kind)
        self._kept.append(members)
        self._absent(members, self._known)


class _View:
    """What is read of an object, as a mapping."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def get(self, name: str, default: Any = None) -> Any:
        """What is read by a name."""
        return self._read(name)


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = f"_{kind.__name__.lstrip('_')}"
    return [
        private + name if name.startswith("__") else name
        for name in names
        if not name.endswith("__")
    ]


def held(cell: types.CellType) -> Any:
    """What a variable of a closure holds; `MISSING` before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


def _key(key: Any, position: int) -> str:
    return repr(key) if isinstance(key, (str, int, float, type(None))) else f"#{position}"


def _is_library(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename
    if file[:1] == "<":  # generated, such as by exec
        return (function.__module__ or "").partition(".")[0] in _CONSTANT
    return function.__globals__.get("__name__") != "__main__" and not is_users(file)


def _is_library_module(module: types.ModuleType) -> bool:
    if module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    if file is not None:
        return not is_users(file)
    folders = [*getattr(module, "__path__", ())]
    if folders:  # a package without __init__.py
        return not all(is_users(folder + os.sep) for folder in folders)
    return module.__name__.partition(".")[0] in _CONSTANT | _FOLLOWED


def _is_library_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    if module is None:
        return kind.__module__.partition(".")[0] in _CONSTANT | _FOLLOWED
    return _is_library_module(module)
