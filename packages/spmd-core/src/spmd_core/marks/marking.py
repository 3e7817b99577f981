"""Marks, which set, change or remove a tensor's sharding; and `sync`, which ends a step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from spmd_core.arguments import checked, require_bool, require_int
from spmd_core.config import config
from spmd_core.errors import DeviceMismatchError, MeshError, PartitionSpecError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Handle, Storage, read
from spmd_core.marks import process_data
from spmd_core.marks.constraints import constrained, constrained_copy
from spmd_core.ops.kernels.shard_alike import shard_alike
from spmd_core.program import execution, leaves
from spmd_core.program.mark_names import MARK, MARK_AT_ONCE, MARK_SHARDING
from spmd_core.recording.jax_calls import call_jax
from spmd_core.runtime import devices
from spmd_core.runtime.jax_sharding import require_shardy
from spmd_core.sharding.mesh import Mesh, check_devices
from spmd_core.sharding.partition_spec import PartitionSpecLike, ShardingSpec
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.gradient_sharding import GradientSharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, device_tensor, wrap


def mark_sharding(
    t: torch.Tensor,
    mesh: Mesh | ShardingSpec,
    partition_spec: PartitionSpecLike | None = None,
    *,
    inplace: bool = True,
    priority: int = 0,
) -> XLAShardedTensor:
    """Shards a tensor over a mesh, in place; returns the same tensor.

    The mark is visible at once. Data on the host is uploaded in shards when the first program needs
    it; data on the device is redistributed; a pending value gets a constraint in the program.
    Another mark replaces the sharding. The sharding stays with the tensor: in-place updates keep
    it, the gradient of a leaf gets it, and tensors made by `zeros_like` and similar functions (so
    an optimizer's state) inherit it. Does not wait for the device.

    Args:
        t: a tensor on device `xla`, of any shape and dtype.
        mesh: the devices and the axes; or a `ShardingSpec`, which has a partition spec of its own.
            With its `minibatch` under several processes, `t` is this process's part of a global
            tensor, which the call makes and returns (`from_process_local`); `t` stays as it is, on
            the CPU, or on device `xla` as long as no program has read it.
        partition_spec: for each dim of `t` the mesh axis (a name or an index) that shards it, a
            tuple of axes (major first), or None. A spec shorter than the rank replicates the
            remaining dims. `PartitionSpec.OPEN`, alone or behind the axes of a tuple, lets the
            partitioner split the dim further inside of a program. Data that is stored is split by
            the named axes alone, also as a program reads it, so an open dim of a leaf is about its
            gradient.
        inplace: False for a new tensor of the same values, marked, whose gradient is constrained to
            the same sharding; `t` and its gradient keep their own. Can be differentiated any number
            of times. This is what jax calls `with_sharding_constraint`.
        priority: where marks in a program ask for different layouts of a value between them, the
            one of the lowest number decides: axes are propagated in the order of priorities, 0
            first. Holds for the tensor as an input and a result of programs too, and for its
            gradient. What a mark says of its own tensor holds at any priority. A mark that names no
            axis has nothing to propagate.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        DeviceMismatchError: the tensor is not on device `xla`; or, with `minibatch`, its data is
            not on the host any more.
        MeshError: the mesh names a device that does not exist, or is not a Mesh.
        PartitionSpecError: the spec does not fit the mesh or the tensor; or a `ShardingSpec` came
            with another partition spec.
        TypeError, ValueError: the priority is not a whole number of at least 0.
        ProgramError: there is an open dim or a priority, and jax's Shardy is switched off.

    Example:
        >>> mesh = Mesh(range(8), (4, 2), ("data", "model"))
        >>> w = mark_sharding(torch.randn(8, 4, device="xla"), mesh, ("data", "model"))
        >>> w.sharding_spec
        '{devices=[4,2]0,1,2,3,4,5,6,7}'
    """
    if isinstance(mesh, ShardingSpec):
        if partition_spec is not None:
            raise PartitionSpecError(
                "a ShardingSpec has its own partition spec; got "
                f"{mesh.partition_spec!r} and {partition_spec!r} beside it. "
                "Write spmd.mark_sharding(tensor, sharding_spec), or pass a Mesh with the second."
            )
        if mesh.minibatch and devices.num_processes() > 1:
            _refuse_priority(priority)
            return process_data.from_process_local(_host_data(t), mesh)
        partition_spec, mesh = mesh.partition_spec, mesh.mesh
    tensor, sharding = _check_arguments(t, mesh, partition_spec, "mark_sharding", priority)
    if not require_bool("inplace", inplace):
        return MarkSharding.apply(tensor, sharding)
    return mark(tensor, sharding)


def mark(tensor: XLAShardedTensor, sharding: Sharding) -> XLAShardedTensor:
    """Marks a tensor of the sharding's rank, in place; returns it. See `mark_sharding`."""
    with lock:
        _mark(tensor._handle, sharding)
    if tensor.requires_grad:
        _follow_gradients(tensor)
    return tensor


def constrain(
    t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpecLike, *, priority: int = 0
) -> XLAShardedTensor:
    """Constrains the sharding of a tensor's present value, in place; returns the same tensor.

    A hint to the partitioner at one place of the program. Unlike `mark_sharding` it does not stay
    with the tensor: `t.sharding`, later in-place updates, gradients and `zeros_like` do not change.
    Data on the device moves when the next program that reads the tensor runs. Arguments and errors
    are those of `mark_sharding`; an open dim and the priority are about the value in the program.
    """
    tensor, sharding = _check_arguments(t, mesh, partition_spec, "constrain", priority)
    handle = tensor._handle
    with lock:
        value = constrained(read(handle), sharding)
        if isinstance(handle, Storage):
            handle.write(value)
        else:
            handle.value = value
    return tensor


class MarkSharding(torch.autograd.Function):
    """The same values, marked with a `Sharding`; the backward marks the gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: XLAShardedTensor, sharding: Sharding) -> XLAShardedTensor:
        ctx.sharding = sharding
        return _marked_copy(x, sharding)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return MarkSharding.apply(grads[0], ctx.sharding), None


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Gives the tensors of two nested structures one sharding, pair by pair.

    A tensor with a sharding passes it to the other of its pair. If neither has one, the partitioner
    chooses one for both. Gradients flow through.

    Args:
        a: a tensor, or nested lists, tuples and dicts of tensors. Other leaves, such as None, stay
            as they are.
        b: a structure of the same form, with tensors of the same shapes.

    Returns:
        New tensors, in the same structures.

    Raises:
        ValueError: the structures differ.
        PartitionSpecError: the two tensors of a pair differ in shape, or have different shardings.
    """
    devices.require_spmd("shard_as")
    leaves_a, form_a = pytree.tree_flatten(a)
    leaves_b, form_b = pytree.tree_flatten(b)
    if form_a != form_b or any(
        isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor)
        for x, y in zip(leaves_a, leaves_b)
    ):
        raise ValueError(
            "shard_as pairs the leaves of two structures of one form; got "
            f"{form_a} and {form_b} with leaves of types {[type(x).__name__ for x in leaves_a]} "
            f"and {[type(x).__name__ for x in leaves_b]}. Give both tensors in the same places."
        )
    pairs = [
        _shard_pair(x, y) if isinstance(x, torch.Tensor) else (x, y)
        for x, y in zip(leaves_a, leaves_b)
    ]
    return pytree.tree_unflatten([x for x, _ in pairs], form_a), pytree.tree_unflatten(
        [y for _, y in pairs], form_b
    )


