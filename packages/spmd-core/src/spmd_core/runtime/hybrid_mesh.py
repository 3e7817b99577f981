"""`HybridMesh`: a mesh over slices, which have fast links inside (ICI) and slow between (DCN)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd_core import releases
from spmd_core.arguments import checked
from spmd_core.errors import MeshError
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh

_mesh_utils = releases.jax_module("jax.experimental.mesh_utils", "create_device_mesh")


class HybridMesh(Mesh):
    """A mesh over all devices that keeps fast links along its ICI axes.

    Axis `i` has `ici_mesh_shape[i] * dcn_mesh_shape[i]` devices, and the slices are its major part.
    Where the devices have coordinates (TPU), neighbours along an ICI axis are neighbours in the
    torus of their slice: jax's mesh utilities assign the devices, and split physical axes if the
    shape requires it. Starts the runtime.

    Args:
        ici_mesh_shape: for each axis, the number of devices inside a slice.
        dcn_mesh_shape: for each axis, the number of slices; None for all ones.
        axis_names: a name for each axis, or None.
        num_slices: divides the devices, in the order of their ids, into this number of simulated
            slices, whatever the hardware has. Emulated CPU devices have no slices of their own: for
            them, None simulates as many slices as `dcn_mesh_shape` needs.

    Attributes:
        ici_mesh_shape: tuple of ints.
        dcn_mesh_shape: tuple of ints, of the same length.

    Raises:
        MeshError: the shapes differ in length, their products are not the numbers of devices per
            slice and of slices, or the devices of a slice cannot form a mesh of that shape.

    Example:
        >>> dict(HybridMesh((1, 4, 1), (2, 1, 1), ("data", "fsdp", "tensor")).shape())
        {'data': 2, 'fsdp': 4, 'tensor': 1}
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]

    @checked(num_slices=1)
    def __init__(
        self,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        *,
        num_slices: int | None = None,
    ) -> None:
        ici = _checked_shape("ici_mesh_shape", ici_mesh_shape)
        dcn = (
            (1,) * len(ici)
            if dcn_mesh_shape is None
            else _checked_shape("dcn_mesh_shape", dcn_mesh_shape)
        )
        if len(ici) != len(dcn):
            raise MeshError(
                "ici_mesh_shape and dcn_mesh_shape must have one size for each axis; "
                f"got {ici} with {len(ici)} and {dcn} with {len(dcn)}. "
                "Write 1 for an axis that the network does not split."
            )
        positions = arrange(self._devices(), ici, dcn, num_slices=num_slices)
        super().__init__(positions.reshape(-1), tuple(a * b for a, b in zip(ici, dcn)), axis_names)
        object.__setattr__(self, "ici_mesh_shape", ici)
        object.__setattr__(self, "dcn_mesh_shape", dcn)

    @staticmethod
    def _devices() -> Sequence[Any]:
        """jax's devices in the order of their ids; a subclass may return stand-ins for them."""
        return devices.all_devices()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process may have other devices: the result is stored, as a plain mesh.
        return Mesh, (self.device_ids.tolist(), self.mesh_shape, self.axis_names)


def arrange(
    devices: Sequence[Any],
    ici: tuple[int, ...],
    dcn: tuple[int, ...],
    *,
    num_slices: int | None = None,
) -> np.ndarray:
    """The arrangement of devices for the mesh, as positions in `devices`.

    Args:
        devices: jax's devices, in the order of their ids.
        ici: see `HybridMesh`.
        dcn: see `HybridMesh`.
        num_slices: see `HybridMesh`.

    Returns:
        An int64 array whose size along axis `i` is `ici[i] * dcn[i]`.

    Raises:
        MeshError: see `HybridMesh`.
    """
    slices = _slices(devices, math.prod(dcn), num_slices)
    if len(slices) != math.prod(dcn):
        if math.prod(dcn) == 1:
            raise MeshError(
                "dcn_mesh_shape must say which axes go between slices; "
                f"got {len(slices)} slices and {dcn}. Provide a dcn_mesh_shape that multiplies "
                f"to {len(slices)}, for instance {(len(slices),) + (1,) * (len(dcn) - 1)}."
            )
        only = "there is a single slice" if len(slices) == 1 else f"there are {len(slices)} slices"
        raise MeshError(
            "the product of dcn_mesh_shape must be the number of slices; "
            f"got {dcn} with product {math.prod(dcn)}, and {only}. "
            f"Give {(len(slices),) + (1,) * (len(dcn) - 1)}, "
            f"or simulate slices with num_slices={math.prod(dcn)}."
        )
    sizes = {len(members) for members in slices}
    if sizes != {math.prod(ici)}:
        raise MeshError(
            "the product of ici_mesh_shape must be the number of devices of each slice; "
            f"got {ici} with product {math.prod(ici)}, and "
            f"{len(slices)} slices of {', '.join(map(str, sorted(sizes)))} devices. "
            "Change ici_mesh_shape, or the number of slices."
        )
    position = {id(device): i for i, device in enumerate(devices)}
    blocks = np.empty(len(slices), dtype=object)
    for number, members in enumerate(slices):
        try:
            grid = _mesh_utils.create_device_mesh(ici, members, allow_split_physical_axes=True)
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise MeshError(
                "the devices of a slice must form a mesh of shape ici_mesh_shape; "
                f"got {ici} for {len(members)} devices of kind "
                f"{members[0].device_kind!r}, which jax cannot lay out: "
                f"{error} Choose a shape whose sizes are products of the slice's own."
            ) from error
        blocks[number] = np.vectorize(lambda device: position[id(device)], otypes=[np.int64])(grid)
    return np.block(blocks.reshape(dcn).tolist())


def _slices(devices: Sequence[Any], wanted: int, num_slices: int | None) -> list[list[Any]]:
    """The devices of each slice, in the order of the slices."""
    emulated = devices[0].platform == "cpu"
    if num_slices is None and emulated:
        num_slices = wanted
    if num_slices is not None:
        if not isinstance(num_slices, int) or num_slices < 1 or len(devices) % num_slices:
            raise MeshError(
                "simulated slices are of equal size; "
                f"got {len(devices)} devices for {num_slices!r} slices. "
                f"Use a number that divides {len(devices)}."
            )
        size = len(devices) // num_slices
        return [list(devices[i * size : (i + 1) * size]) for i in range(num_slices)]
    by_slice: dict[int, list[Any]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    return [by_slice[index] for index in sorted(by_slice)]


def _checked_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, (tuple, list, np.ndarray)) else ()
    if not sizes or any(
        isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1
        for size in sizes
    ):
        raise MeshError(
            f"{name} must be a tuple with a size of at least 1 for each axis; got {shape!r}. "
            "Write for instance (1, 4, 1)."
        )
    return tuple(int(size) for size in sizes)
