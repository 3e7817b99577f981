"""What a function can reach: the Python values and the tensors that its next call may depend on.

A walk begins at the function and follows what the user's code names: closures, defaults, globals,
and attributes of the user's objects. Of modules, optimizers and other libraries' objects it follows
all attributes; the code of libraries is taken as constant. `Guards.hold` is called before each
captured call, so it compares identities, in C where there are many.
"""

import functools
import itertools
import operator
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spmd_core import source_lines
from spmd_core.errors import CaptureError
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, attributes_of

MOST_VALUES = 200_000
_MOST_ARRAY_BYTES = 1 << 20
_MISSING = object()
_SEQUENCES = (list, tuple, set, frozenset, deque)
ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, types.CodeType, np.generic,
    types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
# The classes of torch whose objects are walked.
_OWNERS = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# What objects of other classes of these packages hold does not change what a step computes.
_CONSTANT = frozenset(
    {"torch", "jax", "jaxlib", "numpy", "spmd_core", *sys.stdlib_module_names}
) - {"types", "argparse"}
_INSTALLED = tuple(
    path + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_handle_of = operator.attrgetter("_handle")
_sharding_of = operator.attrgetter("sharding")
_requires_grad: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


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
        grads: the gradients of these, by the path of the tensor; None where there is none.
        numbers: the numbers of param_groups, each as its mapping and its key there.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, XLAShardedTensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    numbers: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    mappings: list[dict[Any, Any]] = field(default_factory=list)
    sequences: list[Collection[Any]] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)
    cells: list[types.CellType] = field(default_factory=list)
    on_host: list[torch.Tensor] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)

    def number(self, path: str) -> Any:
        """The number of a param_group, as it is at the moment."""
        mapping, key = self.numbers[path]
        return mapping.get(key)


def walk(function: Any, arguments: Sequence[Any] = ()) -> Reached:
    """What a function reaches, from objects among its arguments, too.

    Raises:
        CaptureError: it reaches what cannot be seen to be the same: an iterator, a large array, or
            too much.
    """
    names: set[str] = set()
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
        old = before.values.get(path, _MISSING)
        if old is not value and not _are_equal(old, value):
            return f"{path} is {_text(value)} in place of {_text(old)}"
    gone = next((path for path in before.values if path not in after.values), None)
    return None if gone is None else f"{gone} is gone"


def _are_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, ATOMS) and bool(a == b)


def _text(value: Any) -> str:
    if value is _MISSING:
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
        self._waiting: deque[tuple[str, Any]] = deque()
        self._kept: list[Any] = []  # made by the walk: an id stays one object's

    def finish(self) -> None:
        """Visits what is waiting, and what that leads to."""
        while self._waiting:
            self.visit(*self._waiting.popleft())

    def visit(self, path: str, value: Any) -> None:
        """Notes a value, and has what it holds visited."""
        values = self.reached.values
        values[path] = value
        if len(values) > MOST_VALUES:
            raise CaptureError(
                f"a captured step compares all that it reaches, at most {MOST_VALUES:,} values; "
                f"got more, the last at {path}. Pass what the step needs as arguments."
            )
        if isinstance(value, ATOMS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, np.ndarray):
            self._array(path, value)
        elif isinstance(value, dict):
            self._mapping(path, value)
        elif isinstance(value, _SEQUENCES):
            self.reached.sequences.append(value)
            self._wait((f"{path}[{i}]", item) for i, item in enumerate(value))
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
            reached.on_host.append(tensor)
            return
        reached.tensors[path] = tensor
        if tensor.is_leaf and tensor.requires_grad:
            reached.grads[path] = tensor.grad
        if attributes := attributes_of(tensor):
            self._some(path, tensor.__dict__, sorted(attributes))

    def _array(self, path: str, array: np.ndarray) -> None:
        if array.nbytes > _MOST_ARRAY_BYTES or array.dtype.hasobject:
            raise CaptureError(
                "a captured step compares the arrays that it reaches, of numbers and of at most "
                f"{_MOST_ARRAY_BYTES:,} bytes; got one of {array.nbytes:,} bytes, dtype "
                f"{array.dtype}, at {path}. Pass it as an argument, as a tensor."
            )
        self.reached.arrays.append(array)

    def _mapping(self, path: str, mapping: dict[Any, Any]) -> None:
        items = [(f"{path}[{_key(key, i)}]", key) for i, key in enumerate(mapping)]
        if id(mapping) in self._groups:
            for at, key in items:
                if type(mapping[key]) in (int, float):
                    self.reached.numbers[at] = (mapping, key)
            self._some(path, mapping, tuple(mapping), [at for at, _ in items])
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
        values = tuple(mapping.get(name, _MISSING) for name in names)
        self.reached.named.append(Named(mapping, names, values))
        at = paths or [f"{path}.{name}" if path else str(name) for name in names]
        self._wait((p, value) for p, value in zip(at, values) if value is not _MISSING)

    def _function(self, path: str, function: types.FunctionType) -> None:
        if path and _is_library(function):
            return
        used = set(_names(function.__code__))
        self.names |= used
        self._some("", function.__globals__, sorted(used & function.__globals__.keys()))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self.reached.cells.append(cell)
            if (held := _held(cell)) is not _MISSING:
                self._wait([(name, held)])
        self._wait([(f"{path}.__defaults__", function.__defaults__)])
        self._wait([(f"{path}.__kwdefaults__", function.__kwdefaults__)])
        if "__wrapped__" in function.__dict__:
            self._wait([(f"{path}.__wrapped__", function.__dict__["__wrapped__"])])

    def _object(self, path: str, value: Any) -> None:
        kind = type(value)
        root = kind.__module__.partition(".")[0]
        if root in _CONSTANT and not isinstance(value, _OWNERS):
            return
        is_users = not _is_library_class(kind)
        attributes = getattr(value, "__dict__", None) or {}
        if isinstance(value, torch.optim.Optimizer):
            self._groups |= {id(group) for group in value.param_groups}
        if isinstance(value, torch.nn.Module):
            for name in ("_parameters", "_buffers", "_modules"):
                part = attributes[name]
                self._seen.add(id(part))
                self.reached.mappings.append(part)
                self._wait((f"{path}.{key}", item) for key, item in part.items())
        if is_users and not isinstance(value, _OWNERS):
            self._some(path, attributes, sorted(self._known & attributes.keys()))
        else:
            self._some(path, attributes, attributes)
        slots = [n for k in kind.__mro__ for n in _slots(k) if hasattr(value, n)]
        if slots:
            self._kept.append(view := _Slots(value))
            self._some(path, view, slots)
        if is_users:
            for base in kind.__mro__:
                if not _is_library_class(base):
                    self._class(f"{base.__qualname__}", base)

    def _class(self, path: str, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        plain = []
        for name, member in vars(kind).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, types.FunctionType):
                self._wait([(f"{path}.{name}", function)])
            elif name in self._known and not name.startswith("__"):
                plain.append(name)
        self._some(path, vars(kind), plain)


