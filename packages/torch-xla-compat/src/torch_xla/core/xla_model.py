"""torch_xla.core.xla_model ("xm"): the logical device, steps, saving, random state, processes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

import spmd_core as spmd
from spmd_core import debugging, releases
from spmd_core.arguments import checked, require_callable, require_int, require_kind
from spmd_core.marks import marking
from spmd_core.modules import barrier
from spmd_core.runtime import processes
from spmd_core.steps import closures, loop, structures
from spmd_core.tensor.logical_device import as_device
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.torch_backend import random_state
from torch_xla import _exchanged
from torch_xla._environment import is_set
from torch_xla._upstream import refuse, refused
from torch_xla.core._collectives import REDUCE_AND as REDUCE_AND
from torch_xla.core._collectives import REDUCE_MAX as REDUCE_MAX
from torch_xla.core._collectives import REDUCE_MIN as REDUCE_MIN
from torch_xla.core._collectives import REDUCE_MUL as REDUCE_MUL
from torch_xla.core._collectives import REDUCE_OR as REDUCE_OR
from torch_xla.core._collectives import REDUCE_SUM as REDUCE_SUM
from torch_xla.core._collectives import all_gather as all_gather
from torch_xla.core._collectives import all_reduce as all_reduce
from torch_xla.core._collectives import all_to_all as all_to_all
from torch_xla.core._collectives import broadcast_master_param as broadcast_master_param
from torch_xla.core._collectives import check_world_of_one, require_tensors
from torch_xla.core._collectives import collective_broadcast as collective_broadcast
from torch_xla.core._collectives import collective_permute as collective_permute
from torch_xla.core._collectives import reduce_scatter as reduce_scatter
from torch_xla.core._devices import physical_names, require_logical

_multihost_utils = releases.jax_module("jax.experimental.multihost_utils", "process_allgather")

XLA_LIB = torch.library.Library("xla", "FRAGMENT")
_PLATFORMS = ("TPU", "CPU", "GPU", "CUDA", "ROCM", "NEURON", "XLA_CPU", "XLA_GPU")

RateTracker = loop.RateTracker


# Devices.


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the device. TypeError for what is no tensor."""
    require_kind("tensor", tensor, torch.Tensor, write="a tensor")
    return tensor.device.type == "xla"


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The one logical device, `xla:0`. IndexError for any other index."""
    _check_platform(devkind)
    if n not in (None, 0):
        raise IndexError(f"there is one logical device, with index 0; got {n}. Call xla_device().")
    return spmd.device()


@checked(max_devices=0)
def get_xla_supported_devices(
    devkind: str | None = None, max_devices: int | None = None
) -> list[str]:
    """The logical devices: `["xla:0"]`.

    Raises:
        ValueError: `devkind` is no platform, or `max_devices` is negative.
    """
    _check_platform(devkind)
    return [str(spmd.device())][:max_devices]


def _check_platform(devkind: str | None) -> None:
    if devkind is not None and devkind not in _PLATFORMS:
        raise ValueError(
            f"devkind is one of {', '.join(_PLATFORMS)}; got {devkind!r}. "
            "Leave it out for the platform of this process."
        )


def xla_real_devices(devices: Sequence[Any] | None = None) -> list[str]:
    """Names the physical device of each given device; the default is the logical device.

    The logical device gives the first physical one, such as `CPU:0`; a physical device gives
    itself. `torch_xla.real_devices()` has all of them.

    Raises:
        TypeError: `devices` is no list.
        RuntimeError: a device is neither the logical device nor a physical one.
    """
    return physical_names([] if devices is None else devices) or physical_names([spmd.device()])


def xla_device_hw(device: Any) -> str:
    """The platform of a device: CPU, TPU or CUDA. RuntimeError for an unknown device."""
    physical_names([device])
    return spmd.distributed.device_type()


def xla_device_kind(device: Any = None) -> str:
    """The vendor's name of the hardware, such as `TPU v4`. RuntimeError for an unknown device."""
    physical_names([spmd.device() if device is None else device])
    return str(spmd.distributed.device_attributes()[0]["kind"])


