"""Arithmetic on the part of a global array that each of several processes holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from spmd_core.errors import DataError, MeshError
from spmd_core.sharding.sharding import Shape, Sharding


@dataclass(frozen=True)
class ProcessPart:
    """The part of tensors of one sharding that one process holds: some blocks of each dim.

    In the process's local data, its blocks along each dim are concatenated in the order of their
    numbers; in the global tensor they need not be adjacent.

    Attributes:
        tiles: for each dim, into how many blocks the sharding splits it.
        blocks: for each dim, the numbers of this process's blocks, ascending.
        is_whole: for each dim, whether every process of the mesh holds all blocks along it. Such a
            dim has the same size in all processes, which need not be a multiple of the number of
            blocks.
        processes: the processes that have a device of the mesh, ascending.
    """

    tiles: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    is_whole: tuple[bool, ...]
    processes: tuple[int, ...]

    def global_shape(self, local_shape: Shape) -> Shape:
        """The shape of the global tensor, from that of this process's data.

        Raises:
            DataError: the process's blocks of a dim cannot be of one size.

        Example:
            >>> part = ProcessPart((4, 1), ((0, 2), (0,)), (False, True), (0, 1))
            >>> part.global_shape((6, 5))
            (12, 5)
        """
        for dim, (size, blocks) in enumerate(zip(local_shape, self.blocks, strict=True)):
            if size % len(blocks) and not self.is_whole[dim]:
                raise DataError(
                    "a process's part of a dim must divide by the number of blocks that the "
                    f"process holds of it; got size {size} in dim {dim} of a tensor of shape "
                    f"{tuple(local_shape)} for {len(blocks)} of {self.tiles[dim]} blocks. "
                    f"Use {size - size % len(blocks)} or {size + len(blocks) - size % len(blocks)} "
                    "in each process, for instance by leaving out or padding the last batch."
                )
        return tuple(map(int, self.scaled_shape(local_shape)))

    def scaled_shape(self, local_shape: Shape) -> tuple[Fraction, ...]:
        """The shape of the global tensor; with fractions if the blocks differ in size."""
        return tuple(
            Fraction(size) if whole else Fraction(size * tiles, len(blocks))
            for size, blocks, tiles, whole in zip(
                local_shape, self.blocks, self.tiles, self.is_whole, strict=True
            )
        )

    def local_bounds(
        self, bounds: Sequence[tuple[int, int]], local_shape: Shape
    ) -> tuple[tuple[int, int], ...]:
        """Where one of the process's blocks of the global tensor lies in the process's data.

        Args:
            bounds: for each dim the start and the stop of the block; in dims that are whole, also
                of any other part.
            local_shape: the shape of the process's data.

        Example:
            >>> part = ProcessPart((4, 1), ((0, 2), (0,)), (False, True), (0, 1))
            >>> part.local_bounds(((6, 9), (0, 5)), (6, 5))
            ((3, 6), (0, 5))
        """
        found = []
        for (start, stop), size, blocks, whole in zip(
            bounds, local_shape, self.blocks, self.is_whole, strict=True
        ):
            step = size // len(blocks)
            if not whole and step:
                start = blocks.index(start // step) * step
                stop = start + step
            found.append((start, stop))
        return tuple(found)


def process_part(sharding: Sharding, process_of: Sequence[int], process: int) -> ProcessPart:
    """The part of one process.

    Args:
        sharding: of the global tensors.
        process_of: for each device id, the process that it belongs to.
        process: the process that asks.

    Raises:
        MeshError: the process has no device of the mesh, or the blocks of some process are not all
            combinations of some blocks of each dim, so that no tensor consists of them.

    Example:
        >>> from spmd_core.sharding.mesh import Mesh
        >>> sharding = Sharding.of(Mesh([0, 2, 1, 3], (4,), ("data",)), ("data",), 1)
        >>> process_part(sharding, [0, 0, 1, 1], 0).blocks
        ((0, 2),)
    """
    # For each block and each of its holders, the holder's process.
    owners = np.asarray(process_of)[sharding.tile_assignment]
    processes, owners = np.unique(owners, return_inverse=True)
    owners = owners.reshape(sharding.tile_assignment.shape)
    if process not in processes:
        raise MeshError(
            "a process gives its part of a tensor to the devices of the mesh that it has; process "
            f"{process} has none in {sharding.mesh!r}. "
            "Use a mesh over devices of every process, or leave the call out in this one."
        )
    held = _held(owners, len(processes))
    num_held = held.sum(axis=1)
    held = held.reshape(len(processes), *sharding.tiles)
    by_dim: list[np.ndarray] = [
        np.any(held, axis=tuple(i + 1 for i in range(sharding.ndim) if i != dim))
        for dim in range(sharding.ndim)
    ]
    expected = np.ones(len(processes), np.int64)
    for blocks in by_dim:
        expected *= blocks.sum(axis=1)
    uneven = np.flatnonzero(expected != num_held)
    if uneven.size:
        raise MeshError(
            "each process must hold all combinations of its blocks of each dim, so that one tensor "
            f"can be its part; process {processes[uneven[0]]} has {num_held[uneven[0]]} blocks of "
            f"{' x '.join(map(str, sharding.tiles))} and would need {expected[uneven[0]]}, with "
            f"{sharding!r}. "
            "Build the mesh so that each process has a rectangle of it, for instance from the "
            "devices in the order of their ids."
        )
    own = int(np.flatnonzero(processes == process)[0])
    return ProcessPart(
        sharding.tiles,
        tuple(tuple(np.flatnonzero(blocks[own]).tolist()) for blocks in by_dim),
        tuple(bool(blocks.all()) for blocks in by_dim),
        tuple(processes.tolist()),
    )


def _held(owners: np.ndarray, num_processes: int) -> np.ndarray:
    """Which blocks each process holds.

    Args:
        owners: the number of the owner of each copy of each block, `(*tiles, copies)`.
        num_processes: the number of owners.

    Returns:
        A bool array `(num_processes, num_blocks)`.
    """
    owners = owners.reshape(-1, owners.shape[-1])
    held = np.zeros((num_processes, len(owners)), bool)
    held[owners, np.arange(len(owners))[:, None]] = True
    return held
