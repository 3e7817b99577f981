"""Runs a captured program again, on new arguments and on the state as it is."""

import itertools
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from spmd_core import counters
from spmd_core.config import config
from spmd_core.graph import recorders
from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage, failed, pending_elsewhere
from spmd_core.graph.values import Spec, Value, line_of
from spmd_core.program import execution, fingerprint, index_checks, start
from spmd_core.program.leaves import convert
from spmd_core.program.planning import CutPlan
from spmd_core.program.program import Program
from spmd_core.recording import random_stream
from spmd_core.runtime import interrupts
from spmd_core.sharding.sharding import Sharding
from spmd_core.steps.capture.bindings import Binding, Chain, Kind
from spmd_core.steps.capture.guards import Guards
from spmd_core.steps.capture.numbers import Numbers, kind_of
from spmd_core.steps.capture.reachable import Reached
from spmd_core.steps.capture.stacked import Stacks
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap, wrap_alias

_data_of = operator.attrgetter("data")
_value_of = operator.attrgetter("value")
_placement_of = operator.attrgetter("placement")
_handle_of = operator.attrgetter("_handle")
_grad_of = operator.attrgetter("grad")


@dataclass(frozen=True)
class Outcome:
    """What a call returned.

    Attributes:
        tree: its structure.
        leaves: its leaves; tensors of them are detached.
    """

    tree: Any
    leaves: list[Any]


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


