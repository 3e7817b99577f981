"""The recorded graph: interned specs and entries, and values that are pending or computed.

A `Spec` is torch's metadata of a tensor: shape, strides, dtype. An `Entry` is one operation with
all static arguments fixed: two recordings of the same call share one entry, so a graph's key is
little more than a list of entries. A `Value` is the result of one recorded operation: pending while
`data` is None, and a leaf of later graphs once it holds data. Nothing here calls a torch kernel or
a device.
"""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core import source_lines
from spmd_core.config import config
from spmd_core.graph.placement import Placement
from spmd_core.graph.recorders import Recorder
from spmd_core.ops.kernels.traits import COMPUTED, Traits
from spmd_core.sharding.sharding import Border, Sharding

# Interned specs.
# Guarded by: the graph lock while recording; elsewhere a race makes a second object, which costs an
# entry and a compile.
# Cleared by: never, a cache.
_specs: "weakref.WeakValueDictionary[tuple[Any, ...], Spec]" = weakref.WeakValueDictionary()
# The next position in the order of recording.
# Guarded by: the GIL. Cleared by: never: only the order counts.
_serial = itertools.count()

# Set while any thread recomputes a forward in a backward: (node, operands) -> the operands for the
# node; the same object for a node of another thread. Set by `recording.recomputation`.
# Guarded by: the graph lock. Cleared by: the end of the last such forward.
recomputation: "Callable[[Value, Sequence[Value]], Sequence[Value]] | None" = None


