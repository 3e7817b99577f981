"""A captured step: records its first calls; once two of them agree, replays their program."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from spmd_core.config import config
from spmd_core.debugging.recompiles import explain
from spmd_core.errors import CaptureError
from spmd_core.graph.storage import Storage, View
from spmd_core.graph.values import Entry
from spmd_core.program import cut_guard
from spmd_core.program.compile_cache import Compiled, Key
from spmd_core.program.planning import CutPlan
from spmd_core.program.program import Program
from spmd_core.runtime import abstract
from spmd_core.steps.capture import bindings, code_names, host_effects, numbers, reachable
from spmd_core.steps.capture.bindings import Binding
from spmd_core.steps.capture.numbers import Live
from spmd_core.steps.capture.reachable import Reached
from spmd_core.steps.capture.replay import Outcome, Replay
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, attributes_of, wrap_alias

# A call that never agrees with the one before it is an error after so many.
_MOST_RECORDED = 8
# Of so many kinds of arguments, the newest are kept.
_MOST_KINDS = 64
# A recording changes what the whole process has: its streams and its settings.
_one_at_a_time = threading.RLock()


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
        has_gradients: whether each parameter had a gradient before the call, by path.
        outcome: what it returned, without tensors once it is compared.
        change: how the call changed what it reaches, in words; None if it did not.
        since: what had changed since the call before it, but numbers of param_groups.
        after: what it reached at its end.
        decides_by_groups: whether its Python may have decided by numbers of param_groups.
    """

    plan: CutPlan | None
    key: Key
    numbers: list[Any]
    program: Program
    inputs: list[Binding]
    results: list[Binding]
    draws: list[tuple[torch.Generator | None, int]]
    group_values: dict[str, Any]
    has_gradients: dict[str, bool]
    outcome: Outcome
    change: str | None
    since: str | None
    after: Reached
    decides_by_groups: bool


@dataclass(eq=False)
class _Kind:
    """The calls with arguments of one kind.

    Attributes:
        kept: the arguments that are compared by identity.
        last: the last call that was recorded.
        replay: what later calls run; None until two calls agree.
        live: the numbers that are known to be read from param_groups.
        num_apart: how many calls in a row did not agree with the one before them.
        apart: how the last of these did not, in words.
    """

    kept: list[Any]
    last: Recording | None = None
    replay: Replay | None = None
    live: tuple[Live, ...] = ()
    num_apart: int = 0
    apart: str | None = None


