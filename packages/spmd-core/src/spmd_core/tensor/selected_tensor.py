"""`SelectedTensor`: the elements that a boolean mask selects, before their number is read.

How many elements a mask selects depends on the data. Until the number is needed, the selected
elements are represented by a tensor of all elements, of which those at True count. torch's C++
holds the number as a `SymInt`, which is read from the device when C++ compares it with another one,
or needs its value.

A class of its own has its own `__torch_dispatch__`, so other tensors pay nothing for it. Autograd
works on it as it is.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core.graph.storage import Handle, read
from spmd_core.graph.values import Value
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap, wrap_alias

_new = torch.Tensor._make_wrapper_subclass
# How many pairs of pending operations are compared before two masks count as different.
_MOST_COMPARED = 64


class SymNode:
    """A number as a node of torch's `SymInt`, `SymFloat` and `SymBool`.

    torch's C++ calls these methods by name.
    """

    def __init__(self, number: int | float | bool) -> None:
        self._number = number

    def value(self) -> Any:
        """The number; waits for the device if it is not known yet."""
        return self._number

    def bounds(self) -> tuple[Any, Any]:
        """The least and the greatest value that it may have. Does not wait."""
        return self._number, self._number

    def is_int(self) -> bool:
        return not self.is_bool() and not self.is_float()

    def is_bool(self) -> bool:
        return isinstance(self._number, bool)

    def is_float(self) -> bool:
        return isinstance(self._number, float)

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        """False, so that C++ skips comparisons that only save work.

        By one of these, `x[mask] = values` drops leading dims of one element from the values.
        """
        return False

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def wrap_int(self, number: int) -> "SymNode":
        return SymNode(number)

    def wrap_float(self, number: float) -> "SymNode":
        return SymNode(number)

    def wrap_bool(self, number: bool) -> "SymNode":
        return SymNode(number)

    def clone(self) -> "SymNode":
        return self

    def _guard(self, file: str = "", line: int = 0) -> Any:
        return self.value()

    guard_int = guard_bool = guard_size_oblivious = guard_or_false = guard_or_true = _guard
    guard_float = statically_known_true = expect_true = expect_size = _guard

    def int_(self) -> int:
        return int(self.value())

    def bool_(self) -> bool:
        return bool(self.value())

    @property
    def hint(self) -> Any:
        return self.value()

    def str(self) -> str:
        return str(self.value())

    _graph_repr = str

    def is_same(self, other: "SymNode") -> bool:
        """Whether the two are the same number by construction. Does not wait."""
        return self is other

    def eq(self, other: "SymNode") -> "SymNode":
        if self.is_same(other):
            return SymNode(True)
        (low, high), (least, most) = self.bounds(), other.bounds()
        if high < least or most < low:
            return SymNode(False)
        return Unknown(lambda: self.value() == other.value())

    def ne(self, other: "SymNode") -> "SymNode":
        return self.eq(other).sym_not()

    def lt(self, other: "SymNode") -> "SymNode":
        if self.is_same(other):
            return SymNode(False)
        (low, high), (least, most) = self.bounds(), other.bounds()
        if high < least or low >= most:
            return SymNode(high < least)
        return Unknown(lambda: self.value() < other.value())

    def gt(self, other: "SymNode") -> "SymNode":
        return other.lt(self)

    def le(self, other: "SymNode") -> "SymNode":
        return other.lt(self).sym_not()

    def ge(self, other: "SymNode") -> "SymNode":
        return self.lt(other).sym_not()

    def sym_not(self) -> "SymNode":
        return SymNode(not self._number)


class Unknown(SymNode):
    """A bool that depends on a mask. If C++ has code for both cases, it need not be known."""

    def __init__(self, compute: Callable[[], bool]) -> None:
        self._compute = compute

    def value(self) -> bool:
        return self._compute()

    def is_bool(self) -> bool:
        return True

    def is_float(self) -> bool:
        return False

    def statically_known_true(self, file: str = "", line: int = 0) -> bool:
        return False

    def sym_not(self) -> SymNode:
        return Unknown(lambda: not self._compute())

    def guard_or_false(self, file: str = "", line: int = 0) -> bool:
        return False

    def guard_or_true(self, file: str = "", line: int = 0) -> bool:
        return True


def _computed(function: Callable[..., Any]) -> Any:
    def method(self: SymNode, *others: SymNode) -> SymNode:
        return SymNode(function(self.value(), *(other.value() for other in others)))

    return method


for _name, _function in {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "int_floordiv": operator.floordiv,
    "pow_by_natural": operator.pow,
    "neg": operator.neg,
    "sym_and": lambda a, b: a and b,
    "sym_or": lambda a, b: a or b,
    "truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "sym_float": float,
    "sym_min": min,
    "sym_max": max,
}.items():
    setattr(SymNode, _name, _computed(_function))  # type: ignore[arg-type]


class Count(SymNode):
    """How many elements a mask selects.

    Attributes:
        mask: a copy of the mask at the time of the selection, on the device.
        read_mask: returns the mask on the host, and waits for it. Set by `dispatch.selections`.
    """

    read_mask: Callable[[XLAShardedTensor], torch.Tensor]

    def __init__(self, mask: XLAShardedTensor) -> None:
        self._given = read(mask._handle)
        self.mask: XLAShardedTensor = torch.ops.aten.clone.default(mask)
        self._on_host: torch.Tensor | None = None

    @property
    def on_host(self) -> torch.Tensor:
        """The mask on the host; waits for it at the first call."""
        if self._on_host is None:
            self._on_host = Count.read_mask(self.mask)
        return self._on_host

    def value(self) -> int:
        return int(self.on_host.sum())

    def is_bool(self) -> bool:
        return False

    def is_float(self) -> bool:
        return False

    def bounds(self) -> tuple[int, int]:
        return (0, self.mask.numel()) if self._on_host is None else (self.value(), self.value())

    def is_same(self, other: SymNode) -> bool:
        return isinstance(other, Count) and self.is_of(other._given)

    def is_of(self, mask: Value) -> bool:
        """Whether this is the number of elements that a mask with this value selects.

        So it is if the mask is the same value, or was computed by the same operations.
        """
        return _are_same(self._given, mask)


def _are_same(a: Value, b: Value) -> bool:
    """Whether two values are identical, or computed from identical ones by the same operations."""
    pairs, num_compared = [(a, b)], 0
    while pairs:
        a, b = pairs.pop()
        num_compared += 1
        if a is b or _are_equal_on_host(a.data, b.data):
            continue
        if (
            num_compared > _MOST_COMPARED
            or not a.__class__ is b.__class__ is Value
            or a.data is not None
            or b.data is not None
            or a.entry is not b.entry
            or a.entry.random
            or len(a.inputs) != len(b.inputs)
            or repr(a.numbers) != repr(b.numbers)
        ):
            return False
        pairs.extend(zip(a.inputs, b.inputs))
    return True


def _are_equal_on_host(a: Any, b: Any) -> bool:
    """Whether both are equal data that is not uploaded yet, such as a CPU mask used twice."""
    return a.__class__ is b.__class__ is torch.Tensor and a.dtype is b.dtype and torch.equal(a, b)


class Selection:
    """A mask's selection from a tensor.

    Attributes:
        full: all elements, of which those at True count: (dims before the mask, dims of the mask,
            dims after it). Replaced by a write. None once the size was read.
        count: how many elements the mask selects.
        place: the number of dims before the mask.
        dense: the selected elements alone: (dims before, count, dims after). None until the size is
            read.
        select: makes `dense` from the others. Set by `dispatch.selections`.
    """

    __slots__ = ("count", "dense", "full", "place")
    select: Callable[["Selection"], XLAShardedTensor]

    def __init__(self, full: XLAShardedTensor, count: Count, place: int) -> None:
        self.full: XLAShardedTensor | None = full
        self.count, self.place = count, place
        self.dense: XLAShardedTensor | None = None

    @property
    def num_behind(self) -> int:
        """The number of dims after the mask."""
        assert self.full is not None
        return self.full.dim() - self.place - self.count.mask.dim()

    def like(self, full: XLAShardedTensor) -> "Selection":
        """The same mask's selection from another tensor."""
        return Selection(full, self.count, self.place)

    def look(self) -> XLAShardedTensor:
        """The selected elements alone. Waits for the mask at the first call."""
        if self.dense is None:
            self.dense = Selection.select(self)
            self.full = None
        return self.dense