def xla_replication_devices(local_devices: Sequence[Any]) -> list[str]:
    """The devices of all replicas: there is one."""
    return xla_real_devices(local_devices)


def set_replication(device: Any, devices: Sequence[Any] | None) -> None:
    """Does nothing: there is one replica. RuntimeError for an unknown device."""
    physical_names([device])
    physical_names([] if devices is None else devices)


def get_ordinal() -> int:
    """Index of the replica: 0."""
    return 0


def get_local_ordinal() -> int:
    """Index of the replica on this host: 0."""
    return 0


def xrt_world_size() -> int:
    """Number of replicas: 1."""
    return 1


@checked()
def is_master_ordinal(local: bool = True) -> bool:
    """Whether this process is the first of this host, or with `local=False` of all hosts.

    The first process is the one that writes files.
    """
    return processes.is_master(local=local)


@checked()
def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """`print` in the master process only, to `fd`; None is `sys.stdout` at the time of the call.

    Raises:
        TypeError: `fd` is no file.
    """
    if fd is not None and not hasattr(fd, "write"):
        raise TypeError(
            f"fd is an open file; got {fd!r}, of type {type(fd).__name__}. Write fd=sys.stderr."
        )
    if is_master_ordinal(local=local):
        print(*args, file=fd, flush=flush)


def get_memory_info(device: Any = None) -> dict[str, int]:
    """`bytes_used`, `bytes_limit` and `peak_bytes_used` of a device, in bytes.

    ValueError for an unknown device.
    """
    found = processes.memory_stats(device)
    return {
        "bytes_used": found["bytes_in_use"],
        "bytes_limit": found["bytes_limit"],
        "peak_bytes_used": found["peak_bytes_in_use"],
    }


# Steps.


@checked()
def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Ends a step: `torch_xla.sync`."""
    spmd.sync(wait=wait or is_set("XLA_SYNC_WAIT"))


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """Waits until the devices have finished every program that was started.

    RuntimeError for an unknown device.
    """
    physical_names(devices)
    loop.wait_device_ops()


def unlazy(tensors: Any) -> None:
    """Computes the tensors now, and waits for them. TypeError for what can hold no tensors."""
    if not dataclasses.is_dataclass(tensors):
        kinds = (torch.Tensor, list, tuple, Mapping, set, frozenset)
        require_kind("tensors", tensors, *kinds, write="the tensors in a list")
    loop.unlazy(tensors)


@checked()
def add_step_closure(
    closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False
) -> None:
    """`spmd_core.add_step_closure`."""
    closures.add_step_closure(closure, args, run_async)


@checked()
def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """`optimizer.step(**optimizer_args)`; with `barrier`, also ends the step.

    There is one replica, so gradients are not reduced.
    """
    check_world_of_one(groups)
    return loop.optimizer_step(optimizer, barrier=barrier, optimizer_args=optimizer_args)


@checked()
def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: Any = None, pin_layout: bool = True
) -> None:
    """Does nothing: there is one logical replica, so gradients are already complete."""
    require_kind("optimizer", optimizer, torch.optim.Optimizer, write="a torch.optim.Optimizer")
    check_world_of_one(groups)


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Operations that read the tensors afterwards run after all of them are computed."""
    barrier.optimization_barrier_(tensors)


# Data.


