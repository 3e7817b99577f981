"""A captured step: records its first calls; once two of them agree, replays their program."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree

from spmd_core.config import config
from spmd_core.errors import CaptureError
from spmd_core.graph import recorders
from spmd_core.graph.storage import Storage, View, failed, pending_elsewhere
from spmd_core.graph.values import Entry
from spmd_core.program import cut_guard, execution
from spmd_core.program.planning import CutPlan
from spmd_core.program.program import Program
from spmd_core.program.small_state import CapturedCall
from spmd_core.runtime import abstract
from spmd_core.steps.capture import (
    accumulators,
    agreement,
    bindings,
    code_names,
    host_effects,
    numbers,
    reachable,
)
from spmd_core.steps.capture.accumulators import has_hooks
from spmd_core.steps.capture.agreement import Outcome, Recording
from spmd_core.steps.capture.bindings import Owned
from spmd_core.steps.capture.gradients import Installed, Pattern
from spmd_core.steps.capture.numbers import Lists
from spmd_core.steps.capture.reachable import Reached
from spmd_core.steps.capture.replay import Replay
from spmd_core.tensor.logical_device import XLA_DEVICE
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, attributes_of, wrap_alias

OF_A_BLOCK = (
    "capture=True is for a function, as later calls run what its first ones recorded; got a `with` "
    "block. Write @spmd.compile(capture=True) above a function and call that, or `with "
    "spmd.compile():` for a block, which is recorded each time."
)
# A call that never agrees with the one before it is an error after so many.
_MOST_RECORDED = 8
# In a loop that does several things in turns, so many are known.
_MOST_PATTERNS = 8
# Of so many kinds of arguments, the newest are kept.
_MOST_KINDS = 64
# A recording changes what the whole process has: its streams and its settings.
_one_at_a_time = threading.RLock()


@dataclass(eq=False)
class _Kind:
    """The calls with arguments of one kind.

    Attributes:
        kept: the arguments that are compared by identity.
        may_replay: whether no mode around the calls looks at each operation.
        recordings: the newest calls that were recorded, with the present tensors.
        replays: what later calls run, the newest one first: in a loop that does several things in
            turns, each thing is one of these.
        num_apart: how many recorded calls in a row agreed with none before them.
        apart: how the last of these did not, in words.
    """

    kept: list[Any]
    may_replay: bool
    recordings: list[Recording] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
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

    def __enter__(self) -> NoReturn:
        raise TypeError(OF_A_BLOCK)

    def __exit__(self, *error: object) -> None:
        """Makes this a context manager for Python, which `__enter__` refuses."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step. See `compile`."""
        with _one_at_a_time:
            if not kwargs and all(x.__class__ is XLAShardedTensor for x in args):
                leaves, tree = [*args], _tree_of(len(args))
                tensors = leaves
            else:
                leaves, tree = _pytree.tree_flatten((args, kwargs))
                leaves = [_on_device(leaf) for leaf in leaves]
                tensors = [leaf for leaf in leaves if isinstance(leaf, XLAShardedTensor)]
            kind = self._kind(leaves, tree)
            may_replay = kind.replays and kind.may_replay and _runs_programs()
            chosen = _chosen(kind, tensors) if may_replay else None
            if chosen is None:
                return self._record(kind, leaves, tree, tensors)
            replay, numbers = chosen
            found = replay(tensors, numbers)
            self.replayed += 1
            return found

    def _kind(self, leaves: Sequence[Any], tree: Any) -> _Kind:
        kept: list[Any] = []
        first: dict[Storage, int] = {}
        key: list[Any] = [tree, _modes()]
        loose: list[Any] = []  # the key, if objects were compared by their classes
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, XLAShardedTensor):
                handle, storage = leaf._handle, leaf._handle.storage
                chain = handle.chain() if isinstance(handle, View) else ()
                links = tuple((view.link, view.link.numbers, view.sharding) for view in chain)
                same = first.setdefault(storage, i)
                key += (storage.spec, storage.sharding, storage.inference, links, same)
                key += (leaf.requires_grad, leaf.is_leaf, leaf.__class__, has_hooks(leaf))
                key.append(getattr(leaf, "_is_param", False))
                if len(leaf.__dict__) > 1:  # more than its handle
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
            found = self._kinds[whole] = _Kind(kept, _sees_no_operation())
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
        """Records a call, and captures it if one before agrees."""
        before = reachable.walk(self._function, kind.kept, self._names)
        hooked = accumulators.hooked(before, tensors)
        self.reason = hooked or self._reason_of(kind, before)
        entered: list[str] = []
        started: list[tuple[CutPlan, Program]] = []
        around = accumulators.entering(tensors, entered)
        with _lines() as asked, around, host_effects.noted() as effects:
            outcome: list[Outcome] = []

            def run() -> CapturedCall:
                args, kwargs = _pytree.tree_unflatten(leaves, tree)
                outcome.append(_outcome(self._function(*args, **kwargs)))
                return _call(before, tensors, outcome[0], has_lines=asked)

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
        owned = Owned.of(before), Owned.of(after)
        inputs = bindings.of_leaves(plan, arguments, *owned)
        results = bindings.of_results(plan, arguments, *owned, outcome[0].leaves)
        recording = Recording(
            plan,
            plan.key,
            plan.numbers,
            program,
            inputs,
            results,
            effects.seeds(),
            {path: after.number(path) for path in after.numbers},
            Pattern.of(before.grads, after.grads),
            outcome[0],
            reachable.difference(before, after),
            after,
            _decides_by_groups(effects.group_readers, after),
            hooked
            or next(iter(entered), None)
            or agreement.problem(before, after, results, outcome[0]),
        )
        self._compare(kind, recording, before, tensors)
        return found

    def _reason_of(self, kind: _Kind, before: Reached) -> str:
        """Why a call is recorded."""
        if not kind.recordings:
            return "no call before it had such arguments"
        newest = kind.recordings[-1]
        changed = reachable.difference(
            newest.after, before, but_numbers=True
        ) or reachable.difference(newest.after, before)
        if changed is None and not kind.replays:
            changed = kind.apart
        return changed or "gradients, threads or modes are others"

    def _compare(
        self, kind: _Kind, now: Recording, before: Reached, tensors: Sequence[XLAShardedTensor]
    ) -> None:
        """Captures the call if it agrees with one before."""
        # Others would keep tensors that are no longer there.
        kind.replays = [r for r in kind.replays if now.after.has_tensors_of(r.reached)]
        kind.recordings = [r for r in kind.recordings if now.after.has_tensors_of(r.after)]
        last = agreement.newest_alike(kind.recordings, before)
        apart = agreement.disagreement(last, now)
        if last is None and kind.recordings and now.change is None:
            apart = f"what it reaches changes between the calls: {self.reason}"
        kind.apart = apart
        kind.recordings = [*kind.recordings, now][-_MOST_PATTERNS:]
        if apart is not None:
            now.forget()
            kind.num_apart += 1
            if kind.num_apart > _MOST_RECORDED:
                raise CaptureError(
                    f"a captured step comes to do the same in each call; after {kind.num_apart} "
                    f"calls with such arguments {_name(self._function)} does not: {apart}. Keep "
                    "what varies outside of the step, or use compile(step) without capture."
                )
            return
        assert last is not None
        kind.num_apart = 0
        kind.recordings.remove(last)
        try:
            replay = self._replay(last, now, before, tensors)
        finally:
            now.forget()
        others = [r for r in kind.replays if not r.is_for(before)]
        kind.replays = [replay, *others][:_MOST_PATTERNS]

    def _replay(
        self,
        last: Recording,
        now: Recording,
        before: Reached,
        tensors: Sequence[XLAShardedTensor],
    ) -> Replay:
        """What later calls run that do what two recorded ones did."""
        assert now.plan is not None
        entries = [x for x in now.key.structure if isinstance(x, Entry)]
        found = numbers.compared(
            last.numbers,
            now.numbers,
            numbers.seed_positions(entries),
            [seed for _, seed in now.draws],
            now.plan,
            (last.group_values, now.after),
            last.live,
        )
        now.live = found.live
        installed = self._installed(now)
        return Replay(
            now,
            last.gradients,
            found,
            before=before.grads,
            installed=installed,
            arguments=tensors,
        )

    def _installed(self, now: Recording) -> Installed:
        """The gradients of all captured calls with the parameters of a call."""
        parameters = [now.after.tensors[path] for path in now.after.grads]
        for kind in self._kinds.values():
            for replay in kind.replays:
                installed = replay.gradients.installed
                if [*map(id, installed.parameters)] == [*map(id, parameters)]:
                    return installed
        return Installed(parameters)


