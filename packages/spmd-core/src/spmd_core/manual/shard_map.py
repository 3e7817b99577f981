"""Manual regions: inside, a tensor is one device's block, and devices exchange data by explicit collectives. `shard_map` is the way in."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from spmd_core.errors import DeviceMismatchError, PartitionSpecError, SpmdError
from spmd_core.graph.storage import Storage, lock, read
from spmd_core.graph.values import Entry, Spec, Value
from spmd_core.manual.collectives import all_reduce, checked_axes
from spmd_core.manual.region import axes_of, current_region, given_or_global, inside, manual_axes
from spmd_core.program import regions
from spmd_core.recording.calls import entries, remember
from spmd_core.runtime import devices
from spmd_core.runtime.placement import jax_axis_names
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import PartitionSpec
from spmd_core.sharding.sharding import Manual, Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap

# The border.


def _crossing(
    tensor: XLAShardedTensor, border: regions.Border, shape: tuple[int, ...]
) -> XLAShardedTensor:
    spec = tensor._handle.spec
    key = ("border", spec, border)
    entry = entries.get(key)
    if entry is None:
        name = "spmd::leave_region" if border.leaves else "spmd::enter_region"
        entry = Entry(name, _never, (Spec.contiguous(shape, spec.dtype),), border=border)
        remember(key, entry)
    with lock:
        return wrap(Storage(Value(entry, (read(tensor._handle),), ()), entry.spec))


def _never(*_: Any) -> Any:
    raise AssertionError("a border is crossed by `regions.cross`")


def _scaled(shape: Sequence[int], sharding: Sharding, *, leaves: bool) -> tuple[int, ...]:
    return tuple(n * tiles if leaves else n // tiles for n, tiles in zip(shape, sharding.tiles))


class _Enter(torch.autograd.Function):
    """The blocks of a whole tensor. Its transpose puts them together, summed over the axes along which each device had the same block."""

    @staticmethod
    def forward(
        ctx: Any, x: XLAShardedTensor, manual: Manual, sharding: Sharding
    ) -> XLAShardedTensor:
        ctx.manual, ctx.sharding = manual, sharding
        return _crossing(
            x,
            regions.Border(manual, sharding, leaves=False),
            _scaled(x.shape, sharding, leaves=False),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        copied = _unused(ctx.manual, ctx.sharding)
        with inside(ctx.manual):
            grad = all_reduce(grads[0], copied) if copied else grads[0]
        return _Leave.apply(grad, ctx.manual, ctx.sharding), None, None


class _Leave(torch.autograd.Function):
    """The whole tensor that the blocks are. Over axes that its spec leaves out every device has the same block, and an equal part of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: XLAShardedTensor, manual: Manual, sharding: Sharding
    ) -> XLAShardedTensor:
        ctx.manual, ctx.sharding = manual, sharding
        return _crossing(
            x,
            regions.Border(manual, sharding, leaves=True),
            _scaled(x.shape, sharding, leaves=True),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        copies = ctx.manual.size // ctx.sharding.num_shards
        grad = _Enter.apply(grads[0], ctx.manual, ctx.sharding)
        return (grad if copies == 1 else grad / copies), None, None


def _unused(manual: Manual, sharding: Sharding) -> tuple[int, ...]:
    used = {axis for axes in sharding.dims for axis in axes}
    return tuple(axis for axis in manual.axes if axis not in used)


def _sharding(manual: Manual, spec: PartitionSpec, ndim: int) -> Sharding:
    sharding = Sharding.of(manual.mesh, spec, ndim)
    others = [axis for axes in sharding.dims for axis in axes if axis not in manual.axes]
    if others:
        names = jax_axis_names(manual.mesh)
        raise PartitionSpecError(
            f"the specs of a manual region name its own axes; got {names[others[0]]!r} in {tuple(spec)!r} for a region over "
            f"{[names[axis] for axis in manual.axes]}. Mark tensors over other axes with mark_sharding."
        )
    return sharding


def _enter(x: Any, manual: Manual, spec: PartitionSpec) -> XLAShardedTensor:
    if not isinstance(x, XLAShardedTensor):
        got = f"a tensor on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise DeviceMismatchError(
            f"a manual region takes tensors on device 'xla'; got {got}. Move it first, or give it the spec ... to pass it as it is."
        )
    sharding = _sharding(manual, spec, x.dim())
    for dim, (size, tiles) in enumerate(zip(x.shape, sharding.tiles)):
        if size % tiles:
            raise PartitionSpecError(
                f"every device of a manual region has a block of one shape; got {size} elements in dim {dim} of a tensor of shape {tuple(x.shape)}, "
                f"to be split into {tiles}. Pad the tensor, or split another dim."
            )
    result: XLAShardedTensor = _Enter.apply(x, manual, sharding)
    return result