class SelectedTensor(XLAShardedTensor):
    """The elements that a boolean mask selects from a tensor, as `x[mask]` returns them.

    Elementwise operations, and writes at the same mask, do not need the size. All other operations
    read the mask, and wait.
    """

    _selection: Selection

    @staticmethod
    def over(selection: Selection) -> "SelectedTensor":
        """A new tensor; those over one selection share its elements."""
        full = selection.full
        assert full is not None
        place, behind = selection.place, full.dim() - selection.num_behind
        size: list[Any] = [*full.shape]
        size[place:behind] = [torch.SymInt(selection.count)]
        # By position: class, size, strides, offset, memory format, dtype, layout, device,
        # pin_memory, requires_grad, who tells sizes and strides, who tells device and layout, keys,
        # bytes of the storage.
        tensor: SelectedTensor = _new(
            SelectedTensor,
            size,
            [1] * len(size),
            0,
            None,
            full.dtype,
            torch.strided,
            XLA_DEVICE,
            False,
            False,
            "sizes",
            False,
            False,
            None,
            0,
        )
        tensor._selection = selection
        return tensor

    @property
    def _handle(self) -> Handle:
        return self._selection.look()._handle

    @_handle.setter
    def _handle(self, handle: Handle) -> None:
        dense = wrap(handle)
        self._selection = Selection(dense, self._selection.count, 0)
        self._selection.dense, self._selection.full = dense, None

    def plain(self) -> XLAShardedTensor:
        """A tensor of known size over the same elements. Waits for the mask at the first call."""
        return wrap_alias(self._handle)

    # torch's own implementations would return the SymInt.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The size. Waits for the mask at the first call."""
        return self._handle.spec.size

    def size(self, dim: int | None = None) -> Any:
        """The size, or that of one dim. Waits for the mask at the first call."""
        return self.shape if dim is None else self.plain().size(dim)


def concrete(tree: Any) -> Any:
    """An argument with numbers in place of SymInts. Waits for their masks."""
    if isinstance(tree, torch.SymInt):
        return int(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(concrete, tree))
    return tree


def counted(sizes: Sequence[Any]) -> tuple[int, Count] | None:
    """The dim whose size is the count of a mask, and the count; None unless it is one dim."""
    found = [
        (dim, size.node)
        for dim, size in enumerate(sizes)
        if isinstance(size, torch.SymInt) and isinstance(size.node, Count)
    ]
    return found[0] if len(found) == 1 else None
