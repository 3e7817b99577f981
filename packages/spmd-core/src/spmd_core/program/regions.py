"""Manual regions inside a program: which values are local to a device, and how each operation on them is run by every device for itself.

A local value is kept as one array with a first dim for the positions along the manual axes, split over them; so it may pass from one operation to the
next, and from one program to the next. Each operation on local values is a `jax.shard_map` of its kernel over the manual axes. The other axes of the
mesh stay with the partitioner.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.errors import ProgramError
from spmd_core.ops import registry
from spmd_core.runtime.placement import Placement, jax_axis_names, jax_mesh, jax_partition_spec
from spmd_core.sharding.sharding import Manual, Sharding


@dataclass(frozen=True)
class Border:
    """An operation that takes a tensor into a manual region or out of it; `sharding` is the whole tensor's, over manual axes alone."""

    manual: Manual
    sharding: Sharding
    leaves: bool


def manual_of(
    entry_name: str, border: Border | None, inputs: Sequence[Manual | None]
) -> Manual | None:
    """The axes to which an operation's results are local, from those of its inputs.

    Raises:
        ProgramError: the inputs are local to different axes.
    """
    found = {manual for manual in inputs if manual is not None}
    if border is not None:
        if found != ({border.manual} if border.leaves else set()):
            what = (
                "left by what is local to its axes"
                if border.leaves
                else "entered by a global tensor"
            )
            raise ProgramError(
                f"a manual region is {what}; {entry_name} got {_names(found) or 'a global tensor'}. Leave one region before the next."
            )
        return None if border.leaves else border.manual
    if len(found) > 1:
        raise ProgramError(
            f"an operation takes the local tensors of one manual region; {entry_name} got {_names(found)}. Leave one before the next."
        )
    return found.pop() if found else None


def _names(found: set[Manual]) -> str:
    each = (f"({', '.join(_axes(manual))})" for manual in found)
    return " and ".join(sorted(f"a tensor local to {axes}" for axes in each))


def _axes(manual: Manual) -> tuple[str, ...]:
    names = jax_axis_names(manual.mesh)
    return tuple(names[axis] for axis in manual.axes)


def placement(manual: Manual) -> Placement:
    """How a local tensor's values lie."""
    return Placement.of(
        NamedSharding(jax_mesh(manual.mesh), PartitionSpec(_axes(manual))), None, manual
    )


def check_devices(manual: Manual, device_ids: tuple[int, ...]) -> None:
    """Raises ProgramError where the mesh of a manual region is not over the program's devices in their order."""
    own = manual.mesh.ids
    if own != device_ids:
        raise ProgramError(
            f"the mesh of a manual region is over all devices of its program; got devices {own} in a program on {device_ids}. "
            "Use meshes over the same devices in the same order, or sync() between."
        )


def _on_each(
    manual: Manual, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    return jax.shard_map(
        function,
        mesh=jax_mesh(manual.mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(_axes(manual)),
        check_vma=False,
    )


def cross(border: Border, x: jax.Array) -> jax.Array:
    """The whole tensor as its stacked blocks, or back."""
    whole = jax_partition_spec(border.sharding)
    stacked = PartitionSpec(_axes(border.manual))
    if border.leaves:
        return _on_each(border.manual, lambda block: block[0], (stacked,), whole)(x)
    return _on_each(border.manual, lambda block: block[None], (whole,), stacked)(x)


def run(
    manual: Manual,
    kernel: Callable[[list[Any], list[Any], jax.Array | None], list[Any]],
    inputs: Sequence[jax.Array],
    local: Sequence[bool],
    numbers: Sequence[registry.Number],
    key: jax.Array | None,
) -> list[jax.Array]:
    """`kernel(inputs, numbers, key)` by every device for itself, the results stacked. What is not local is the same on each, save for `key`."""
    stacked, same = PartitionSpec(_axes(manual)), PartitionSpec()
    kinds = [number.kind for number in numbers]

    def on_device(
        arrays: list[jax.Array], values: list[jax.Array], keys: list[jax.Array]
    ) -> list[jax.Array]:
        own = [x[0] if is_local else x for x, is_local in zip(arrays, local)]
        given = [registry.Number(value, kind) for value, kind in zip(values, kinds)]
        folded = [jax.random.fold_in(k, lax.axis_index(_axes(manual))) for k in keys]
        return [result[None] for result in kernel(own, given, folded[0] if folded else None)]

    in_specs = (
        [stacked if is_local else same for is_local in local],
        [same] * len(numbers),
        [same] * (key is not None),
    )
    return _on_each(manual, on_device, in_specs, stacked)(
        list(inputs), [n.value for n in numbers], [] if key is None else [key]
    )
