"""`scan_layers`: layers of one structure, called one after another, as one loop of the program."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from spmd_core.modules.layer_loop import run_layers
from torch_xla.experimental.scan import (
    PartitionFn,
    default_partition,
    warn_of_partition,
    with_checked_carry,
)


def scan_layers(
    layers: Iterable[nn.Module],
    input_data: Any,
    partition_fn: PartitionFn = default_partition,
    is_layer_pure: bool = False,
) -> Any:
    """Calls layers one after another, each with the result of the one before, as one loop.

    The program has the operations of one layer, whatever their number. Python calls the first
    layer, with the tensors of all as slices of stacks. Gradients go to each layer's own parameters;
    random operations, such as dropout, draw other numbers in each layer. A parameter or buffer
    that has the same mark in all layers keeps it, in its stack behind the first dim and in the
    loop. One tensor that all layers have is not stacked. Does not wait for the device.

    Args:
        layers: modules of the same class that differ in the values of their parameters and buffers
            and in no other attribute that forward reads. They write to no buffer.
        input_data: what the first layer gets: a tensor, or tensors in lists, tuples and dicts; the
            items of a tuple are several arguments. A layer returns the same structure, shapes and
            dtypes.
        partition_fn: not used, with a warning; checkpoint the layers to choose what backward keeps.
        is_layer_pure: not used: a layer is recorded at each call, and what it records is compared.

    Returns:
        What the last layer returns; `input_data` if there is no layer.

    Raises:
        ValueError: the parameters or buffers differ in names, shapes or dtypes; or layers differ in
            classes, or in an attribute that forward reads.
        AssertionError: a layer's result has not the structure, shapes and dtypes of its input.
        RuntimeError: a layer writes to a buffer, or reads a value on the host.

    Example:
        >>> import torch
        >>> layers = [torch.nn.Linear(4, 4).to("xla") for _ in range(3)]
        >>> scan_layers(layers, torch.ones(2, 4, device="xla")).shape
        torch.Size([2, 4])
    """
    modules = list(layers)
    warn_of_partition(partition_fn)
    if not modules:
        return input_data

    def step(layer: nn.Module, carry: Any, *_: Any) -> tuple[Any, Any]:
        def call(carry: Any, _: Any) -> tuple[Any, None]:
            return layer(*(carry if isinstance(carry, tuple) else (carry,))), None

        return with_checked_carry(call)(carry, None)

    result, _, _ = run_layers(modules, step, input_data)
    return result
