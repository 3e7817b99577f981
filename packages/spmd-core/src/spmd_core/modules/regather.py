"""Saves shards for backward instead of the tensors that were gathered from them.

Where autograd would save a value that is made of gathered tensors, a recipe is saved instead. In
backward it is replayed on tensors that are gathered again from their shards, behind a barrier
across which the compiler cannot keep the first gather. `fully_shard` does so with parameters, and
sequence parallelism with the inputs of its layers.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage, read
from spmd_core.graph.values import Entry, OpResult, Value
from spmd_core.modules.checkpointing import barrier, in_backward
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


class Regather:
    """The shards that a forward keeps, to gather from them again in its backward.

    Args:
        tensors: the shards, on device `xla`.
        gather: for each of them a function that gathers an alias of it. Not differentiable.
        whole: the gathered tensors that the forward uses.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        gather: Sequence[Callable[[torch.Tensor], XLAShardedTensor]],
        whole: Sequence[XLAShardedTensor],
    ) -> None:
        # Aliases: assigning to `parameter.data` does not change them, and unlike the parameters
        # they have no hooks.
        self._shards = [t.data for t in tensors]
        self._gather, self._tensors = gather, tensors
        self._versions = [t._version for t in tensors]
        self._sources = {read(w._handle): i for i, w in enumerate(whole)}
        self._values: list[Value] | None = None

    @contextmanager
    def saving_recipes(self) -> Iterator[None]:
        """Inside, autograd saves recipes for values that are made of gathered tensors.

        Other values are passed to outer saved-tensor hooks, if there are any.
        """
        outer = outer_hooks()
        outer_pack, outer_unpack = outer if outer is not None else (_unchanged, _unchanged)
        sources = self._sources

        def pack(saved: torch.Tensor) -> Any:
            recipe = (
                _recipe(read(saved._handle), sources, depth=8)
                if isinstance(saved, XLAShardedTensor)
                else None
            )
            return (outer_pack(saved), None) if recipe is None else (recipe, saved._handle.spec)  # type: ignore[attr-defined]

        def unpack(packed: Any) -> torch.Tensor:
            content, spec = packed
            if spec is None:
                other: torch.Tensor = outer_unpack(content)
                return other
            with lock:
                return wrap(Storage(_replay(content, self._regathered(None)[0]), spec))

        pack.saves_recipes = True  # type: ignore[attr-defined]
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            # This object lives until backward, and must not keep the values of forward alive.
            self._sources = {}

    def before_backward(self, output: Any) -> Any:
        """Gathers the parameters again when the first gradient of `output` arrives.

        A barrier makes the gather wait for that gradient, and the gradient for the shards.
        """
        # A weak reference, because the hook outlives backward and would keep gathered tensors alive
        # at the end of the step, where they would become results of the program.
        reference = weakref.ref(self)

        def gather(gradient: torch.Tensor) -> torch.Tensor | None:
            regather = reference()
            if (
                regather is None
                or regather._values is not None
                or not isinstance(gradient, XLAShardedTensor)
                or torch.is_grad_enabled()
            ):
                return None
            return regather._regathered(gradient)[1]

        if self._shards:
            for leaf in pytree.tree_leaves(output):
                if (
                    isinstance(leaf, torch.Tensor)
                    and leaf.requires_grad
                    and leaf.grad_fn is not None
                ):
                    leaf.register_hook(gather)
        return output

    def _regathered(self, gradient: torch.Tensor | None) -> tuple[list[Value], torch.Tensor | None]:
        """The tensors, gathered once in each backward, and the gradient behind their barrier.

        The gradient is None where none was given, and where they were gathered already.
        """
        if self._values is not None:
            return self._values, None
        for tensor, version in zip(self._tensors, self._versions):
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by "
                    f"an inplace operation: a tensor of shape {tuple(tensor.shape)} "
                    f"is at version {tensor._version}; expected version {version}, "
                    "as it was in forward. Call backward before parameters are updated."
                )
        with torch.no_grad():
            results = barrier([*self._shards, *([] if gradient is None else [gradient])])
            whole = [gather(shard) for gather, shard in zip(self._gather, results)]
        # Values, not tensors: a value that a tensor holds at a cut becomes a result of the program.
        values = [read(w._handle) for w in whole]
        if in_backward():
            # Kept until the end of this backward; a later one gathers again.
            self._values = values
            torch.autograd.Variable._execution_engine.queue_callback(self._forget)
        return values, None if gradient is None else results[-1]

    def _forget(self) -> None:
        self._values = None


def is_saved_by_others() -> bool:
    """Whether saved-tensor hooks other than a `Regather`'s, such as a checkpoint's, are active."""
    outer = outer_hooks()
    return outer is not None and not getattr(outer[0], "saves_recipes", False)


def outer_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The (pack, unpack) that autograd would call on a saved tensor now, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _unchanged(saved: torch.Tensor) -> torch.Tensor:
    return saved


# How a value is computed from gathered tensors: the index of one of them, or an operation with the
# recipes of its inputs and its scalars.
_Recipe: TypeAlias = "int | tuple[Entry, tuple[_Recipe, ...], Sequence[Any]]"


def _recipe(value: Value, sources: dict[Value, int], *, depth: int) -> "_Recipe | None":
    """The recipe of a value; None if it is not computed from gathered tensors alone.

    Args:
        value: the value.
        sources: the gathered tensors, numbered.
        depth: the largest number of nested operations.
    """
    if value in sources:
        return sources[value]
    if value.data is not None or depth == 0 or isinstance(value, OpResult) or not value.inputs:
        return None
    inputs = []
    for x in value.inputs:
        recipe = _recipe(x, sources, depth=depth - 1)
        if recipe is None:
            return None
        inputs.append(recipe)
    return value.entry, tuple(inputs), value.numbers


def _replay(recipe: _Recipe, values: list[Value]) -> Value:
    """Evaluates a recipe on the gathered tensors `values`."""
    if isinstance(recipe, int):
        return values[recipe]
    entry, inputs, numbers = recipe
    return Value(entry, tuple(_replay(x, values) for x in inputs), numbers)
