"""Global tensors from the host data of several processes (`minibatch=True`)."""

import functools
import itertools
import threading
from collections.abc import Sequence

import torch

from spmd_core import dtypes
from spmd_core.arguments import require_kind
from spmd_core.errors import DataError, DeviceMismatchError
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Spec
from spmd_core.program.leaves import marked_placement
from spmd_core.recording.layouts import require_dense
from spmd_core.runtime import agreement, buffers, devices, processes
from spmd_core.sharding.mesh import Mesh, check_devices
from spmd_core.sharding.partition_spec import PartitionSpecLike, ShardingSpec
from spmd_core.sharding.process_parts import ProcessPart, process_part
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap

_MAX_AGREED = 4096
_END = "the end"
_LEFT = "none, as it has left the loop"


class Stream:
    """Data that all processes provide in the same order, such as the batches of one loop.

    Threads may provide several streams at once, in any order relative to each other.

    Args:
        topic: names it; equal in all processes, and of no other stream.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        # For each group of processes: the descriptions, and those on which it has agreed. Not
        # reused for another stream: if one process gives up its wait, another may have got the
        # result.
        self._series: dict[tuple[int, ...], agreement.Series] = {}
        self._agreed: set[tuple[tuple[int, ...], str]] = set()
        self._lock = threading.Lock()
        self._is_abandoned = False

    @classmethod
    def of_loop(cls) -> "Stream":
        """The next loop's stream. All processes begin the loops that compare in the same order."""
        return cls(f"data of loop {next(_loops)}")

    def abandon(self) -> None:
        """Ends a wait for other processes: the data is not wanted any more. Does not wait."""
        self._is_abandoned = True
        for series in [*self._series.values()]:
            series.close(_LEFT)

    def compare(self, texts: list[str], group: tuple[int, ...]) -> None:
        """Compares descriptions of data, unless they are known.

        A process that knows them does not wait, and answers if another one compares.

        Raises:
            DataError: the processes have different ones.
            ProcessError: a process did not reach this comparison.
            Abandoned: the stream was abandoned.
        """
        text = "\n".join(texts)
        # Held while waiting, so that of two threads with the same new data the second finds it
        # known.
        with self._lock:
            series = self._series.get(group)
            if series is None:
                series = self._series[group] = agreement.Series(self._topic, group)
            series.add(text)
            if (group, text) in self._agreed:
                return
            different = series.disagreement(is_wanted=lambda: not self._is_abandoned)
            if different:
                raise _different(different, f"number {series.count} of the {self._topic}")
            if len(self._agreed) >= _MAX_AGREED:
                self._agreed.clear()
            self._agreed.add((group, text))

    def end(self) -> None:
        """Checks that the data ends here in all processes that it was compared with.

        Raises:
            DataError, ProcessError, Abandoned: see `compare`.
        """
        for group in [*self._series]:
            self.compare([_END], group)


# How many loops over loaders have begun.
# Guarded by: nothing, as one thread begins loops. Cleared by: never: all processes count alike.
_loops = itertools.count(1)
# What the processes have compared of the data of calls.
# Guarded by: its own lock. Cleared by: never, a cache.
CALLS = Stream("data")
"""What the program gives by calls, in its own order."""


def from_process_local(t: torch.Tensor, spec: ShardingSpec) -> XLAShardedTensor:
    """The global tensor of which each process gives its part, as `spec` shards it.

    A process's part consists of the blocks that its devices hold, joined along each dim in the
    order of their numbers. So its size in a split dim is the whole size if every process holds all
    blocks of the dim, and otherwise `size / tiles * blocks`. Processes that hold the same blocks
    must give equal data: their shapes are compared, their values are not. The data goes to this
    process's devices directly; the uploads start now. Does not wait, except that the processes of
    the mesh compare the dtype and the global shape of data that they have not had before. So all
    must call this function in the same order.

    Args:
        t: this process's part, of any shape and dtype, on the CPU.
        spec: how the global tensor is sharded; of one process, `t` is all of it.

    Returns:
        The global tensor, marked.

    Raises:
        TypeError: `t` is no tensor, or `spec` no ShardingSpec.
        UnsupportedOpError: `t` is not dense.
        DataError: a part does not divide into the blocks that the process holds, the processes'
            data do not fit together, or `t` requires grad.
        DeviceMismatchError: `t` is not on the CPU.
        MeshError: this process has no device in the mesh, or its blocks form no tensor.
        ProcessError: another process did not call this within `config.process_timeout_s`.

    Example:
        >>> from spmd_core import Mesh
        >>> spec = ShardingSpec(Mesh(range(8), (8,), ("data",)), ("data",), minibatch=True)
        >>> from_process_local(torch.zeros(16, 4), spec).shape
        torch.Size([16, 4])
    """
    require_kind("t", t, torch.Tensor, write="a tensor, such as torch.as_tensor(data)")
    write = "ShardingSpec(mesh, partition_spec, minibatch=True)"
    require_kind("spec", spec, ShardingSpec, write=write)
    require_dense(t, "a process's part of a tensor")
    check_alike([("the tensor", t, spec)])
    return global_tensor(t, spec)


