"""torch's own DTensor functions on meshes of device type xla: they make marked tensors.

`distribute_tensor`, `distribute_module`, `DTensor.from_local` and the factories `zeros`, `ones`,
`empty`, `full`, `rand` and `randn` of `torch.distributed.tensor`. They are changed when the program
imports that module, as its import takes a second.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from spmd_core import releases
from spmd_core.arguments import require_kind
from spmd_core.errors import ShardError
from spmd_core.manual import region
from spmd_core.marks import dtensor, marking
from spmd_core.marks.device_mesh import DeviceMesh, from_device_mesh
from spmd_core.marks.placements import partition_spec_of, placement_types
from spmd_core.marks.process_data import from_process_local
from spmd_core.runtime import processes
from spmd_core.sharding.partition_spec import ShardingSpec
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.torch_backend.after_import import after_import
from spmd_core.torch_backend.function_bodies import replace_body

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def _mesh_for_xla(module: ModuleType, device_mesh: Any) -> DeviceMesh | None:
    """The mesh of a call, given or current, if it is of device type xla; else None."""
    if device_mesh is None:
        current = getattr(module, "_mesh_resources", None)
        if current is None:
            return None
        try:
            device_mesh = current.get_current_mesh()
        except RuntimeError:  # torch's own function says that there is none
            return None
    is_for_xla = isinstance(device_mesh, DeviceMesh) and device_mesh.device_type == "xla"
    return device_mesh if is_for_xla else None


def _factory(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's helper of all factories: creates a tensor where it will live."""

    @functools.wraps(original)
    def create(
        init_op: Callable[..., torch.Tensor],
        size: torch.Size,
        device_mesh: Any = None,
        placements: Sequence["Placement"] | None = None,
        **kwargs: Any,
    ) -> Any:
        mesh = _mesh_for_xla(module, device_mesh)
        if mesh is None:
            return original(init_op, size, device_mesh, placements, **kwargs)
        given = placements or [placement_types().Replicate()] * mesh.ndim
        over, spec = partition_spec_of(mesh, given, len(size))
        fill = [kwargs.pop("fill_value", 0)] if init_op is torch.full else []
        made = init_op(size, *fill, **kwargs, device="xla")
        return marking.mark_sharding(made, over, spec)

    return create


def _distribute(ours: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """`distribute_tensor` or `distribute_module`, for which torch asks the package torch_xla."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def distribute(*args: Any, **kwargs: Any) -> Any:
            mesh = _mesh_for_xla(module, args[1] if len(args) > 1 else kwargs.get("device_mesh"))
            if mesh is None or importlib.util.find_spec("torch_xla") is not None:
                return original(*args, **kwargs)
            # The rank whose data counts: all processes give the same values here.
            kwargs.pop("src_data_rank", None)
            first, rest = args[0], args[2:]
            kwargs.pop("device_mesh", None)
            return ours(first, mesh, *rest, **kwargs)

        return distribute

    return make


def from_local(
    local_tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence["Placement"] | None,
    shape: Sequence[int] | None,
) -> XLAShardedTensor:
    """torch's `DTensor.from_local` on a mesh of device type xla.

    Args:
        local_tensor: a tensor that is local to each device, as `to_local` gives; or one of the
            process: the whole tensor, if all placements replicate it, and the process's block, if
            a process has one device.
        mesh: the mesh.
        placements: one for each of its dimensions; None: replicated.
        shape: the whole tensor's shape, which must be what the blocks make; None: that.

    Raises:
        ShardError: the process has several devices, so one tensor is not the block of each; or the
            blocks make another shape.
        TypeError: not a tensor.
    """
    require_kind("local_tensor", local_tensor, torch.Tensor, write="a tensor")
    types = placement_types()
    given = list(placements) if placements is not None else [types.Replicate()] * mesh.ndim
    if isinstance(local_tensor, XLAShardedTensor) and region.is_local(local_tensor):
        made = dtensor.from_local(local_tensor, mesh, given)
    elif all(isinstance(p, types.Replicate) for p in given):
        over, spec = partition_spec_of(mesh, given, local_tensor.dim())
        made = marking.mark_sharding(local_tensor.to("xla"), over, spec, inplace=False)
    elif (
        processes.addressable_runtime_device_count() == 1
        and not any(isinstance(p, types.Partial) for p in given)
        and not local_tensor.requires_grad
    ):
        over, spec = partition_spec_of(mesh, given, local_tensor.dim())
        made = from_process_local(local_tensor.cpu(), ShardingSpec(over, spec, minibatch=True))
    else:
        raise ShardError(
            "DTensor.from_local takes each device's own block, and a process here drives "
            f"{processes.addressable_runtime_device_count()} devices; got one tensor of shape "
            f"{tuple(local_tensor.shape)} for placements {tuple(given)}. Pass the whole tensor to "
            "distribute_tensor(tensor, mesh, placements), or this process's part to "
            "spmd.from_process_local(part, spec); inside shard_map, and of tensor.to_local(), "
            "from_local takes the blocks."
        )
    if shape is not None and tuple(shape) != tuple(made.shape):
        raise ShardError(
            f"blocks of shape {tuple(local_tensor.shape)} with placements {tuple(given)} over "
            f"{from_device_mesh(mesh).mesh!r} make a tensor of shape {tuple(made.shape)}; got "
            f"shape={tuple(shape)}. Leave shape out, or pass the whole tensor to distribute_tensor."
        )
    return made


def _from_local(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(
        local_tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Sequence["Placement"] | None = None,
        **kwargs: Any,
    ) -> Any:
        mesh = _mesh_for_xla(module, device_mesh)
        if mesh is None:
            return original(local_tensor, device_mesh, placements, **kwargs)
        return from_local(local_tensor, mesh, placements, kwargs.get("shape"))

    return convert


def _method(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of DTensor that a program calls as a function of the class: ours for our tensors."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(self, XLAShardedTensor)
        function = getattr(XLAShardedTensor, original.__name__) if ours else original
        return function(self, *args, **kwargs)

    return call


def _change(module: Any) -> None:
    if releases.has_parts(module, "_dtensor_init_helper"):
        module._dtensor_init_helper = _factory(module, module._dtensor_init_helper)
    replace_body(module.distribute_tensor, _distribute(dtensor.distribute_tensor, module))
    replace_body(module.distribute_module, _distribute(dtensor.distribute_module, module))
    for name in ("full_tensor", "to_local", "redistribute"):
        setattr(module.DTensor, name, _method(getattr(module.DTensor, name)))
    module.DTensor.from_local = staticmethod(_from_local(module, module.DTensor.from_local))


def install() -> None:
    """Changes torch's functions, now or when the program imports them."""
    after_import("torch.distributed.tensor._api", _change)
