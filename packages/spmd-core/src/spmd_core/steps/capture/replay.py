"""Runs a captured program again, on new arguments and on the state as it is."""

from collections.abc import Sequence
from typing import Any

import torch

from spmd_core import counters
from spmd_core.config import config
from spmd_core.graph import parked, recorders
from spmd_core.graph.stacks import Row
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.program import execution, fingerprint, index_checks, start
from spmd_core.program.leaves import convert
from spmd_core.recording import random_stream
from spmd_core.runtime import interrupts
from spmd_core.steps.capture import reachable
from spmd_core.steps.capture.agreement import Recording
from spmd_core.steps.capture.bindings import Kind
from spmd_core.steps.capture.gradients import Grads, Installed, Pattern
from spmd_core.steps.capture.guards import Guards
from spmd_core.steps.capture.numbers import Lists, Numbers, Scalars
from spmd_core.steps.capture.reachable import Reached
from spmd_core.steps.capture.returned import Returned
from spmd_core.steps.capture.state import getter
from spmd_core.steps.capture.versions import Versions
from spmd_core.steps.capture.wiring import wire
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


class Replay:
    """A captured call.

    Args:
        recording: the last call that was recorded, with its plan.
        pattern: the gradients of the earlier one, which agrees with it.
        numbers: how the program's scalar inputs come about.
        before: the gradients of parameters before that call.
        installed: the gradients of all captured calls with these parameters.
        arguments: the tensors among its arguments.

    Attributes:
        reached: what the step reached after that call.
        gradients: those that a call finds and leaves.
    """

    def __init__(
        self,
        recording: Recording,
        pattern: Pattern,
        numbers: Numbers,
        *,
        before: Grads,
        installed: Installed,
        arguments: Sequence[XLAShardedTensor],
    ) -> None:
        plan = recording.plan
        assert plan is not None
        self._key, self._program = plan.key, recording.program
        self._donated_bytes = sum(plan.leaves[i].spec.num_bytes for i in plan.key.donated)
        self._lines = [plan.line(check.position) for check in self._program.index_checks]
        self._generators = [generator for generator, _ in recording.draws]
        self.reached = recording.after
        self._scalars = Scalars(numbers, self.reached)
        self._wiring = wiring = wire(recording, before, installed)
        self._state = wiring.state()
        self.gradients = wiring.gradients([recording.gradients, pattern], installed)
        parked_storages = {s for unit in wiring.units for s in unit.storages()}
        live = () if recording.decides_by_groups else numbers.paths()
        self._guards = Guards(self.reached, live, parked_storages)
        self._returned = Returned(recording, arguments)
        self._written = getter(wiring.write_at)
        # Other inputs, in the order of their positions: an argument's index, or a constant.
        self._others: list[tuple[int, int | Value]] = [
            (i, binding.index if binding.kind is Kind.ARGUMENT else plan.leaves[i])
            for i, binding in enumerate(recording.inputs)
            if binding.kind in (Kind.ARGUMENT, Kind.CONSTANT)
        ]
        self._targets = [plan.targets[i] for i, _ in self._others]
        self._written_arguments = [
            (i, binding.index, self._program.out_placements[i])
            for i, binding in enumerate(recording.results)
            if binding.kind is Kind.ARGUMENT
        ]
        self._bind_arguments(before, recording, arguments)
        written = {s for n, _ in wiring.writes for s in wiring.units[n].storages()}
        self._versions = Versions(self.reached, written)

    def _bind_arguments(
        self, before: Grads, recording: Recording, arguments: Sequence[XLAShardedTensor]
    ) -> None:
        """Notes which arguments are state, or the gradient of a parameter."""
        number = {path: n for n, path in enumerate(recording.gradients.paths)}
        grads = {
            grad._handle.storage: number[path]
            for path, grad in before.items()
            if isinstance(grad, XLAShardedTensor)
        }
        self._alias: list[Storage | int | None] = []
        for argument in arguments:
            storage = argument._handle.storage
            of_state = storage if storage in self._wiring.storages else None
            self._alias.append(of_state or grads.get(storage))

    def is_for(self, before: Reached) -> bool:
        """Whether it was meant for calls that reach this, but did not fit for another reason."""
        found = [grad is not None for grad in before.grads.values()]
        return self.gradients.is_found(found) and (
            reachable.difference(self.reached, before, but_numbers=True) is None
        )

    def ready(
        self, arguments: Sequence[XLAShardedTensor], now: Sequence[torch.Tensor | None]
    ) -> bool:
        """Whether a call can be replayed now: what it depends on is as it was.

        Args:
            arguments: the tensors among its arguments.
            now: the present gradients of the parameters.
        """
        if not self.gradients.fit(now):
            return False
        state, installed = self._wiring.storages, self.gradients.installed
        for argument, alias in zip(arguments, self._alias):
            storage = argument._handle.storage
            if alias is None:
                if storage in state or id(storage) in installed.ids:
                    return False
            elif storage is not (installed.storages[alias] if isinstance(alias, int) else alias):
                return False
        return self._guards.hold() and self._is_unparked_alike()

    def _is_unparked_alike(self) -> bool:
        """Whether the state that anything may have changed differs by its values alone."""
        unparked = self._state.unparked()
        if not unparked:
            return True
        wiring = self._wiring
        for n in unparked:
            storages = wiring.units[n].storages()
            if n in wiring.new and not self.gradients.is_there(wiring.new[n]):
                continue
            if [s.sharding for s in storages] != wiring.marks[n]:
                return False
            if not self._guards.require_grad(storages):
                return False
        return self._state.can_be_read()

    def numbers(self) -> Lists | None:
        """The program's numbers without new seeds; None if one is of another kind now."""
        return self._scalars.now()

    def __call__(self, arguments: Sequence[XLAShardedTensor], numbers: Lists) -> Any:
        """Starts the program, and returns what the call returns. Does not wait.

        Args:
            arguments: the tensors among the arguments.
            numbers: from `numbers()`.

        Raises:
            DeviceMemoryError, ProgramError: it could not be started; nothing has changed.
        """
        if self._generators:
            seeds = [random_stream.draw(generator) for generator in self._generators]
            numbers = self._scalars.seeded(numbers, seeds)
        return execution.in_step(lambda: self._run(arguments, numbers))

    def _run(self, arguments: Sequence[XLAShardedTensor], numbers: Lists) -> Any:
        interrupts.protect()
        with recorders.lock, counters.timed(counters.Activity.PLANNING):
            if self.gradients.take_renewed():
                self._state.rebind(self._wiring.gradient_units)
            units = self._wiring.units
            touched = [s for n in self._state.unparked() for s in units[n].storages()]
            versions = self._versions.outdated(touched)
            results = self._start(arguments, numbers)
            checked = index_checks.stamp()
            self._store(arguments, results, checked)
            versions += self._written_tensors(arguments)
            if versions:
                torch.autograd.graph.increment_version(versions)
            return self._returned.of_call(arguments, results, checked)

    def _written_tensors(self, arguments: Sequence[XLAShardedTensor]) -> list[XLAShardedTensor]:
        """The arguments and gradients that the call writes."""
        grads = self.gradients.installed.tensors
        found = [grads[n] for n in self._wiring.written]
        found += [arguments[index] for _, index, _ in self._written_arguments]
        return [t for t in found if not t.is_inference()]

    def _start(self, arguments: Sequence[XLAShardedTensor], numbers: Lists) -> list[Any]:
        """Starts the program. Its inputs are nobody's when this returns."""
        arrays = self._state.arrays()
        read = []
        for (i, other), target in zip(self._others, self._targets):
            if isinstance(other, int):
                other = arguments[other]._handle.storage.value
            read.append(other)
            is_there = other.placement is target and other.data.__class__ is not Row
            arrays.insert(i, other.data if is_there else convert(other, target))
        if config.compare_processes_every_s is not None:
            fingerprint.note(self._key, self._program, numbers)
        index_checks.note_read(parked.newest.checked)
        try:
            results = start.start(self._program, read, arrays, numbers, self._lines)
        except BaseException:
            self._state.give_back()  # the program may have taken over their buffers
            raise
        if self._donated_bytes:
            counters.count("donated_bytes", self._donated_bytes)
        return results

    def _store(
        self, arguments: Sequence[XLAShardedTensor], results: list[Any], checked: Any
    ) -> None:
        """Gives the storages their new values."""
        parked.newest.checked = checked
        if self.gradients.prepare():
            self._state.rebind([*self._wiring.new])
        self._state.store(self._written(results))
        self.gradients.set()
        for i, index, placement in self._written_arguments:
            storage = arguments[index]._handle.storage
            value = Value.leaf(storage.spec, results[i], placement, None)
            if checked is not None:
                value.checked = checked
            storage.write(value)
