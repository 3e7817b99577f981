"""DTensor's interface: `distribute_tensor`, `distribute_module`, methods of our tensors."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spmd_core.arguments import require_callable, require_kind
from spmd_core.errors import PartitionSpecError, ShardError
from spmd_core.manual import collectives, region, shard_map
from spmd_core.marks import marking
from spmd_core.marks.device_mesh import AnyMesh, DeviceMesh, from_device_mesh, to_device_mesh
from spmd_core.marks.placements import partition_spec_of, placement_types, placements_of
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh, get_global_mesh
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement


def auto_policy(name: str, module: nn.Module, device_mesh: AnyMesh) -> None:
    """Given to `distribute_module`, asks for shardings that are found automatically."""


def _without_search(mesh: Mesh) -> None:
    raise AssertionError("spmd_core registers the search when it is imported")


# Turns automatic sharding on over a mesh; set by `auto.registration`.
# Guarded by: imports. Cleared by: never.
on_auto_policy: Callable[[Mesh], None] = _without_search


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: AnyMesh | None = None,
    placements: Sequence["Placement"] | None = None,
) -> XLAShardedTensor:
    """A tensor on device `xla`, sharded as the placements say. Does not wait.

    torch's `distribute_tensor` for a mesh of device type "xla".

    Args:
        tensor: a leaf, on the host (it is uploaded in shards) or on device `xla` (it is marked in
            place and returned). The result requires grad if `tensor` does.
        device_mesh: a DeviceMesh of device type "xla", a slice of one, or a Mesh; None: the global
            mesh.
        placements: one for each dimension of the mesh; None: replicated.

    Raises:
        MeshError, ValueError, UnsupportedOpError, IndexError: see `from_device_mesh` and
            `partition_spec_of`.
        PartitionSpecError: the tensor has another sharding already (use `redistribute`).
        TypeError: not a tensor, or a DTensor of another device type.
        RuntimeError: the tensor is not a leaf.
    """
    require_kind("tensor", tensor, torch.Tensor, write="a tensor, such as torch.as_tensor(data)")
    over = from_device_mesh(device_mesh)
    given = [placement_types().Replicate()] * len(over.axes) if placements is None else placements
    mesh, spec = partition_spec_of(
        over.mesh if device_mesh is None else device_mesh, given, tensor.dim()
    )
    if not isinstance(tensor, XLAShardedTensor) and hasattr(tensor, "_local_tensor"):
        raise TypeError(
            "distribute_tensor takes a plain tensor; "
            f"got a DTensor over {tensor.device_mesh}. "  # type: ignore[attr-defined]
            "Pass tensor.full_tensor()."
        )
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes a leaf of autograd; got a tensor that was computed. "
            "Distribute its inputs, or use redistribute."
        )
    if isinstance(tensor, XLAShardedTensor):
        if tensor.sharding is not None and tensor.sharding != Sharding.of(mesh, spec, tensor.dim()):
            raise PartitionSpecError(
                "distribute_tensor marks a tensor once; got "
                f"one with the sharding {tensor.partition_spec} for placements {tuple(given)}. "
                "Use tensor.redistribute(device_mesh, placements)."
            )
        return marking.mark_sharding(tensor, mesh, spec)
    moved = marking.mark_sharding(tensor.detach().to("xla"), mesh, spec)
    return moved.requires_grad_() if tensor.requires_grad else moved


def distribute_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    partition_fn: Callable[[str, nn.Module, AnyMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Moves a module to device `xla` and marks its parameters and buffers, in place.

    torch's `distribute_module` for device type "xla".

    Args:
        module: a module that was not distributed before.
        device_mesh: see `distribute_tensor`.
        partition_fn: called as `(name, submodule, device_mesh)` for each submodule, which is on
            device `xla` by then; may mark or replace its parameters. Parameters that it does not
            mark are replicated. None: all are replicated. `auto_policy`: shardings over the mesh
            are found when the first step is compiled, as by `use_spmd(auto=True)`.
        input_fn: called as `(module, inputs, device_mesh)` before each forward; a result replaces
            the inputs.
        output_fn: called as `(module, outputs, device_mesh)` after each forward; a result replaces
            the outputs.

    Returns:
        The module.

    Raises:
        TypeError: `module` is no module, or one of the functions is none.
        RuntimeError: the module was distributed before.
        ValueError: `input_fn` or `output_fn` does not take three arguments (two, without the
            module, are accepted with a warning).
        MeshError: see `from_device_mesh`.
    """
    devices.require_spmd("distribute_module")
    require_kind("module", module, nn.Module, write="a module")
    if partition_fn is not None:
        require_callable("partition_fn", partition_fn)
    mesh = from_device_mesh(device_mesh).mesh
    num_for_input, num_for_output = (
        _num_arguments(input_fn, "input_fn"),
        _num_arguments(output_fn, "output_fn"),
    )
    if getattr(module, "_spmd_distributed", False):
        raise RuntimeError(
            "distribute_module takes a module once; this one was distributed before. "
            "Call it on the outermost module only."
        )
    # First, so that partition_fn may mark in place; host data is uploaded at its first use.
    module.to("xla")
    given = mesh if device_mesh is None else device_mesh
    if partition_fn is auto_policy:
        on_auto_policy(mesh)
    else:
        _mark_all(module, mesh, given, partition_fn)
    if input_fn is not None:
        module.register_forward_pre_hook(_hook(input_fn, num_for_input, given))
    if output_fn is not None:
        module.register_forward_hook(_hook(output_fn, num_for_output, given))
    module._spmd_distributed = True  # type: ignore[assignment]
    return module


