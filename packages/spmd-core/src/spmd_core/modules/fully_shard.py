"""Fully sharded data parallelism: each unit gathers its sharded parameters when it runs.

`fully_shard` works in place, as torch's function of that name. `SpmdFullyShardedDataParallel` wraps
a module, and the modules inside that a policy selects.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from spmd_core.arguments import checked
from spmd_core.errors import MeshError, WrapError
from spmd_core.marks import along
from spmd_core.marks.device_mesh import AnyMesh, DeviceMesh, from_device_mesh
from spmd_core.marks.marking import mark, mark_sharding, sync
from spmd_core.modules import fsdp_methods
from spmd_core.modules.checkpointing import CheckpointedForward
from spmd_core.modules.fsdp_unit import Precision, Unit, UnitAxes, parameter_refs, unit_of
from spmd_core.modules.wrap_policies import has_forward, recursive_wrap
from spmd_core.runtime.devices import require_spmd
from spmd_core.sharding.mesh import Mesh, given_or_global
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

ShardOutput = Callable[[Any, Mesh], Any]
"""`shard_output(output, mesh)` marks a module's result, in place; its own result is ignored."""


@checked()
def fully_shard(
    module: nn.Module,
    mesh: AnyMesh | None = None,
    *,
    axis: str = "fsdp",
    extra_data_axis: str | None = None,
    shard_output: ShardOutput | None = None,
    reshard_after_forward: bool = True,
    mp_policy: Any = None,
) -> nn.Module:
    """Shards a module's parameters over a mesh axis and makes it an FSDP unit, in place.

    A unit has the parameters of its subtree that no unit inside it has: apply this to the blocks
    first, and to the whole model last. Before a unit's forward its parameters are all-gathered, and
    after it they are dropped. Before its backward they are gathered again, and their gradients are
    reduce-scattered into the layout of the parameters. So beside its shards a device holds the
    parameters of about one unit. The values are those of the module on one device: batch and loss
    are global.

    A parameter without a sharding is split over `axis` along the largest of the dims that the axis
    divides evenly (the first of equals); where it divides none, along its largest dim, padded. A
    parameter that other axes of the mesh split, as by `parallelize_module`, is split over `axis`
    too, along a dim that divides evenly, if there is one. A parameter whose mark names `axis`, or
    replicates the parameter, keeps its mark. A unit gathers over `axis` alone. Names, class and
    `state_dict()` of the module stay as they are. It gets the methods of torch's `FSDPModule`, such
    as `set_requires_gradient_sync`, as attributes (`modules/fsdp_methods.py`).

    `torch.distributed.fsdp.fully_shard` calls this function for modules of device `xla`, and in
    SPMD mode for all; without a mesh it takes the global one, or one of all devices.

    The module is moved to device `xla`. Tensors on the meta device are created there, sharded, and
    initialised by `reset_parameters()` of the module that holds them.

    Args:
        module: the module. If its activations should not be kept, call `checkpoint_module` on it
            first.
        mesh: the mesh, by default the global one; it has an axis `axis`. Or a DeviceMesh of device
            type "xla", such as the slice `mesh["dp"]`, whose last dimension stands for `axis`, and
            the one before, if there is one, for `extra_data_axis`.
        axis: the name of the axis that splits parameters. The batch is split over it too.
        extra_data_axis: the name of another axis that splits the batch, and over which parameters
            are replicated (hybrid sharding).
        shard_output: `shard_output(output, mesh)` marks the module's result. By default dim 0 of
            one tensor is split over the batch's axes, if it has at least as many rows as there are
            shards: of the result itself, of the first of a tuple or list, or of the `logits`, else
            the first tensor, of a dict or dataclass.
        reshard_after_forward: False keeps the gathered parameters from forward to backward: it
            takes more memory and saves one gather.
        mp_policy: an object with any of the attributes of torch's `MixedPrecisionPolicy`:
            `param_dtype` (parameters are gathered and used in it), `reduce_dtype` (gradients are
            summed over devices in it), `output_dtype`, `cast_forward_inputs`.

    Returns:
        The module.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        MeshError: there is no mesh, or it has no such axis.
        TypeError: not a module.
        WrapError: the module is sharded already, or has no forward of its own; or a module with
            tensors on the meta device has no `reset_parameters`. The module's forward raises it if
            the result has no tensor that the default `shard_output` can mark.

    Example:
        >>> mesh = Mesh(range(8), (8,), ("fsdp",))
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        >>> for block in model:
        ...     _ = fully_shard(block, mesh)
        >>> fully_shard(model, mesh)[0].weight.partition_spec
        ('fsdp', None)
    """
    require_spmd("fully_shard")
    _check_module(module)
    mesh, batch_axes = (
        _axes_of(mesh) if isinstance(mesh, DeviceMesh) else _named_axes(mesh, axis, extra_data_axis)
    )
    if unit_of(module) is not None or isinstance(module, SpmdFullyShardedDataParallel):
        raise WrapError(
            f"a module is sharded once; got a {type(module).__name__} that is a unit already. "
            "Call fully_shard once for each block."
        )
    index = batch_axes[-1]
    _to_device(module, mesh, index)

    def lay_out(output: Any) -> None:
        if shard_output is None:
            _shard_first(output, mesh, batch_axes)
        else:
            shard_output(output, mesh)

    unit = Unit(
        module,
        UnitAxes(mesh, index, batch_axes),
        _precision(mp_policy),
        reshard_after_forward=reshard_after_forward,
        shard_output=lay_out,
    )
    own = module.__dict__.get("forward")
    if isinstance(own, CheckpointedForward):
        # Inside the checkpoint, so that the recomputation gathers again and no gathered value is
        # kept.
        unit.inner, own.inner, unit.inside_checkpoint = own.inner, unit, True
    else:
        unit.inner = own
        module.forward = unit
    fsdp_methods.install(module)
    return module