class Replay:
    """A captured call.

    Args:
        plan: of the last recording, which was started.
        program: what it started.
        inputs: where the program's inputs come from.
        results: where its results go.
        numbers: how its scalar inputs come about.
        generators: torch's generator of each seed that the call draws; None for the default one.
        reached: what the step reached after the last recording.
        may_vary: the paths of numbers of param_groups that may be others.
        has_gradients: by the path of each parameter, whether it had a gradient before the call;
            None if that does not matter.
        outcome: what that returned.
        arguments: the tensors among its arguments.
    """

    def __init__(
        self,
        plan: CutPlan,
        program: Program,
        *,
        inputs: Sequence[Binding],
        results: Sequence[Binding],
        numbers: Numbers,
        generators: Sequence[torch.Generator | None],
        reached: Reached,
        may_vary: Collection[str],
        has_gradients: Mapping[str, bool] | None,
        outcome: Outcome,
        arguments: Sequence[XLAShardedTensor],
    ) -> None:
        self._key, self._program, self._targets = plan.key, program, plan.targets
        self._donated_bytes = sum(plan.leaves[i].spec.num_bytes for i in plan.key.donated)
        self._lines = [line_of(plan.nodes[check.position]) for check in program.index_checks]
        self._numbers, self._generators, self._reached = numbers, generators, reached
        self._classes = [kind_of(numbers.values[x.position]) for x in numbers.live]
        self.guards = Guards(reached, may_vary)
        self._tree = outcome.tree
        parameters = has_gradients or {}
        self._parameters = [reached.tensors[path] for path in parameters]
        self._have_gradients = [*parameters.values()]
        self._bind_inputs(plan, inputs)
        self._bind_results(plan, results, outcome, arguments)
        reached.grads.clear()  # they are the parameters' to keep

    def _bind_inputs(self, plan: CutPlan, inputs: Sequence[Binding]) -> None:
        at = range(len(inputs))
        self._state_at = [i for i in at if inputs[i].kind is Kind.STATE]
        self._state_storages = [_storage(inputs[i]) for i in self._state_at]
        self._state_targets = [plan.targets[i] for i in self._state_at]
        # Gradients that are read are those of the parameters, at each call.
        grads = {f"{path}.grad": self._reached.tensors[path] for path in self._reached.grads}
        self._read_gradients = [
            (grads[inputs[i].path], _storage(inputs[i]))
            for i in self._state_at
            if inputs[i].path in grads
        ]
        self._rows_at = {i: inputs[i].rows for i in at if inputs[i].kind is Kind.STACK}
        rows = {storage for rows in self._rows_at.values() for storage in rows}
        self._read_gradients += [
            (self._reached.tensors[path], grad._handle.storage)
            for path, grad in self._reached.grads.items()
            if isinstance(grad, XLAShardedTensor) and grad._handle.storage in rows
        ]
        self._argument_at = [(i, inputs[i].index) for i in at if inputs[i].kind is Kind.ARGUMENT]
        self._constants = [(i, plan.leaves[i]) for i in at if inputs[i].kind is Kind.CONSTANT]

    def _bind_results(
        self,
        plan: CutPlan,
        results: Sequence[Binding],
        outcome: Outcome,
        arguments: Sequence[XLAShardedTensor],
    ) -> None:
        placements = self._program.out_placements
        at = range(len(results))
        self._written_at = [i for i in at if results[i].kind is Kind.STATE]
        written = [_storage(results[i]) for i in self._written_at]
        self._written = _Written(written, [placements[i] for i in self._written_at])
        stacks = [i for i in at if results[i].kind is Kind.STACK]
        self._stacks = Stacks(self._rows_at, {i: (results[i].rows, placements[i]) for i in stacks})
        written = [*written, *self._stacks.written]
        self._written_arguments = [
            (i, results[i].index, placements[i]) for i in at if results[i].kind is Kind.ARGUMENT
        ]
        self._gradients = _Gradients(
            [
                (i, self._reached.tensors[results[i].path], plan.live[i], placements[i])
                for i in at
                if results[i].kind is Kind.GRADIENT
            ]
        )
        # Autograd notices by a tensor's version that what it saved was overwritten.
        storages = {*written}
        self._versions = [
            t for t in self._reached.tensors.values() if t._handle.storage in storages
        ]
        # An argument that the step also reaches is state, and only that tensor may be passed.
        # So are gradients that it reads.
        self._state = {t._handle.storage for t in self._reached.tensors.values()}
        self._state.update(self._state_storages, self._stacks.storages, written)
        given_now = [t._handle.storage for t in arguments]
        self._argument_state = [s if s in self._state else None for s in given_now]
        number = {plan.live[i]: i for i in at if results[i].kind is Kind.RESULT}
        self._made = [
            _Made(i, storage.spec, storage.sharding, placements[i]) for storage, i in number.items()
        ]
        made = {storage: n for n, storage in enumerate(number)}
        given = {t._handle.storage: i for i, t in enumerate(arguments)}
        self._returned: list[Callable[[Sequence[XLAShardedTensor], Sequence[Storage]], Any]] = [
            _returned(leaf, made, given, arguments, self._owners()) for leaf in outcome.leaves
        ]

    def _owners(self) -> dict[Storage, XLAShardedTensor]:
        """The parameter of each gradient."""
        owners = [(t.grad, t) for t in self._reached.tensors.values() if t.is_leaf]
        return {
            grad._handle.storage: owner
            for grad, owner in owners
            if isinstance(grad, XLAShardedTensor)
        }

    def ready(self, arguments: Sequence[XLAShardedTensor]) -> bool:
        """Whether a call can be replayed now: what it depends on is as it was.

        Ends the step that is pending in this thread, if any.

        Args:
            arguments: the tensors among its arguments.
        """
        for argument, state in zip(arguments, self._argument_state):
            storage = argument._handle.storage
            if state is not storage and (state is not None or storage in self._state):
                return False
        own = recorders.current()
        if own.storages or len(recorders.cut_here()) > 1:
            execution.end_step()  # first, as closures at the end of a step may change anything
        if not self.guards.hold() or failed() or pending_elsewhere():
            return False
        if not self._stacks.are_there():
            return False
        grads = map(_grad_of, self._parameters)
        if [*map(operator.is_not, grads, itertools.repeat(None))] != self._have_gradients:
            return False
        for parameter, storage in self._read_gradients:
            grad: Any = parameter.grad
            if grad is None or grad._handle is not storage:
                return False
        return True

    def numbers(self) -> list[Any] | None:
        """The program's numbers without new seeds; None if one is of another kind now."""
        values = list(self._numbers.values)
        fresh: dict[int, Any] = {}
        for live, kind in zip(self._numbers.live, self._classes):
            number = live.form(*(self._reached.number(p) for p in live.paths))
            if kind_of(number) != kind:
                return None
            if fresh.setdefault(live.position, number) != number:
                return None
            values[live.position] = number
        return values

    def __call__(self, arguments: Sequence[XLAShardedTensor], numbers: list[Any]) -> Any:
        """Starts the program, and returns what the call returns. Does not wait.

        Args:
            arguments: the tensors among the arguments.
            numbers: from `numbers()`.

        Raises:
            DeviceMemoryError, ProgramError: it could not be started; nothing has changed.
        """
        if self._generators:
            seeds = [random_stream.draw(generator) for generator in self._generators]
            for position, draw in self._numbers.seeds:
                numbers[position] = seeds[draw]
        results = execution.in_step(lambda: self._run(arguments, numbers))
        made = []
        for one in self._made:
            storage = Storage.of_leaf(one.spec, results[one.position], one.placement)
            storage.sharding = one.sharding
            self._check(storage.value)
            made.append(storage)
        leaves = [returned(arguments, made) for returned in self._returned]
        return _pytree.tree_unflatten(leaves, self._tree)

    def _run(self, arguments: Sequence[XLAShardedTensor], numbers: list[Any]) -> list[Any]:
        interrupts.protect()
        with recorders.lock, counters.timed(counters.Activity.PLANNING):
            results = self._start(arguments, numbers)
            self._checked = index_checks.stamp()
            self._store(arguments, results)
        if self._versions:
            torch.autograd.graph.increment_version(self._versions)
        return results

    def _start(self, arguments: Sequence[XLAShardedTensor], numbers: list[Any]) -> list[Any]:
        """Starts the program. Its inputs are nobody's when this returns."""
        leaves: list[Any] = [None] * len(self._targets)
        state = [*map(_value_of, self._state_storages)]
        for i, value in zip(self._state_at, state):
            leaves[i] = value
        for i, index in self._argument_at:
            leaves[i] = arguments[index]._handle.storage.value
        for i, value in (*self._constants, *self._stacks.leaves()):
            leaves[i] = value
        if all(map(operator.is_, map(_placement_of, leaves), self._targets)):
            arrays = [*map(_data_of, leaves)]
        else:
            arrays = [
                leaf.data if leaf.placement is target else convert(leaf, target)
                for leaf, target in zip(leaves, self._targets)
            ]
        scalars = start.by_kind(numbers)
        if config.compare_processes_every_s is not None:
            fingerprint.note(self._key, self._program, scalars)
        results = start.start(self._program, leaves, arrays, scalars, self._lines)
        if self._donated_bytes:
            counters.count("donated_bytes", self._donated_bytes)
        return results

    def _store(self, arguments: Sequence[XLAShardedTensor], results: list[Any]) -> None:
        """Gives the storages their new values."""
        self._written.store([results[i] for i in self._written_at], self._checked)
        self._stacks.store(results, self._checked)
        for i, index, placement in self._written_arguments:
            storage = arguments[index]._handle.storage
            value = Value.leaf(storage.spec, results[i], placement, None)
            self._check(value)
            storage.write(value)
        self._gradients.store(results, self._checked)

    def _check(self, value: Value) -> None:
        if self._checked is not None:
            value.checked = self._checked