def _chosen(kind: _Kind, tensors: Sequence[XLAShardedTensor]) -> tuple[Replay, Lists] | None:
    """The replay that does what a call would do, with its numbers; None if no one does.

    Ends the step that is pending in this thread, if any.
    """
    own = recorders.current()
    if own.storages or len(recorders.cut_here()) > 1:
        execution.end_step()  # first, as closures at the end of a step may change anything
    if failed() or pending_elsewhere():
        return None
    now: list[Any] = []
    of: Installed | None = None
    for i, replay in enumerate(kind.replays):
        if replay.gradients.installed is not of:
            of = replay.gradients.installed
            now = of.now()
        if replay.ready(tensors, now):
            numbers = replay.numbers()
            if numbers is not None:
                if i:
                    kind.replays.insert(0, kind.replays.pop(i))
                return replay, numbers
    return None


@functools.cache
def _tree_of(num_args: int) -> Any:
    """The structure of a call with so many positional arguments that are leaves."""
    return _pytree.tree_flatten(((0,) * num_args, {}))[1]


def _on_device(leaf: Any) -> Any:
    """A tensor of the CPU on the device: so a captured step gets its data as an argument."""
    if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
        return leaf.to(XLA_DEVICE)
    return leaf


def _outcome(returned: Any) -> Outcome:
    leaves, tree = _pytree.tree_flatten(returned)
    return Outcome(tree, [_detached(leaf) for leaf in leaves])