class Captured:
    """What `compile(step, capture=True)` returns: call it like the step.

    Attributes:
        recorded: how many calls were recorded.
        replayed: how many ran the captured program.
        reason: why the last recorded call was not replayed, in words.
    """

    def __init__(self, function: Callable[..., Any], region: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._region = function, region
        self._kinds: dict[Any, _Kind] = {}
        self._names: set[str] = set()  # of attributes that libraries read
        self._new_objects: Counter[Any] = Counter()
        self.recorded = self.replayed = 0
        self.reason = ""

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step. See `compile`."""
        with _one_at_a_time:
            leaves, tree = _pytree.tree_flatten((args, kwargs))
            leaves = [_on_device(leaf) for leaf in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, XLAShardedTensor)]
            kind = self._kind(leaves, tree)
            replay = kind.replay
            if replay is not None and _may_replay() and replay.ready(tensors):
                values = replay.numbers()
                if values is not None:
                    found = replay(tensors, values)
                    self.replayed += 1
                    return found
            return self._record(kind, leaves, tree, tensors)

    def _kind(self, leaves: Sequence[Any], tree: Any) -> _Kind:
        kept: list[Any] = []
        first: dict[Storage, int] = {}
        key: list[Any] = [tree, _modes()]
        loose: list[Any] = []  # the key, if objects were compared by their classes
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, XLAShardedTensor):
                handle, storage = leaf._handle, leaf._handle.storage
                chain = handle.chain() if isinstance(handle, View) else ()
                links = tuple((view.link, view.link.numbers) for view in chain)
                same = first.setdefault(storage, i)
                key.append(
                    (storage.spec, storage.sharding, links, leaf.requires_grad, leaf.is_leaf, same)
                )
                for name, value in attributes_of(leaf).items():
                    key.append((name, *_by_value(value, kept)))
            else:
                key.append(_by_value(leaf, kept))
                if key[-1][0] is object:
                    loose.append((i, type(leaf)))
        found = self._kinds.get(whole := tuple(key))
        if found is None:
            if loose:
                self._count_objects((tree, *loose))
            found = self._kinds[whole] = _Kind(kept)
            if len(self._kinds) > _MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
        return found

    def _count_objects(self, loose: tuple[Any, ...]) -> None:
        """Refuses an argument that is an object, and another one at each call."""
        self._new_objects[loose] += 1
        if self._new_objects[loose] > _MOST_RECORDED:
            classes = ", ".join(sorted({kind.__name__ for _, kind in loose[1:]}))
            raise CaptureError(
                "objects among the arguments of a captured step are the same ones at each call, as "
                f"their attributes are; got new ones, of {classes}, in {_MOST_RECORDED + 1} calls. "
                "Pass their tensors and numbers, also in tuples, lists and dicts."
            )

    def _record(
        self, kind: _Kind, leaves: list[Any], tree: Any, tensors: list[XLAShardedTensor]
    ) -> Any:
        """Records a call, and captures it if the call before agrees."""
        before = reachable.walk(self._function, kind.kept, self._names)
        self.reason, since = self._reason(kind, before)
        started: list[tuple[CutPlan, Program]] = []
        with _lines(), host_effects.noted() as effects:
            outcome: list[Outcome] = []

            def run() -> set[Storage]:
                args, kwargs = _pytree.tree_unflatten(leaves, tree)
                outcome.append(_outcome(self._function(*args, **kwargs)))
                returned = [x for x in outcome[0].leaves if isinstance(x, XLAShardedTensor)]
                return {x._handle.storage for x in returned}

            self._region(run, lambda plan, program: started.append((plan, program)))
        self.recorded += 1
        found = _pytree.tree_unflatten(outcome[0].leaves, outcome[0].tree)
        effects.refuse(before.generators)
        if abstract.run() is not None or not started:
            return found
        self._names |= code_names.of_libraries(effects.codes)
        after = reachable.walk(self._function, kind.kept, self._names)
        if (written := reachable.written_on_host(before, after)) is not None:
            raise CaptureError(
                "a captured step only computes on the device, as it runs its Python only when it is"
                f" recorded; got one that writes to memory of the host: {written}. If it counts "
                "steps, keep the count on the device: AdamW(..., fused=True) or capturable=True "
                "does. Else write it outside of the step."
            )
        ((plan, program),) = started
        arguments = [t._handle.storage for t in tensors]
        own_state = bindings.state_of(before)
        recording = Recording(
            plan,
            plan.key,
            plan.numbers,
            program,
            bindings.of_leaves(plan, arguments, own_state, after),
            bindings.of_results(plan, arguments, own_state, after, outcome[0].leaves),
            effects.seeds(),
            {path: after.number(path) for path in after.numbers},
            {path: grad is not None for path, grad in before.grads.items()},
            outcome[0],
            reachable.difference(before, after),
            since,
            after,
            _decides_by_groups(effects.group_readers, after),
        )
        self._compare(kind, recording, tensors)
        return found

    def _reason(self, kind: _Kind, before: Reached) -> tuple[str, str | None]:
        """Why a call is recorded, and what has changed since the last one but param_groups."""
        if kind.last is None:
            return "no call before it had such arguments", None
        since = reachable.difference(kind.last.after, before, but_numbers=True)
        changed = since or reachable.difference(kind.last.after, before)
        if changed is None and kind.replay is None:
            changed = kind.apart
        return changed or "gradients, threads or modes are others", since

    def _compare(self, kind: _Kind, now: Recording, tensors: Sequence[XLAShardedTensor]) -> None:
        """Captures the call if it agrees with the one before."""
        last, kind.last, kind.replay = kind.last, now, None
        apart = _disagreement(last, now)
        kind.apart = apart
        if apart is not None:
            kind.num_apart += 1
            if kind.num_apart > _MOST_RECORDED:
                raise CaptureError(
                    f"a captured step comes to do the same in each call; after {kind.num_apart} "
                    f"calls with such arguments {_name(self._function)} does not: {apart}. Keep "
                    "what varies outside of the step, or use compile(step) without capture."
                )
            _forget(now)
            return
        assert last is not None and now.plan is not None
        kind.num_apart = 0
        entries = [x for x in now.key.structure if isinstance(x, Entry)]
        found = numbers.compared(
            last.numbers,
            now.numbers,
            numbers.seed_positions(entries),
            [seed for _, seed in now.draws],
            now.plan,
            (last.group_values, now.after),
            kind.live,
        )
        kind.live = found.live
        patterns = (last.has_gradients, now.has_gradients)
        kind.replay = Replay(
            now.plan,
            now.program,
            inputs=now.inputs,
            results=now.results,
            numbers=found,
            generators=[generator for generator, _ in now.draws],
            reached=now.after,
            may_vary=() if now.decides_by_groups else found.paths(),
            has_gradients=patterns[1] if patterns[0] == patterns[1] else None,
            outcome=now.outcome,
            arguments=tensors,
        )
        _forget(now)


def _forget(recording: Recording) -> None:
    """Drops what would keep tensors and values of a call; what is compared later stays."""
    recording.plan = None
    recording.after.grads.clear()
    kinds = [None if isinstance(x, torch.Tensor) else x for x in recording.outcome.leaves]
    recording.outcome = Outcome(recording.outcome.tree, kinds)


def _disagreement(last: Recording | None, now: Recording) -> str | None:
    """How a call differs from the one before, in words; None if its program can be replayed."""
    if now.change is not None:
        return f"it changes what it reaches: {now.change}"
    if last is None:
        return "there is no call to compare it with"
    if now.since is not None:
        return f"what it reaches changes between the calls: {now.since}"
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
    return None


def _bound(binding: Binding) -> str:
    return f"{binding.kind.value}" + (f" ({binding.path})" if binding.path else "")


def _on_device(leaf: Any) -> Any:
    """A tensor of the CPU on the device: so a captured step gets its data as an argument."""
    if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
        return leaf.to(XLA_DEVICE)
    return leaf


def _outcome(returned: Any) -> Outcome:
    leaves, tree = _pytree.tree_flatten(returned)
    return Outcome(tree, [_detached(leaf) for leaf in leaves])


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, XLAShardedTensor):
        return leaf
    return wrap_alias(leaf._handle) if leaf.grad_fn is not None else leaf


def _by_value(value: Any, kept: list[Any]) -> tuple[Any, Any]:
    """What stands for a value in a key; what is compared by identity is kept, too."""
    if isinstance(value, (float, complex, np.inexact)):
        return type(value), repr(value)  # zeros have signs, and NaN is no other one
    if isinstance(value, reachable.ATOMS):
        return type(value), value
    kept.append(value)
    return object, id(value)


def _decides_by_groups(readers: Iterable[CodeType], after: Reached) -> bool:
    """Whether code that reads param_groups reads numbers there, not only parameters."""
    keys = {key for _, key in after.numbers.values()}
    read = [code_names.names(code) for code in readers]
    return any(not keys.isdisjoint(names) or "params" not in names for names in read)


def _modes() -> tuple[Any, ...]:
    """What is switched on around a call."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("xla"),
        torch.get_autocast_dtype("xla"),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._len_torch_function_stack(),
        config.check_indices,
        config.reduce_gradients_once,
        tuple(sorted(config.compiler_options.items())),
    )


def _may_replay() -> bool:
    """Whether programs run here, outside of regions and modes that look at each operation."""
    return (
        abstract.run() is None
        and not config.verify_programs
        and not config.record_source_lines
        and cut_guard.this_thread.cut_guard is None
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.is_anomaly_enabled()
    )


@contextmanager
def _lines() -> Iterator[None]:
    """Inside, operations note their lines, so that an error can name one."""
    before, config.record_source_lines = config.record_source_lines, True
    try:
        yield
    finally:
        config.record_source_lines = before


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
