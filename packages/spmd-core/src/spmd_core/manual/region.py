"""Which mesh axes are manual where the code stands, and to which axes a tensor is local."""

from collections.abc import Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from spmd_core.errors import MeshError
from spmd_core.graph.storage import read
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh, check_devices, get_global_mesh
from spmd_core.sharding.sharding import Manual, Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

current_region: ContextVar[Manual | None] = ContextVar("region", default=None)


@contextmanager
def inside(manual: Manual) -> Any:
    token = current_region.set(manual)
    try:
        yield
    finally:
        current_region.reset(token)


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
    check_devices(mesh, devices.global_runtime_device_count())
    every = tuple(range(len(mesh.mesh_shape)))
    return Manual(
        mesh, every if axis_names is None else tuple(sorted(axes_of(mesh, tuple(axis_names))))
    )


def given_or_global(mesh: Mesh | None) -> Mesh:
    chosen = get_global_mesh() if mesh is None else mesh
    if chosen is None:
        raise MeshError(
            "a manual region needs a mesh; got None, and no global mesh is set. Pass mesh=, or call set_global_mesh(mesh)."
        )
    return chosen


def axes_of(mesh: Mesh, axes: Any) -> tuple[int, ...]:
    """Numbers of axes from a name, a number, or several; each once."""
    sharding = Sharding.of(mesh, ((axes,) if isinstance(axes, (str, int)) else tuple(axes),), 1)
    return sharding.dims[0]
