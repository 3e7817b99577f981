"""Manual regions: inside, a tensor is one device's block, and devices exchange data by explicit collectives. `shard_map` is the way in."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core import regions, runtime
from spmd_core.errors import DeviceMismatchError, MeshError, PartitionSpecError, SpmdError
from spmd_core.graph import Entry, Spec, Value
from spmd_core.mesh import Mesh, check_devices, get_global_mesh
from spmd_core.ops import registry
from spmd_core.recording import NO_KWARGS, Handler, entries, functional_handler, remember
from spmd_core.sharding import Manual, PartitionSpec, Sharding
from spmd_core.storage import Storage, lock, read
from spmd_core.tensor import XLAShardedTensor, wrap

_region: ContextVar[Manual | None] = ContextVar("region", default=None)


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
        with _inside(ctx.manual):
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


@contextmanager
def _inside(manual: Manual) -> Any:
    token = _region.set(manual)
    try:
        yield
    finally:
        _region.reset(token)


def _sharding(manual: Manual, spec: PartitionSpec, ndim: int) -> Sharding:
    sharding = Sharding.of(manual.mesh, spec, ndim)
    others = [axis for axes in sharding.dims for axis in axes if axis not in manual.axes]
    if others:
        names = runtime.axis_names(manual.mesh)
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
    runtime.require_spmd("shard_map")
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
        if _region.get() is not None:
            raise SpmdError(
                "manual regions do not nest; got a shard_map inside a shard_map. Name the axes of both in the outer one."
            )
        local = [
            arg if spec is ... else _enter(arg, manual, spec) for arg, spec in zip(args, in_specs)
        ]
        with _inside(manual):
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


def is_local(tensor: XLAShardedTensor) -> bool:
    """Whether a tensor is local to the devices of a manual region, so that it has a value of its own on each."""
    return region_of(tensor) is not None


def region_of(tensor: XLAShardedTensor) -> Manual | None:
    """The mesh, and its axes, to whose devices a tensor is local; None for a tensor that is whole."""
    value = read(tensor._handle)
    seen: set[int] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.data is not None:
            if value.placement.manual is not None:
                return value.placement.manual
            continue
        border = value.entry.border if value.parent is None else None
        if border is not None:
            if not border.leaves:
                return border.manual
            continue  # what leaves a region is whole, wherever it came from
        pending.extend(value.inputs if value.parent is None else (value.parent,))
    return None


def manual_axes(mesh: Mesh, axis_names: Iterable[str | int] | None = None) -> Manual:
    """The axes of a manual region: those named, or all."""
    check_devices(mesh, runtime.global_runtime_device_count())
    every = tuple(range(len(mesh.mesh_shape)))
    return Manual(
        mesh, every if axis_names is None else tuple(sorted(_axes_of(mesh, tuple(axis_names))))
    )


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """The tensor as each device's own block, over all axes of the mesh: `shard_map`'s way in, for code that is not one function.

    Raises:
        MeshError: `mesh` is None and no global mesh is set.
    """
    runtime.require_spmd("enable_manual_sharding")
    return _enter(t, manual_axes(_given_or_global(mesh)), partition_spec)


def _given_or_global(mesh: Mesh | None) -> Mesh:
    chosen = get_global_mesh() if mesh is None else mesh
    if chosen is None:
        raise MeshError(
            "a manual region needs a mesh; got None, and no global mesh is set. Pass mesh=, or call set_global_mesh(mesh)."
        )
    return chosen


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
    runtime.require_spmd("disable_manual_sharding")
    result = _leave(t, manual_axes(_given_or_global(mesh)), partition_spec)
    if tuple(result.shape) != tuple(full_shape):
        raise PartitionSpecError(
            f"blocks of shape {tuple(t.shape)} under {tuple(partition_spec)!r} make a tensor of shape {tuple(result.shape)}; got full_shape "
            f"{tuple(full_shape)}. Give that shape, or another spec."
        )
    return result


# Collectives.


@dataclass(frozen=True)
class _Along:
    """Axes of the region that the code stands in: their names to jax, and how many devices they have together."""

    names: tuple[str, ...]
    size: int


def _axes_of(mesh: Mesh, axes: Any) -> tuple[int, ...]:
    """Numbers of axes from a name, a number, or several; each once."""
    sharding = Sharding.of(mesh, ((axes,) if isinstance(axes, (str, int)) else tuple(axes),), 1)
    return sharding.dims[0]


def _along(axes: Any, what: str) -> _Along:
    manual = _region.get()
    if manual is None:
        raise SpmdError(
            f"{what} is a collective of a manual region; got a call outside of one. Call it inside a function given to shard_map."
        )
    numbers = _axes_of(manual.mesh, axes)
    names = runtime.axis_names(manual.mesh)
    for axis in numbers:
        if axis not in manual.axes:
            raise PartitionSpecError(
                f"a collective goes along manual axes; {what} got {names[axis]!r} in a region over {[names[a] for a in manual.axes]}. "
                "Add it to the region's axis_names."
            )
    return _Along(
        tuple(names[axis] for axis in numbers),
        math.prod(manual.mesh.mesh_shape[axis] for axis in numbers),
    )


def _recorder(name: str) -> Handler:
    lowering = registry.find(registry.resolve(f"spmd.{name}.default"))
    assert lowering is not None
    return functional_handler(lowering)


_records = {
    name: _recorder(name)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
}


class _Collective(torch.autograd.Function):
    """A linear collective; its transpose is another one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        name: str,
        args: tuple[Any, ...],
        transposed: tuple[str, tuple[Any, ...]],
    ) -> torch.Tensor:
        ctx.forward_call, ctx.transposed = (name, args), transposed
        result: torch.Tensor = _records[name]((x, *args), NO_KWARGS)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Collective.apply(grads[0], *ctx.transposed, ctx.forward_call), None, None, None