def _mark_all(
    module: nn.Module,
    mesh: Mesh,
    given: AnyMesh,
    partition_fn: Callable[[str, nn.Module, AnyMesh], None] | None,
) -> None:
    """Has the user's function mark each submodule's parameters; replicates what is left."""
    for name, submodule in module.named_modules() if partition_fn is not None else ():
        assert partition_fn is not None
        partition_fn(name, submodule, given)
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, XLAShardedTensor) and tensor.sharding is None:
            marking.mark_sharding(tensor, mesh, ())


def _hook(fn: Callable[..., Any], count: int, device_mesh: AnyMesh) -> Callable[..., Any]:
    def hook(module: nn.Module, *inputs_and_outputs: Any) -> Any:
        last = inputs_and_outputs[-1]
        return fn(last, device_mesh) if count == 2 else fn(module, last, device_mesh)

    return hook


def _num_arguments(fn: Callable[..., Any] | None, what: str) -> int:
    if fn is None:
        return 3
    require_callable(what, fn)
    count = len(inspect.signature(fn).parameters)
    if count == 2:
        warnings.warn(
            f"{what} takes (module, "
            f"{what[:-3]}s, device_mesh); two arguments are deprecated in torch. Give the function "
            "the module as its first argument.",
            FutureWarning,
            stacklevel=3,
        )
    elif count != 3:
        raise ValueError(
            f"{what} takes three arguments, "
            f"(module, {what[:-3]}s, device_mesh); got a function of {count}. Write it with three."
        )
    return count


# DTensor's methods. The assignments at the end of the file add them to `XLAShardedTensor`.


def _own_sharding(tensor: XLAShardedTensor, what: str) -> Sharding:
    sharding = tensor.sharding
    if sharding is None:
        raise ShardError(
            f"{what} needs a tensor with a sharding; "
            f"this one, of shape {tuple(tensor.shape)}, has none. Mark it first."
        )
    return sharding


def _all_devices() -> Mesh:
    count = devices.global_runtime_device_count()
    return Mesh(range(count), (count,))


def _device_mesh(self: XLAShardedTensor) -> DeviceMesh:
    """The DeviceMesh over which the tensor is sharded. Raises ShardError if it has no sharding."""
    return to_device_mesh(_own_sharding(self, "device_mesh").mesh)


def _placements(self: XLAShardedTensor) -> tuple["Placement", ...]:
    """For each dimension of `device_mesh`, `Shard(dim)` or `Replicate()`.

    Raises ShardError if the tensor has no sharding.
    """
    return placements_of(_own_sharding(self, "placements"))


def _spec(self: XLAShardedTensor) -> "DTensorSpec":
    """torch's DTensorSpec of the tensor: mesh, placements, shape, strides and dtype.

    The same object until the sharding changes. A tensor without a sharding is described as
    replicated over a mesh of all devices with one dimension.
    """
    from torch.distributed.tensor import _dtensor_spec  # noqa: PLC0415 - see `placement_types`

    sharding = self.sharding
    key = (sharding, self.shape, self.stride(), self.dtype)
    cached = self.__dict__.get("_cached_spec")
    if cached is None or cached[0] != key:
        over = Sharding.of(_all_devices(), (), self.dim()) if sharding is None else sharding
        meta = _dtensor_spec.TensorMeta(*key[1:])
        cached = self.__dict__["_cached_spec"] = (
            key,
            _dtensor_spec.DTensorSpec(to_device_mesh(over.mesh), placements_of(over), meta),
        )
    return cached[1]


def _invalidate_spec_cache(self: XLAShardedTensor) -> None:
    """Drops the cached DTensorSpec. Never needed: a new sharding leads to a new DTensorSpec."""
    self.__dict__.pop("_cached_spec", None)


