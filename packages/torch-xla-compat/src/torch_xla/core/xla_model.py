"""The logical device: steps, saving, random state, and the collectives of a world of one replica ("xm")."""

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from jax.experimental import multihost_utils

import spmd_core as spmd
from spmd_core import barrier, debugging, random_state, steps, structures, topology
from spmd_core.tensor import XLAShardedTensor
from torch_xla._upstream import refuse
from torch_xla.core import _replica_groups

XLA_LIB = torch.library.Library("xla", "FRAGMENT")
REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX = (
    "sum",
    "mul",
    "and",
    "or",
    "min",
    "max",
)
_REDUCTIONS = (REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX)

RateTracker = steps.RateTracker


# Devices.


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the device."""
    return tensor.device.type == "xla"


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The one logical device."""
    if n not in (None, 0):
        raise IndexError(f"there is one logical device, with index 0; got {n}. Call xla_device().")
    return spmd.device()


def get_xla_supported_devices(
    devkind: str | None = None, max_devices: int | None = None
) -> list[str]:
    """The logical devices: `["xla:0"]`."""
    return [str(spmd.device())][:max_devices]


def xla_real_devices(devices: Sequence[Any] | None = None) -> list[str]:
    """The first physical device, such as `CPU:0`, for the logical one, which is the default; a physical one for itself.

    All of them are `torch_xla.real_devices()`. RuntimeError for a device that is neither.
    """
    known = spmd.real_devices()
    result = []
    for device in devices or [spmd.device()]:
        name = known[0] if str(device) in ("xla", str(spmd.device())) else str(device)
        if name not in known:
            raise RuntimeError(
                f"a device is xla:0 or one of {', '.join(known)}; got {device}. Pass torch_xla.device()."
            )
        result.append(name)
    return result


def xla_device_hw(device: Any) -> str:
    """The platform of a device: CPU, TPU or CUDA."""
    return spmd.device_type()


def xla_device_kind(device: Any = None) -> str:
    """The hardware's own name, such as `TPU v4`."""
    return str(spmd.device_attributes()[0]["kind"])


def xla_replication_devices(local_devices: Sequence[Any]) -> list[str]:
    """The devices of all replicas: there is one."""
    return xla_real_devices(local_devices)


def set_replication(device: Any, devices: Sequence[Any] | None) -> None:
    """Nothing: there is one replica."""


def get_ordinal() -> int:
    """The replica's number: 0."""
    return 0


def get_local_ordinal() -> int:
    """The replica's number on this host: 0."""
    return 0


def xrt_world_size() -> int:
    """Number of replicas: 1."""
    return 1


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this process is the one that writes: the first, of this host or (`local=False`) of all."""
    return topology.is_master(local=local)


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """`print` in the master process only, to `fd`; None is the standard output of the time of the call."""
    if is_master_ordinal(local=local):
        print(*args, file=fd, flush=flush)


def get_memory_info(device: Any = None) -> dict[str, int]:
    """`bytes_used`, `bytes_limit` and `peak_bytes_used` of a device."""
    return topology.memory_info(
        None if device is None or torch.device(device) == spmd.device() else device
    )


# Steps.


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Ends a step: `torch_xla.sync`."""
    spmd.sync(wait=wait or os.environ.get("XLA_SYNC_WAIT", "0") == "1")


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """Waits until the devices have done what was sent to them."""
    steps.wait_device_ops()


def unlazy(tensors: Any) -> None:
    """Computes the tensors now."""
    steps.unlazy(tensors)


def add_step_closure(
    closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False
) -> None:
    """`spmd_core.add_step_closure`."""
    steps.add_step_closure(closure, args, run_async)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """`optimizer.step(**optimizer_args)`; with `barrier` the step ends. There is one replica, so no gradients are reduced."""
    _world_of_one(groups)
    return steps.optimizer_step(optimizer, barrier=barrier, optimizer_args=optimizer_args)


def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: Any = None, pin_layout: bool = True
) -> None:
    """Nothing: gradients of the one logical replica are whole already."""
    _world_of_one(groups)


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """`spmd_core.optimization_barrier_`."""
    barrier.optimization_barrier_(tensors)


# Data.


def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> Any:
    """The same structure on the device, its tuples as lists, sharded where a ShardingSpec can apply, else replicated. Does not wait.

    Raises:
        RuntimeError: `minibatch` of a batch that does not divide by the devices of this host.
    """
    _check_minibatch(datas, input_sharding)
    return _lists(structures.map_tensors(datas, lambda t: _sent(t, input_sharding)))