class SpmdFullyShardedDataParallel(nn.Module):
    """Wraps a module and shards its parameters over the mesh axis "fsdp" (see `fully_shard`).

    The modules inside that a policy selects are wrapped too. Names in `state_dict()` get a prefix
    `module.` for each wrapper, as with torch's other wrappers; `fully_shard` adds none. Attributes
    and indices that the wrapper does not have are the module's.

    Args:
        module: the module; it is changed in place.
        mesh: the mesh, by default the global one. It has an axis "fsdp".
        shard_output: as for `fully_shard`.
        auto_wrap_policy: selects the modules inside that become units: one of
            `modules.wrap_policies`, or of torch's policies.
        auto_wrapper_callable: `auto_wrapper_callable(child, mesh, **kwargs)` makes these units; by
            default this class.
        extra_data_axis: as for `fully_shard`, also for the modules inside.
        reshard_after_forward: as for `fully_shard`.
        mp_policy: as for `fully_shard`.

    Raises:
        As `fully_shard`; and WrapError if there is a policy and a module inside is wrapped already.

    Example:
        >>> from functools import partial
        >>> from torch import nn
        >>> from spmd_core.modules.wrap_policies import transformer_auto_wrap_policy
        >>> mesh = Mesh(range(8), (8,), ("fsdp",))
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        >>> policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
        >>> SpmdFullyShardedDataParallel(model, mesh, auto_wrap_policy=policy)[
        ...     0
        ... ].weight.partition_spec
        ('fsdp', None)
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    is_sharded_wrapper = True

    @checked()
    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh | None = None,
        *,
        shard_output: ShardOutput | None = None,
        auto_wrap_policy: Any = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
        reshard_after_forward: bool = True,
        mp_policy: Any = None,
    ) -> None:
        require_spmd("SpmdFullyShardedDataParallel")
        super().__init__()
        if isinstance(module, SpmdFullyShardedDataParallel):
            raise WrapError(
                "a module is wrapped once; got a SpmdFullyShardedDataParallel. "
                "Wrap the module inside it, or use it as it is."
            )
        _check_module(module)
        mesh, _ = _named_axes(mesh, "fsdp", extra_data_axis)
        options: dict[str, Any] = {
            "shard_output": shard_output,
            "extra_data_axis": extra_data_axis,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
        }
        if auto_wrap_policy is not None:
            _refuse_units_inside(module)
            recursive_wrap(
                module,
                auto_wrap_policy,
                auto_wrapper_callable or SpmdFullyShardedDataParallel,
                only_wrap_children=True,
                mesh=mesh,
                **options,
            )
        self.module = fully_shard(module, mesh, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, laid out over the mesh."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard takes a torch.nn.Module; got {type(module).__name__}. "
            "Pass the module that computes the result."
        )
    if not has_forward(module):
        raise WrapError(
            f"a unit gathers its parameters in its forward; got a {type(module).__name__}, "
            "which has no forward of its own. "
            "Shard the modules in it, or the module that calls them."
        )


def _axes_of(device_mesh: DeviceMesh) -> tuple[Mesh, tuple[int, ...]]:
    """The mesh of a DeviceMesh, and the axes that split the batch; the last splits parameters."""
    over = from_device_mesh(device_mesh)
    if len(over.axes) > 2 or any(len(axes) != 1 for axes in over.axes):
        raise MeshError(
            "fully_shard takes a DeviceMesh of one dimension, which splits the parameters, or of "
            f"two, the first of which replicates them; got {device_mesh}. "
            "Pass a slice, such as mesh['dp'] or mesh['replicate', 'shard']."
        )
    return over.mesh, tuple(axes[0] for axes in over.axes)


def _named_axes(
    mesh: Mesh | None, axis: str, extra_data_axis: str | None
) -> tuple[Mesh, tuple[int, ...]]:
    """The mesh, given or global, and the axes that split the batch."""
    mesh = given_or_global(mesh, "sharding")
    names = mesh.axis_names or ()
    if axis not in names:
        raise MeshError(
            f"the mesh needs an axis {axis!r}, which splits the parameters; got {mesh!r}. "
            f"Name one of its axes {axis!r}."
        )
    if extra_data_axis is not None and (extra_data_axis not in names or extra_data_axis == axis):
        raise MeshError(
            "extra_data_axis is another axis of the mesh, which splits the batch too; "
            f"got {extra_data_axis!r} for {mesh!r}. "
            f"Give one of {tuple(name for name in names if name != axis)!r}, or leave it out."
        )
    index = mesh.get_axis_name_idx(axis)
    if extra_data_axis is None:
        return mesh, (index,)
    return mesh, (mesh.get_axis_name_idx(extra_data_axis), index)


def _refuse_units_inside(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if unit_of(child) is not None or isinstance(child, SpmdFullyShardedDataParallel):
            raise WrapError(
                "a wrap policy starts from modules that are not sharded; "
                f"got {name or 'the module itself'!r}, a {type(child).__name__} that is. "
                "Leave auto_wrap_policy out, or leave the wrapping to the policy."
            )


def _precision(policy: Any) -> Precision:
    if policy is None or isinstance(policy, Precision):
        return policy or Precision()
    names = [field.name for field in dataclasses.fields(Precision)]
    if not any(hasattr(policy, name) for name in names):
        raise TypeError(
            f"mp_policy has attributes such as param_dtype; got {type(policy).__name__} "
            f"without any of {', '.join(names)}. "
            "Pass torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        )
    return Precision(**{name: getattr(policy, name) for name in names if hasattr(policy, name)})


def _to_device(module: nn.Module, mesh: Mesh, axis: int) -> None:
    """Moves the module to the device; its parameters are marked before any data is uploaded."""
    initialised = False
    for name, owner in module.named_modules():
        if any(
            t.is_meta
            for t in (*owner._parameters.values(), *owner._buffers.values())
            if t is not None
        ):
            _initialise(name, owner, mesh, axis)
            initialised = True
    module.to("xla")
    for ref in parameter_refs(module):
        _mark(ref.parameter, mesh, axis)
    if initialised:
        # So that the memory for one unit's initialisation is freed before the next.
        sync()


def _initialise(name: str, owner: nn.Module, mesh: Mesh, axis: int) -> None:
    """Creates a module's meta tensors on the device, and initialises the module."""
    reset = getattr(owner, "reset_parameters", None)
    if not callable(reset):
        raise WrapError(
            "a module with tensors on the meta device initialises them in reset_parameters(); "
            f"got {name or 'the module itself'!r}, a {type(owner).__name__} without that method. "
            "Define it, or call module.to_empty(device='xla') first and load values afterwards."
        )
    for parameter in owner._parameters.values():
        if parameter is not None and parameter.is_meta:
            # The parameter stays the same object, so that modules go on sharing it.
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device="xla")
            torch.utils.swap_tensors(parameter, nn.Parameter(made, parameter.requires_grad))
            _mark(parameter, mesh, axis)
    for key, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta:
            owner._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device="xla")
    with torch.no_grad():
        reset()