def _leave(x: Any, manual: Manual, spec: PartitionSpec) -> XLAShardedTensor:
    if not isinstance(x, XLAShardedTensor):
        raise DeviceMismatchError(
            f"a manual region returns tensors on device 'xla'; got {type(x).__name__}. Return tensors only."
        )
    result: XLAShardedTensor = _Leave.apply(x, manual, _sharding(manual, spec, x.dim()))
    return result


# The region.


def shard_map(
    function: Callable[..., Any],
    mesh: Mesh,
    in_specs: Sequence[Any],
    out_specs: Any,
    *,
    axis_names: Iterable[str | int] | None = None,
) -> Callable[..., Any]:
    """`function` made to run on each device's own blocks: inside it a tensor has its block's shape, and collectives are explicit.

    What it returns can be differentiated, any number of times, and computed together with everything else in one program. Marks on axes outside
    `axis_names` go on working inside. Tensors that `function` closes over, or makes without looking at a local tensor, are the same on each device;
    random operations on local tensors draw other numbers on each. Does not wait for the device.

    Args:
        function: takes and returns tensors (one, or a tuple or list of them).
        mesh: the devices: those of the whole program.
        in_specs: a partition spec for each positional argument, over the manual axes; `...` passes an argument as it is.
        out_specs: a partition spec for the result, or one for each of several. Over an axis that it leaves out, every device must have the same
            values: one device's are taken.
        axis_names: the manual axes, names or numbers; None: all of the mesh's.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        PartitionSpecError: a spec does not fit, names an axis that is not manual, or splits a dim unevenly; or their number is wrong.
        DeviceMismatchError: an argument or a result is not a tensor on device `xla`.
        SpmdError: in a manual region already.

    Example:
        >>> mesh = Mesh(range(8), (8,), ("x",))
        >>> total = shard_map(lambda block: all_reduce(block.sum(0), "x"), mesh, [("x",)], ())
        >>> total(torch.ones(16, 3, device="xla")).tolist()
        [16.0, 16.0, 16.0]
    """
    devices.require_spmd("shard_map")
    manual = manual_axes(mesh, axis_names)
    if isinstance(in_specs, str) or not isinstance(in_specs, (tuple, list)):
        raise PartitionSpecError(
            f"in_specs has one partition spec for each argument; got {in_specs!r}. Write a list of specs, [('x', None)] for one."
        )

    def mapped(*args: Any) -> Any:
        if len(args) != len(in_specs):
            raise PartitionSpecError(
                f"in_specs has one partition spec for each argument; got {len(in_specs)} specs and {len(args)} arguments."
            )
        if current_region.get() is not None:
            raise SpmdError(
                "manual regions do not nest; got a shard_map inside a shard_map. Name the axes of both in the outer one."
            )
        local = [
            arg if spec is ... else _enter(arg, manual, spec) for arg, spec in zip(args, in_specs)
        ]
        with inside(manual):
            results = function(*local)
        if not isinstance(results, (tuple, list)):
            return _leave(results, manual, out_specs)
        if not isinstance(out_specs, (tuple, list)) or len(out_specs) != len(results):
            raise PartitionSpecError(
                f"out_specs has one partition spec for each result; got {out_specs!r} for {len(results)} results."
            )
        return type(results)(
            _leave(result, manual, spec) for result, spec in zip(results, out_specs)
        )

    return mapped


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """The tensor as each device's own block, over all axes of the mesh: `shard_map`'s way in, for code that is not one function.

    Raises:
        MeshError: `mesh` is None and no global mesh is set.
    """
    devices.require_spmd("enable_manual_sharding")
    return _enter(t, manual_axes(given_or_global(mesh)), partition_spec)


def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: PartitionSpec,
    full_shape: Sequence[int],
    *,
    mesh: Mesh | None = None,
) -> XLAShardedTensor:
    """The whole tensor of `full_shape` that the blocks are: `shard_map`'s way out.

    Raises:
        MeshError: `mesh` is None and no global mesh is set.
        PartitionSpecError: `full_shape` is not what the blocks make.
    """
    devices.require_spmd("disable_manual_sharding")
    result = _leave(t, manual_axes(given_or_global(mesh)), partition_spec)
    if tuple(result.shape) != tuple(full_shape):
        raise PartitionSpecError(
            f"blocks of shape {tuple(t.shape)} under {tuple(partition_spec)!r} make a tensor of shape {tuple(result.shape)}; got full_shape "
            f"{tuple(full_shape)}. Give that shape, or another spec."
        )
    return result


def axis_index(axes: Any) -> torch.Tensor:
    """Where the device stands along mesh axes, the last one running fastest: a 0-dim int64 tensor, another on each device."""
    along = checked_axes(axes, "axis_index")
    manual = current_region.get()
    assert manual is not None
    positions = torch.arange(along.size, device="xla")
    numbers = axes_of(manual.mesh, axes)
    return _enter(positions, manual, (numbers,)).reshape(())
