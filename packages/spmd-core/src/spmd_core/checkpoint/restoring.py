"""Restoring a state: what goes where, everything that does not fit at once, then block by block.

Nothing changes before all of the state has been compared with what was saved, and all that is to be
read was read once: what comes into tensors that have no values yet is kept, and the rest is read
again, as there is no memory for values before and after.
"""

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd_core import dtypes
from spmd_core.checkpoint.entries import Entry
from spmd_core.checkpoint.store import Reader, damaged
from spmd_core.errors import CheckpointError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.program import leaves
from spmd_core.steps.weight_saving import identity
from spmd_core.tensor import shards
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.tensor.shards import Part

# Blocks of one tensor in host memory, before they go to the devices.
_HOST_BYTES = 256 << 20

Node = Mapping[str, Any]


@dataclass
class _Fill:
    """A tensor that gets values.

    Attributes:
        tensor: the tensor.
        names: of the array that it gets; for each of its rows, if they come from several.
        is_stacked: whether it has rows from several arrays.
        whole: of a view, a tensor that gets them first.
        value: what was read for it.
        is_filled: whether a tensor in host memory has its values.
    """

    tensor: torch.Tensor
    names: dict[int, str]
    is_stacked: bool
    whole: torch.Tensor | None = None
    value: Value | None = None
    is_filled: bool = False


@dataclass
class Restoration:
    """What a restore does, and what keeps it from being done.

    Attributes:
        reader: of the step.
        convert: whether values may be converted to the dtypes of the tensors here.
        missing: what the state has and the checkpoint lacks, by name.
        extra: what the checkpoint has and the state lacks, by name.
        problems: sentences about what does not fit.
        afterwards: called in this order when all tensors have their values.
    """

    reader: Reader
    convert: bool
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    afterwards: list[Callable[[], object]] = field(default_factory=list)
    _fills: dict[Any, _Fill] = field(default_factory=dict)
    _new: dict[int, torch.Tensor] = field(default_factory=dict)

    def fits(self, path: str, node: Node, entry: Entry) -> bool:
        """Whether a tensor can have an array's values; notes why not."""
        shape, dtype = tuple(node["shape"]), getattr(torch, node["dtype"])
        before = len(self.problems)
        if entry.tensor.is_meta:
            self.problems.append(f"without memory, on device meta: {path}; call to_empty() first")
        if shape != entry.shape:
            self.problems.append(f"another shape: {path}, {list(shape)} for {list(entry.shape)}")
        elif dtype != entry.tensor.dtype:
            if not dtypes.converts(dtype, entry.tensor.dtype):
                self.problems.append(f"another dtype: {path}, {dtype} for {entry.tensor.dtype}")
            elif not self.convert:
                self.problems.append(
                    f"another dtype: {path}, {dtype} for {entry.tensor.dtype}; pass convert=True"
                )
        return before == len(self.problems)

    def fill(self, path: str, node: Node, entry: Entry) -> None:
        """Has a tensor, or a row of one, get an array's values, if they fit."""
        if not self.fits(path, node, entry):
            return
        key = identity(entry.tensor), tuple(entry.tensor.shape)
        is_stacked = entry.row is not None
        known = self._fills.setdefault(key, _Fill(entry.tensor, {}, is_stacked))
        other = known.names.setdefault(entry.row or 0, node["name"])
        if other != node["name"] or known.is_stacked != is_stacked:
            self.problems.append(f"one tensor here, different ones there: {path} and {other}")

    def leave_partly(self) -> None:
        """Leaves stacked tensors of which not all rows are there as they are."""
        for key, fill in [*self._fills.items()]:
            if fill.is_stacked and len(fill.names) < len(fill.tensor):
                del self._fills[key]

    def new(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        like: torch.Tensor | None = None,
        on_device: bool = False,
    ) -> torch.Tensor:
        """A tensor without values yet, which nobody sees before `run`.

        Args:
            shape: its shape.
            dtype: its dtype.
            like: gives it its device, and its sharding if it has the same shape.
            on_device: without `like`, whether it is on device xla, replicated, and not on the CPU.
        """
        device = (XLA_DEVICE if on_device else torch.device("cpu")) if like is None else like.device
        made = torch.empty(tuple(shape), dtype=dtype, device=device)
        if isinstance(like, XLAShardedTensor) and tuple(like.shape) == tuple(shape):
            assert isinstance(made, XLAShardedTensor)
            leaves.set_sharding(made._handle.storage, like.sharding)
        self._new[id(made)] = made
        return made

    def read(self, *, check: bool) -> None:
        """Reads all that can be held: what comes into tensors that have no values yet.

        They get it by `run`, and no tensor of the state changes here.

        Args:
            check: whether what comes into other tensors is read, too, and not kept.

        Raises:
            CheckpointError: an array cannot be read, or a chunk's checksum is another.
        """
        for fill in self._fills.values():
            tensor = fill.tensor
            if isinstance(tensor, XLAShardedTensor) and not isinstance(tensor._handle, Storage):
                fill.whole = self.new(tensor.shape, tensor.dtype, like=tensor)
            target = tensor if fill.whole is None else fill.whole
            if isinstance(target, XLAShardedTensor):
                assert isinstance(target._handle, Storage)
                if target._handle.value.data is None:
                    fill.value = self._value(fill, target._handle)
                    continue
            elif id(target) in self._new:
                self._fill(fill, [(_all(target), target)])
                fill.is_filled = True
                continue
            if check:
                for name, parts in _by_name(fill, _needed(target)):
                    self.reader.check(name, parts)

    def run(self) -> None:
        """Gives all tensors their values, then calls `afterwards`. Waits for the transfers.

        Raises:
            CheckpointError: an array cannot be read; tensors before it have their values.
        """
        for fill in self._fills.values():
            self._run(fill)
        for action in self.afterwards:
            action()

    def _run(self, fill: _Fill) -> None:
        target = fill.tensor if fill.whole is None else fill.whole
        if isinstance(target, XLAShardedTensor):
            assert isinstance(target._handle, Storage)
            value = fill.value or self._value(fill, target._handle)
            fill.value = None
            is_replaced = target._handle.value.data is not None
            with lock:
                target._handle.write(value)
            if is_replaced:
                # jaxlib gives back what arrays used of numpy's memory when Python collects.
                gc.collect(0)
        elif not fill.is_filled:
            with torch.no_grad():
                self._fill(fill, [(_all(target), target.detach())])
        if fill.whole is not None:
            with torch.no_grad():
                fill.tensor.copy_(fill.whole)
            fill.whole = None
        elif not fill.tensor.is_inference():
            torch.autograd.graph.increment_version(fill.tensor)

    def _value(self, fill: _Fill, storage: Storage) -> Value:
        return shards.filled(storage, functools.partial(self._fill, fill), host_bytes=_HOST_BYTES)

    def _fill(self, fill: _Fill, parts: Sequence[Part]) -> None:
        for name, of in _by_name(fill, parts):
            self.reader.fill(name, of)

    def check_arrays(self, nodes: Sequence[Node]) -> None:
        """Raises CheckpointError for an array on the disk that is not what the state says of it."""
        self.reader.open(node["name"] for node in nodes)
        for node in nodes:
            check_array(self.reader, node)

    def refuse(self, *, strict: bool) -> None:
        """Raises CheckpointError with all that keeps the state from being restored."""
        told = [*self.problems]
        if strict:
            told += [f"missing: {name}" for name in self.missing]
            told += [f"extra: {name}" for name in self.extra]
        if told:
            raise CheckpointError(
                f"a state is restored from one of the same parts and tensors; got {len(told)} "
                f"differences from step {self.reader.folder.name} in {self.reader.folder.parent}, "
                "and changed nothing:\n  "
                + "\n  ".join(told)
                + "\nBuild the state that was saved"
                + (", or pass strict=False for missing and extra ones." if strict else ".")
            )