def _check_minibatch(datas: Any, input_sharding: Any) -> None:
    """RuntimeError where a ShardingSpec with `minibatch` applies to a tensor whose rows do not divide by the devices of this host."""
    if input_sharding is None or not input_sharding.minibatch:
        return
    local = topology.addressable_runtime_device_count()
    for tensor in _tensors(datas):
        if tensor.dim() and tensor.shape[0] % local and input_sharding.can_apply(tensor):
            raise RuntimeError(
                "When minibatch is configured, the per-host batch size must be divisible by local runtime device count. "
                f"Per host input data shape is {tuple(tensor.shape)}, for {local} devices. Use another batch size."
            )


def _sent(t: torch.Tensor, input_sharding: Any) -> torch.Tensor:
    moved = t.to(spmd.device())
    if input_sharding is not None and input_sharding.can_apply(moved):
        spmd.start_upload(spmd.apply_sharding(moved, input_sharding))
    return _replicated(moved)


def _replicated(t: torch.Tensor) -> torch.Tensor:
    """The tensor, marked as replicated where it has no mark. It goes up when it is used, as a program may mark it before."""
    if isinstance(t, XLAShardedTensor) and t.sharding is None and spmd.is_spmd():
        spmd.mark_sharding(t, spmd.get_1d_mesh(), ())
    return t


