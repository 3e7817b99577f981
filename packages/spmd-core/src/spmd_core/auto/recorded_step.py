"""Records one step of a user's program without running it, and takes back what it changed."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from spmd_core.auto import layer_loops, module_paths
from spmd_core.config import config
from spmd_core.errors import AutoShardingError
from spmd_core.graph.recorders import lock
from spmd_core.graph.repetition import result_of
from spmd_core.graph.storage import Handle, Storage, pending, read, take_pending
from spmd_core.graph.values import Value
from spmd_core.metrics.flops import entry_flops
from spmd_core.modules.one_by_one import Layers, one_by_one
from spmd_core.program import execution, planning, tensor_names
from spmd_core.program.cut_guard import this_thread
from spmd_core.program.planning import CutPlan, collect
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.source_lines import user_line
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_PLAIN = (int, float, bool, str, type(None))


class _StepEndedError(BaseException):
    """Ends a step at its `sync()`. No `except Exception` of the step catches it."""


@dataclass(frozen=True)
class Call:
    """A call of a module, by positions among the step's tensors (see `step_graph`).

    Attributes:
        result: the first tensor that the module returned.
        gradient: the gradient of that tensor; None if there is none.
    """

    result: int
    gradient: int | None = None


@dataclass(frozen=True)
class Markable:
    """The tensors inside of a step that marks in its code reach, by their positions.

    Attributes:
        calls: for each module whose results hooks may mark, its calls; for those that are one in
            all layers of a loop, their calls together.
        gradients: gradients of parameters, which marks of parameters reach, with the leaves.
        alike: leaves that are sharded alike, as they are one in all layers of a loop.
    """

    calls: tuple[tuple[Call, ...], ...]
    gradients: tuple[tuple[int, int], ...]
    alike: tuple[tuple[int, ...], ...] = ()

    @property
    def has_loops(self) -> bool:
        """Whether layers of the step run as a loop."""
        return bool(self.alike)


@dataclass
class RecordedStep:
    """A step that was recorded and not run.

    Attributes:
        graph: its program.
        names: the names of its tensors, by storage.
        calls: the calls of each module, by the module.
        gradients: for each gradient that a backward gave a parameter, its position and the leaf's.
        loops: the layers of each loop (`scan_model`, `scan_layers`), recorded one by one.
        leaves: for each graph input its storage; None if nothing holds it any more.
        rows: for graph inputs that are stacks, the storages of their rows.
        inputs: for each graph input its value, while the step is recorded.
        numbers: the graph's scalar inputs, in the order of its operations.
    """

    graph: RecordedGraph
    names: Mapping[Storage, str]
    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    gradients: list[tuple[int, int]] = field(default_factory=list)
    loops: Sequence[Sequence[nn.Module]] = ()
    leaves: tuple[Storage | None, ...] = ()
    rows: Mapping[int, Sequence[Storage]] = field(default_factory=dict)
    inputs: Sequence[Value] = ()
    numbers: Sequence[Any] = ()

    @property
    def markable(self) -> Markable:
        """What marks of parameters and of modules' results reach."""
        in_loops = layer_loops.modules(self.loops)
        calls: dict[Hashable, tuple[Call, ...]] = {}
        for module in self.paths:
            key = in_loops.get(module, module)
            calls[key] = (*calls.get(key, ()), *self.calls[module])
        alike = layer_loops.leaves(self.loops, self.names, self.leaves)
        return Markable(tuple(calls.values()), tuple(self.gradients), alike)

    @cached_property
    def paths(self) -> dict[nn.Module, str]:
        """The modules that have parameters of their own, with their names in their models."""
        return {
            module: path
            for module, path in module_paths.paths(self.calls).items()
            if path and next(module.parameters(recurse=False), None) is not None
        }


