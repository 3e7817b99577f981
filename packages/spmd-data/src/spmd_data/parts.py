"""Which part of the data a process loads: arithmetic on the grid of a mesh, without any device.

The axes that split the batch cut it into blocks. Each device holds one block, and devices that
differ in other axes alone hold the same one. The part of a process is the blocks of its devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmd_core.errors import DataError


@dataclass(frozen=True)
class BatchPart:
    """The part of each global batch that a process loads.

    Attributes:
        number: of this part, from 0 on. Parts are numbered by their first blocks.
        num_parts: into how many equal parts the processes cut a batch.
        blocks: the numbers of the part's blocks, ascending. They need not be consecutive.
    """

    number: int
    num_parts: int
    blocks: tuple[int, ...]


def parts_of_processes(
    grid: np.ndarray, axes: Sequence[int], process_of: Mapping[int, int] | Sequence[int]
) -> dict[int, BatchPart]:
    """The part of each process that has devices in a mesh.

    Processes that hold the same blocks have the same part. All others are disjoint, and together
    the parts have every block.

    Args:
        grid: the device ids of the mesh, integers, one dim for each axis.
        axes: the indices of the axes that split the batch, the slowest first; may be empty.
        process_of: the process of each device id.

    Raises:
        DataError: an axis is named twice; or two processes share some blocks and not all, or hold
            different numbers of them.

    Example:
        >>> grid = np.arange(8).reshape(4, 2)  # 2 processes of 4 devices each; axis 0 splits
        >>> parts_of_processes(grid, [0], [0, 0, 0, 0, 1, 1, 1, 1])[1]
        BatchPart(number=1, num_parts=2, blocks=(2, 3))
    """
    if len(set(axes)) < len(axes):
        raise DataError(
            f"an axis splits the batch once; got the axes {list(axes)}. Name each one once."
        )
    sizes = [grid.shape[axis] for axis in axes]
    num_blocks = math.prod(sizes)
    shape = [grid.shape[d] if d in axes else 1 for d in range(grid.ndim)]
    # The number of each position's block, in row-major order of the axes.
    numbers = np.arange(num_blocks).reshape(sizes).transpose(np.argsort(axes)).reshape(shape)
    block_of = np.broadcast_to(numbers, grid.shape)

    held: dict[int, set[int]] = {}
    for device, block in zip(grid.ravel().tolist(), block_of.ravel().tolist()):
        held.setdefault(process_of[device], set()).add(block)
    blocks = {process: tuple(sorted(found)) for process, found in held.items()}
    _check(blocks, num_blocks)
    ordered = sorted(set(blocks.values()))
    number_of = {found: number for number, found in enumerate(ordered)}
    return {
        process: BatchPart(number_of[found], len(ordered), found)
        for process, found in sorted(blocks.items())
    }


def _check(blocks: Mapping[int, tuple[int, ...]], num_blocks: int) -> None:
    """Raises DataError unless any two processes have the same blocks, or as many disjoint ones."""
    owner: dict[int, int] = {}  # of each block, the first process that holds it
    for process, found in blocks.items():
        for other in {owner.setdefault(block, process) for block in found}:
            if blocks[other] != found:
                raise DataError(
                    "processes must hold the same blocks of the batch, or none in common; got "
                    f"process {other} with blocks {_listed(blocks[other])} and process {process} "
                    f"with {_listed(found)} of {num_blocks}. Order the mesh's devices so that each "
                    "process has a whole range of the axes that split the batch, or split the "
                    "batch over other axes."
                )
    counts = {len(found): process for process, found in blocks.items()}
    if len(counts) > 1:
        few, many = min(counts), max(counts)
        raise DataError(
            "every process must hold equally many blocks of the batch; got "
            f"{few} on process {counts[few]} and {many} on process {counts[many]}, of "
            f"{num_blocks}. Take equally many devices of each process into the mesh."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