def _tensors(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    structures.map_tensors(data, note)
    return found


def _lists(data: Any) -> Any:
    """Upstream gives tuples back as lists."""
    if type(data) in (list, tuple):
        return [_lists(part) for part in data]
    return {key: _lists(part) for key, part in data.items()} if type(data) is dict else data


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    return structures.to_cpu(data) if convert else data


def save(
    data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False
) -> None:
    """`torch.save` with device tensors on the CPU; every process must call it.

    Args:
        data: any nested structure.
        file_or_path: as `torch.save` takes it.
        master_only: one process writes; else each does.
        global_master: with `master_only`: one of all hosts, and not one of each host.
    """
    if master_only and not global_master and topology.process_count() > 1:
        whole = structures.to_cpu(data)
        if is_master_ordinal(local=True):
            torch.save(whole, file_or_path)
        rendezvous("torch_xla.core.xla_model.save")
        return
    structures.save(data, file_or_path, master_only=master_only)


def get_stablehlo(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """The StableHLO of the program that would compute the tensors, or all that is pending."""
    return debugging.stablehlo(*(tensors or ()))


def get_stablehlo_bytecode(tensors: Sequence[torch.Tensor] | None = None) -> bytes:
    """Refused: the text is what tools here read."""
    refuse(
        "get_stablehlo_bytecode",
        "returns StableHLO in PyTorch/XLA's byte form",
        "Use get_stablehlo, and stablehlo-translate where bytes are needed.",
    )


# Random state.


def set_rng_state(seed: int, device: Any = None) -> None:
    """Sets the random state to a number that `get_rng_state` gave, or to a seed."""
    random_state.set_rng_state(seed)


def get_rng_state(device: Any = None) -> int:
    """The random state as a number. Restoring it gives the same numbers again."""
    return random_state.as_seed()


def fork_rng(device: Any = None, enabled: bool = True) -> AbstractContextManager[None]:
    """Inside, randomness may be used without a trace outside."""
    return random_state.fork_rng(enabled=enabled)


# The collectives of replicas: in SPMD mode there is one, whose values are whole.


def _world_of_one(groups: Any) -> None:
    if groups and any(list(group) != [0] for group in groups):
        raise ValueError(
            f"groups name replicas, and in SPMD mode there is one, number 0; got {groups}. Leave groups out, or enter a manual region first."
        )


def _reduction(reduce_type: str) -> None:
    if reduce_type not in _REDUCTIONS:
        raise ValueError(
            f"a reduction is one of {', '.join(_REDUCTIONS)}; got {reduce_type!r}. Use one of the constants REDUCE_*."
        )


def all_reduce(
    reduce_type: str, inputs: Any, scale: float = 1.0, groups: Any = None, pin_layout: bool = True
) -> Any:
    """The value over all replicas, of which there is one: a copy times `scale`; a list is scaled in place.

    In a manual region the replicas are its devices, and `groups` are their numbers: so with all collectives here.
    """
    _reduction(reduce_type)
    region = _replica_groups.region(inputs)
    if region is not None:
        return _replica_groups.all_reduce(region, reduce_type, inputs, scale, groups)
    if not isinstance(inputs, torch.Tensor) and any(
        _replica_groups.region(tensor) is not None for tensor in inputs
    ):
        for tensor in inputs:
            tensor.copy_(all_reduce(reduce_type, tensor, scale, groups))
        return None
    _world_of_one(groups)
    if isinstance(inputs, torch.Tensor):
        return inputs * scale if scale != 1.0 else inputs.clone()
    if scale != 1.0:
        for tensor in inputs:
            tensor.mul_(scale)
    return None


def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: Any = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """The values of all replicas, joined: the value."""
    region = _replica_groups.region(value)
    if region is not None:
        gathered = _replica_groups.all_gather(region, value, dim, groups)
        return gathered if output is None else output.copy_(gathered)
    _world_of_one(groups)
    return value if output is None else output.copy_(value)


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Any = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """The replica's part of the sum over all: the value times `scale`. ValueError for more parts than replicas."""
    _reduction(reduce_type)
    region = _replica_groups.region(input)
    if region is not None:
        part = _replica_groups.reduce_scatter(
            region, reduce_type, input, scale, scatter_dim, shard_count, groups
        )
        return part if output is None else output.copy_(part)
    _world_of_one(groups)
    if shard_count != 1:
        raise ValueError(
            f"there is one replica in SPMD mode; got shard_count={shard_count}. Use spmd_core.shard_map and reduce_scatter along a mesh axis."
        )
    result = input * scale
    return result if output is None else output.copy_(result)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """What the replicas exchange: the value. ValueError for more parts than replicas."""
    region = _replica_groups.region(value)
    if region is not None:
        return _replica_groups.all_to_all(
            region, value, split_dimension, concat_dimension, split_count, groups
        )
    _world_of_one(groups)
    if split_count != 1:
        raise ValueError(
            f"there is one replica in SPMD mode; got split_count={split_count}. Use spmd_core.shard_map and all_to_all along a mesh axis."
        )
    return value


def collective_permute(value: torch.Tensor, pairs: Iterable[tuple[int, int]]) -> torch.Tensor:
    """What another replica has: the value for the pair (0, 0), zeros without it."""
    given = [tuple(pair) for pair in pairs]
    if any(pair != (0, 0) for pair in given):
        raise ValueError(
            f"there is one replica in SPMD mode, number 0; got {given}. Use spmd_core.shard_map and collective_permute along a mesh axis."
        )
    return value.clone() if given else torch.zeros_like(value)


def collective_broadcast(
    tensors: Sequence[torch.Tensor],
    root_ordinal: int = 0,
    groups: Any = None,
    pin_layout: bool = True,
) -> None:
    """Gives all replicas the root's values: nothing to do."""
    _world_of_one(groups)
    if root_ordinal != 0:
        raise ValueError(
            f"there is one replica in SPMD mode, number 0; got root_ordinal={root_ordinal}. Leave it out."
        )


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Gives all replicas the first one's parameters: nothing to do."""


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Waits for the processes of all hosts; returns their payloads, by process."""
    if topology.process_count() == 1:
        return [payload]
    lengths = multihost_utils.process_allgather(np.array([len(payload)]))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    every = multihost_utils.process_allgather(padded)
    return [
        bytes(row[: int(n)]) for row, n in zip(every.reshape(len(lengths), -1), lengths.reshape(-1))
    ]


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """`reduce_fn` of the values that the processes of all hosts have (pickled on the way, so of your own processes only)."""
    if topology.process_count() == 1:
        return reduce_fn([structures.to_cpu(data)])
    return reduce_fn(
        [pickle.loads(one) for one in rendezvous(tag, pickle.dumps(structures.to_cpu(data)))]
    )


def do_on_ordinals(
    target: Callable[..., Any], data: Any = (), ordinals: Sequence[int] = (0,)
) -> Any:
    """Runs `target(*data)` where the replica is one of `ordinals`."""
    return target(*data) if 0 in ordinals else None


def check_view_sharing(obj: Any) -> None:
    """Nothing: views share storage here in every case."""


def _get_all_reduce_token() -> None:
    refuse(
        "xm._get_all_reduce_token",
        "orders collectives between replicas",
        "The compiler orders those of one program.",
    )
