"""A table of how each tensor of a run is sharded, for the console."""

import math
import re
from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.table import Table
from torch import nn

import spmd_core as spmd


def layout_table(model: nn.Module, tokens: spmd.ShardingSpec | None = None) -> Table:
    """How the parameters of a model on device `xla`, and its token ids, are sharded over the mesh.

    Layers of equal sharding share a line: * stands for their numbers, column x counts them. "(64
    tensor, 192)" is a tensor of shape (64, 192) whose first dim the axis tensor splits.

    Args:
        model: the model.
        tokens: the sharding of token ids, whose last dims are sequences (B) and tokens (T).
    """
    table = Table(title="Layout on the mesh", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape and axes", no_wrap=True)
    for name in ("x", "a device"):
        table.add_column(name, justify="right", no_wrap=True)
    if tokens is not None:
        spec = zip(("B", "T"), tokens.partition_spec[-2:])
        table.add_row("token ids", _dims_text(spec), "", "")
    lines = Counter(_line(name, parameter) for name, parameter in model.named_parameters())
    for (name, dims, num_bytes), count in lines.items():
        table.add_row(name, dims, str(count), _size_text(count * num_bytes))
    total = sum(count * num_bytes for (_, _, num_bytes), count in lines.items())
    table.add_row("all parameters", "", str(lines.total()), _size_text(total))
    return table


def _line(name: str, parameter: nn.Parameter) -> tuple[str, str, int]:
    """A parameter's name with * for numbers and without "weight", its layout, its bytes here."""
    sharding = parameter.sharding if isinstance(parameter, spmd.XLAShardedTensor) else None
    spec = sharding.partition_spec if sharding else ()
    spec = (*spec, *(None,) * (parameter.dim() - len(spec)))
    block = sharding.shard_shape(tuple(parameter.shape)) if sharding else parameter.shape
    return (
        re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight"),
        _dims_text(zip(parameter.shape, spec)),
        math.prod(block) * parameter.element_size(),
    )


def _dims_text(dims: Iterable[tuple[object, object]]) -> str:
    """Sizes (or names) of dims, each with the axes that split it."""
    texts = []
    for size, axes in dims:
        names = axes if isinstance(axes, tuple) else (axes,) if axes is not None else ()
        texts.append(" ".join(map(str, (size, *names))))
    return f"({', '.join(texts)})"


def _size_text(num_bytes: int) -> str:
    large = num_bytes >= 10 * 2**20
    return f"{num_bytes / 2**20:,.0f} MiB" if large else f"{num_bytes / 2**10:,.1f} KiB"