def _apply(
    x: torch.Tensor, call: tuple[str, tuple[Any, ...]], transposed: tuple[str, tuple[Any, ...]]
) -> torch.Tensor:
    result: torch.Tensor = _Collective.apply(x, *call, transposed)
    return result


def all_reduce(x: torch.Tensor, axes: Any, op: str = "sum") -> torch.Tensor:
    """The sum (or "mean", "max", "min") of `x` over the devices along mesh axes (a name, a number, or several): the same on each.

    Raises:
        SpmdError: outside of a manual region.
        ValueError: another `op`, or a maximum or minimum that is to be differentiated, as equal elements leave its gradient open.
    """
    along = _along(axes, "all_reduce")
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"all_reduce computes 'sum', 'mean', 'max' or 'min'; got {op!r}.")
    call = ("all_reduce", (list(along.names), op))
    if op in ("sum", "mean"):
        return _apply(x, call, call)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"all_reduce with {op!r} has no gradient; got a tensor that requires one. Call it on x.detach()."
        )
    result: torch.Tensor = _records["all_reduce"]((x, *call[1]), NO_KWARGS)
    return result


def in_region(manual: Manual, collective: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """`collective(*args)` of tensors that are local to a region (`region_of`), outside of a function of `shard_map`."""
    with _inside(manual):
        return collective(*args)


def all_gather(x: torch.Tensor, axes: Any, dim: int = 0) -> torch.Tensor:
    """The blocks of all devices along mesh axes, joined along `dim` in the devices' order: the same on each."""
    along = _along(axes, "all_gather")
    args = (list(along.names), along.size, _dim(x, dim))
    return _apply(x, ("all_gather", args), ("reduce_scatter", args))


def reduce_scatter(x: torch.Tensor, axes: Any, dim: int = 0) -> torch.Tensor:
    """The sum of `x` over the devices along mesh axes, of which each keeps its part of `dim`.

    Raises:
        ValueError: `dim` does not divide by the number of devices.
    """
    along = _along(axes, "reduce_scatter")
    args = (list(along.names), along.size, _even(x, dim, along, "reduce_scatter"))
    return _apply(x, ("reduce_scatter", args), ("all_gather", args))


def all_to_all(x: torch.Tensor, axes: Any, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Each device cuts `split_dim` into a part for each device along mesh axes, and joins what it receives along `concat_dim`.

    Raises:
        ValueError: `split_dim` does not divide by the number of devices.
    """
    along = _along(axes, "all_to_all")
    split, concat = _even(x, split_dim, along, "all_to_all"), _dim(x, concat_dim)
    names = list(along.names)
    return _apply(
        x,
        ("all_to_all", (names, along.size, split, concat)),
        ("all_to_all", (names, along.size, concat, split)),
    )


def collective_permute(
    x: torch.Tensor, axis: str | int, pairs: Iterable[tuple[int, int]]
) -> torch.Tensor:
    """What another device along a mesh axis has: `pairs` are (source, target) positions; zeros where no pair has the device as target.

    Raises:
        ValueError: a position is outside of the axis, or comes twice as source or as target.
    """
    along = _along(axis, "collective_permute")
    given = [(int(source), int(target)) for source, target in pairs]
    sources, targets = [source for source, _ in given], [target for _, target in given]
    for which in (sources, targets):
        if len(set(which)) != len(which) or any(
            not 0 <= position < along.size for position in which
        ):
            raise ValueError(
                f"collective_permute sends each position of an axis at most once, to at most one other; got {given} on an axis of "
                f"{along.size}. Write (source, target) pairs of positions from 0 to {along.size - 1}."
            )
    name = along.names[0]
    return _apply(
        x,
        ("collective_permute", (name, sources, targets)),
        ("collective_permute", (name, targets, sources)),
    )


def axis_index(axes: Any) -> torch.Tensor:
    """Where the device stands along mesh axes, the last one running fastest: a 0-dim int64 tensor, another on each device."""
    along = _along(axes, "axis_index")
    manual = _region.get()
    assert manual is not None
    positions = torch.arange(along.size, device="xla")
    numbers = _axes_of(manual.mesh, axes)
    return _enter(positions, manual, (numbers,)).reshape(())


def _dim(x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-x.dim()}, {x.dim() - 1}], but got {dim})"
        )
    return dim % x.dim()


def _even(x: torch.Tensor, dim: int, along: _Along, what: str) -> int:
    dim = _dim(x, dim)
    if x.shape[dim] % along.size:
        raise ValueError(
            f"{what} gives each of {along.size} devices an equal part; got {x.shape[dim]} elements in dim {dim} of shape {tuple(x.shape)}. "
            "Pad the dim to a multiple."
        )
    return dim