def _returned(
    leaf: Any,
    made: Mapping[Storage, int],
    given: Mapping[Storage, int],
    arguments: Sequence[XLAShardedTensor],
    owners: Mapping[Storage, XLAShardedTensor],
) -> Callable[[Sequence[XLAShardedTensor], Sequence[Storage]], Any]:
    """How a later call returns what is returned here; keeps no data of this call."""
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
    if storage in owners:
        parameter: Any = owners[storage]
        if leaf is parameter.grad:
            return lambda arguments, storages: parameter.grad
        return lambda arguments, storages: wrap_alias(chain.over(parameter.grad._handle.storage))
    return lambda arguments, storages: leaf  # a tensor of the state, or over one


def _storage(binding: Binding) -> Storage:
    assert binding.storage is not None
    return binding.storage


class _Written:
    """The state that a call writes.

    Its values are changed in place where nobody else has them: a step may write thousands.
    """

    def __init__(self, storages: list[Storage], placements: list[Placement]) -> None:
        self._storages, self._placements = storages, placements  # of the results
        self._values: list[Value] = []
        self._counts: list[int] = []

    def store(self, results: Sequence[Any], checked: Any) -> None:
        """Stores the results of a call."""
        values = self._values
        if (
            values
            and all(map(operator.is_, map(_value_of, self._storages), values))
            and all(map(operator.is_, map(_placement_of, values), self._placements))
            and [*map(sys.getrefcount, values)] == self._counts
        ):
            for value, storage, array in zip(values, self._storages, results):
                value.data = array
                storage.version += 1
            if checked is not None:
                for value in values:
                    value.checked = checked
            return
        self._values = values = []
        for storage, array, placement in zip(self._storages, results, self._placements):
            value = Value.leaf(storage.spec, array, placement, None)
            if checked is not None:
                value.checked = checked
            storage.write(value)
            values.append(value)
            del value
        self._counts = [*map(sys.getrefcount, values)]