def _shard_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = device_tensor(a, "shard_as"), device_tensor(b, "shard_as")
    if x.shape != y.shape:
        raise PartitionSpecError(
            f"shard_as pairs tensors of one shape; got {tuple(x.shape)} and {tuple(y.shape)}. "
            "Pair tensors of the same shape."
        )
    given = {sharding for sharding in (x.sharding, y.sharding) if sharding is not None}
    if len(given) == 2:
        raise PartitionSpecError(
            "shard_as gives two tensors one sharding; "
            f"got two that were marked with different ones, {x.sharding!r} and {y.sharding!r}. "
            "Call clear_sharding on the one that should follow."
        )
    if given:
        (sharding,) = given
        return MarkSharding.apply(x, sharding), MarkSharding.apply(y, sharding)
    paired: tuple[torch.Tensor, torch.Tensor] = call_jax(shard_alike, x, y)
    return paired


def clear_sharding(t: torch.Tensor) -> XLAShardedTensor:
    """Removes a tensor's mark, so that the partitioner chooses again; returns the same tensor.

    Data on the device is gathered, without waiting.
    """
    tensor = device_tensor(t, "clear_sharding")
    handle = tensor._handle
    with lock:
        if isinstance(handle, Storage):
            leaves.set_sharding(handle, None)
        else:
            handle.sharding = None
    if tensor._gradient_sharding is not None:
        tensor._gradient_sharding.follow(handle)
    return tensor


def _host_data(t: torch.Tensor) -> torch.Tensor:
    """A tensor's data in host memory: a CPU tensor itself, or the copy made by `t.to("xla")`."""
    if not isinstance(t, XLAShardedTensor):
        return t
    handle = t._handle
    if isinstance(handle, Storage) and handle.value.data is not None:
        value = handle.value
        if value.placement.jax_sharding is None:
            host: torch.Tensor = value.data
            return host
    raise DeviceMismatchError(
        "a process's part of a tensor comes from its host's memory; got a tensor of shape "
        f"{tuple(t.shape)} that a program has computed, or whose data is on the device. "
        "Pass the CPU tensor, without .to('xla')."
    )


def start_upload(t: torch.Tensor) -> XLAShardedTensor:
    """Uploads a tensor's host data now, in shards, instead of when the first program needs it.

    For a thread that works ahead of the training loop. Does not wait, and does nothing if the data
    is not on the host. Returns the tensor.
    """
    tensor = device_tensor(t, "start_upload")
    execution.upload(tensor._handle.storage)
    return tensor


