"""The recorded program: immutable specs, interned operation entries, and values that are either pending or computed.

A `Spec` is what torch says of a tensor (shape, strides, dtype). An `Entry` is one operation with every static argument fixed, so two
recordings of the same call share one entry and a graph's key is little more than a list of entries. A `Value` is the result of one
recording: pending while `data` is None, and a leaf of later graphs once it holds data. No torch kernel and no device is touched here.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core import source_lines
from spmd_core.config import config

_specs: "weakref.WeakValueDictionary[tuple[Any, ...], Spec]" = weakref.WeakValueDictionary()
_serial = itertools.count()


def _packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class Spec:
    """Shape, strides (in elements) and dtype of a tensor; interned, so equality is identity.

    Where a view begins in its storage is not part of it: what is computed from `x[0]` and from `x[1]` is the same operation.
    """

    __slots__ = ("__weakref__", "_packed", "dtype", "shape", "size", "strides")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.shape, self.strides, self.dtype = shape, strides, dtype
        self.size = torch.Size(shape)
        packed = _packed_strides(shape)
        self._packed = None if packed == strides else Spec.of(shape, packed, dtype)

    @staticmethod
    def of(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> "Spec":
        key = (shape, strides, dtype)
        found = _specs.get(key)
        if found is None:
            found = _specs.setdefault(key, Spec(*key))
        return found

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> "Spec":
        return Spec.of(tuple(shape), _packed_strides(shape), dtype)

    @staticmethod
    def from_tensor(t: torch.Tensor) -> "Spec":
        return Spec.of(tuple(t.shape), tuple(t.stride()), t.dtype)

    @property
    def logical(self) -> "Spec":
        """The contiguous spec of this shape and dtype: what the data on the devices has, whatever strides the tensor shows."""
        return self._packed or self

    @property
    def num_elements(self) -> int:
        return self.size.numel()

    @property
    def num_bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Entry:
    """One operation with its static arguments: what a node of the graph computes, for inputs of fixed specs.

    `kernel(ctx, inputs, numbers)` returns a list of arrays, one per element of `outs`; `structure` says how torch wants the results:
    None for a single tensor, else a tuple whose elements are indices into `outs` or None (and `as_list` for a Python list).
    """

    __slots__ = (
        "as_list",
        "border",
        "kernel",
        "name",
        "number_kinds",
        "outs",
        "random",
        "sharding",
        "spec",
        "structure",
        "view_write",
    )

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Any],
        outs: tuple[Spec, ...],
        *,
        structure: tuple[int | None, ...] | None = None,
        as_list: bool = False,
        number_kinds: tuple[type, ...] = (),
        random: bool = False,
        sharding: Any = None,
        border: Any = None,
    ) -> None:
        self.name, self.kernel, self.outs, self.structure, self.as_list = (
            name,
            kernel,
            outs,
            structure,
            as_list,
        )
        self.number_kinds, self.random, self.sharding = number_kinds, random, sharding
        self.spec = outs[0]
        self.border = (
            border  # of a manual region, where the operation crosses it (`regions.Border`)
        )
        # For a view: the operation that puts a written view back into its base.
        self.view_write: Entry | None = None

    def __repr__(self) -> str:
        return f"{self.name} -> {', '.join(map(repr, self.outs))}"


class Value:
    """The result of one recording. Pending: `entry`, `inputs` and `numbers` say how to compute it. Computed: `data` holds a device array or
    host data, and the rest is dropped so that memory is freed. An operation with several results is one Value, and each result a `Part`.
    `origin` is there only where `config.record_source_lines` was on: `origin_of` reads it."""

    __slots__ = (
        "data",
        "entry",
        "inputs",
        "numbers",
        "origin",
        "owner",
        "placement",
        "serial",
        "spec",
    )
    parent: "Value | None" = None

    def __init__(self, entry: Entry, inputs: Any, numbers: Any) -> None:
        self.entry, self.inputs, self.numbers = entry, inputs, numbers
        self.spec = entry.spec
        self.data: Any = None
        self.serial = next(_serial)
        if config.record_source_lines:
            self.origin = source_lines.origin()

    def settle(self, data: Any, placement: Any, owner: Any) -> None:
        """Turns a pending value into a leaf."""
        self.data, self.placement, self.owner = data, placement, owner
        self.entry, self.inputs, self.numbers = None, (), ()  # type: ignore[assignment]

    @staticmethod
    def leaf(spec: Spec, data: Any, placement: Any, owner: Any) -> "Value":
        """A value over data that is already there."""
        value: Value = Value.__new__(Value)
        value.spec = spec
        value.settle(data, placement, owner)
        if config.record_source_lines:
            value.origin = source_lines.origin()
        return value

    def __repr__(self) -> str:
        return f"{self.spec!r} {'leaf' if self.data is not None else self.entry.name}"


class Part(Value):
    """One result of an operation with several."""

    __slots__ = ("index", "parent")

    def __init__(self, parent: Value, index: int) -> None:
        self.parent, self.index = parent, index
        self.spec = parent.entry.outs[index]
        self.data = None

    def settle(self, data: Any, placement: Any, owner: Any) -> None:
        """Turns a pending result into a leaf; its siblings stay as they are."""
        super().settle(data, placement, owner)
        self.parent = None

    def __repr__(self) -> str:
        return f"{self.spec!r} {'leaf' if self.data is not None else f'part {self.index} of {self.parent.entry.name}'}"  # type: ignore[union-attr]


def origin_of(value: Value) -> source_lines.Origin | None:
    """Where a value comes from, as far as it was recorded."""
    return getattr(value if value.parent is None else value.parent, "origin", None)
