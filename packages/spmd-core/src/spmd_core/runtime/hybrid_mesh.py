"""`HybridMesh`: a mesh laid out by the network: fast links inside a slice (ICI), slow ones between slices (DCN)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from spmd_core.errors import MeshError
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh


class HybridMesh(Mesh):
    """A mesh over all devices whose axis `i` has `ici_mesh_shape[i] * dcn_mesh_shape[i]` devices, the slices being the major part.

    Neighbours along an ICI axis are neighbours in the torus of their slice, where the devices tell where they stand (TPU): jax's mesh
    utilities assign them, splitting physical axes where the shape asks for it. Starts the runtime.

    Args:
        ici_mesh_shape: for each axis, devices inside a slice.
        dcn_mesh_shape: for each axis, slices; None for all ones.
        axis_names: a name for each axis, or None.
        num_slices: cuts the devices, in the order of their ids, into so many simulated slices, whatever the hardware says. Emulated CPU devices
            have no slices of their own: there, as many are simulated as `dcn_mesh_shape` asks for.

    Attributes:
        ici_mesh_shape: tuple of ints.
        dcn_mesh_shape: tuple of ints, of the same length.

    Raises:
        MeshError: the shapes differ in length, do not multiply to the number of devices and slices, or the devices of a slice cannot be laid
            out in that shape.

    Example:
        >>> dict(HybridMesh((1, 4, 1), (2, 1, 1), ("data", "fsdp", "tensor")).shape())
        {'data': 2, 'fsdp': 4, 'tensor': 1}
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]

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
                f"ici_mesh_shape and dcn_mesh_shape must have one size for each axis; got {ici} with {len(ici)} and {dcn} with {len(dcn)}. "
                "Write 1 for an axis that the network does not split."
            )
        positions = arrange(self._devices(), ici, dcn, num_slices=num_slices)
        super().__init__(positions.reshape(-1), tuple(a * b for a, b in zip(ici, dcn)), axis_names)
        object.__setattr__(self, "ici_mesh_shape", ici)
        object.__setattr__(self, "dcn_mesh_shape", dcn)

    @staticmethod
    def _devices() -> Sequence[Any]:
        """The devices to be laid out, by id: jax's, or what tells the same of them."""
        return devices.all_devices()

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process the devices may be others: what was laid out here stays as it is, in a plain mesh.
        return Mesh, (self.device_ids.tolist(), self.mesh_shape, self.axis_names)


def arrange(
    devices: Sequence[Any],
    ici: tuple[int, ...],
    dcn: tuple[int, ...],
    *,
    num_slices: int | None = None,
) -> np.ndarray:
    """Numbers of devices (their positions in `devices`, jax's devices by id), as an int64 array of shape `ici * dcn`, axis by axis.

    Raises:
        MeshError: see `HybridMesh`.
    """
    slices = _slices(devices, math.prod(dcn), num_slices)
    if len(slices) != math.prod(dcn):
        if math.prod(dcn) == 1:
            raise MeshError(
                f"dcn_mesh_shape must say which axes go between slices; got {len(slices)} slices and {dcn}. Provide a dcn_mesh_shape that multiplies "
                f"to {len(slices)}, for instance {(len(slices),) + (1,) * (len(dcn) - 1)}."
            )
        only = "there is a single slice" if len(slices) == 1 else f"there are {len(slices)} slices"
        raise MeshError(
            f"the product of dcn_mesh_shape must be the number of slices; got {dcn} with product {math.prod(dcn)}, and {only}. "
            f"Give {(len(slices),) + (1,) * (len(dcn) - 1)}, or simulate slices with num_slices={math.prod(dcn)}."
        )
    sizes = {len(one) for one in slices}
    if sizes != {math.prod(ici)}:
        raise MeshError(
            f"the product of ici_mesh_shape must be the number of devices of each slice; got {ici} with product {math.prod(ici)}, and "
            f"{len(slices)} slices of {', '.join(map(str, sorted(sizes)))} devices. Change ici_mesh_shape, or the number of slices."
        )
    position = {id(device): i for i, device in enumerate(devices)}
    blocks = np.empty(len(slices), dtype=object)
    for number, one in enumerate(slices):
        try:
            laid_out = mesh_utils.create_device_mesh(ici, one, allow_split_physical_axes=True)
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise MeshError(
                f"the devices of a slice must form a mesh of shape ici_mesh_shape; got {ici} for {len(one)} devices of kind "
                f"{one[0].device_kind!r}, which jax cannot lay out: {error} Choose a shape whose sizes are products of the slice's own."
            ) from error
        blocks[number] = np.vectorize(lambda device: position[id(device)], otypes=[np.int64])(
            laid_out
        )
    return np.block(blocks.reshape(dcn).tolist())


def _slices(devices: Sequence[Any], wanted: int, num_slices: int | None) -> list[list[Any]]:
    """The devices of each slice, the slices in order."""
    emulated = devices[0].platform == "cpu"
    if num_slices is None and emulated:
        num_slices = wanted
    if num_slices is not None:
        if not isinstance(num_slices, int) or num_slices < 1 or len(devices) % num_slices:
            raise MeshError(
                f"simulated slices are of equal size; got {len(devices)} devices for {num_slices!r} slices. Use a number that divides {len(devices)}."
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
            f"{name} must be a tuple with a size of at least 1 for each axis; got {shape!r}. Write for instance (1, 4, 1)."
        )
    return tuple(int(size) for size in sizes)
