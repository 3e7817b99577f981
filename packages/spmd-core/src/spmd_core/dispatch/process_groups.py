"""Collectives of `torch.distributed` on xla tensors, by the process group, over the host.

A process group such as gloo's exchanges host memory between processes. Its kernels do not support
the device, so each call reads its tensors, runs on the CPU and copies the results back, counted as
any operation that runs on the host. A process group exchanges nothing between the devices of one
process: that is for the partitioner's collectives, or those of `shard_map`.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from spmd_core.dispatch.fallback import note_host_run
from spmd_core.dispatch.transfer import store, to_host
from spmd_core.errors import UnsupportedOpError
from spmd_core.recording import inference, schema
from spmd_core.recording.calls import Handler, from_host
from spmd_core.recording.views import alias
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional

_WHY = "exchanges host memory between processes, over a torch.distributed process group,"
_STRICT_ADVICE = (
    "Use spmd.distributed.initialize and a mesh over the devices of all processes, or leave "
    "strict mode."
)

# The argument that each operation writes, which its schema does not say, and whether the operation
# also reads it.
_WRITTEN = {
    c10d.allreduce_: ("tensors", True),
    c10d.allreduce_coalesced_: ("tensors", True),
    c10d.broadcast_: ("tensors", True),
    c10d.reduce_: ("tensors", True),
    c10d.allgather_: ("output_tensors", False),
    c10d._allgather_base_: ("output_tensor", False),
    c10d.allgather_coalesced_: ("output_lists", False),
    c10d.allgather_into_tensor_coalesced_: ("outputs", False),
    c10d.gather_: ("output_tensors", False),
    c10d.scatter_: ("output_tensors", False),
    c10d.reduce_scatter_: ("output_tensors", False),
    c10d._reduce_scatter_base_: ("output_tensor", False),
    c10d.reduce_scatter_tensor_coalesced_: ("outputs", False),
    c10d.alltoall_: ("output_tensors", False),
    c10d.alltoall_base_: ("output", False),
}


def _note(func: torch._ops.OpOverload) -> None:
    note_host_run(func.name(), _WHY, _STRICT_ADVICE)


def _collective(func: torch._ops.OpOverload, written: str, reads: bool) -> Handler:
    """A handler that waits for the collective, also if it is called with `async_op=True`.

    Every process of a group calls its collectives in the same order, so none waits for a later one.
    """
    names = schema.of(func).names

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        _note(func)
        given = {**dict(zip(names, args)), **kwargs}
        on_cpu = {
            name: inference.map_tensors(
                value, _host_empty if name == written and not reads else _host
            )
            for name, value in given.items()
        }
        result = func(**on_cpu)
        boxed = result[-1] if isinstance(result, tuple) else result
        distributed.Work.unbox(boxed).wait()
        for target, host in zip(_leaves(given[written]), _leaves(on_cpu[written])):
            if target is not host:
                store(target, host)
        work = _finished(list(_leaves(given[written])))
        return (given[written], work) if isinstance(result, tuple) else work

    return handler


def _receive(func: torch._ops.OpOverload) -> Handler:
    """Returns at once, as the sender may run later; `wait` stores the received data."""

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        _note(func)
        (target,) = args[0]
        host = _host_empty(target)
        inner = distributed.Work.unbox(func([host], *args[1:], **kwargs))
        return _Received(inner, target, host).boxed()

    return handler


class _Received(distributed.Work):
    """The work of a receive: `wait` stores the received data in the target."""

    def __init__(self, inner: Any, target: torch.Tensor, host: torch.Tensor) -> None:
        super().__init__()
        self._inner, self._target, self._host = inner, target, host
        # torch's C++ keeps only the C++ half of this object alive; without a reference to the
        # Python half, `wait` would not be found.
        target.__dict__.setdefault("_receives", []).append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the sender; timeout 0 is the process group's own."""
        receives = self._target.__dict__["_receives"]
        if self in receives:
            self._inner.wait(timeout)
            receives.remove(self)
            store(self._target, self._host)
        return True

    def is_completed(self) -> bool:
        done: bool = self._inner.is_completed()
        return done

    def _source_rank(self) -> int:
        rank: int = self._inner._source_rank()
        return rank


def _send(func: torch._ops.OpOverload) -> Handler:
    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        _note(func)
        return func([_host(t) for t in args[0]], *args[1:], **kwargs)

    return handler


def _functional(func: torch._ops.OpOverload) -> Handler:
    """A handler for a functional collective; it waits, so `wait_tensor` has nothing to do."""
    facts = schema.of(func)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        _note(func)
        given = facts.by_name(args, kwargs)
        on_cpu = {name: inference.map_tensors(value, _host) for name, value in given.items()}
        hosts = func(**on_cpu)
        for host in _leaves(hosts):
            functional.wait_tensor(host)
        if not facts.written:
            return inference.map_tensors(hosts, from_host)
        (written,) = facts.written
        for target, host in zip(_leaves(given[written]), _leaves(hosts)):
            store(target, host)
        return given[written]

    return handler


def _refuse_functional(func: torch._ops.OpOverload) -> Handler:
    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise UnsupportedOpError(
            "a functional send or receive waits for the other process while it is recorded, and "
            f"two of them may wait for each other; got {func.name()} on an xla tensor. "
            "Use torch.distributed.isend and irecv, or batch_isend_irecv."
        )

    return handler


def _host(t: torch.Tensor) -> torch.Tensor:
    return to_host(t) if isinstance(t, XLAShardedTensor) else t


def _host_empty(t: torch.Tensor) -> torch.Tensor:
    """Host memory for data that will overwrite the tensor, whose own values are not read."""
    return torch.empty(t.shape, dtype=t.dtype) if isinstance(t, XLAShardedTensor) else t


def _leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for part in tree:
            yield from _leaves(part)


def _finished(results: list[torch.Tensor]) -> Any:
    """A completed collective's work, with its results."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(results)
    # torch's annotations lack this function.
    make_work: Any = getattr(torch._C._distributed_c10d, "_create_work_from_future")  # noqa: B009
    return make_work(future).boxed()


_MakeHandler = Callable[[torch._ops.OpOverload], Handler]
_FUNCTIONAL: dict[_MakeHandler, tuple[str, ...]] = {
    _functional: (
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "broadcast",
        "broadcast_",
    ),
    _refuse_functional: ("isend", "irecv", "batch_p2p_ops"),
    lambda func: alias: ("wait_tensor",),
}

HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    **{
        packet.default: _collective(packet.default, written, reads)
        for packet, (written, reads) in _WRITTEN.items()
    },
    **{packet.default: _receive(packet.default) for packet in (c10d.recv_, c10d.recv_any_source_)},
    c10d.send.default: _send(c10d.send.default),
    **{
        getattr(functional, name).default: make(getattr(functional, name).default)
        for make, names in _FUNCTIONAL.items()
        # torch 2.11 lacks some of them.
        for name in names
        if hasattr(functional, name)
    },
}

# `batch_isend_irecv` asks a group which backend serves the device of a tensor.
distributed.Backend.backend_capability["gloo"].append("xla")
