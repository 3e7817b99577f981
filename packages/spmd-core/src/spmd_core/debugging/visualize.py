"""Tables of which device holds which block of a tensor, from XLA's text of a sharding."""

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd_core.arguments import checked
from spmd_core.errors import PartitionSpecError, SpmdError
from spmd_core.runtime import devices
from spmd_core.sharding import xla_text
from spmd_core.tensor.sharded_tensor import device_tensor

if TYPE_CHECKING:
    from rich.table import Table

# Dark enough for white text.
_COLOURS = ("dark_blue", "dark_green", "dark_red", "purple4")
_MAX_DIMS = 3


@checked(min_width=0, max_width=1)
def visualize_sharding(
    sharding: str,
    *,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> "Table":
    """Prints a table of the devices that hold each block, and returns it.

    A cell is a block: `CPU 0` if one device holds it, `CPU [0, 4]` if several do. Rows are blocks
    along the first tensor dim, columns along the second; a 1-D tensor is one row. The table of a
    3-D tensor contains one table for each block along the first dim. Only the ids are used: the
    devices may belong to other hosts, or not exist.

    Args:
        sharding: XLA's text, as in `tensor.sharding_spec`, with a list of devices (V1) or an iota
            (V2).
        use_color: colour the cells, so that neighbours differ.
        scale: factor of the cells' width and height.
        min_width: least width of a cell, in characters.
        max_width: greatest width of a cell, in characters.

    Raises:
        ImportError: `rich` is not installed.
        PartitionSpecError: the text is no sharding, or a sharding of more than three dims.
        ValueError: a scale or width is not positive, or `min_width` is above `max_width`.

    Example:
        >>> table = visualize_sharding("{devices=[2,2]<=[4]}", use_color=False)
        ┌─────────┬─────────┐
        │  CPU 0  │  CPU 1  │
        ├─────────┼─────────┤
        │  CPU 2  │  CPU 3  │
        └─────────┴─────────┘
    """
    if importlib.util.find_spec("rich") is None:
        raise ImportError(
            "visualize_sharding draws its table with rich; it is not installed. "
            "Run: pip install rich"
        )
    if not scale > 0 or not 0 < min_width <= max_width:
        raise ValueError(
            "visualize_sharding takes a scale above 0 and 0 < min_width <= max_width; "
            f"got scale={scale}, min_width={min_width}, max_width={max_width}. "
            "Leave them out for the defaults."
        )
    table = _table(sharding, use_color, scale, min_width, max_width)
    _print(table)
    return table


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Any) -> "Table":
    """Prints and returns the table of a tensor's sharding. Does not wait for the device.

    The keywords are those of `visualize_sharding`.

    Raises:
        DeviceMismatchError: the tensor is not on device `xla`.
        SpmdError: the tensor has no sharding: it is neither marked nor computed.
    """
    text = device_tensor(t, "visualize_tensor_sharding").sharding_spec
    if not text:
        raise SpmdError(
            "visualize_tensor_sharding shows a tensor's sharding; "
            f"this one, of shape {tuple(t.shape)}, has none. Call "
            "spmd.mark_sharding(tensor, mesh, partition_spec), "
            "or spmd.sync() for what the partitioner chooses."
        )
    return visualize_sharding(text, **kwargs)


# rich is imported inside the functions: it is optional, and the import takes a while.


def _print(table: "Table") -> None:
    from rich.console import Console  # noqa: PLC0415 - see above

    console = Console()
    if not console.is_terminal:
        # A file or a notebook has no fixed width, so the table need not be cut off.
        console = Console(width=max(console.width, Console(width=1 << 16).measure(table).maximum))
    console.print(table)


def _table(sharding: str, use_color: bool, scale: float, min_width: int, max_width: int) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - see above

    blocks, is_manual = xla_text.blocks(sharding, num_devices=devices.global_runtime_device_count())
    note = "manual" if is_manual else ""
    if blocks.ndim > _MAX_DIMS:
        raise PartitionSpecError(
            f"a table shows shardings of tensors with up to {_MAX_DIMS} dims; "
            f"got {sharding!r} of {blocks.ndim} dims. "
            "Read tensor.sharding.tile_assignment, an array of the device ids of each block."
        )
    platform = devices.platform().upper()
    width = _width(blocks, platform, note, scale, min_width, max_width)
    if blocks.ndim < _MAX_DIMS:
        return _grid(
            blocks.reshape((1,) * (2 - blocks.ndim) + blocks.shape),
            0,
            platform,
            note,
            use_color,
            width,
            scale,
        )
    outer = Table(show_header=False, show_lines=True, padding=0, pad_edge=False)
    for i, part in enumerate(blocks):
        outer.add_row(
            f"block {i} of dim 0", _grid(part, i, platform, note, use_color, width, scale)
        )
    return outer


def _grid(
    part: np.ndarray,
    outer: int,
    platform: str,
    note: str,
    use_color: bool,
    width: int,
    scale: float,
) -> "Table":
    from rich.align import Align  # noqa: PLC0415 - see above
    from rich.padding import Padding  # noqa: PLC0415 - see above
    from rich.table import Table  # noqa: PLC0415 - see above

    grid = Table(show_header=False, show_lines=True, padding=0, pad_edge=False)
    for _ in range(part.shape[1]):
        grid.add_column(width=width)
    above = max(round(scale) - 1, 0)
    for row, cells in enumerate(part):
        drawn = []
        for column, ids in enumerate(cells):
            style = f"white on {_colour(outer, row, column)}" if use_color else ""
            drawn.append(
                Padding(
                    Align(_cell_text(ids, platform, note), "center", vertical="middle"),
                    (above, 0),
                    style=style,
                )
            )
        grid.add_row(*drawn)
    return grid


def _cell_text(ids: list[int], platform: str, note: str) -> str:
    holders = f"{platform} {ids[0] if len(ids) == 1 else ids}"
    return f"{holders} ({note})" if note else holders


def _width(
    blocks: np.ndarray, platform: str, note: str, scale: float, min_width: int, max_width: int
) -> int:
    longest = max(len(_cell_text(ids, platform, note)) for ids in blocks.flat)
    return min(max(round(min_width * scale), longest + 2), round(max_width * scale))


def _colour(outer: int, row: int, column: int) -> str:
    """One of four colours; neighbours differ along each of the three dims."""
    return _COLOURS[(2 * row + column + outer) % len(_COLOURS)]
