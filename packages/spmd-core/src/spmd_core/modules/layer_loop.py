"""Layers of one structure as one loop: the first layer is called with the tensors of each."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.control_flow.scans import scan_inside
from spmd_core.errors import ControlFlowError, WrapError
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import origin_of
from spmd_core.modules.alike import differences, guarded
from spmd_core.modules.layer_stacks import stacked
from spmd_core.modules.other_tensors import having
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

Tensors = Mapping[str, torch.Tensor]

Step = Callable[[nn.Module, Any, Any], tuple[Any, Any]]
"""`step(layer, carry, x)` calls the layer, and returns the new carry, and what is stacked."""


def run_layers(
    layers: Sequence[nn.Module],
    step: Step,
    init: Any,
    xs: Any = None,
    *,
    unread: Collection[str] = (),
) -> Any:
    """What `control_flow.scan` returns of `step`, called for one layer after another.

    Python calls `step` with the first layer, whose parameters and buffers are those of all layers
    as slices of stacks. Does not wait.

    Args:
        layers: at least one.
        step: calls the layer that it gets.
        init: the first carry.
        xs: what else differs between layers: tensors of shape `(number of layers, ...)`.
        unread: attributes of the layers themselves that may differ, as `step` sees to them.

    Raises:
        ValueError: the layers differ in more than the values of their parameters and buffers.
        ControlFlowError: a layer writes to a buffer, or keeps a tensor that it computes.
    """
    if len(layers) == 1:
        slices = pytree.tree_map_only(torch.Tensor, lambda t: t[0], xs)
        carry, y = step(layers[0], init, slices)
        return carry, pytree.tree_map_only(torch.Tensor, lambda t: t.unsqueeze(0), y)
    tensors = [_tensors_of(layer) for layer in layers]
    for index, others in enumerate(tensors[1:], start=1):
        require_alike(tensors[0], others, index)
    by_name = {name: [each[name] for each in tensors] for name in tensors[0]}
    shared = {name: own[0] for name, own in by_name.items() if len(set(map(id, own))) == 1}
    stacks = {
        name: stacked(own, f"the tensor {name!r}")
        for name, own in by_name.items()
        if name not in shared
    }
    loop = _Loop(layers[0], step, shared)
    with guarded(differences(layers, unread)):
        return scan_inside(
            loop.active,
            loop.call,
            init,
            (stacks, xs),
            length=len(layers),
            on_kept=functools.partial(_refuse_kept, layers[0]),
        )


def _tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*layer.named_parameters(), *layer.named_buffers()))


def require_alike(first: Tensors, other: Tensors, index: int) -> None:
    """Raises WrapError if the tensors of a layer differ from the first one's in form."""
    if first.keys() != other.keys():
        raise WrapError(
            f"Layer {index} has mismatched keys. All layers have parameters and buffers of the "
            f"same names; got {sorted(other.keys() - first.keys())} which layer 0 has not, and not "
            f"{sorted(first.keys() - other.keys())}. Build them alike, or call them one after "
            "another."
        )
    for name, tensor in first.items():
        forms = [(tuple(t.shape), t.dtype) for t in (tensor, other[name])]
        for what, mine, its in zip(("Shape", "Dtype"), *forms, strict=True):
            if mine != its:
                raise WrapError(
                    f"{what} mismatch for {name!r}: all layers have tensors of the same shapes and "
                    f"dtypes, which are stacked; got {its} in layer {index} and {mine} in layer 0. "
                    "Build them alike, or call them one after another."
                )


class _Loop:
    """The function of a loop over layers: calls the first one with the tensors of each.

    Args:
        layer: the first layer.
        step: calls it.
        shared: the tensors that all layers have, by name.
    """

    def __init__(self, layer: nn.Module, step: Step, shared: Tensors) -> None:
        self._layer, self._step, self._shared = layer, step, shared
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

    def call(self, carry: Any, x: tuple[Tensors, Any]) -> tuple[Any, Any]:
        slices, given = x
        self._tensors.close()
        before = {name: _state_of(t) for name, t in slices.items()}
        assigned = self._tensors.enter_context(having(self._layer, {**self._shared, **slices}))
        result = self._step(self._layer, carry, given)
        written = [name for name, t in slices.items() if _state_of(t) != before[name]]
        for what, names in (("an assignment to", assigned()), ("a write in place to", written)):
            for name in names:
                raise ControlFlowError(
                    "layers that run as one loop write to no parameter or buffer, as Python calls "
                    f"only the first of them; got {what} {name} of a "
                    f"{type(self._layer).__name__}. Return the new value, call eval() where "
                    "running statistics are written, or call the layers one after another."
                )
        return result


def _refuse_kept(layer: nn.Module, kept: Sequence[Storage]) -> None:
    """Raises ControlFlowError, as tensors of an iteration are kept."""
    storage = kept[0]
    holders = [
        f"attribute {name}.{key}".replace(" .", " ")
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if any(
            isinstance(leaf, XLAShardedTensor) and leaf._handle.storage is storage
            for leaf in pytree.tree_leaves(value)
        )
    ]
    origin = origin_of(storage.value)
    made = "" if origin is None else f", made at {origin}"
    raise ControlFlowError(
        "layers that run as one loop keep no tensor that they compute, as it has a value in each "
        f"iteration and none outside; got one of {storage.spec!r}{made}, in "
        f"{holders[0] if holders else 'a list, closure or hook'} of a {type(layer).__name__}. "
        "Return it, or call the layers one after another."
    )


def _state_of(tensor: Any) -> tuple[Any, int]:
    """What a write in place changes."""
    return tensor._handle, tensor._handle.storage.version
