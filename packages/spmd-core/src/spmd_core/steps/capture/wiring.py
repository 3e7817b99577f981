"""What the inputs and the results of a captured program belong to, among state and gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_core.graph.storage import Storage
from spmd_core.sharding.sharding import Sharding
from spmd_core.steps.capture.agreement import Recording
from spmd_core.steps.capture.bindings import Binding, Kind
from spmd_core.steps.capture.gradients import Form, Gradients, Grads, Installed, Pattern
from spmd_core.steps.capture.state import Lies, State, Unit
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@dataclass
class Wiring:
    """The units of a captured program (`State`), and how it reads and writes them.

    Attributes:
        units: all of them.
        reads: what is read, in the order of the inputs.
        read_at: the positions of these inputs.
        writes: what is written. A gradient comes before the one that replaces it.
        write_at: the positions of these results.
        marks: for each unit, the marks of its storages.
        forms: of gradients, by number of the parameter.
        fixed: the storage of a gradient that is reached in another way, too, or is in a stack.
        gradient_units: the units of gradients, and of new ones.
        new: of the units of new ones, the numbers of the parameters.
        written: the numbers of the parameters whose gradients are written in place.
        storages: of all state but gradients.
    """

    units: list[Unit] = field(default_factory=list)
    reads: list[Lies] = field(default_factory=list)
    read_at: list[int] = field(default_factory=list)
    writes: list[Lies] = field(default_factory=list)
    write_at: list[int] = field(default_factory=list)
    marks: list[list[Sharding | None]] = field(default_factory=list)
    forms: dict[int, Form] = field(default_factory=dict)
    fixed: dict[int, Storage] = field(default_factory=dict)
    gradient_units: list[int] = field(default_factory=list)
    new: dict[int, int] = field(default_factory=dict)
    written: list[int] = field(default_factory=list)
    storages: set[Storage] = field(default_factory=set)

    def state(self) -> State:
        """The state that is wired so."""
        return State(self.units, self.reads, self.writes)

    def gradients(self, patterns: Sequence[Pattern], installed: Installed) -> Gradients:
        """The gradients that are wired so."""
        return Gradients(
            installed,
            patterns,
            forms=self.forms,
            fixed=self.fixed,
            state=self.storages,
        )


def wire(recording: Recording, before: Grads, installed: Installed) -> Wiring:
    """Wires the program of a call that was recorded.

    Args:
        recording: the call, with its plan.
        before: the gradients of parameters before the call.
        installed: those of all captured calls.
    """
    found = Wiring()
    plan = recording.plan
    assert plan is not None
    number = {path: n for n, path in enumerate(recording.gradients.paths)}
    placements = recording.program.out_placements
    numbered: dict[Any, int] = {}

    def unit(binding: Binding, like: Storage | None) -> int:
        """The number of the unit of a binding; a gradient's storage has the form of `like`."""
        of_state = binding.rows or binding.storage
        key = (binding.kind, binding.path) if of_state is None else of_state
        if key not in numbered:
            numbered[key] = len(found.units)
            fixed = binding.rows or (() if binding.storage is None else (binding.storage,))
            storages = _fixed(fixed) if fixed else _gradient(installed, number[binding.path])
            found.units.append(Unit(storages, binding.kind is Kind.STACK))
            found.marks.append([s.sharding for s in fixed or (like,) if s is not None])
            found.storages.update(fixed)
            if not fixed:
                found.gradient_units.append(numbered[key])
        return numbered[key]

    for i, binding in enumerate(recording.inputs):
        if binding.kind in (Kind.STATE, Kind.STACK, Kind.GRADIENT):
            old = _storage_of(before.get(binding.path))
            found.reads.append((unit(binding, old), plan.targets[i]))
            found.read_at.append(i)
            if binding.kind is Kind.GRADIENT and old is not None:
                found.forms[number[binding.path]] = Form(old.spec, old.sharding)
    writing = (Kind.STATE, Kind.STACK, Kind.GRADIENT, Kind.NEW_GRADIENT)
    results = [(i, b) for i, b in enumerate(recording.results) if b.kind in writing]
    for i, binding in sorted(results, key=lambda result: result[1].kind is Kind.NEW_GRADIENT):
        storage = plan.live[i]
        n = unit(binding, storage)
        found.writes.append((n, placements[i]))
        found.write_at.append(i)
        if binding.kind is Kind.GRADIENT:
            found.written.append(number[binding.path])
            found.forms[number[binding.path]] = Form(storage.spec, storage.sharding)
        elif binding.kind is Kind.NEW_GRADIENT:
            found.new[n] = number[binding.path]
            found.forms[number[binding.path]] = Form(storage.spec, storage.sharding, placements[i])
    found.storages.update(t._handle.storage for t in recording.after.tensors.values())
    for path, grad in before.items():
        own = _storage_of(grad)
        if own is not None and own in found.storages:
            found.fixed[number[path]] = own
    return found


def _storage_of(grad: Any) -> Storage | None:
    return grad._handle.storage if isinstance(grad, XLAShardedTensor) else None


def _fixed(storages: Sequence[Storage]) -> Callable[[], Sequence[Storage]]:
    return lambda: storages


def _gradient(installed: Installed, number: int) -> Callable[[], Sequence[Storage]]:
    return lambda: (installed.storages[number],)
