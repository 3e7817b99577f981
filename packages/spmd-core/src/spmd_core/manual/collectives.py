"""Collectives of a manual region; the gradient of each is its transpose."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.arguments import checked, require_int, require_kind
from spmd_core.errors import PartitionSpecError, SpmdError
from spmd_core.manual.region import Axes, axes_of, current_region, inside
from spmd_core.ops import registry
from spmd_core.recording.calls import NO_KWARGS, Handler, functional_handler
from spmd_core.runtime.jax_sharding import jax_axis_names
from spmd_core.sharding.sharding import Manual


@dataclass(frozen=True)
class AxisGroup:
    """The mesh axes along which a collective communicates.

    Attributes:
        names: the names of the axes in jax, major first.
        size: the number of devices that communicate with each other.
    """

    names: tuple[str, ...]
    size: int


def axis_group(axes: Axes, caller: str) -> AxisGroup:
    """The group of mesh axes in the current region; `caller` is the function to name in errors.

    Raises:
        SpmdError: outside of a manual region.
        PartitionSpecError: an axis is not one of the region's.
    """
    manual = current_region.get()
    if manual is None:
        raise SpmdError(
            f"{caller} is a collective of a manual region; got a call outside of one. "
            "Call it inside a function given to shard_map."
        )
    numbers = axes_of(manual.mesh, axes)
    names = jax_axis_names(manual.mesh)
    for axis in numbers:
        if axis not in manual.axes:
            raise PartitionSpecError(
                f"a collective goes along manual axes; {caller} got {names[axis]!r} "
                f"in a region over {[names[a] for a in manual.axes]}. "
                "Add it to the region's axis_names."
            )
    return AxisGroup(
        tuple(names[axis] for axis in numbers),
        math.prod(manual.mesh.mesh_shape[axis] for axis in numbers),
    )


def _group(x: torch.Tensor, axes: Axes, caller: str) -> AxisGroup:
    """As `axis_group`; raises TypeError if `x`, which is sent along the axes, is no tensor."""
    require_kind("x", x, torch.Tensor, write=f"{caller} of one device's tensor")
    return axis_group(axes, caller)


def _recorder(name: str) -> Handler:
    lowering = registry.find_lowering(registry.resolve(f"spmd.{name}.default"))
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


def all_reduce(x: torch.Tensor, axes: Axes, op: str = "sum") -> torch.Tensor:
    """The sum of `x` over the devices along mesh axes; the same on each of them.

    Args:
        x: one device's tensor.
        axes: a mesh axis, by name or number, or several.
        op: "sum", "mean", "max" or "min".

    Raises:
        SpmdError: outside of a manual region.
        ValueError: another `op`; or a maximum or minimum that is to be differentiated, whose
            gradient is not defined where elements are equal.
    """
    group = _group(x, axes, "all_reduce")
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(
            f"all_reduce computes 'sum', 'mean', 'max' or 'min'; got {op!r}. Write one of these, "
            "or all_gather, and compute with what it returns."
        )
    call = ("all_reduce", (list(group.names), op))
    if op in ("sum", "mean"):
        return _apply(x, call, call)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"all_reduce with {op!r} has no gradient; got a tensor that requires one. "
            "Call it on x.detach()."
        )
    result: torch.Tensor = _records["all_reduce"]((x, *call[1]), NO_KWARGS)
    return result


@checked()
def all_gather(x: torch.Tensor, axes: Axes, dim: int = 0) -> torch.Tensor:
    """The blocks of all devices along mesh axes, concatenated along `dim`; the same on each device.

    The blocks are in the order of the devices.
    """
    group = _group(x, axes, "all_gather")
    args = (list(group.names), group.size, _dim(x, dim))
    return _apply(x, ("all_gather", args), ("reduce_scatter", args))


@checked()
def reduce_scatter(x: torch.Tensor, axes: Axes, dim: int = 0) -> torch.Tensor:
    """The sum of `x` over the devices along mesh axes, of which each keeps its part of `dim`.

    Raises:
        ValueError: `dim` does not divide by the number of devices.
    """
    group = _group(x, axes, "reduce_scatter")
    args = (list(group.names), group.size, _divisible_dim(x, dim, group, "reduce_scatter"))
    return _apply(x, ("reduce_scatter", args), ("all_gather", args))


@checked()
def all_to_all(x: torch.Tensor, axes: Axes, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Sends a part of `x` to each device along mesh axes, and concatenates the parts received.

    Args:
        x: one device's tensor.
        axes: a mesh axis, by name or number, or several.
        split_dim: the dim that is split into one part for each device.
        concat_dim: the dim along which the received parts are concatenated.

    Raises:
        ValueError: `split_dim` does not divide by the number of devices.
    """
    group = _group(x, axes, "all_to_all")
    split, concat = _divisible_dim(x, split_dim, group, "all_to_all"), _dim(x, concat_dim)
    names = list(group.names)
    return _apply(
        x,
        ("all_to_all", (names, group.size, split, concat)),
        ("all_to_all", (names, group.size, concat, split)),
    )


def collective_permute(
    x: torch.Tensor, axis: str | int, pairs: Iterable[tuple[int, int]]
) -> torch.Tensor:
    """The `x` of another device along a mesh axis; zeros on a device that is no pair's target.

    Args:
        x: one device's tensor.
        axis: a mesh axis, by name or number.
        pairs: (source, target) positions along the axis.

    Raises:
        ValueError: a position is outside of the axis, or occurs twice as source or as target.
    """
    group = _group(x, axis, "collective_permute")
    given = [
        (require_int("a pair's source", source), require_int("a pair's target", target))
        for source, target in pairs
    ]
    sources, targets = [source for source, _ in given], [target for _, target in given]
    for positions in (sources, targets):
        if len(set(positions)) != len(positions) or any(
            not 0 <= position < group.size for position in positions
        ):
            raise ValueError(
                "collective_permute sends each position of an axis at most once, "
                f"to at most one other; got {given} on an axis of {group.size}. "
                f"Write (source, target) pairs of positions from 0 to {group.size - 1}."
            )
    name = group.names[0]
    return _apply(
        x,
        ("collective_permute", (name, sources, targets)),
        ("collective_permute", (name, targets, sources)),
    )


def in_region(manual: Manual, collective: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """`collective(*args)` of tensors local to a region (`region_of`), for calls outside of it."""
    with inside(manual):
        return collective(*args)


def _dim(x: torch.Tensor, dim: int) -> int:
    """The dim counted from the first; raises torch's IndexError if it is out of range."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-x.dim()}, {x.dim() - 1}], "
            f"but got {dim})"
        )
    return dim % x.dim()


def _divisible_dim(x: torch.Tensor, dim: int, group: AxisGroup, caller: str) -> int:
    """As `_dim`; raises ValueError if the dim does not divide by the number of devices."""
    dim = _dim(x, dim)
    if x.shape[dim] % group.size:
        raise ValueError(
            f"{caller} gives each of {group.size} devices an equal part; "
            f"got {x.shape[dim]} elements in dim {dim} of shape {tuple(x.shape)}. "
            "Pad the dim to a multiple."
        )
    return dim
