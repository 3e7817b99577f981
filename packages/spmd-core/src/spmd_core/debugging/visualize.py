"""Which device holds which block of a tensor, as a table for people: from XLA's text of a sharding, local devices or not."""

import importlib.util
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd_core.errors import DeviceMismatchError, PartitionSpecError, SpmdError
from spmd_core.runtime import devices
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

if TYPE_CHECKING:
    from rich.table import Table
from spmd_core.sharding import xla_text

# Each dark enough for white text.
_COLOURS = ("dark_blue", "dark_green", "dark_red", "purple4")
_MAX_DIMS = 3


def visualize_sharding(
    sharding: str,
    *,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> "Table":
    """Prints a table of the devices that hold each block, and returns it.

    A cell is a block: `CPU 0` where one device holds it, `CPU [0, 4]` where several do. Rows are blocks along the first tensor dim, columns along the
    second; a 1-D tensor is one row. For a 3-D tensor the table has one table for each block along the first dim. Works on ids alone: the devices
    may belong to other hosts, or not exist.

    Args:
        sharding: XLA's text, as `tensor.sharding_spec` gives it, with a list of devices (V1) or an iota (V2).
        use_color: colour the cells, so that neighbours differ.
        scale: of the cells' width and height.
        min_width: of a cell, in characters.
        max_width: of a cell, in characters.

    Raises:
        ImportError: `rich` is not installed.
        PartitionSpecError: the text is no sharding, or is one of tensors with more than three dims.
        ValueError: a scale or a width that is not positive, or widths in the wrong order.

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
            "visualize_sharding draws its table with rich; it is not installed. Run: pip install rich"
        )
    if not scale > 0 or not 0 < min_width <= max_width:
        raise ValueError(
            f"visualize_sharding takes a scale above 0 and 0 < min_width <= max_width; got scale={scale}, min_width={min_width}, "
            f"max_width={max_width}. Leave them out for the defaults."
        )
    table = _table(sharding, use_color, scale, min_width, max_width)
    _print(table)
    return table


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Any) -> "Table":
    """`visualize_sharding` of a tensor's sharding; the keywords are the same. Does not wait.

    Raises:
        DeviceMismatchError: the tensor is not on device `xla`.
        SpmdError: the tensor has no sharding: neither marked, nor computed.
    """
    if not isinstance(t, XLAShardedTensor):
        got = f"a tensor on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise DeviceMismatchError(
            f"visualize_tensor_sharding takes a tensor on device 'xla'; got {got}. Move it first: t = t.to('xla')."
        )
    text = t.sharding_spec
    if not text:
        raise SpmdError(
            f"visualize_tensor_sharding shows a tensor's sharding; this one, of shape {tuple(t.shape)}, has none. "
            "Call mark_sharding(tensor, mesh, partition_spec), or sync() for what the partitioner chooses."
        )
    return visualize_sharding(text, **kwargs)


# From blocks to tables. rich is imported where it is used, as it is optional and takes a while.


def _print(table: "Table") -> None:
    from rich.console import Console  # noqa: PLC0415 - see above

    console = Console()
    if not console.is_terminal:
        # A file or a notebook has no width of its own: nothing need be cut off.
        console = Console(width=max(console.width, Console(width=1 << 16).measure(table).maximum))
    console.print(table)


def _table(sharding: str, use_color: bool, scale: float, min_width: int, max_width: int) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - see above

    held, is_manual = xla_text.blocks(sharding, num_devices=devices.global_runtime_device_count())
    note = "manual" if is_manual else ""
    if held.ndim > _MAX_DIMS:
        raise PartitionSpecError(
            f"a table shows shardings of tensors with up to {_MAX_DIMS} dims; got {sharding!r} of {held.ndim} dims. "
            "Read tensor.sharding.tile_assignment, an array of the device ids of each block."
        )
    platform = devices.platform().upper()
    width = _width(held, platform, note, scale, min_width, max_width)
    if held.ndim < _MAX_DIMS:
        return _grid(
            held.reshape((1,) * (2 - held.ndim) + held.shape),
            0,
            platform,
            note,
            use_color,
            width,
            scale,
        )
    outer = Table(show_header=False, show_lines=True, padding=0, pad_edge=False)
    for i, part in enumerate(held):
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
    held: np.ndarray, platform: str, note: str, scale: float, min_width: int, max_width: int
) -> int:
    longest = max(len(_cell_text(ids, platform, note)) for ids in _each(held))
    return min(max(round(min_width * scale), longest + 2), round(max_width * scale))


def _each(held: np.ndarray) -> Iterator[list[int]]:
    return itertools.chain(held.reshape(-1))


def _colour(outer: int, row: int, column: int) -> str:
    """One of four: along each of the three dims, neighbours differ."""
    return _COLOURS[(2 * row + column + outer) % len(_COLOURS)]
