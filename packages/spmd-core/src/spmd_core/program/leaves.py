"""Placements of a program's inputs in host and device memory, and transfers between them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.errors import SpmdError
from spmd_core.graph.placement import Placement
from spmd_core.graph.stacks import Row, stacked_sharding
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.program.program_graph import stored_shape
from spmd_core.runtime import buffers, devices
from spmd_core.runtime.jax_sharding import (
    default_device_ids,
    device_ids_of,
    named_sharding,
    replicated,
)
from spmd_core.sharding.sharding import Sharding


def host_placement(sharding: Sharding | None = None) -> Placement:
    """The placement of data in host memory that will be uploaded with this sharding."""
    return Placement.of(None, sharding)


def marked_placement(sharding: Sharding) -> Placement:
    """The placement of device data that is sharded as its mark says."""
    return Placement.of(named_sharding(sharding), sharding)


def device_placement(sharding: Sharding | None) -> Placement:
    """The placement of data that is uploaded outside a program; replicated if it has no mark."""
    return (
        marked_placement(sharding)
        if sharding is not None
        else Placement.of(replicated(default_device_ids()), None)
    )


@lru_cache(maxsize=16384)
def target_placement(placement: Placement, device_ids: tuple[int, ...]) -> Placement:
    """The placement that a leaf must have for a program on these devices."""
    sharding, own = placement.sharding, placement.jax_sharding
    if placement.manual is not None:
        return placement
    if sharding is not None:
        return Placement.of(named_sharding(sharding, device_ids), sharding)
    if own is not None and device_ids_of(own) == device_ids:
        return placement.with_room(None)
    return Placement.of(replicated(device_ids), None)


devices.on_exchange.append(target_placement.cache_clear)


@lru_cache(maxsize=4096)
def stack_placement(row: Placement) -> Placement:
    """The placement of a stack whose rows are placed like this."""
    if row.sharding is not None:
        mark = stacked_sharding(row.sharding)
        return host_placement(mark) if row.jax_sharding is None else marked_placement(mark)
    own = row.jax_sharding
    return Placement.of(None if own is None else _over(own.mesh, [None, *own.spec]), None)


@lru_cache(maxsize=4096)
def row_placement(stack: Placement, sharding: Sharding | None) -> Placement:
    """The placement of the rows of a stack in device memory.

    Args:
        stack: where the stack lies.
        sharding: the mark of the rows; None if they have none.
    """
    if sharding is not None:
        return marked_placement(sharding)
    own = stack.device_sharding
    assert not own.spec or own.spec[0] is None, own
    return Placement.of(_over(own.mesh, own.spec[1:]), None)


def _over(mesh: Any, spec: Sequence[Any]) -> NamedSharding:
    """jax's sharding of one form: equal ones are compared by their specs."""
    entries = [*spec]
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, PartitionSpec(*entries))


devices.on_exchange.append(stack_placement.cache_clear)
devices.on_exchange.append(row_placement.cache_clear)


def refuse_local(value: Value) -> None:
    """Raises SpmdError for a tensor that is local to a manual region.

    Such a tensor has one value for each position along the region's axes.
    """
    if value.placement.manual is not None:
        raise SpmdError(
            "a tensor inside a manual region has another value on each device, so it cannot be "
            f"read or sharded; got {value.spec!r}. "
            "Return it from the region with an out_spec, and read the result."
        )


def replace(storage: Storage, array: jax.Array, placement: Placement) -> None:
    """Replaces the storage's value, computed or pending, by a device array."""
    storage.write(Value.leaf(storage.spec, array, placement, None))


def set_sharding(storage: Storage, sharding: Sharding | None) -> None:
    """Sets the storage's mark; None removes it.

    Device data is resharded at once, without waiting. Host data is sharded when it is uploaded.
    """
    value = storage.value
    if value.data is not None:
        refuse_local(value)
    storage.sharding = sharding
    if value.data is None:
        return
    if value.placement.jax_sharding is None:
        value.placement = host_placement(sharding)
        return
    if sharding is None:
        old = value.placement.sharding
        if old is not None:
            target = Placement.of(replicated(old.mesh.ids), None)
            move(value, target)
        return
    target = marked_placement(sharding)
    if value.placement is not target:
        move(value, target)


def move(value: Value, target: Placement) -> None:
    """Reshards a leaf in device memory. Does not wait."""
    same = value.placement.jax_sharding == target.jax_sharding and value.data.__class__ is not Row
    if same and value.data.shape == stored_shape(value.spec, target):
        value.placement = target  # another mark for the same blocks
        return
    value.data = buffers.reshard(
        array_of(value), target.device_sharding, value.spec.shape, stored_shape(value.spec, target)
    )
    value.placement = target


def array_of(value: Value) -> jax.Array:
    """The array of a leaf in device memory; of a row of a stack a copy. Does not wait."""
    if value.data.__class__ is not Row:
        array: jax.Array = value.data
        return array
    row: Row = value.data
    sharding = value.placement.device_sharding
    shape = stored_shape(value.spec, value.placement)
    return buffers.row(row.stack.value.data, row.index, sharding, shape)


def convert(value: Value, target: Placement) -> jax.Array:
    """The leaf's array with the placement `target`.

    Uploaded host data, and resharded data without a mark, become the leaf's data. A marked leaf
    keeps its data, and the result is a copy for one program.
    """
    placement = value.placement
    if placement.jax_sharding is None:
        uploaded = target if placement.sharding is None else marked_placement(placement.sharding)
        value.data = buffers.upload(
            value.data, uploaded.device_sharding, stored_shape(value.spec, uploaded)
        )
        value.placement = placement = uploaded
    if placement is target:
        return array_of(value)
    if placement.sharding is None:
        move(value, target)
        return array_of(value)
    return buffers.reshard(
        array_of(value), target.device_sharding, value.spec.shape, stored_shape(value.spec, target)
    )
