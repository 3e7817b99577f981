"""`shard_map`: runs a function in a manual region, where a tensor is one device's block.

In the region, devices exchange data by explicit collectives (`manual.collectives`).
"""

from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import Any

import torch

from spmd_core.arguments import require_callable, require_kind
from spmd_core.errors import PartitionSpecError, SpmdError
from spmd_core.graph.values import Entry, Spec
from spmd_core.manual.collectives import all_reduce, axis_group
from spmd_core.manual.region import Axes, axes_of, current_region, inside, manual_axes
from spmd_core.ops.kernels.traits import CHOSEN, REPEATED
from spmd_core.recording.calls import known, record_own
from spmd_core.runtime import devices
from spmd_core.runtime.jax_sharding import jax_axis_names
from spmd_core.sharding.mesh import Mesh, given_or_global
from spmd_core.sharding.partition_spec import Axis, PartitionSpec, PartitionSpecLike
from spmd_core.sharding.sharding import Border, Manual, Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, device_tensor


def _crossed(tensor: XLAShardedTensor, border: Border, shape: tuple[int, ...]) -> XLAShardedTensor:
    """The tensor after it enters or leaves a region, with this shape. Not differentiable."""
    spec = tensor._handle.spec

    def make() -> Entry:
        name = "spmd::leave_region" if border.is_exit else "spmd::enter_region"
        # Blocks of an axis that splits nothing are equal: an exit takes one of them.
        traits = CHOSEN if border.is_exit else REPEATED
        return Entry(
            name, _never, (Spec.contiguous(shape, spec.dtype),), border=border, traits=traits
        )

    crossed: XLAShardedTensor = record_own(known(("border", spec, border), make), (tensor,))
    return crossed


def _never(*_: Any) -> Any:
    """The kernel of a region's entry or exit, which the lowering does not call."""
    raise AssertionError("a border is crossed by `regions.cross`")


