"""Collectives of a manual region, each with its transpose as its gradient."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.errors import PartitionSpecError, SpmdError
from spmd_core.manual.region import axes_of, current_region, inside
from spmd_core.ops import registry
from spmd_core.recording.calls import NO_KWARGS, Handler, functional_handler
from spmd_core.runtime.placement import jax_axis_names
from spmd_core.sharding.sharding import Manual

# Collectives.


@dataclass(frozen=True)
class AlongAxes:
    """Axes of the region that the code stands in: their names to jax, and how many devices they have together."""

    names: tuple[str, ...]
    size: int


def checked_axes(axes: Any, what: str) -> AlongAxes:
    manual = current_region.get()
    if manual is None:
        raise SpmdError(
            f"{what} is a collective of a manual region; got a call outside of one. Call it inside a function given to shard_map."
        )
    numbers = axes_of(manual.mesh, axes)
    names = jax_axis_names(manual.mesh)
    for axis in numbers:
        if axis not in manual.axes:
            raise PartitionSpecError(
                f"a collective goes along manual axes; {what} got {names[axis]!r} in a region over {[names[a] for a in manual.axes]}. "
                "Add it to the region's axis_names."
            )
    return AlongAxes(
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
    along = checked_axes(axes, "all_reduce")
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
    with inside(manual):
        return collective(*args)


def all_gather(x: torch.Tensor, axes: Any, dim: int = 0) -> torch.Tensor:
    """The blocks of all devices along mesh axes, joined along `dim` in the devices' order: the same on each."""
    along = checked_axes(axes, "all_gather")
    args = (list(along.names), along.size, _dim(x, dim))
    return _apply(x, ("all_gather", args), ("reduce_scatter", args))


def reduce_scatter(x: torch.Tensor, axes: Any, dim: int = 0) -> torch.Tensor:
    """The sum of `x` over the devices along mesh axes, of which each keeps its part of `dim`.

    Raises:
        ValueError: `dim` does not divide by the number of devices.
    """
    along = checked_axes(axes, "reduce_scatter")
    args = (list(along.names), along.size, _even(x, dim, along, "reduce_scatter"))
    return _apply(x, ("reduce_scatter", args), ("all_gather", args))


def all_to_all(x: torch.Tensor, axes: Any, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Each device cuts `split_dim` into a part for each device along mesh axes, and joins what it receives along `concat_dim`.

    Raises:
        ValueError: `split_dim` does not divide by the number of devices.
    """
    along = checked_axes(axes, "all_to_all")
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
    along = checked_axes(axis, "collective_permute")
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


def _dim(x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-x.dim()}, {x.dim() - 1}], but got {dim})"
        )
    return dim % x.dim()


def _even(x: torch.Tensor, dim: int, along: AlongAxes, what: str) -> int:
    dim = _dim(x, dim)
    if x.shape[dim] % along.size:
        raise ValueError(
            f"{what} gives each of {along.size} devices an equal part; got {x.shape[dim]} elements in dim {dim} of shape {tuple(x.shape)}. "
            "Pad the dim to a multiple."
        )
    return dim
