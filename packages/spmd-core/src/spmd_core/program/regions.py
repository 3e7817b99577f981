"""Manual regions inside a program: which values are local to a device, and how kernels run on them.

A local value is one array with an additional first dim for the positions along the manual axes. The
dim is split over these axes, so that the value can pass from one operation, or program, to the
next. Each operation on local values is a `jax.shard_map` of its kernel over the manual axes: every
device runs the kernel on its own values. The other axes of the mesh are left to the partitioner.

Autograd sees ordinary operations, so the values that backward needs are saved as usual. The
transpose of a collective is another collective (`manual.collectives`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.errors import ProgramError
from spmd_core.graph.placement import Placement
from spmd_core.ops import registry
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh, jax_partition_spec
from spmd_core.sharding.sharding import Border, Manual


def manual_of(
    entry_name: str, border: Border | None, inputs: Sequence[Manual | None]
) -> Manual | None:
    """The region that an operation's results are local to, from those of its inputs.

    Raises:
        ProgramError: the inputs are local to different regions.
    """
    found = {manual for manual in inputs if manual is not None}
    if border is not None:
        if found != ({border.manual} if border.is_exit else set()):
            rule = (
                "only a tensor that is local to a manual region can leave it"
                if border.is_exit
                else "only a global tensor can enter a manual region"
            )
            raise ProgramError(
                f"{rule}; "
                f"{entry_name} got {_names(found) or 'a global tensor'}. "
                "Leave one region before you enter the next."
            )
        return None if border.is_exit else border.manual
    if len(found) > 1:
        raise ProgramError(
            "the local tensors among an operation's inputs must be of one manual region; "
            f"{entry_name} got {_names(found)}. Leave one region before you enter the next."
        )
    return found.pop() if found else None


def of_results(graph: RecordedGraph) -> list[Manual | None]:
    """The region that each result of each operation is local to; None for a global one."""
    leaves = [leaf.placement.manual for leaf in graph.leaves]
    results: list[Manual | None] = []
    for node in graph.nodes:
        inputs = [leaves[-i - 1] if i < 0 else results[i] for i in node.inputs]
        manual = manual_of(node.entry.name, node.entry.border, inputs)
        results += [manual] * len(node.entry.outs)
    return results


def _names(found: set[Manual]) -> str:
    each = (f"({', '.join(_axes(manual))})" for manual in found)
    return " and ".join(sorted(f"a tensor local to {axes}" for axes in each))


def _axes(manual: Manual) -> tuple[str, ...]:
    names = jax_axis_names(manual.mesh)
    return tuple(names[axis] for axis in manual.axes)


def placement(manual: Manual) -> Placement:
    """The placement of a tensor that is local to a region."""
    return Placement.of(
        NamedSharding(jax_mesh(manual.mesh), PartitionSpec(_axes(manual))), None, manual
    )


def check_devices(manual: Manual, device_ids: tuple[int, ...]) -> None:
    """Raises ProgramError unless a region's mesh has the program's devices, in their order."""
    own = manual.mesh.ids
    if own != device_ids:
        raise ProgramError(
            "the mesh of a manual region must have all devices of its program; "
            f"got devices {own} in a program on {device_ids}. "
            "Use meshes over the same devices in the same order, or call spmd.sync() between."
        )


def _mapped(
    manual: Manual,
    function: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    others: Iterable[str] = (),
) -> Callable[..., Any]:
    """`function`, run by every device along the manual axes, and others, on its own blocks."""
    return jax.shard_map(
        function,
        mesh=jax_mesh(manual.mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*_axes(manual), *others},
        check_vma=False,
    )


def cross(border: Border, x: jax.Array) -> jax.Array:
    """A global tensor as a stack of its blocks; at an exit, the stack as a global tensor."""
    spec = jax_partition_spec(border.sharding)
    stacked = PartitionSpec(_axes(border.manual))
    if border.is_exit:
        return _mapped(border.manual, lambda block: block[0], (stacked,), spec)(x)
    return _mapped(border.manual, lambda block: block[None], (spec,), stacked)(x)


def own_seed(manual: Manual, seed: registry.Number) -> registry.Number:
    """Inside a region: a device's own seed, in [0, 2**63), from a seed that is equal on all."""
    key = jax.random.key(seed.value, impl="threefry2x32")
    bits = jax.random.bits(jax.random.fold_in(key, lax.axis_index(_axes(manual))), (), np.uint64)
    return registry.Number((bits >> np.uint64(1)).astype(np.int64), seed.kind)


def run(
    manual: Manual,
    kernel: Callable[[list[jax.Array], list[registry.Number], jax.Array | None], list[jax.Array]],
    inputs: Sequence[jax.Array],
    local: Sequence[bool],
    numbers: Sequence[registry.Number],
    key: jax.Array | None,
    *,
    others: Sequence[tuple[str, ...]] = (),
) -> list[jax.Array]:
    """Runs `kernel(inputs, numbers, key)` on every device, with the device's own values.

    Args:
        manual: the region.
        kernel: takes and returns one device's values.
        inputs: the operation's inputs; a local input is a stack of the devices' values.
        local: whether each input is local; other inputs are equal on all devices.
        numbers: the scalar inputs, equal on all devices.
        key: the random key, or None; every device folds its position into it.
        others: for each dim of local tensors, other axes that split it: the kernel takes and
            returns blocks. A region inside of the kernel would do the same, and Shardy loses that
            it is inside of another one (`docs/explanation/xla_errors.md`).

    Returns:
        Each result as a stack of the devices' values.
    """
    stacked, same = (
        PartitionSpec(_axes(manual), *(axes or None for axes in others)),
        PartitionSpec(),
    )
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
    names = [name for axes in others for name in axes]
    return _mapped(manual, on_device, in_specs, stacked, names)(
        list(inputs), [n.value for n in numbers], [] if key is None else [key]
    )