def _packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class Spec:
    """Shape, strides (in elements) and dtype of a tensor; interned, so equality is identity.

    The offset of a view in its storage is not part of the spec: an operation on `x[0]` and the same
    operation on `x[1]` share one entry.
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
        """The contiguous spec of this shape and dtype, which all device data has."""
        return self._packed or self

    @property
    def num_elements(self) -> int:
        return self.size.numel()

    @property
    def num_bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Indices:
    """The indices that an operation accepts in one of its inputs, by the rule of eager torch.

    Attributes:
        input: the position among the operation's inputs.
        low: the lowest index.
        high: the highest index.
        skip: an index outside of these that means none, such as a loss's `ignore_index`.
    """

    input: int
    low: int
    high: int
    skip: int | None = None

    def __str__(self) -> str:
        apart = "" if self.skip is None else f", or {self.skip} for none"
        return f"{self.low} to {self.high}{apart}" if self.high >= self.low else "no index"


class Entry:
    """One operation with its static arguments: what a node of the graph computes.

    An entry is for inputs of fixed specs.

    Attributes:
        name: the operation's name, such as `aten::add.Tensor`.
        kernel: `kernel(ctx, inputs, numbers)` returns a list of arrays, one per element of `outs`.
        outs: the specs of the results.
        spec: the first of `outs`.
        structure: how torch expects the results: None for a single tensor, else a tuple of indices
            into `outs`, or None where torch's result is None.
        as_list: whether torch expects the structure as a list instead of a tuple.
        number_kinds: the types of the scalar inputs: Python numbers that are inputs of the program.
        random: whether the operation draws random numbers.
        sharding: the mark, if the operation is one.
        along: the mesh axes that the mark is about; None for all. The others are left to the
            partitioner.
        summed_over: if the operation marks a partial sum, the mesh axes over which it is to be
            reduced, the major one first; for the gradient of a leaf, those that split the batch,
            empty where they are not known. Else None.
        border: the entry to, or the exit from, a manual region, if the operation is one.
        block_axes: of an operation on local tensors whose kernel takes blocks along other axes too:
            for each dim of its inputs and results the names of those that split it.
        arguments: the arguments of torch's call by name: a `Spec` for a tensor, a type for a number
            that is an input of the program, else the value itself. None if the operation is not one
            of torch's.
        view_write: for a view, the operation that writes a changed view back into its base.
        key: what the entry was made from: entries of equal keys do the same. None if it was not
            kept.
        accepted: where eager torch may refuse a number by its value, those that it is known to
            accept, and their classes (`recording.cpu_kernels.number_class`); None where it
            accepts all.
        indices: what the operation accepts in those of its inputs that are indices.
        traits: what passes need to know of the operation.
        replaces: of an operation that was recorded in place, for each result the position among the
            inputs of the value that it replaces; empty for any other.
        dims: which dims of its inputs are which dims of its results; set by `program.dim_rules`.
        form: the key without its integers, as a number, and these; set by `program.growing_sizes`.
        subgraphs: what the operation runs, if it is a loop or a branch (`graph.subgraphs`).
    """

    subgraphs: tuple[Any, ...] = ()  # their module imports this one
    __slots__ = (
        "accepted",
        "along",
        "arguments",
        "as_list",
        "block_axes",
        "border",
        "dims",
        "form",
        "indices",
        "kernel",
        "key",
        "name",
        "number_kinds",
        "outs",
        "random",
        "replaces",
        "sharding",
        "spec",
        "structure",
        "summed_over",
        "traits",
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
        sharding: Sharding | None = None,
        along: tuple[int, ...] | None = None,
        summed_over: tuple[int, ...] | None = None,
        border: Border | None = None,
        block_axes: tuple[tuple[str, ...], ...] = (),
        arguments: Mapping[str, Any] | None = None,
        indices: tuple[Indices, ...] = (),
        traits: Traits = COMPUTED,
        replaces: tuple[int, ...] = (),
    ) -> None:
        self.name, self.kernel, self.outs, self.structure, self.as_list = (
            name,
            kernel,
            outs,
            structure,
            as_list,
        )
        self.number_kinds, self.random, self.sharding = number_kinds, random, sharding
        self.along, self.summed_over = along, summed_over
        self.spec = outs[0]
        self.border, self.block_axes = border, block_axes
        self.arguments = arguments
        self.indices, self.traits, self.replaces = indices, traits, replaces
        self.view_write: Entry | None = None
        self.key: Any = None
        self.dims: Any = None
        self.form: tuple[int, tuple[int, ...]] | None = None
        self.accepted: set[tuple[Any, ...]] | None = None

    def __repr__(self) -> str:
        return f"{self.name} -> {', '.join(map(repr, self.outs))}"


class Value:
    """The result of one recorded operation, pending or computed.

    An operation with several results is one Value, and each of its results is a `OpResult`.

    Attributes:
        spec: the spec of the (first) result.
        serial: the position in the order of recording; set for recorded operations only.
        entry: the operation, while the value is pending.
        inputs: the operands, while the value is pending; then `()`, so that their memory is freed.
        numbers: the scalar inputs, while the value is pending; then `()`.
        data: None while the value is pending; else a `jax.Array`, or a CPU tensor that is not
            uploaded yet.
        placement: where `data` lies; set together with it.
        owner: a weak reference to the storage whose value this is or was. While the storage still
            has this value, no program may take over its buffer. None without a storage.
        origin: the line of the user's program; only there if `config.record_source_lines` was on,
            so read it with `origin_of`.
        line: the same as `file:line`; only there if the operation reads or writes at indices that
            programs check, so read it with `line_of`.
        checked: of a computed value, how many programs with such checks were started before it was
            complete, and the thread that started its own (`program.index_checks`); only there if
            any were.
    """

    __slots__ = (
        "checked",
        "data",
        "entry",
        "inputs",
        "line",
        "numbers",
        "origin",
        "owner",
        "placement",
        "serial",
        "spec",
    )
    parent: "Value | None" = None
    line: str
    checked: tuple[int, Recorder]
    inputs: "Sequence[Value]"
    numbers: Sequence[Any]
    placement: Placement
    owner: "weakref.ref[Any] | None"  # to a `Storage`, whose module imports this one

    def __init__(self, entry: Entry, inputs: "Sequence[Value]", numbers: Sequence[Any]) -> None:
        self.entry, self.inputs, self.numbers = entry, inputs, numbers
        self.spec = entry.spec
        self.data: Any = None
        if recomputation is not None:
            self.inputs = recomputation(self, inputs)
        self.serial = next(_serial)
        if config.record_source_lines:
            origin = source_lines.origin()
            if origin is not None and self.inputs is not inputs:
                origin = origin._replace(phase=source_lines.Phase.RECOMPUTATION)
            self.origin = origin
        if entry.indices and config.check_indices:
            self.line = source_lines.user_line()

    def settle(self, data: Any, placement: Placement, owner: "weakref.ref[Any] | None") -> None:
        """Turns a pending value into a leaf."""
        self.data, self.placement, self.owner = data, placement, owner
        self.entry, self.inputs, self.numbers = None, (), ()  # type: ignore[assignment]

    @staticmethod
    def leaf(
        spec: Spec, data: Any, placement: Placement, owner: "weakref.ref[Any] | None"
    ) -> "Value":
        """A computed value over existing data."""
        value: Value = Value.__new__(Value)
        value.spec = spec
        value.settle(data, placement, owner)
        if config.record_source_lines:
            value.origin = source_lines.origin()
        return value

    def __repr__(self) -> str:
        return f"{self.spec!r} {'leaf' if self.data is not None else self.entry.name}"


class OpResult(Value):
    """One result of an operation with several results.

    Attributes:
        parent: the operation; None once this result is computed.
        index: the position among the operation's results.
    """

    __slots__ = ("index", "parent")

    def __init__(self, parent: Value, index: int) -> None:
        self.parent, self.index = parent, index
        self.spec = parent.entry.outs[index]
        self.data = None

    def settle(self, data: Any, placement: Placement, owner: "weakref.ref[Any] | None") -> None:
        """Turns a pending result into a leaf; the operation's other results stay as they are."""
        super().settle(data, placement, owner)
        self.parent = None

    def __repr__(self) -> str:
        if self.parent is None:
            return f"{self.spec!r} leaf"
        return f"{self.spec!r} result {self.index} of {self.parent.entry.name}"


def take_serial() -> int:
    """A serial that no operation has, below those of all later operations."""
    return next(_serial)


def origin_of(value: Value) -> source_lines.Origin | None:
    """The line of the user's program that a value comes from; None if it was not recorded."""
    return getattr(value if value.parent is None else value.parent, "origin", None)


def line_of(value: Value) -> str:
    """`file:line` of the user's program, or a note that it is not known."""
    return getattr(value, "line", "a line that was not recorded")
