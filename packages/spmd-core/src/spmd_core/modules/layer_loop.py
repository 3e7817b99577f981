"""Layers of one structure as one loop: the first layer is called with the tensors of each."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.control_flow.scans import scan_inside
from spmd_core.errors import ControlFlowError, WrapError
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import origin_of
from spmd_core.modules.alike import differences, guarded
from spmd_core.modules.layer_stacks import row_of, stacked, with_row
from spmd_core.modules.layer_state import LayerState, check_states, no_gradient, shared_memory
from spmd_core.modules.other_tensors import having
from spmd_core.recording.functions import closed_over
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

Tensors = Mapping[str, torch.Tensor]

Step = Callable[[nn.Module, Any, Any, Sequence[torch.Tensor]], tuple[Any, Any]]
"""`step(layer, carry, x, rows)` calls the layer, which may write to rows in place, and returns the
new carry, and what is stacked."""


def run_layers(
    layers: Sequence[nn.Module],
    step: Step,
    init: Any,
    xs: Any = None,
    *,
    states: Sequence[LayerState] = (),
    guard: Callable[[], AbstractContextManager[Any]] | None = None,
) -> tuple[Any, Any, Sequence[torch.Tensor]]:
    """What `control_flow.scan` returns of `step`, called for one layer after another, and states.

    Python calls `step` with the first layer, whose parameters and buffers are those of all layers
    as slices of stacks. Does not wait.

    Args:
        layers: at least one.
        step: calls the layer that it gets.
        init: the first carry.
        xs: what else differs between layers: tensors of shape `(number of layers, ...)`.
        states: what layers write to in place.
        guard: returns a context, inside of which reading what differs between layers raises; by
            default for all attributes.

    Returns:
        The last carry, what is stacked, and for each state the stack that the layers leave, which
        the caller writes to it.

    Raises:
        ValueError: the layers differ in more than the values of their parameters and buffers.
        WrittenError: a layer writes to a slice of `xs`.
        ControlFlowError: a layer writes to a buffer, or keeps a tensor that it computes; or a state
            has a gradient, is replaced, or shares memory with what else the layers get.
    """
    if len(layers) == 1:
        slices = pytree.tree_map_only(torch.Tensor, lambda t: t[0], xs)
        carry, y = step(layers[0], init, slices, [state.stack[0] for state in states])
        y = pytree.tree_map_only(torch.Tensor, lambda t: t.unsqueeze(0), y)
        return carry, y, [state.stack for state in states]
    check_states(states, [t for t in pytree.tree_leaves((init, xs)) if t is not None])
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
    loop = _Loop(layers[0], step, shared, states)
    # Only states are read and written at positions.
    positions = torch.arange(len(layers), device="xla") if states else None
    with guarded(differences(layers)) if guard is None else guard():
        (carry, written), y = scan_inside(
            loop.active,
            loop.call,
            (init, [state.stack for state in states]),
            (stacks, xs, positions),
            length=len(layers),
            on_kept=functools.partial(_refuse_kept, layers[0]),
        )
    return carry, y, written


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


class WrittenError(Exception):
    """Layers write to slices of `xs`, which are to be states.

    Attributes:
        numbers: the positions of these among the leaves of `xs`.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"a write to the tensors {numbers} of xs")
        self.numbers = numbers


class _Loop:
    """The function of a loop over layers: calls the first one with the tensors of each.

    Args:
        layer: the first layer.
        step: calls it.
        shared: the tensors that all layers have, by name.
        states: what the layers write.
    """

    def __init__(
        self,
        layer: nn.Module,
        step: Step,
        shared: Tensors,
        states: Sequence[LayerState],
    ) -> None:
        self._layer, self._step, self._shared = layer, step, shared
        self._states = states
        self._owners: dict[Storage, LayerState] = {
            owner._handle.storage: state  # type: ignore[attr-defined]
            for state in states
            for owner in state.owners
        }
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

    def call(self, carry: Any, x: tuple[Tensors, Any, Any]) -> tuple[Any, Any]:
        (carry, stacks), (slices, given, index) = carry, x
        self._tensors.close()
        before = {name: _state_of(t) for name, t in slices.items()}
        own = pytree.tree_leaves(given)
        own_before = [None if t is None else _state_of(t) for t in own]
        assigned = self._tensors.enter_context(having(self._layer, {**self._shared, **slices}))
        rows = [row_of(stack, index) for stack in stacks]
        handles = [row._handle for row in rows]
        carry, y = self._step(self._layer, carry, given, rows)
        numbers = [i for i, t in enumerate(own) if t is not None and _state_of(t) != own_before[i]]
        if numbers:
            raise WrittenError(numbers)
        self._check_states(rows, handles)
        stacks = [with_row(stack, index, row) for stack, row in zip(stacks, rows)]
        written = [name for name, t in slices.items() if _state_of(t) != before[name]]
        for what, names in (("an assignment to", assigned()), ("a write in place to", written)):
            for name in names:
                raise ControlFlowError(
                    "layers that run as one loop write to no parameter or buffer, as Python calls "
                    f"only the first of them; got {what} {name} of a "
                    f"{type(self._layer).__name__}. Return the new value, call eval() where "
                    "running statistics are written, or call the layers one after another."
                )
        return (carry, stacks), y

    def _check_states(self, rows: Sequence[XLAShardedTensor], handles: Sequence[Any]) -> None:
        """Raises ControlFlowError if rows were replaced, have gradients, or are read otherwise.

        Args:
            rows: the row of each state.
            handles: what they were before the layer's call.
        """
        name = type(self._layer).__name__
        for row, handle, state in zip(rows, handles, self._states):
            if row._handle is not handle:
                raise ControlFlowError(
                    "layers that run as one loop write values to tensors that exist; got a "
                    f"{name} that gives {state.where}, of {handle.spec!r}, other memory, as "
                    "set_(), resize_() and `.data =` do. Write copy_(), or call the layers one "
                    "after another."
                )
            if row.requires_grad:
                raise no_gradient(f"to {state.where} of a value that requires one, by a {name}")
        for tensor in closed_over():
            if tensor._handle.storage in self._owners:
                raise shared_memory(tensor, self._owners[tensor._handle.storage].where)


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
