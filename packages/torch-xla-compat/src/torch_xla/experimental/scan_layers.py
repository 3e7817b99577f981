"""`scan_layers`: layers of one structure, called one after another, as one loop of the program."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

import spmd_core as spmd
from spmd_core.control_flow.scans import scan_inside
from spmd_core.errors import ControlFlowError
from spmd_core.modules.alike import differences, guarded
from spmd_core.modules.other_tensors import having
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
    tensors = [dict((*m.named_parameters(), *m.named_buffers())) for m in modules]
    for index, others in enumerate(tensors[1:], start=1):
        _check(tensors[0], others, index)
    by_name = {name: [each[name] for each in tensors] for name in tensors[0]}
    shared = {name: own[0] for name, own in by_name.items() if len(set(map(id, own))) == 1}
    stacks = {name: _stacked(own) for name, own in by_name.items() if name not in shared}

    loop = _Loop(modules[0], shared)
    with guarded(differences(modules)):
        result, _ = scan_inside(
            loop.active, with_checked_carry(loop.step), input_data, stacks, length=len(modules)
        )
    return result


class _Loop:
    """The function of a loop over layers: calls the first one with the tensors of each.

    Args:
        layer: the first layer.
        shared: the tensors that all layers have, by name.
    """

    def __init__(self, layer: nn.Module, shared: Mapping[str, torch.Tensor]) -> None:
        self._layer, self._shared = layer, shared
        self._tensors = ExitStack()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layer keeps the tensors of the last call, which a checkpoint reads again."""
        around, self._tensors = self._tensors, ExitStack()
        try:
            with self._tensors:
                yield
        finally:
            self._tensors = around

    def step(self, carry: Any, slices: Mapping[str, torch.Tensor]) -> tuple[Any, None]:
        self._tensors.close()
        assigned = self._tensors.enter_context(having(self._layer, {**self._shared, **slices}))
        result = self._layer(*(carry if isinstance(carry, tuple) else (carry,)))
        for name in assigned():
            raise ControlFlowError(
                "layers that run as one loop write to no buffer, as Python calls only the first of "
                f"them; got an assignment to {name}. Return the new value, or call the layers one "
                "after another."
            )
        return result, None


def _check(first: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], i: int) -> None:
    """Raises ValueError if the tensors of layer i differ from the first one's in form."""
    if first.keys() != other.keys():
        raise ValueError(
            f"Layer {i} has mismatched keys. All layers have parameters and buffers of the same "
            f"names; got {sorted(other.keys() - first.keys())} which layer 0 has not, and not "
            f"{sorted(first.keys() - other.keys())}. Build them alike, or call them one after "
            "another."
        )
    for name, tensor in first.items():
        forms = [(tuple(t.shape), t.dtype) for t in (tensor, other[name])]
        for what, mine, its in zip(("Shape", "Dtype"), *forms, strict=True):
            if mine != its:
                raise ValueError(
                    f"{what} mismatch for {name!r}: all layers have tensors of the same shapes and "
                    f"dtypes, which are stacked; got {its} in layer {i} and {mine} in layer 0. "
                    "Build them alike, or call them one after another."
                )


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The stack, with the mark that all tensors have."""
    result = torch.stack(list(tensors))
    shardings = {getattr(t, "sharding", None) for t in tensors}
    if len(shardings) == 1 and (sharding := shardings.pop()) is not None:
        spec = (None, *(axes or None for axes in sharding.dims))
        spmd.mark_sharding(result, sharding.mesh, spec)
    return result