def _redistribute(
    self: XLAShardedTensor,
    device_mesh: AnyMesh | None = None,
    placements: Sequence["Placement"] | None = None,
    *,
    async_op: bool = False,
) -> XLAShardedTensor:
    """A tensor of the same values, sharded as the placements say. Does not wait.

    Its gradient is sharded in the same way.

    Args:
        device_mesh: the new mesh; None: the tensor's own mesh.
        placements: one for each dimension of the mesh.
        async_op: accepted and ignored, as all operations are asynchronous.

    Raises:
        ValueError, UnsupportedOpError, IndexError, MeshError: see `partition_spec_of`.
    """
    if placements is None:
        raise ValueError(
            "redistribute needs placements; got None. "
            "Pass one for each dimension of the mesh, such as [Shard(0), Replicate()]."
        )
    target = (
        _own_sharding(self, "redistribute without a mesh").mesh
        if device_mesh is None
        else device_mesh
    )
    mesh, spec = partition_spec_of(target, placements, self.dim())
    return marking.mark_sharding(self, mesh, spec, inplace=False)


def _full_tensor(
    self: XLAShardedTensor, *, grad_placements: Sequence["Placement"] | None = None
) -> XLAShardedTensor:
    """A replicated tensor of the same values.

    A tensor without a sharding, such as an unmarked result, is replicated over the global mesh, or
    over all devices without one. `grad_placements` is accepted and ignored, as gradients are whole
    values here.
    """
    if self.sharding is not None:
        mesh = self.sharding.mesh
    else:
        mesh = get_global_mesh() or _all_devices()
    return marking.mark_sharding(self, mesh, (), inplace=False)


def _to_local(
    self: XLAShardedTensor, *, grad_placements: Sequence["Placement"] | None = None
) -> XLAShardedTensor:
    """Each device's own block, as a tensor that is local to its device. Differentiable.

    The result has the block's shape, and is the kind of tensor that a function inside `shard_map`
    gets: operations take it, the host cannot read it. `from_local` is the inverse. For the blocks'
    values on the host use `local_shards`. Raises PartitionSpecError if the blocks are uneven,
    ShardError if the tensor has no sharding.
    """
    sharding = _own_sharding(self, "to_local")
    return shard_map.enable_manual_sharding(self, sharding.partition_spec, mesh=sharding.mesh)


def from_local(
    local: torch.Tensor,
    device_mesh: AnyMesh | None = None,
    placements: Sequence["Placement"] | None = None,
) -> XLAShardedTensor:
    """The global tensor of which a local tensor (`to_local`) is each device's block.

    It is marked as the placements say. `Partial()` along a dimension sums the blocks of its devices
    ("avg", "max" and "min" likewise). Differentiable.

    Args:
        local: a tensor that is local to each device of the whole mesh.
        device_mesh: see `distribute_tensor`.
        placements: one for each dimension of the mesh; None: replicated, which needs the same
            values on all devices.

    Raises:
        TypeError: `local` is no tensor.
    """
    require_kind("local", local, torch.Tensor, write="a tensor, such as tensor.to_local() gives")
    types, over = placement_types(), from_device_mesh(device_mesh)
    given = list(placements) if placements is not None else [types.Replicate()] * len(over.axes)
    whole: Any = local
    reduced: dict[str, list[int]] = {}
    for i, placement in enumerate(given):
        if isinstance(placement, types.Partial):
            reduced.setdefault(
                {"avg": "mean"}.get(placement.reduce_op, placement.reduce_op), []
            ).extend(over.axes[i] if i < len(over.axes) else ())
            given[i] = types.Replicate()
    mesh, spec = partition_spec_of(
        over.mesh if device_mesh is None else device_mesh, given, local.dim()
    )
    for op, axes in reduced.items():
        whole = collectives.in_region(
            region.manual_axes(mesh), collectives.all_reduce, whole, tuple(axes), op
        )
    sizes = Sharding.of(mesh, spec, local.dim()).tiles
    full_shape = tuple(n * tiles for n, tiles in zip(local.shape, sizes))
    return marking.mark_sharding(
        shard_map.disable_manual_sharding(whole, spec, full_shape, mesh=mesh), mesh, spec
    )


XLAShardedTensor.device_mesh = property(_device_mesh)
XLAShardedTensor.placements = property(_placements)
XLAShardedTensor._spec = property(_spec)
XLAShardedTensor.invalidate_spec_cache = _invalidate_spec_cache
XLAShardedTensor.redistribute = _redistribute
XLAShardedTensor.full_tensor = _full_tensor
XLAShardedTensor.to_local = _to_local
XLAShardedTensor.from_local = staticmethod(from_local)