def _call(
    before: Reached, arguments: Sequence[Any], outcome: Outcome, *, has_lines: bool
) -> CapturedCall:
    """What a cut has to know of a call, between the end of its function and its program."""
    now = [before.tensors[path].grad for path in before.grads]
    grads = _storages([*before.grads.values(), *now])
    reached = _storages(before.tensors.values()) | grads
    return CapturedCall(_storages(outcome.leaves), reached, grads | _storages(arguments), has_lines)


def _storages(values: Iterable[Any]) -> set[Storage]:
    return {x._handle.storage for x in values if isinstance(x, XLAShardedTensor)}


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
        torch._C._len_torch_dispatch_stack(),
        _saves_through_hooks(),
        forward_ad._current_level,
        config.check_indices,
        config.reduce_gradients_once,
        tuple(sorted(config.compiler_options.items())),
    )


def _sees_no_operation() -> bool:
    """Whether no mode of `_modes` looks at each operation."""
    return (
        torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not _saves_through_hooks()
        and forward_ad._current_level < 0
    )


def _runs_programs() -> bool:
    """Whether programs run here, outside of regions, and without looking at each operation."""
    return (
        abstract.run() is None
        and not config.verify_programs
        and not config.record_source_lines
        and cut_guard.this_thread.cut_guard is None
        and not torch.is_anomaly_enabled()
    )


def _saves_through_hooks() -> bool:
    """Whether hooks of the user's get what autograd saves, outside of the step."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def _lines() -> Iterator[bool]:
    """Inside, operations note their lines, so that an error can name one.

    Yields whether they did before.
    """
    before, config.record_source_lines = config.record_source_lines, True
    try:
        yield before
    finally:
        config.record_source_lines = before


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