def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> Any:
    """Moves a nested structure of tensors to the device; tuples become lists. Does not wait.

    A tensor is sharded if `input_sharding` can apply to it, else replicated.

    Raises:
        TypeError: `device` is no device, `input_sharding` no ShardingSpec, or `datas` an iterator.
        RuntimeError: `device` is not the logical device; or with `minibatch`, the batch size is not
            divisible by the number of devices of this host.
    """
    as_device("device", device)  # which None is not, here
    require_logical(device)
    structures.refuse_iterator("datas", datas)
    if input_sharding is not None:
        write = "ShardingSpec(mesh, partition_spec)"
        require_kind("input_sharding", input_sharding, spmd.ShardingSpec, write=write)
    _check_minibatch(datas, input_sharding)
    return _lists(structures.map_tensors(datas, lambda t: _sent(t, input_sharding)))


def _check_minibatch(datas: Any, input_sharding: Any) -> None:
    """Checks, for a ShardingSpec with `minibatch`, that the local devices divide the batch size.

    Raises:
        RuntimeError: they do not divide the rows of a tensor to which the spec applies.
    """
    if input_sharding is None or not input_sharding.minibatch:
        return
    local = processes.addressable_runtime_device_count()
    for tensor in _tensors(datas):
        if tensor.dim() and tensor.shape[0] % local and input_sharding.can_apply(tensor):
            raise RuntimeError(
                "When minibatch is configured, the per-host batch size must be divisible by local "
                "runtime device count. "
                f"Per host input data shape is {tuple(tensor.shape)}, for {local} devices. "
                "Use another batch size."
            )


def _sent(t: torch.Tensor, input_sharding: Any) -> torch.Tensor:
    moved = t.to(spmd.device())
    if input_sharding is not None and input_sharding.can_apply(moved):
        # Under several processes, with `minibatch`, another tensor: the global one.
        moved = marking.start_upload(spmd.mark_sharding(moved, input_sharding))
    return _replicated(moved)


def _replicated(t: torch.Tensor) -> torch.Tensor:
    """Marks a tensor without a sharding as replicated, and returns it.

    Its upload waits until the tensor is used, because the program may mark it before that.
    """
    if isinstance(t, XLAShardedTensor) and t.sharding is None and spmd.is_spmd():
        spmd.mark_sharding(t, processes.get_1d_mesh(), ())
    return t