def _scaled(shape: Sequence[int], sharding: Sharding, *, is_exit: bool) -> tuple[int, ...]:
    """The shape of a block from that of the global tensor; at an exit, the reverse."""
    return tuple(n * tiles if is_exit else n // tiles for n, tiles in zip(shape, sharding.tiles))


class _Enter(torch.autograd.Function):
    """The blocks of a whole tensor.

    The transpose joins the blocks' gradients, summed over the axes along which every device had the
    same block.
    """

    @staticmethod
    def forward(
        ctx: Any, x: XLAShardedTensor, manual: Manual, sharding: Sharding
    ) -> XLAShardedTensor:
        ctx.manual, ctx.sharding = manual, sharding
        return _crossed(
            x,
            Border(manual, sharding, is_exit=False),
            _scaled(x.shape, sharding, is_exit=False),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        copied = _replicated_axes(ctx.manual, ctx.sharding)
        with inside(ctx.manual):
            grad = all_reduce(grads[0], copied) if copied else grads[0]
        return _Leave.apply(grad, ctx.manual, ctx.sharding), None, None


class _Leave(torch.autograd.Function):
    """The global tensor that the blocks make up.

    Along axes that the spec leaves out, every device has the same block; in the transpose each gets
    an equal share of the block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: XLAShardedTensor, manual: Manual, sharding: Sharding
    ) -> XLAShardedTensor:
        ctx.manual, ctx.sharding = manual, sharding
        return _crossed(
            x,
            Border(manual, sharding, is_exit=True),
            _scaled(x.shape, sharding, is_exit=True),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        copies = ctx.manual.size // ctx.sharding.num_shards
        grad = _Enter.apply(grads[0], ctx.manual, ctx.sharding)
        return (grad if copies == 1 else grad / copies), None, None


def _replicated_axes(manual: Manual, sharding: Sharding) -> tuple[int, ...]:
    """The region's axes that the sharding does not use."""
    used = {axis for axes in sharding.dims for axis in axes}
    return tuple(axis for axis in manual.axes if axis not in used)


def _sharding(manual: Manual, spec: PartitionSpecLike, ndim: int) -> Sharding:
    """The spec as a sharding; raises PartitionSpecError if it names an axis that is not manual."""
    sharding = Sharding.of(manual.mesh, spec, ndim)
    others = [axis for axes in sharding.dims for axis in axes if axis not in manual.axes]
    if others:
        names = jax_axis_names(manual.mesh)
        raise PartitionSpecError(
            f"the specs of a manual region name its own axes; got {names[others[0]]!r} "
            f"in {tuple(spec)!r} for a region over {[names[axis] for axis in manual.axes]}. "
            "Mark tensors over other axes with mark_sharding."
        )
    return sharding


def enter(x: Any, manual: Manual, spec: PartitionSpecLike) -> XLAShardedTensor:
    """A whole tensor as each device's block, over manual axes; what `shard_map` does to arguments.

    Raises:
        DeviceMismatchError: not a tensor on device `xla`.
        PartitionSpecError: the spec names another axis, or splits a dim unevenly.
    """
    advice = "Move it first, or give it the spec ... to pass it as it is."
    x = device_tensor(x, "a manual region", advice=advice)
    sharding = _sharding(manual, spec, x.dim())
    for dim, (size, tiles) in enumerate(zip(x.shape, sharding.tiles)):
        if size % tiles:
            raise PartitionSpecError(
                "every device of a manual region has a block of one shape; "
                f"got {size} elements in dim {dim} of a tensor of shape {tuple(x.shape)}, "
                f"to be split into {tiles}. Pad the tensor, or split another dim."
            )
    result: XLAShardedTensor = _Enter.apply(x, manual, sharding)
    return result


def leave(x: Any, manual: Manual, spec: PartitionSpecLike) -> XLAShardedTensor:
    """The whole tensor that the devices' blocks make up; what `shard_map` does to results.

    Raises:
        DeviceMismatchError: not a tensor on device `xla`.
        PartitionSpecError: the spec names an axis that is not manual.
    """
    x = device_tensor(x, "the way out of a manual region", advice="Return tensors only.")
    result: XLAShardedTensor = _Leave.apply(x, manual, _sharding(manual, spec, x.dim()))
    return result


def shard_map(
    function: Callable[..., Any],
    mesh: Mesh,
    in_specs: PartitionSpec | Sequence[PartitionSpecLike | EllipsisType],
    out_specs: Any,
    *,
    axis_names: Iterable[Axis] | None = None,
) -> Callable[..., Any]:
    """A function that runs `function` on every device, on that device's blocks of the tensors.

    Inside `function` a tensor has the shape of a block, and devices exchange data by explicit
    collectives. The result can be differentiated, any number of times, and is computed together
    with everything else in one program. Marks on axes outside of `axis_names` have their effect
    inside too. Tensors that `function` closes over, or makes without a local tensor, are the same
    on each device; random operations on local tensors draw different numbers on each. Does not wait
    for the device.

    Args:
        function: takes and returns tensors (one, or a tuple or list of them).
        mesh: the devices: all of the program's.
        in_specs: a partition spec for each positional argument, over the manual axes; `...` passes
            an argument as it is.
        out_specs: a partition spec for the result, or one for each of several. Along an axis that
            it leaves out, every device must have the same values: those of one device are taken.
        axis_names: the manual axes, names or numbers; None: all of the mesh's.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        PartitionSpecError: a spec does not fit, names an axis that is not manual, or splits a dim
            unevenly; or the number of specs is wrong.
        DeviceMismatchError: an argument or a result is not a tensor on device `xla`.
        SpmdError: the call is in a manual region already.

    Example:
        >>> mesh = Mesh(range(8), (8,), ("x",))
        >>> total = shard_map(lambda block: all_reduce(block.sum(0), "x"), mesh, [("x",)], ())
        >>> total(torch.ones(16, 3, device="xla")).tolist()
        [16.0, 16.0, 16.0]
    """
    devices.require_spmd("shard_map")
    require_callable("function", function)
    manual = manual_axes(mesh, axis_names)
    if not isinstance(in_specs, (tuple, list)):
        raise PartitionSpecError(
            f"in_specs has one partition spec for each argument; got {in_specs!r}. "
            "Write a list of specs, [('x', None)] for one."
        )

    def mapped(*args: Any) -> Any:
        specs = (in_specs,) * len(args) if isinstance(in_specs, PartitionSpec) else in_specs
        if len(args) != len(specs):
            raise PartitionSpecError(
                "in_specs has one partition spec for each argument; "
                f"got {len(specs)} specs and {len(args)} arguments. Write () for an argument "
                "that each device gets whole."
            )
        if current_region.get() is not None:
            raise SpmdError(
                "manual regions do not nest; got a shard_map inside a shard_map. "
                "Name the axes of both in the outer one."
            )
        local = [arg if spec is ... else enter(arg, manual, spec) for arg, spec in zip(args, specs)]
        with inside(manual):
            results = function(*local)
        if not isinstance(results, (tuple, list)):
            return leave(results, manual, out_specs)
        if isinstance(out_specs, PartitionSpec):
            return type(results)(leave(result, manual, out_specs) for result in results)
        if not isinstance(out_specs, (tuple, list)) or len(out_specs) != len(results):
            raise PartitionSpecError(
                "out_specs has one partition spec for each result; "
                f"got {out_specs!r} for {len(results)} results. Write a list of specs, with () "
                "for a result that is the same on each device."
            )
        return type(results)(
            leave(result, manual, spec) for result, spec in zip(results, out_specs)
        )

    return mapped


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpecLike, *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """The tensor as each device's block, over all axes of the mesh.

    What `shard_map` does to an argument, for code that is not one function.

    Raises:
        MeshError: `mesh` is None and no global mesh is set.
    """
    devices.require_spmd("enable_manual_sharding")
    return enter(t, manual_axes(given_or_global(mesh, "a manual region")), partition_spec)


def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: PartitionSpecLike,
    full_shape: Sequence[int],
    *,
    mesh: Mesh | None = None,
) -> XLAShardedTensor:
    """The whole tensor of `full_shape` that the devices' blocks make up.

    What `shard_map` does to a result.

    Raises:
        MeshError: `mesh` is None and no global mesh is set.
        TypeError: `full_shape` is no list of sizes.
        PartitionSpecError: `full_shape` is not the shape that the blocks make up.
    """
    devices.require_spmd("disable_manual_sharding")
    require_kind("full_shape", full_shape, tuple, list, write="the sizes of the whole tensor")
    result = leave(t, manual_axes(given_or_global(mesh, "a manual region")), partition_spec)
    if tuple(result.shape) != tuple(full_shape):
        raise PartitionSpecError(
            f"blocks of shape {tuple(t.shape)} under {tuple(partition_spec)!r} "
            f"make a tensor of shape {tuple(result.shape)}; got full_shape "
            f"{tuple(full_shape)}. Give that shape, or another spec."
        )
    return result


def axis_index(axes: Axes) -> torch.Tensor:
    """The device's position along mesh axes, the last one running fastest.

    Returns:
        A 0-dim int64 tensor, with a separate value on each device.
    """
    group = axis_group(axes, "axis_index")
    manual = current_region.get()
    assert manual is not None
    positions = torch.arange(group.size, device="xla")
    numbers = axes_of(manual.mesh, axes)
    return enter(positions, manual, (numbers,)).reshape(())
