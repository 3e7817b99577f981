"""Recorded calls of a captured step, and whether two of them agree: then one program does both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd_core.debugging.recompiles import explain
from spmd_core.program.compile_cache import Compiled, Key
from spmd_core.program.planning import CutPlan
from spmd_core.program.program import Program
from spmd_core.steps.capture import reachable
from spmd_core.steps.capture.bindings import Binding, Kind
from spmd_core.steps.capture.gradients import Pattern
from spmd_core.steps.capture.numbers import Live
from spmd_core.steps.capture.reachable import Reached
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@dataclass(frozen=True)
class Outcome:
    """What a call returned.

    Attributes:
        tree: its structure.
        leaves: its leaves; tensors of them are detached.
    """

    tree: Any
    leaves: list[Any]


@dataclass(eq=False)
class Recording:
    """A call that was recorded.

    Attributes:
        plan: what was started; None once it is compared, as it keeps data.
        key: the program's.
        numbers: the program's scalar inputs.
        program: the program.
        inputs: where its inputs came from.
        results: where its results went.
        draws: the seeds that it drew, each behind its generator.
        group_values: the values of param_groups, by path.
        gradients: what gradients it found and left.
        outcome: what it returned, without tensors once it is compared.
        change: how the call changed what it reaches, in words; None if it did not.
        after: what it reached at its end.
        decides_by_groups: whether its Python may have decided by numbers of param_groups.
        problem: why no later call could do the same, in words; or None.
        live: the numbers that are known to be read from param_groups.
    """

    plan: CutPlan | None
    key: Key
    numbers: list[Any]
    program: Program
    inputs: list[Binding]
    results: list[Binding]
    draws: list[tuple[torch.Generator | None, int]]
    group_values: dict[str, Any]
    gradients: Pattern
    outcome: Outcome
    change: str | None
    after: Reached
    decides_by_groups: bool
    problem: str | None
    live: tuple[Live, ...] = field(default=())

    def forget(self) -> None:
        """Drops what would keep tensors and values of the call; what is compared later stays."""
        self.plan = None
        self.after.grads.update(dict.fromkeys(self.after.grads))
        kinds = [None if isinstance(x, torch.Tensor) else x for x in self.outcome.leaves]
        self.outcome = Outcome(self.outcome.tree, kinds)


def newest_alike(recordings: Sequence[Recording], before: Reached) -> Recording | None:
    """The newest recorded call with which a new one may agree.

    Args:
        recordings: of earlier calls.
        before: what the new one reaches at its beginning.
    """
    are_there = tuple(grad is not None for grad in before.grads.values())
    found = [
        r
        for r in reversed(recordings)
        if reachable.difference(r.after, before, but_numbers=True) is None
    ]
    alike = [r for r in found if r.gradients.are_there == are_there]
    return next(iter(alike or found), None)


def disagreement(last: Recording | None, now: Recording) -> str | None:
    """How a call differs from the one before, in words; None if its program can be replayed.

    Args:
        last: the newest one with which it may agree.
        now: the call.
    """
    if now.change is not None:
        return f"it changes what it reaches: {now.change}"
    if last is None:
        return "there is no call to compare it with"
    if last.key != now.key:
        before, new_one = (Compiled(x.key, x.program.graph, x.program.record) for x in (last, now))
        changes = explain(new_one, [before]).changes
        return "it is another program" + "".join(f"; {c.text}" for c in changes[:3])
    for what, old, new in (
        ("input", last.inputs, now.inputs),
        ("result", last.results, now.results),
    ):
        for i, (a, b) in enumerate(zip(old, new)):
            if not a.agrees(b):
                return f"{what} {i} of its program is {_bound(b)}, and was {_bound(a)}"
    if not last.gradients.agrees(now.gradients):
        return "it finds or leaves gradients at other parameters"
    if last.outcome.tree != now.outcome.tree:
        return "it returns another structure"
    for a, b in zip(last.outcome.leaves, now.outcome.leaves):
        if isinstance(b, XLAShardedTensor):
            if a is not None:
                return f"it returns a tensor, and returned {a!r}"
        elif type(a) is not type(b) or a != b:
            return f"it returns {b!r}, and returned {a!r}; a captured step returns tensors"
    if len(last.draws) != len(now.draws):
        return f"it draws {len(now.draws)} seeds, and drew {len(last.draws)}"
    return now.problem


def problem(
    before: Reached, after: Reached, results: Sequence[Binding], outcome: Outcome
) -> str | None:
    """What a call does with gradients that no later call could do again, in words; or None.

    Args:
        before: what the call reached at its beginning.
        after: what it reached at its end.
        results: where the results of its program went.
        outcome: what it returned.
    """
    made = {b.path for b in results if b.kind is Kind.NEW_GRADIENT}
    written = {b.path for b in results if b.kind is Kind.GRADIENT}
    kept = {id(grad) for grad in after.grads.values()}
    own = {t._handle.storage for t in after.tensors.values()}
    dropped = set()
    for path, grad in after.grads.items():
        old = before.grads.get(path)
        if isinstance(old, XLAShardedTensor) and id(old) not in kept:
            dropped.add(old._handle.storage)
        if grad is None or grad is old:
            continue
        if not isinstance(grad, XLAShardedTensor) or grad.requires_grad:
            return f"the gradient of {path} is part of a graph"
        storage = grad._handle.storage
        if path not in made or grad._handle is not storage:
            return f"the gradient of {path} is a view, or belongs to another tensor, too"
        if path in written and isinstance(old, XLAShardedTensor) and _form(old) != _form(grad):
            return f"the gradient of {path} is replaced by one of another form"
    for leaf in outcome.leaves:
        if isinstance(leaf, XLAShardedTensor) and leaf._handle.storage in dropped - own:
            return "it returns a gradient that it takes from a parameter; return its clone()"
    return None


def _form(grad: XLAShardedTensor) -> tuple[Any, Any]:
    return grad._handle.storage.spec, grad._handle.storage.sharding


def _bound(binding: Binding) -> str:
    return f"{binding.kind.value}" + (f" ({binding.path})" if binding.path else "")