def _tensors(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    structures.map_tensors(data, note)
    return found


def _lists(data: Any) -> Any:
    """Turns tuples into lists, as upstream does."""
    if type(data) in (list, tuple):
        return [_lists(part) for part in data]
    return {key: _lists(part) for key, part in data.items()} if type(data) is dict else data


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    return structures.to_cpu(data) if convert else data


@checked()
def save(
    data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False
) -> None:
    """`torch.save` with device tensors moved to the CPU; every process must call it.

    Args:
        data: any nested structure.
        file_or_path: as for `torch.save`.
        master_only: whether one process writes rather than each.
        global_master: with `master_only`, whether one process of all hosts writes rather than one
            of each host.

    Raises:
        TypeError: `file_or_path` is neither, or the data holds what has no pickle.
    """
    structures.require_target("file_or_path", file_or_path)
    if master_only and not global_master and processes.process_count() > 1:
        whole = structures.to_cpu(data)
        if is_master_ordinal(local=True):
            structures.write(whole, file_or_path)
        rendezvous("torch_xla.core.xla_model.save")
        return
    structures.save(data, file_or_path, master_only=master_only)


def get_stablehlo(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """StableHLO of the program that would compute the tensors; by default all that is pending."""
    if tensors is not None:
        require_tensors("tensors", tensors)
    return debugging.stablehlo(*(tensors or ()))


def get_stablehlo_bytecode(tensors: Sequence[torch.Tensor] | None = None) -> bytes:
    """Refused with NotImplementedError: tools here read StableHLO as text."""
    refuse(
        "get_stablehlo_bytecode",
        "returns StableHLO in PyTorch/XLA's byte form",
        "Use get_stablehlo, and stablehlo-translate where bytes are needed.",
    )


# Random state.


def set_rng_state(seed: int, device: Any = None) -> None:
    """Sets the random state to a number that `get_rng_state` gave, or to a seed.

    Here and below, RuntimeError for another device than the logical one.
    """
    require_logical(device)
    random_state.set_rng_state(seed)


def get_rng_state(device: Any = None) -> int:
    """The random state as a number. Restoring it repeats the random numbers drawn since."""
    require_logical(device)
    return random_state.as_seed()


@checked()
def fork_rng(device: Any = None, enabled: bool = True) -> AbstractContextManager[None]:
    """Context that restores the random state on exit."""
    require_logical(device)
    return random_state.fork_rng(enabled=enabled)


# Replicas, of which SPMD mode has one, and processes.


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Waits for the processes of all hosts; returns their payloads, in the order of processes.

    Raises:
        TypeError: the payload is not bytes.
        ValueError: `replicas` leaves out a process, or has another number.
    """
    require_kind("payload", payload, bytes, write="for instance payload=b'ready'")
    require_kind("replicas", replicas, list, tuple, range, write="replicas=()")
    if len(replicas) and set(replicas) != set(range(processes.process_count())):
        raise ValueError(
            f"replicas are all {processes.process_count()} processes, numbered from 0; got "
            f"{list(replicas)}. Leave replicas out."
        )
    if processes.process_count() == 1:
        return [payload]
    lengths = _multihost_utils.process_allgather(np.array([len(payload)]))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    gathered = _multihost_utils.process_allgather(padded)
    return [
        bytes(row[: int(n)])
        for row, n in zip(gathered.reshape(len(lengths), -1), lengths.reshape(-1))
    ]


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """Applies `reduce_fn` to the list of the values of all processes of all hosts.

    Args:
        tag: has no effect.
        data: numbers, texts, bytes, tensors, numpy arrays, None, and lists, tuples and dicts of
            these, which is what processes exchange.
        reduce_fn: of the list of all values, in the order of processes; tensors are on the CPU.

    Raises:
        TypeError: the data holds something else.
    """
    require_callable("reduce_fn", reduce_fn)
    host = structures.to_cpu(data)
    payload = _exchanged.to_bytes(host)  # of one process too: what others refuse is refused there
    if processes.process_count() == 1:
        return reduce_fn([host])
    return reduce_fn([_exchanged.from_bytes(one) for one in rendezvous(tag, payload)])


def do_on_ordinals(
    target: Callable[..., Any], data: Any = (), ordinals: Sequence[int] = (0,)
) -> Any:
    """Runs `target(*data)` if replica 0, the only one, is in `ordinals`; else returns None."""
    require_callable("target", target)
    require_kind("data", data, list, tuple, write="the arguments of target in a tuple")
    require_kind("ordinals", ordinals, list, tuple, range, set, frozenset, write="ordinals=(0,)")
    runs = any(require_int("ordinals", ordinal) == 0 for ordinal in ordinals)
    return target(*data) if runs else None


def check_view_sharing(obj: Any) -> None:
    """Does nothing: views always share storage here."""


_BETWEEN_REPLICAS = "moves tensors between replicas, and in SPMD mode there is one"
_INSTEAD = "Use spmd_core.shard_map and its collectives along a mesh axis."
send = refused("xm.send", _BETWEEN_REPLICAS, _INSTEAD)
recv = refused("xm.recv", _BETWEEN_REPLICAS, _INSTEAD)
all_gather_bucketized = refused("xm.all_gather_bucketized", _BETWEEN_REPLICAS, _INSTEAD)
reduce_scatter_bucketized = refused("xm.reduce_scatter_bucketized", _BETWEEN_REPLICAS, _INSTEAD)
all_reduce_bucketized_gradients = refused(
    "xm.all_reduce_bucketized_gradients",
    _BETWEEN_REPLICAS,
    "Leave it out: the gradients of a loss over the whole batch are whole.",
)


def _get_all_reduce_token() -> None:
    refuse(
        "xm._get_all_reduce_token",
        "orders collectives between replicas",
        "The compiler orders those of one program.",
    )
