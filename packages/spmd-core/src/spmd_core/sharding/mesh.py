"""`Mesh`: an immutable grid of global device ids, built and compared without touching a device."""

import ast
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, SupportsIndex

import numpy as np

from spmd_core.errors import MeshError, PartitionSpecError

_MESH_KEYS = ("device_ids", "mesh_shape", "axis_names")
_MAX_IDS_IN_REPR = 32
_MAX_DEVICE_ID = 2**31 - 1
_MOST_DEVICES = 2**20


class Mesh:
    """A grid of global device ids whose axes may be named.

    The ids fill the grid in row-major order; any subset of the machine's devices may be used. The
    constructor does not look at the machine: `check_devices` compares a mesh with the number of
    devices that exist. A mesh is immutable, and equal meshes have equal hashes.

    Args:
        device_ids: global device ids, unique and not negative: a list, a range or an integer array
            of any shape, which is flattened.
        mesh_shape: size of each axis; the product is the number of ids.
        axis_names: one unique, non-empty name for each axis, or None for a mesh whose axes are
            known by index only.

    Attributes:
        device_ids: read-only int64 array of shape `(size,)`.
        ids: the device ids as a tuple of ints, which is hashable.
        mesh_shape: tuple of ints.
        axis_names: tuple of str, or None.
        text: a literal from which `from_str` reads the mesh.

    Raises:
        MeshError: an argument breaks one of the rules above.

    Example:
        >>> mesh = Mesh(range(8), (4, 2), ("data", "model"))
        >>> dict(mesh.shape())
        {'data': 4, 'model': 2}
        >>> mesh.get_logical_mesh()[1]
        array([2, 3])
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    device_ids: np.ndarray
    ids: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None
    text: str
    _hash: int
    # Set by `sharding.sharding` and `runtime.jax_sharding`, which this module cannot import.
    get_op_sharding: ClassVar[Callable[["Mesh", Any], Any]]
    get_jax_mesh: ClassVar[Callable[["Mesh"], Any]]

    def __init__(
        self,
        device_ids: Iterable[int] | np.ndarray,
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        shape = _checked_shape(mesh_shape)
        ids = _checked_ids(device_ids, shape)
        names = _checked_names(axis_names, shape)
        ids.flags.writeable = False
        fields = {
            "device_ids": ids,
            "ids": tuple(ids.tolist()),
            "mesh_shape": shape,
            "axis_names": names,
            # Written once, as programs that torch.compile traces compare it at each call.
            "text": str(dict(zip(_MESH_KEYS, (ids.tolist(), shape, names)))),
            "_hash": hash((shape, names, ids.tobytes())),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def size(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.mesh_shape)

    def shape(self) -> "OrderedDict[str | int, int]":
        """Size of each axis in mesh order, keyed by axis name, or by index in an unnamed mesh."""
        keys: Sequence[str | int] = (
            range(len(self.mesh_shape)) if self.axis_names is None else self.axis_names
        )
        return OrderedDict(zip(keys, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray:
        """The device ids as a read-only int64 array of shape `mesh_shape`."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int:
        """Index of the axis called `name`.

        Raises:
            MeshError: the mesh has no such axis, or its axes have no names.
        """
        if self.axis_names is None or name not in self.axis_names:
            raise MeshError(_unknown_name(self, name))
        return self.axis_names.index(name)

    def axis_index(self, axis: int | str) -> int:
        """Index, in `range(len(mesh_shape))`, of an axis given by name or by index.

        A negative index counts from the last axis.

        Raises:
            PartitionSpecError: the mesh has no such axis, or `axis` is neither an int nor a str (a
                bool is not an int here).
        """
        if isinstance(axis, str):
            if self.axis_names is None or axis not in self.axis_names:
                raise PartitionSpecError(_unknown_name(self, axis))
            return self.axis_names.index(axis)
        index = _as_int(axis)
        if index is None:
            raise PartitionSpecError(
                "a mesh axis is given by its index (int) or its name (str); "
                f"got {axis!r} of type {type(axis).__name__}. "
                f"Use one of {_known_axes(self)}."
            )
        rank = len(self.mesh_shape)
        if not -rank <= index < rank:
            raise PartitionSpecError(
                f"the index of a mesh axis must lie between {-rank} and {rank - 1}, "
                f"as the mesh has {rank} axes; got {index}. "
                f"Use one of {_known_axes(self)}."
            )
        return index % rank

    @staticmethod
    def from_str(text: str) -> "Mesh":
        """The mesh whose `str(mesh)` is `text`. Raises MeshError for any other text.

        Example:
            >>> Mesh.from_str(
            ...     "{'device_ids': [0, 1], 'mesh_shape': (2,), 'axis_names': ('data',)}"
            ... ).size()
            2
        """
        try:
            fields = ast.literal_eval(text.strip())
        except (AttributeError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or set(fields) != set(_MESH_KEYS):
            raise MeshError(
                f"a mesh is read from a dict literal with the keys {', '.join(_MESH_KEYS)}; "
                f"got {_shortened(text)}. "
                "Pass a string that str(mesh) returned, such as "
                "\"{'device_ids': [0, 1], 'mesh_shape': (2,), 'axis_names': ('data',)}\"."
            )
        return Mesh(**fields)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        ids = self.device_ids.tolist()
        consecutive = range(ids[0], ids[0] + len(ids))
        if ids == list(consecutive):
            ids_text = repr(consecutive)
        elif len(ids) <= _MAX_IDS_IN_REPR:
            ids_text = repr(ids)
        else:
            ids_text = f"[{ids[0]}, {ids[1]}, {ids[2]}, ..., {ids[-1]}]"
        names_text = "" if self.axis_names is None else f", {self.axis_names!r}"
        return f"{type(self).__name__}({ids_text}, {self.mesh_shape!r}{names_text})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.mesh_shape == other.mesh_shape
            and self.axis_names == other.axis_names
            and np.array_equal(self.device_ids, other.device_ids)
        )

    def __hash__(self) -> int:
        return self._hash

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a Mesh is immutable; got an assignment to {name!r}. Build another Mesh instead."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"a Mesh is immutable; got a deletion of {name!r}. Build another Mesh instead."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Not the instance's dict: a pickled numpy array loses its read-only flag, and a str's hash
        # differs between processes.
        return _rebuild_mesh, (
            type(self),
            self.device_ids.tolist(),
            self.mesh_shape,
            self.axis_names,
        )


