"""Prints shardings as tables of devices, in upstream's form."""

import importlib.util
from typing import Any

import torch

from spmd_core.debugging import visualize
from spmd_core.runtime import devices
from spmd_core.sharding import xla_text
from torch_xla import _XLAC

# Upstream's tables have two dims. `spmd_core` draws all others.
_DIMS = 2


def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> Any:
    """Prints upstream's table of the devices that hold each block, and returns it.

    A cell is `CPU 0` if one device holds the block, `CPU [0, 4]` if several do. With a coloured
    console and `use_color` there are no lines between the cells, as upstream draws them. Unlike
    upstream, this also takes an iota (V2), a single dim, and a third dim, for which
    `spmd_core.debugging.visualize_sharding` draws the table.

    Args:
        sharding: XLA's text; '' is replicated.
        use_color: no lines between the cells where the console has colours.
        scale: only used for three dims, as in `spmd_core.debugging.visualize_sharding`; so is
            `min_width`.
        min_width: see `scale`.
        max_width: width of the console, in characters.

    Raises:
        PartitionSpecError: the text is no sharding (a ValueError, as upstream's).
        ValueError: `rich` is not installed.
    """
    if importlib.util.find_spec("rich") is None:
        raise ValueError(
            "`visualize_sharding` requires `rich` to be installed. Run: pip install rich"
        )
    blocks, _ = xla_text.blocks(
        xla_text.REPLICATED if sharding == "" else sharding,
        num_devices=devices.global_runtime_device_count(),
    )
    if blocks.ndim > _DIMS:
        return visualize.visualize_sharding(
            sharding, use_color=use_color, scale=scale, min_width=min_width, max_width=max_width
        )
    # rich is optional, and its import takes a while.
    import rich.box  # noqa: PLC0415
    from rich.align import Align  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.padding import Padding  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console(width=max_width)
    is_coloured = use_color and console.color_system is not None
    table = Table(
        show_header=False,
        show_lines=not is_coloured,
        padding=0,
        highlight=not is_coloured,
        pad_edge=False,
        box=None if is_coloured else rich.box.SQUARE,
    )
    platform = devices.platform().upper()
    is_replicated = not blocks.ndim
    for row in blocks.reshape((1,) * (_DIMS - blocks.ndim) + blocks.shape):
        table.add_row(
            *(
                Padding(
                    Align(
                        f"{platform} {ids if is_replicated or len(ids) > 1 else ids[0]}",
                        "center",
                        vertical="middle",
                    ),
                    1,
                )
                for ids in row
            )
        )
    print(f"Visualizing {sharding} (showing up to the first two dimensions)")
    console.print(table, end="\n\n")
    return table


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Any) -> Any:
    """Prints and returns the table of a tensor's sharding; one without a mark is replicated.

    The keywords are those of `visualize_sharding`. Does not wait for the device.
    """
    return visualize_sharding(_XLAC._get_xla_sharding_spec(t), **kwargs)


def construct_v1_sharding_str(t: torch.Tensor) -> str:
    """The text of a tensor's sharding that lists every device id, the only form used here."""
    return _XLAC._get_xla_sharding_spec(t)
