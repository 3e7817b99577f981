"""What a captured call returns: new tensors, arguments, state, gradients, and what is no tensor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Spec
from spmd_core.sharding.sharding import Sharding
from spmd_core.steps.capture.agreement import Recording
from spmd_core.steps.capture.bindings import Chain, Kind
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap, wrap_alias

_Leaf = Callable[[Sequence[XLAShardedTensor], Sequence[Storage]], Any]


@dataclass(frozen=True)
class _Made:
    """A tensor that each call makes and returns.

    Attributes:
        position: among the program's results.
        spec: of its storage.
        sharding: of its storage.
        placement: where the result lies.
    """

    position: int
    spec: Spec
    sharding: Sharding | None
    placement: Placement


class Returned:
    """What calls return that do what a recorded call did.

    Args:
        recording: that call, with its plan.
        arguments: the tensors among its arguments.
    """

    def __init__(self, recording: Recording, arguments: Sequence[XLAShardedTensor]) -> None:
        plan = recording.plan
        assert plan is not None
        placements = recording.program.out_placements
        made = [
            (i, plan.live[i])
            for i, binding in enumerate(recording.results)
            if binding.kind is Kind.RESULT
        ]
        self._made = [_Made(i, s.spec, s.sharding, placements[i]) for i, s in made]
        numbers = {storage: n for n, (_, storage) in enumerate(made)}
        given = {t._handle.storage: i for i, t in enumerate(arguments)}
        grads = {
            grad._handle.storage: recording.after.tensors[path]
            for path, grad in recording.after.grads.items()
            if isinstance(grad, XLAShardedTensor)
        }
        self._tree = recording.outcome.tree
        self._is_leaf = self._tree.is_leaf()
        self._leaves = [
            _returned(leaf, numbers, given, arguments, grads) for leaf in recording.outcome.leaves
        ]

    def of_call(
        self, arguments: Sequence[XLAShardedTensor], results: Sequence[Any], checked: Any
    ) -> Any:
        """What a call returns.

        Args:
            arguments: the tensors among its arguments.
            results: of the program.
            checked: `Value.checked` of its results; None for none.
        """
        made = []
        for one in self._made:
            storage = Storage.of_leaf(one.spec, results[one.position], one.placement)
            storage.sharding = one.sharding
            if checked is not None:
                storage.value.checked = checked
            made.append(storage)
        leaves = [returned(arguments, made) for returned in self._leaves]
        return leaves[0] if self._is_leaf else _pytree.tree_unflatten(leaves, self._tree)


def _returned(
    leaf: Any,
    made: Mapping[Storage, int],
    given: Mapping[Storage, int],
    arguments: Sequence[XLAShardedTensor],
    grads: Mapping[Storage, XLAShardedTensor],
) -> _Leaf:
    """How a later call returns what is returned here; keeps no data of this call.

    Args:
        leaf: what is returned.
        made: the numbers of the tensors that each call makes.
        given: the numbers of the arguments.
        arguments: of this call.
        grads: the parameter of each gradient.
    """
    if not isinstance(leaf, XLAShardedTensor):
        return lambda arguments, storages: leaf
    chain, storage = Chain.of(leaf._handle), leaf._handle.storage
    if storage in made:
        n = made[storage]
        if isinstance(leaf, torch.nn.Parameter):
            needs = leaf.requires_grad
            return lambda arguments, storages: torch.nn.Parameter(
                wrap(chain.over(storages[n])), requires_grad=needs
            )
        if leaf.requires_grad:
            return lambda arguments, storages: wrap(chain.over(storages[n])).requires_grad_()
        return lambda arguments, storages: wrap(chain.over(storages[n]))
    if storage in given:
        i = given[storage]
        if leaf is arguments[i]:
            return lambda arguments, storages: arguments[i]
        return lambda arguments, storages: wrap_alias(chain.over(arguments[i]._handle.storage))
    if storage in grads:
        parameter: Any = grads[storage]
        if leaf is parameter.grad:
            return lambda arguments, storages: parameter.grad
        return lambda arguments, storages: wrap_alias(chain.over(parameter.grad._handle.storage))
    return lambda arguments, storages: leaf  # a tensor of the state, or over one