class _Slots:
    """The slots of an object, as a mapping."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._of, name, default)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(n for n in names if not n.startswith("__"))


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _key(key: Any, position: int) -> str:
    return repr(key) if isinstance(key, (str, int, float, type(None))) else f"#{position}"


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def is_users(file: str) -> bool:
    """Whether the code of a file is the user's: no installed package's, and not Python's own."""
    return not source_lines.is_library(file) and not file.startswith(_INSTALLED)


def _is_library(function: types.FunctionType) -> bool:
    return function.__module__ != "__main__" and not is_users(function.__code__.co_filename)


def _is_library_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__name__ != "__main__" and (file is None or not is_users(file))


def _is_library_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return module is None or _is_library_module(module)


class Guards:
    """Whether what a walk found is still the same. Nothing of it is looked at twice.

    Args:
        reached: what a walk found.
        live: paths of numbers of param_groups that may vary.
    """

    def __init__(self, reached: Reached, live: Collection[str] = ()) -> None:
        free = {(id(mapping), key) for path in live for mapping, key in [reached.numbers[path]]}
        self._mappings = reached.mappings
        self._mapping_sizes = [len(m) for m in self._mappings]
        self._mapping_values = [v for m in self._mappings for v in dict.values(m)]
        self._sequences = reached.sequences
        self._sequence_sizes = [len(s) for s in self._sequences]
        self._sequence_values = [v for s in self._sequences for v in s]
        self._named: list[tuple[Any, list[Any], list[Any]]] = []
        by_names: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
        for one in reached.named:
            kept = [
                (n, v) for n, v in zip(one.names, one.values) if (id(one.mapping), n) not in free
            ]
            names = tuple(n for n, _ in kept)
            if type(one.mapping) is dict and len(names) > 1:
                mappings, values = by_names.setdefault(names, ([], []))
                mappings.append(one.mapping)
                values += [v for _, v in kept]
            elif names:
                self._named.append((one.mapping, [*names], [v for _, v in kept]))
        self._by_names = [(operator.itemgetter(*names), *of) for names, of in by_names.items()]
        self._cells = [(cell, _held(cell)) for cell in reached.cells]
        self._on_host = [(t, t._version) for t in reached.on_host]
        self._arrays = [(a, a.tobytes()) for a in reached.arrays]
        self._tensors = list(reached.tensors.values())
        self._handles = [t._handle for t in self._tensors]
        self._storages = [h.storage for h in self._handles]
        self._shardings = [s.sharding for s in self._storages]
        self._requires_grad = [t.requires_grad for t in self._tensors]

    def hold(self) -> bool:
        """Whether all values are where they were. Does not wait."""
        same, chain = operator.is_, itertools.chain.from_iterable
        try:
            return (
                [*map(len, self._mappings)] == self._mapping_sizes
                and all(map(same, chain(map(dict.values, self._mappings)), self._mapping_values))
                and [*map(len, self._sequences)] == self._sequence_sizes
                and all(map(same, chain(self._sequences), self._sequence_values))
                and all(
                    all(map(same, chain(map(get, mappings)), values))
                    for get, mappings, values in self._by_names
                )
                and all(
                    mapping.get(name, _MISSING) is value
                    for mapping, names, values in self._named
                    for name, value in zip(names, values)
                )
                and all(_held(cell) is value for cell, value in self._cells)
                and all(map(same, map(_handle_of, self._tensors), self._handles))
                and all(map(same, map(_sharding_of, self._storages), self._shardings))
                and [*map(_requires_grad, self._tensors)] == self._requires_grad
                and all(t._version == version for t, version in self._on_host)
                and all(array.tobytes() == data for array, data in self._arrays)
            )
        except KeyError:  # a name is gone
            return False