# The mesh for calls that name none.
# Guarded by: the GIL. Cleared by: set_global_mesh(None).
_global_mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh | None) -> None:
    """Sets the mesh for calls that name none; None unsets it. Raises MeshError for other types."""
    global _global_mesh
    if mesh is not None and not isinstance(mesh, Mesh):
        raise MeshError(
            f"the global mesh must be a Mesh or None; got {type(mesh).__name__}. "
            "Build one: spmd.Mesh(device_ids, mesh_shape, axis_names)."
        )
    _global_mesh = mesh


def get_global_mesh() -> Mesh | None:
    """The mesh that was last passed to `set_global_mesh`, or None."""
    return _global_mesh


def given_or_global(mesh: Mesh | None, what: str) -> Mesh:
    """`mesh`, or the global mesh if it is None; `what` names the caller.

    Raises:
        MeshError: there is neither, or `mesh` is not a Mesh.
    """
    chosen = get_global_mesh() if mesh is None else mesh
    if not isinstance(chosen, Mesh):
        got = "None, and no global mesh is set" if chosen is None else type(chosen).__name__
        raise MeshError(
            f"{what} needs a mesh; got {got}. "
            "Pass mesh=spmd.Mesh(device_ids, mesh_shape, axis_names), "
            "or call spmd.set_global_mesh(mesh)."
        )
    return chosen


def check_devices(mesh: Mesh, num_devices: int) -> None:
    """Raises MeshError unless `mesh` is one, and every device id of it below `num_devices`."""
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"a mesh is needed; got {mesh!r}, of type {type(mesh).__name__}. Build one: "
            "Mesh(device_ids, mesh_shape, axis_names)."
        )
    missing = mesh.device_ids[mesh.device_ids >= num_devices]
    if missing.size:
        raise MeshError(
            f"every device id of a mesh must be below the number of devices, {num_devices}; "
            f"got {listed(missing.tolist())} in {mesh!r}. "
            f"Build the mesh from ids in range({num_devices}), "
            f"or start the program with at least {int(missing.max()) + 1} devices."
        )


def _rebuild_mesh(
    cls: type[Mesh],
    device_ids: list[int],
    mesh_shape: tuple[int, ...],
    axis_names: tuple[str, ...] | None,
) -> Mesh:
    """Unpickles a mesh. A subclass keeps its type, although its constructor may differ."""
    mesh = cls.__new__(cls)
    Mesh.__init__(mesh, device_ids, mesh_shape, axis_names)
    return mesh


_rebuild_mesh.__module__ = "spmd_core"  # for the same reason as Mesh's