@checked()
def sync(*, wait: bool = False) -> None:
    """Ends a step: computes everything pending and held in one program, then runs the closures.

    Closures are those of `add_step_closure`. Returns when the program was started, so that Python
    records the next step meanwhile; `wait=True` blocks until the devices are done.

    Each thread has a pending graph of its own: a call, or a read, computes what this thread has
    recorded, what threads that have ended left, and what these values depend on, whichever thread
    recorded it. So threads that train models of their own do not cut each other's steps. A value
    that another thread has recorded is right wherever it is read; but a read in the middle of the
    other's step cuts that step, whose programs are then new ones and compile. While one thread's
    program is compiled, the others wait. Random numbers come from torch's one generator, as on the
    CPU, so they depend on the order in which threads draw. Under several processes one thread
    records and ends the steps, as all processes must start the same programs in the same order.
    """
    execution.end_step(wait=wait)


def _check_arguments(
    t: torch.Tensor,
    mesh: Mesh,
    partition_spec: PartitionSpecLike | None,
    what: str,
    priority: int,
) -> tuple[XLAShardedTensor, Sharding]:
    """Checks the arguments of a marking function; returns the tensor and the sharding."""
    devices.require_spmd(what)
    tensor = device_tensor(t, what)
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"{what} needs a Mesh; got {type(mesh).__name__}. "
            f"Write {what}(tensor, Mesh(device_ids, shape, names), spec)."
        )
    check_devices(mesh, devices.global_runtime_device_count())
    spec: Any = partition_spec
    sharding = Sharding.marked(mesh, spec, tensor.dim(), priority=priority)
    if sharding.has_hints:
        require_shardy(what)
    return tensor, sharding


def _refuse_priority(priority: int) -> None:
    if require_int("priority", priority, least=0):
        raise PartitionSpecError(
            "a process's part of a batch is uploaded as its ShardingSpec says, without a priority; "
            f"got priority={priority}. Leave it out, and mark what is computed from the batch."
        )


def marked_gradient(
    gradient: XLAShardedTensor, sharding: Sharding, batch_axes: tuple[int, ...] = ()
) -> XLAShardedTensor:
    """A leaf's gradient, constrained and marked; reduce-scattered if it is a sum over the batch.

    Not differentiable. Does not wait. See `program.batch_sums`.

    Args:
        gradient: with the leaf's shape.
        sharding: the leaf's.
        batch_axes: the axes of the mesh that split the batch, the major one first; empty to take
            those that split the program's data.
    """
    return _marked_copy(gradient, sharding, batch_axes)


def _marked_copy(
    x: XLAShardedTensor, sharding: Sharding, summed_over: tuple[int, ...] | None = None
) -> XLAShardedTensor:
    """A new tensor of the same value, constrained and marked."""
    mark = MARK if config.reduce_gradients_once else MARK_AT_ONCE
    name = MARK_SHARDING if summed_over is None else mark
    with lock:
        storage = constrained_copy(x, sharding, name, summed_over=summed_over)
        storage.sharding = sharding
    return wrap(storage)


def _mark(handle: Handle, sharding: Sharding) -> None:
    if handle.sharding == sharding:
        return
    value = read(handle)
    if not isinstance(handle, Storage):
        # A mark on a view is a constraint on its value; its storage keeps its own sharding.
        handle.value, handle.sharding = constrained(value, sharding), sharding
        return
    if value.data is None:
        handle.sharding = sharding
        handle.write(constrained(value, sharding))
    else:
        leaves.set_sharding(handle, sharding)


def _follow_gradients(tensor: XLAShardedTensor) -> None:
    """Constrains each gradient of a marked leaf or intermediate to the sharding it has by then."""
    if tensor._gradient_sharding is not None:
        tensor._gradient_sharding.follow(tensor._handle)
        return
    # A hook that holds the tensor would keep it alive; `tensor.data = other` updates the handle.
    target = tensor._gradient_sharding = GradientSharding(tensor._handle)
    is_leaf = tensor.is_leaf

    def follow(gradient: torch.Tensor) -> torch.Tensor | None:
        sharding = target.sharding
        if (
            sharding is None
            or not isinstance(gradient, XLAShardedTensor)
            or gradient.shape != target.shape
        ):
            return None
        # Under create_graph=True autograd continues from the hook's result, which it must have
        # recorded.
        if torch.is_grad_enabled() and gradient.requires_grad:
            return MarkSharding.apply(gradient, sharding)
        return marked_gradient(gradient, sharding) if is_leaf else _marked_copy(gradient, sharding)

    # If the base of a view was written since, reading the node creates it anew. torch's own
    # register_hook does not do so, and crashes the process.
    _ = tensor.grad_fn
    tensor.register_hook(follow)


def _mark_over(
    tensor: XLAShardedTensor, mesh_shape: Sequence[int], partition_spec: PartitionSpecLike
) -> None:
    mark_sharding(tensor, Mesh(range(math.prod(mesh_shape)), mesh_shape), partition_spec)


XLAShardedTensor._on_requires_grad = staticmethod(_follow_gradients)
XLAShardedTensor._mark_over = staticmethod(_mark_over)