def record(step: Callable[[], Any], read_graph: Callable[[RecordedStep], Any]) -> Any:
    """Records a step, and calls `read_graph` with it before everything is as it was.

    The step ends at its `sync()`, or where it returns. What it changed is taken back: tensors on
    the device, gradients, the state of optimizers, schedulers and torch's random generator, and
    plain attributes of modules. What else it does in Python, such as appending to a list, stays.
    Pending operations of before are computed first.

    Args:
        step: the step.
        read_graph: called with the recorded step; its result is returned.

    Raises:
        AutoShardingError: the step reads a value on the host, or records nothing.
    """
    execution.cut()
    seen = _Seen()
    live: list[Storage] = []
    with _state_kept(), torch.random.fork_rng(devices=[]), _recording(seen):
        try:
            result = None  # kept, as a value that nothing holds is not computed
            with contextlib.suppress(_StepEndedError):
                result = step()
            with lock:
                live = take_pending()
            if not live:
                raise AutoShardingError(
                    "a step to be sharded must compute something on device 'xla'; got one after "
                    "which nothing is pending. Let it compute a loss, call backward() and the "
                    "optimizer's step(), and keep the parameters on device 'xla'."
                )
            found = read_graph(_recorded(live, seen))
            del result
            return found
        finally:
            with lock:
                live += take_pending()
            for storage in live:
                if storage.committed is not None:
                    storage.write(storage.committed)


@dataclass
class _SeenCall:
    """A call of a module: its result, and the gradient of that."""

    module: nn.Module
    result: Value
    gradient: Value | None = None


@dataclass
class _Seen:
    """What is noted while a step is recorded: calls of modules, gradients of parameters, loops."""

    calls: list[_SeenCall] = field(default_factory=list)
    gradients: list[tuple[Storage, Value]] = field(default_factory=list)
    loops: Layers = field(default_factory=dict)


def _recorded(live: list[Storage], seen: _Seen) -> RecordedStep:
    with lock:
        planned = planning.plan(live, one_by_one=True)
    _require_whole(planned)
    graph = replace(planned.graph(), fold_layers=False)  # candidates decide (`LoopedStep`)
    first, count = {}, len(graph.leaves)
    for node in planned.nodes:
        first[node] = count
        count += len(node.entry.outs)

    def position(value: Value | None) -> int | None:
        if value is None:
            return None
        node, index = result_of(value)
        return first[node] + index if node in first else None

    calls: dict[nn.Module, list[Call]] = {}
    for one in seen.calls:
        result = position(one.result)
        if result is not None:
            calls.setdefault(one.module, []).append(Call(result, position(one.gradient)))
    owners = tuple(None if leaf.owner is None else leaf.owner() for leaf in graph.leaves)
    leaf_of = {storage: i for i, storage in enumerate(owners) if storage is not None}
    gradients = []
    for storage, value in seen.gradients:
        gradient = position(value)
        if gradient is not None and storage in leaf_of:
            gradients.append((gradient, leaf_of[storage]))
    return RecordedStep(
        graph,
        tensor_names.names(),
        calls,
        gradients,
        [*seen.loops.values()],
        owners,
        inputs=planned.leaves,
        numbers=planned.numbers,
    )


def why_not(planned: CutPlan) -> str | None:
    """What a plan reads that cannot be searched; None if there is nothing.

    Args:
        planned: of a step, or of any program.
    """
    if any(leaf.placement.manual for leaf in planned.leaves):
        return "a tensor that a shard_map has left on its devices"
    if any(leaf.placement.room for leaf in planned.leaves):
        return "a tensor whose size varies"
    return None


def _require_whole(planned: CutPlan) -> None:
    refused = why_not(planned)
    if refused is not None:
        raise AutoShardingError(
            f"automatic sharding splits whole tensors; got a step that reads {refused}. "
            "Compute it in the step, or shard the step by marks."
        )