def check_array(reader: Reader, node: Node) -> None:
    """Raises CheckpointError for an array on the disk that is not what the state says of it."""
    array = reader.array(node["name"])
    dtype = dtypes.to_torch(array.dtype)
    if array.shape != tuple(node["shape"]) or dtype != getattr(torch, node["dtype"]):
        raise damaged(
            reader.folder,
            f"{node['name']} is {dtype}{list(array.shape)} there, and not "
            f"{node['dtype']}{node['shape']}",
        )


def _all(tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in tensor.shape)


def _needed(tensor: torch.Tensor) -> list[Part]:
    """The blocks of a tensor that this process has, as tensors on device meta."""
    blocks = [_all(tensor)]
    if isinstance(tensor, XLAShardedTensor) and isinstance(tensor._handle, Storage):
        blocks = shards.local_blocks(tensor._handle)
    return [
        (index, torch.empty([s.stop - s.start for s in index], device="meta")) for index in blocks
    ]


def _by_name(fill: _Fill, parts: Sequence[Part]) -> Iterator[tuple[str, Sequence[Part]]]:
    """The arrays that a tensor gets, and where each of them goes."""
    if not fill.is_stacked:
        yield fill.names[0], parts
        return
    for row, name in fill.names.items():
        yield (
            name,
            [
                (index[1:], into[row - index[0].start])
                for index, into in parts
                if index[0].start <= row < index[0].stop
            ],
        )