def check_alike(
    data: Sequence[tuple[str, torch.Tensor, ShardingSpec]], stream: Stream = CALLS
) -> None:
    """Checks that all processes are about to give parts of the same global tensors.

    Communicates only about data whose dtypes, shapes and shardings it has not seen before; then the
    other processes of the mesh call this, too, or answer what they had at this position. Parts that
    do not divide into blocks are compared, too, so that all processes find the same error.

    Args:
        data: the name, the process's part and the spec of each tensor, such as those of a batch.
        stream: the stream that the data belongs to.

    Raises:
        DataError, DeviceMismatchError, MeshError, ProcessError: see `from_process_local`.
        Abandoned: the stream was abandoned.
    """
    texts, group = [], set()
    for name, t, spec in data:
        part, sharding = _part(t, spec)
        sizes = ", ".join(map(str, part.scaled_shape(tuple(t.shape))))
        texts.append(
            f"{name} {str(t.dtype).removeprefix('torch.')}[{sizes}] as {sharding.partition_spec}"
        )
        group.add(part.processes)
    if devices.num_processes() == 1 or not texts:
        return
    if len(group) > 1:
        raise DataError(
            "the tensors of one batch must lie on the devices of the same processes; got meshes "
            f"over {' and '.join(map(str, sorted(group)))}. Use one mesh for them."
        )
    stream.compare(texts, next(iter(group)))


def _different(different: dict[int, str], where: str) -> DataError:
    by_text: dict[str, list[int]] = {}
    for process, text in different.items():
        by_text.setdefault(text, []).append(process)
    lines = {process: text.split("\n") for process, text in different.items()}
    # Parts that are equal everywhere are left out.
    common = set.intersection(*map(set, lines.values()))
    said = [
        f"process {', '.join(map(str, sorted(who)))}: "
        + ("; ".join(x for x in lines[who[0]] if x not in common) or "fewer tensors")
        for _, who in sorted(by_text.items(), key=lambda item: min(item[1]))
    ]
    if not {_END, _LEFT}.isdisjoint(different.values()):
        rule = "and ends where the others end"
        advice = (
            "Give each process equally many batches: ShardedSampler and shard_dataset cut a "
            "dataset so."
        )
    else:
        rule = "so that their dtypes and global shapes must be equal"
        advice = (
            "Give each process equally many rows for each of its blocks, in the same structure."
        )
    return DataError(
        f"with minibatch=True each process gives its part of the same tensors, {rule}; "
        f"at {where}, got from {'; from '.join(said)}. {advice}"
    )


def global_tensor(t: torch.Tensor, spec: ShardingSpec) -> XLAShardedTensor:
    """`from_process_local`, where the processes have agreed already (`check_alike`)."""
    part, sharding = _part(t, spec)
    shape = part.global_shape(tuple(t.shape))
    placement = marked_placement(sharding)
    array = buffers.from_process_part(
        t.resolve_conj().resolve_neg(),
        placement.device_sharding,
        sharding.padded_shape(shape),
        part,
    )
    storage = Storage.of_leaf(Spec.contiguous(shape, t.dtype), array, placement)
    storage.sharding = sharding
    return wrap(storage)


def _part(t: torch.Tensor, spec: ShardingSpec) -> tuple[ProcessPart, Sharding]:
    devices.require_spmd("minibatch=True")
    if t.device.type != "cpu":
        raise DeviceMismatchError(
            "a process's part of a tensor comes from its host's memory; "
            f"got a tensor on {t.device}. Pass the CPU tensor, without .to('xla')."
        )
    if t.requires_grad:
        raise DataError(
            "a process's part of a tensor is data, through which no gradient goes back; got a "
            "tensor that requires grad. Pass t.detach()."
        )
    dtypes.to_jax(t.dtype)
    sharding = Sharding.of(spec.mesh, spec.partition_spec, t.dim())
    return _part_of(sharding), sharding


def part_of(mesh: Mesh, partition_spec: PartitionSpecLike) -> ProcessPart:
    """The part that this process holds of tensors with as many dims as the spec has entries.

    See `process_part` for its errors.
    """
    return _part_of(Sharding.of(mesh, partition_spec, len(partition_spec)))


@functools.lru_cache(maxsize=1024)
def _part_of(sharding: Sharding) -> ProcessPart:
    check_devices(sharding.mesh, devices.global_runtime_device_count())
    process_of = [devices.process_of(i) for i in range(devices.global_runtime_device_count())]
    return process_part(sharding, process_of, processes.process_index())


devices.on_exchange.append(_part_of.cache_clear)