@contextlib.contextmanager
def _recording(seen: _Seen) -> Iterator[None]:
    """Inside, no program of the step runs, and what marks can reach is noted.

    Values that no product computes may be read, such as a mask's: they are computed apart.
    """

    def read_apart(wanted: Storage | None) -> None:
        if wanted is not None and not any(entry_flops(x.entry) for x in collect([wanted])[0]):
            with lock:
                execution.compute_apart([wanted])
            return
        raise AutoShardingError(
            "a step to be sharded is recorded and not run, so it must not read what its products "
            f"compute; {user_line()} does (.item(), print, `if` of a tensor, .cpu()). Read after "
            "the step, or leave the reading out of the function that you give."
        )

    @contextlib.contextmanager
    def ended() -> Iterator[None]:
        if pending():
            raise _StepEndedError
        yield

    def note(module: nn.Module, arguments: Any, result: Any) -> None:
        found = _first_tensor(result)
        if found is not None:
            call = _SeenCall(module, _value(found))
            seen.calls.append(call)
            if found.requires_grad and not found.is_leaf:
                _ = found.grad_fn  # see `marking._follow_gradients`
                found.register_hook(functools.partial(_note_gradient_of_result, call))

    before, lines = this_thread.in_place_of_cut, config.record_source_lines
    hooks: list[Any] = [nn.modules.module.register_module_forward_hook(note)]
    for storage, tensor in tensor_names.parameters().items():
        if tensor.requires_grad and tensor.is_leaf:
            hooks.append(tensor.register_hook(functools.partial(_note_gradient, seen, storage)))
    execution.around_step.insert(0, ended)
    this_thread.in_place_of_cut, config.record_source_lines = read_apart, True
    try:
        with one_by_one() as seen.loops:
            yield
    finally:
        this_thread.in_place_of_cut, config.record_source_lines = before, lines
        execution.around_step.remove(ended)
        for hook in hooks:
            hook.remove()


def _note_gradient_of_result(call: _SeenCall, gradient: torch.Tensor) -> None:
    if isinstance(gradient, XLAShardedTensor):
        call.gradient = _value(gradient)


def _note_gradient(seen: _Seen, storage: Storage, gradient: torch.Tensor) -> None:
    if isinstance(gradient, XLAShardedTensor):
        seen.gradients.append((storage, _value(gradient)))


def _value(tensor: XLAShardedTensor) -> Value:
    handle: Handle = tensor._handle
    with lock:
        return read(handle)


def _first_tensor(result: Any) -> XLAShardedTensor | None:
    """The tensor on the device in a module's result: itself, or the first of a tuple or list."""
    if isinstance(result, (tuple, list)):
        result = result[0] if result else None
    return result if isinstance(result, XLAShardedTensor) else None


@contextlib.contextmanager
def _state_kept() -> Iterator[None]:
    """Inside, what changes in modules, optimizers and schedulers is taken back at the end."""
    found = tensor_names.instances((nn.Module, torch.optim.Optimizer, LRScheduler))
    modules = [x for x in found if isinstance(x, nn.Module)]
    optimizers = [x for x in found if isinstance(x, torch.optim.Optimizer)]
    schedulers = [x for x in found if isinstance(x, LRScheduler)]
    plain = [(x, {k: v for k, v in vars(x).items() if isinstance(v, _PLAIN)}) for x in modules]
    parameters = {p for x in modules for p in x.parameters(recurse=False)}
    parameters |= {p for x in optimizers for group in x.param_groups for p in group["params"]}
    gradients = {p: p.grad for p in parameters}
    states = [(x, _copied(x.state), [dict(g) for g in x.param_groups]) for x in optimizers]
    dicts = [(x, dict(vars(x))) for x in schedulers]
    try:
        yield
    finally:
        for module, attributes in plain:
            for key, value in attributes.items():
                if vars(module).get(key) is not value:
                    vars(module)[key] = value
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for optimizer, state, groups in states:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, values in zip(optimizer.param_groups, groups):
                group.clear()
                group.update(values)
        for scheduler, attributes in dicts:
            vars(scheduler).clear()
            vars(scheduler).update(attributes)


def _copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state. Tensors of the CPU, such as step counts, are copied: steps change them.

    Those on the device go back to the values of the last program by themselves.
    """

    def kept(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, XLAShardedTensor):
            return value.clone()
        return value

    return {
        p: {k: kept(v) for k, v in of.items()} if isinstance(of, dict) else of
        for p, of in state.items()
    }