def _checked_shape(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    sizes = [_as_int(size) for size in _as_list(mesh_shape) or []]
    shape = tuple(size for size in sizes if size is not None and size >= 1)
    if not shape or len(shape) != len(sizes):
        single = _as_int(mesh_shape)
        advice = (
            f"Write ({single},) for one axis"
            if single is not None and single >= 1
            else "Pass one size for each axis, such as (4, 2)"
        )
        raise MeshError(
            f"mesh_shape must be one or more ints, each at least 1; got {mesh_shape!r}. {advice}."
        )
    return shape


def _checked_ids(device_ids: Iterable[int] | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A fresh int64 array of shape `(prod(shape),)`: unique, not negative."""
    size = math.prod(shape)
    is_long = isinstance(device_ids, range) and bool(device_ids[_MOST_DEVICES:])
    if size > _MOST_DEVICES or is_long:  # before a list of them is made
        raise MeshError(
            f"a mesh has at most {_MOST_DEVICES} devices; got mesh_shape {shape}"
            f"{f' and {device_ids!r}' if is_long else ''}. Pass the ids of devices that exist."
        )
    given = _as_list(device_ids)
    ids = [_as_int(device_id) for device_id in given or []]
    bad = [
        value
        for value, device_id in zip(given or [], ids, strict=True)
        if device_id is None or not 0 <= device_id <= _MAX_DEVICE_ID
    ]
    if given is None or bad:
        raise MeshError(
            f"device_ids must be a list, range or array of ints from 0 to {_MAX_DEVICE_ID}; "
            f"got {listed(bad) if given is not None else repr(device_ids)}. "
            f"Pass for instance range({size})."
        )
    if len(ids) != size:
        raise MeshError(
            "the product of mesh_shape must be the number of device_ids; "
            f"got mesh_shape {shape} with product {size} "
            f"and {len(ids)} ids. Pass {size} ids, or a mesh_shape whose product is {len(ids)}."
        )
    array = np.array(ids, dtype=np.int64)
    values, counts = np.unique(array, return_counts=True)
    if values.size != size:
        raise MeshError(
            "device_ids must be unique, as a device has one place in the mesh; "
            f"got {listed(values[counts > 1].tolist())} more than once. "
            f"Pass {size} different ids."
        )
    return array


def checked_grid(
    mesh_shape: Sequence[int], axis_names: Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    """A mesh's shape and names. Raises MeshError as `Mesh` does."""
    shape = _checked_shape(mesh_shape)
    return shape, _checked_names(axis_names, shape)


def _checked_names(
    axis_names: Sequence[str] | None, shape: tuple[int, ...]
) -> tuple[str, ...] | None:
    if axis_names is None:
        return None
    names = _as_list(axis_names)
    if names is None:
        example = (
            tuple(f"axis{index}" for index in range(len(shape)))
            if not isinstance(axis_names, str)
            else (axis_names,)
        )
        raise MeshError(
            f"axis_names must be a tuple with one name for each axis, or None; got {axis_names!r}. "
            f"Write a tuple, such as {example!r}."
        )
    if any(not isinstance(name, str) or not name for name in names):
        raise MeshError(
            f"every axis name must be a str that is not empty; got {names}. "
            "Name each axis, such as ('data', 'model')."
        )
    if len(names) != len(shape):
        raise MeshError(
            "axis_names must have one name for each axis of mesh_shape; "
            f"got {len(names)} names {names} for {len(shape)} axes {shape}. "
            f"Pass {len(shape)} names, or None."
        )
    if len(set(names)) != len(names):
        raise MeshError(
            f"axis names must be unique; got {names}. Rename the axis that is repeated."
        )
    return tuple(str(name) for name in names)


def _as_list(value: object) -> list[Any] | None:
    """The elements of an ordered collection (an array is flattened); None for everything else."""
    if isinstance(value, np.ndarray):
        return list(value.reshape(-1))
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict, set, frozenset)):
        return list(value)
    return None


def _as_int(value: object) -> int | None:
    """`value` as an int if it is a Python or numpy integer; else None, also for a bool."""
    # The common case first: a protocol check takes microseconds, which adds up over 1024 ids.
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several elements has __index__, which raises
        return None


def _unknown_name(mesh: Mesh, name: object) -> str:
    if mesh.axis_names is None:
        return (
            "a mesh axis can be named only where the mesh has axis names; "
            f"got {name!r} for the unnamed {mesh!r}. "
            f"Use one of {_known_axes(mesh)}, or pass axis_names to Mesh."
        )
    return (
        f"an axis name must be one of the mesh's axis names; got {name!r} for {mesh!r}. "
        f"Use one of {_known_axes(mesh)}."
    )


def _known_axes(mesh: Mesh) -> str:
    return ", ".join(repr(axis) for axis in mesh.shape())


def listed(values: Sequence[object]) -> str:
    """The first few values, so that an error message about a large mesh stays readable."""
    shown = ", ".join(repr(value) for value in values[:4])
    return shown if len(values) <= 4 else f"{shown} and {len(values) - 4} more"


def _shortened(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
