"""Marks: `mark_sharding` says where a tensor's blocks live, `clear_sharding` takes that back, `sync` ends a step. Most users' whole API."""

from typing import Any

import torch

from spmd_core import execution, runtime
from spmd_core.errors import DeviceMismatchError, MeshError, UnsupportedOpError
from spmd_core.graph import Entry, Value
from spmd_core.mesh import Mesh, check_devices
from spmd_core.recording import entries, remember
from spmd_core.sharding import PartitionSpec, Sharding, ShardingSpec
from spmd_core.storage import Handle, Storage, lock, read
from spmd_core.tensor import XLAShardedTensor, wrap


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> XLAShardedTensor:
    """Shards a tensor over a mesh, in place; returns the same tensor.

    The mark is visible at once. Host data goes up sharded when the first program needs it; data on the device is laid out anew; a pending
    value gets a constraint in the program. Marking again reshards. From then on an in-place update keeps the sharding, the gradient of a
    leaf follows it, and tensors made by `zeros_like` and its kin (so an optimizer's state) inherit it. Does not wait for the device.

    Args:
        t: a tensor on device `xla`, of any shape and dtype.
        mesh: the devices and the axes.
        partition_spec: for each dim of `t` the mesh axis (a name or an index) that shards it, a tuple of axes (major first), or None; a spec
            shorter than the rank replicates the remaining dims.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        DeviceMismatchError: the tensor is not on device `xla`.
        MeshError: the mesh names a device that does not exist, or is not a Mesh.
        PartitionSpecError: the spec does not fit the mesh or the tensor.

    Example:
        >>> mesh = Mesh(range(8), (4, 2), ("data", "model"))
        >>> w = mark_sharding(torch.randn(8, 4, device="xla"), mesh, ("data", "model"))
        >>> w.sharding_spec
        '{devices=[4,2]0,1,2,3,4,5,6,7}'
    """
    runtime.require_spmd("mark_sharding")
    tensor = _device_tensor(t, "mark_sharding")
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mark_sharding needs a Mesh; got {type(mesh).__name__}. Write mark_sharding(tensor, Mesh(device_ids, shape, names), spec).")
    check_devices(mesh, runtime.global_runtime_device_count())
    sharding = Sharding.of(mesh, partition_spec, tensor.dim())
    with lock:
        _mark(tensor._handle, sharding)
    if tensor.requires_grad:
        _follow_gradients(tensor)
    return tensor


def clear_sharding(t: torch.Tensor) -> XLAShardedTensor:
    """Takes a mark back: the partitioner may choose again; data on the device is gathered (without waiting). Returns the same tensor."""
    tensor = _device_tensor(t, "clear_sharding")
    handle = tensor._handle
    with lock:
        if isinstance(handle, Storage):
            execution.set_sharding(handle, None)
        else:
            handle.sharding = None
    return tensor


def apply_sharding(t: torch.Tensor, spec: ShardingSpec) -> XLAShardedTensor:
    """`mark_sharding` with a `ShardingSpec`.

    Raises:
        UnsupportedOpError: `spec.minibatch` under several processes, where each process would hold its own part of the batch.
    """
    if spec.minibatch and runtime.num_processes() > 1:
        raise UnsupportedOpError(
            f"minibatch=True joins the batches of several processes into one global tensor, which is not available yet; "
            f"got {runtime.num_processes()} processes. Give every process the whole batch and minibatch=False."
        )
    return mark_sharding(t, spec.mesh, spec.partition_spec)


def start_upload(t: torch.Tensor) -> XLAShardedTensor:
    """Sends a tensor's host data to the devices now, sharded as it is marked, instead of when the first program needs it. Returns the tensor.

    For a thread that works ahead of the training loop. Does not wait, and does nothing for data that is not on the host.
    """
    tensor = _device_tensor(t, "start_upload")
    execution.upload(tensor._handle.storage)
    return tensor


def sync(*, wait: bool = False) -> None:
    """Ends a step: computes everything pending and held in one program, then runs the step's closures (`steps.add_step_closure`).

    Returns when the program was started, so that Python records the next step meanwhile; `wait=True` blocks until the devices are done.
    """
    execution.end_step(wait=wait)


def _device_tensor(t: Any, what: str) -> XLAShardedTensor:
    if not isinstance(t, XLAShardedTensor):
        got = f"a tensor on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise DeviceMismatchError(f"{what} needs a tensor on device 'xla'; got {got}. Move it first: t = t.to('xla').")
    return t


def _constrained(value: Value, sharding: Sharding) -> Value:
    key = ("mark_sharding", value.spec, sharding)
    entry = entries.get(key)
    if entry is None:
        entry = Entry("spmd::mark_sharding", lambda context, inputs, numbers: inputs, (value.spec,), sharding=sharding)
        remember(key, entry)
    return Value(entry, (value,), ())


def _mark(handle: Handle, sharding: Sharding) -> None:
    if handle.sharding == sharding:
        return
    value = read(handle)
    if not isinstance(handle, Storage):
        # The view's value from here on; its storage keeps its own layout.
        handle.value, handle.sharding = _constrained(value, sharding), sharding
        return
    if value.data is None:
        handle.sharding = sharding
        handle.write(_constrained(value, sharding))
    else:
        execution.set_sharding(handle, sharding)


def _follow_gradients(tensor: XLAShardedTensor) -> None:
    """Constrains what autograd sends to a marked leaf (or intermediate) to the sharding that it has at that time."""
    if tensor._followed is not None:
        return
    # A cell and not the tensor, which its own hook would keep alive; `tensor.data = other` puts the new handle in.
    cell = tensor._followed = [tensor._handle]

    def follow(gradient: torch.Tensor) -> torch.Tensor | None:
        handle = cell[0]
        sharding = handle.sharding
        if sharding is None or not isinstance(gradient, XLAShardedTensor) or gradient.shape != handle.spec.shape:
            return None
        with lock:
            followed = Storage(_constrained(read(gradient._handle), sharding), gradient._handle.spec)
            followed.sharding = sharding
        return wrap(followed)

    tensor.register_hook(follow)


XLAShardedTensor._on_requires_grad = staticmethod(_follow_gradients)