def _mark(parameter: torch.Tensor, mesh: Mesh, axis: int) -> None:
    """Splits a parameter over the axis, if none or others do, along the dim of `fully_shard`."""
    if not isinstance(parameter, XLAShardedTensor):
        return
    marked = parameter.sharding
    if marked is not None and (
        marked.mesh != mesh or marked.is_replicated or any(axis in axes for axes in marked.dims)
    ):
        return
    shape, rank = parameter.shape, parameter.dim()
    before = ((),) * rank if marked is None else marked.dims
    tiles = (1,) * rank if marked is None else marked.tiles
    size = mesh.mesh_shape[axis]
    even = [dim for dim in range(rank) if shape[dim] % (tiles[dim] * size) == 0]
    if marked is not None and not even:
        return
    # Prefers a dim that no other axis splits, then the largest.
    choices = even or range(rank)
    dim = max(choices, key=lambda d: (not before[d], shape[d]), default=-1)
    spec = tuple((*axes, axis) if d == dim else axes for d, axes in enumerate(before))
    sharding = Sharding.of(mesh, spec, rank)
    if marked is not None:
        sharding = sharding.with_hints(marked.open_dims, marked.priority)
    mark(parameter, sharding)


def _shard_first(output: Any, mesh: Mesh, batch_axes: tuple[int, ...]) -> None:
    """Marks the tensor of a module's result that has the batch in dim 0."""
    first: Any = output
    if isinstance(output, dict):
        first = (
            output["logits"] if output.get("logits") is not None else _first_tensor(output.values())
        )
    elif dataclasses.is_dataclass(output):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        first = (
            fields["logits"] if fields.get("logits") is not None else _first_tensor(fields.values())
        )
    elif isinstance(output, (tuple, list)) and output:
        first = output[0]
    if not isinstance(first, torch.Tensor):
        raise WrapError(
            "by default a unit returns a tensor, a tuple or list whose first element is one, "
            f"or a dict or dataclass with one; got {_described(output)}. "
            "Pass shard_output, a function of (output, mesh) that marks what should be split."
        )
    if isinstance(first, XLAShardedTensor) and first.dim() > 0:
        num_shards = math.prod(mesh.mesh_shape[axis] for axis in batch_axes)
        others = math.prod(mesh.mesh_shape) // num_shards
        if first.shape[0] < num_shards:
            return
        if others == 1:
            mark_sharding(first, mesh, (batch_axes,))
        else:  # they may split another dim, such as the sequence
            along.constrain(first, along.AxisLayout(mesh, batch_axes, 0))


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor that has dims, which a loss has not; else the first tensor, or None."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return next((t for t in tensors if t.dim() > 0), tensors[0] if tensors else None)


def _described(output: object) -> str:
    inside = (
        f" with a {type(output[0]).__name__} first"
        if isinstance(output, (tuple, list)) and output
        else ""
    )
    return type(output).__name__ + inside