class _Gradients:
    """The gradients that a call gives its parameters.

    A gradient that nobody else keeps gets its new value; else the parameter gets a new one, as
    whoever keeps the gradient of an earlier call keeps its value.
    """

    def __init__(self, of: Sequence[tuple[int, XLAShardedTensor, Storage, Placement]]) -> None:
        self._of = [*of]
        self._at = [i for i, *_ in of]
        self._parameters = [parameter for _, parameter, _, _ in of]
        self._placements = [placement for *_, placement in of]
        self._storages: list[Storage] = []
        self._values: list[Value] = []
        self._counts: list[list[int]] = []

    def store(self, results: Sequence[Any], checked: Any) -> None:
        """Stores the results of a call."""
        grads = [*map(_grad_of, self._parameters)]
        if self._are_own(grads):
            for value, storage, i in zip(self._values, self._storages, self._at):
                value.data = results[i]
                storage.version += 1
            if checked is not None:
                for value in self._values:
                    value.checked = checked
            return
        del grads
        self._store_each(results, checked)
        # Nobody else has these at the moment.
        self._storages = [storage for _, _, storage, _ in self._of]
        self._values = [storage.value for storage in self._storages]
        self._counts = self._references([*map(_grad_of, self._parameters)])

    def _are_own(self, grads: list[Any]) -> bool:
        """Whether all gradients are those that the last call stored, and nobody else's."""
        same = operator.is_
        return (
            bool(self._counts)
            and not any(map(same, grads, itertools.repeat(None)))
            and all(map(same, map(_handle_of, grads), self._storages))
            and all(map(same, map(_value_of, self._storages), self._values))
            and all(map(same, map(_placement_of, self._values), self._placements))
            and self._references(grads) == self._counts
        )

    def _references(self, grads: list[Any]) -> list[list[int]]:
        """How many references there are to each gradient, to its storage, and to its value."""
        return [[*map(sys.getrefcount, of)] for of in (grads, self._storages, self._values)]

    def _store_each(self, results: Sequence[Any], checked: Any) -> None:
        for n, (i, parameter, storage, placement) in enumerate(self._of):
            kept: Any = parameter.grad
            if kept is not None and kept._handle is storage and not _is_shared(kept, storage):
                value = Value.leaf(storage.spec, results[i], placement, None)
                storage.write(value)
            else:
                fresh = Storage.of_leaf(storage.spec, results[i], placement)
                fresh.sharding, value = storage.sharding, fresh.value
                parameter.grad = wrap(fresh)
                self._of[n] = (i, parameter, fresh, placement)
            if checked is not None:
                value.checked = checked


# The references to a gradient and to its storage in `_is_shared` if only its parameter has it:
# those of the caller's variables, of arguments, of torch and of the list above.
# Guarded by: the GIL; a race measures twice. Cleared by: never, a fact.
_unshared: list[int] = []


def _is_shared(grad: Any, storage: Storage) -> bool:
    counts = sys.getrefcount(grad), sys.getrefcount(storage)
    if not _unshared:
        _unshared.extend(_measured())
    return counts[0] > _unshared[0] or counts[1] > _unshared[1]


def _measured() -> tuple[int, int]:
    parameter: Any = torch.zeros(1, device=XLA_DEVICE).requires_grad_()
    parameter.grad = torch.zeros(1, device=XLA_DEVICE)
    of = [(0, parameter, parameter.grad._handle, None)]
    for _, (_, owner, storage, _) in enumerate(of):
        kept = owner.grad
        return _counts(kept, storage)
    raise AssertionError


def _counts(grad: Any, storage: Storage) -> tuple[int, int]:
    return sys.getrefcount(grad), sys.getrefcount(storage)
