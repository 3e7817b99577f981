"""Layers that run as one loop when a model calls them one after another.

The model's own loop in Python stays as it is: it calls each layer. The call of the first one
records the loop over all. It and the later calls return what their layer returns in that loop, as
slices of stacks, which no program computes where nobody reads them; the last one returns the last
`x`. So whatever else the model does with what each layer returns is right. That each layer gets
what the one before has returned, and else the same arguments, is checked at each call.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core import counters
from spmd_core.errors import ControlFlowError
from spmd_core.manual.region import current_region
from spmd_core.modules import layer_hooks
from spmd_core.modules.alike import Differences, differences, guarded
from spmd_core.modules.layer_caches import LayerCaches
from spmd_core.modules.layer_call import LayerCall, State, state_of
from spmd_core.modules.layer_loop import run_layers
from spmd_core.modules.layer_results import LayerResults
from spmd_core.modules.layer_stacks import rows_of
from spmd_core.modules.one_by_one import called_one_by_one

ATTRIBUTE = "_runs_in_stack"
"""The attribute of a layer that has its stack."""

_UNDO = "Call spmd.scan_model(model, undo=True) for a model that does this"


class _Phase(Enum):
    """What the layers of a stack do since the first one was called."""

    ENDED = auto()
    LOOP = auto()  # they return the results of one loop
    ONE_BY_ONE = auto()  # each runs by itself


class LayerStack:
    """Layers in a list of modules that are called as one.

    Attributes:
        path: the list's name in the model.
        hooks_inside: whether the layers' own forward hooks change something, and so run in the
            loop.
    """

    def __init__(self, path: str, container: nn.Module) -> None:
        self.path, self.hooks_inside = path, False
        # Weak, as the layers refer to this: a model without cycles is freed at once.
        self._container: Callable[[], nn.Module | None] = weakref.ref(container)
        self._phase, self._next = _Phase.ENDED, 0
        self._records = False
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerStack | None":
        """That of the list's copy; None for a copy of a layer without its list."""
        container = memo.get(id(self._container()))
        return None if container is None else LayerStack(self.path, container)

    def layers(self, layer: nn.Module) -> list[nn.Module]:
        """The layers one behind the other in the list as it is now, with one of them.

        Args:
            layer: this one; nothing is returned if it is not in the list.
        """
        container = self._container()
        run: list[nn.Module] = []
        for module in () if container is None else container._modules.values():
            if module is not None and module.__dict__.get(ATTRIBUTE) is self:
                run.append(module)
            elif any(each is layer for each in run):
                break
            else:
                run = []
        return run if any(each is layer for each in run) else []

    def call(
        self, layer: nn.Module, run: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """What a layer returns.

        Args:
            layer: a layer.
            run: calls it by itself.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        called = called_one_by_one()
        if called is not None:
            called.setdefault(self, self.layers(layer))
            return run(*args, **kwargs)
        is_inside = self._records or current_region.get() is not None
        if is_inside or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        layers, call = self.layers(layer), LayerCall.of(layer, args, kwargs)
        if call is None or not layers:
            return run(*args, **kwargs)
        if len(layers) == 1:
            self._warn("the list has changed, and has no two of them one behind the other")
            return run(*args, **kwargs)
        index = next(i for i, each in enumerate(layers) if each is layer)
        given = _given_by(call.x)
        if given is not None and given.run.stack is self:
            self._reach(_Phase.LOOP, index, len(layers))
            return given.run.later(index, layer, call, given.index)
        before = (self._phase, self._next)
        self._phase = _Phase.ENDED
        reason = ""
        if index == 0:
            try:
                result = _Run.start(self, layers, call)
                self._reach(_Phase.LOOP, 0, len(layers))
                return result
            except _NoLoopError as error:
                reason = str(error)
        if before == (_Phase.LOOP, index):
            raise _changed(index, self.path)
        if index == 0:
            self._warn(reason)
        elif before != (_Phase.ONE_BY_ONE, index):
            self._warn(f"layer {index} was called without layer 0")
        self._reach(_Phase.ONE_BY_ONE, index, len(layers))
        return run(*args, **kwargs)

    def _reach(self, phase: _Phase, index: int, count: int) -> None:
        """Notes the call of a layer."""
        self._phase, self._next = (phase if index + 1 < count else _Phase.ENDED), index + 1

    def _warn(self, reason: str) -> None:
        counters.count("stacks_run_layer_by_layer")
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"the layers of {self.path} run one after another, and not as one loop: {reason}. "
                f"{_UNDO}.",
                stacklevel=4,  # of the caller of the layer
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, each layer runs by itself."""
        around, self._records = self._records, True
        try:
            yield
        finally:
            self._records = around


@dataclass(frozen=True)
class _Given:
    """Where a tensor comes from.

    Attributes:
        run: the loop.
        index: the layer that has returned it.
        leaf: its position in that layer's `x`.
        state: the tensor's, then.
    """

    run: "_Run"
    index: int
    leaf: int
    state: State


_GIVEN = "_given_by_layer"


def _given_by(x: Any) -> _Given | None:
    """Where the first tensor of `x` comes from; None if no layer of a loop has returned it."""
    first = next(leaf for leaf in pytree.tree_leaves(x) if leaf is not None)
    found: _Given | None = first.__dict__.get(_GIVEN)
    return found


def _changed(index: int, path: str) -> ControlFlowError:
    return ControlFlowError(
        "each of the layers that run as one loop gets what the layer before has returned, as it "
        f"is; got something else for layer {index} of {path}. {_UNDO}."
    )


class _NoLoopError(Exception):
    """A layer gets an object that it may change, and that cannot be in a loop; says why."""


def _caches_of(layers: Sequence[nn.Module], call: LayerCall, found: Differences) -> LayerCaches:
    """The parts of an object that the layers get and may change.

    Raises:
        ControlFlowError: it cannot be in a loop.
    """
    if torch.is_grad_enabled():
        raise ControlFlowError("what it gets has no gradient, so it takes torch.no_grad()")
    if call.cache is None:
        raise ControlFlowError("there are several such objects, or it is inside of another one")
    return LayerCaches(call.cache, layers, found)


class _Run:
    """One loop over the layers of a stack.

    Nothing that the loop calls refers to this object, which has its results.

    Attributes:
        stack: the stack.
    """

    def __init__(self, stack: LayerStack, call: LayerCall, count: int) -> None:
        self.stack, self._call, self._count, self._outside = stack, call, count, True
        self._caches: LayerCaches | None = None

    @staticmethod
    def start(stack: LayerStack, layers: Sequence[nn.Module], call: LayerCall) -> Any:
        """What the first layer returns, whose call this is.

        Its tensors refer to the loop, and the loop to no such tensor: what nobody needs is freed.

        Raises:
            _NoLoopError: the layer may change an argument, and a loop could not.
        """
        seeds = torch.get_rng_state()
        if call.unknown is None:
            return _Run._start(stack, layers, call, seeds)
        try:
            if any(map(layer_hooks.any_of, layers)):
                # They would be called again, one by one.
                raise ControlFlowError("the layers have forward hooks")
            return _Run._start(stack, layers, call, seeds)
        # Whatever it is: an error of the layers' own comes again as they run one by one.
        except Exception as error:
            torch.set_rng_state(seeds)
            raise _NoLoopError(
                f"layer 0 gets {call.unknown}, which it may change, and a loop cannot: {error}. "
                "Leave it out (a cache of a model of Hugging Face: use_cache=False)"
            ) from error

    @staticmethod
    def _start(
        stack: LayerStack, layers: Sequence[nn.Module], call: LayerCall, seeds: torch.Tensor
    ) -> Any:
        run, first = _Run(stack, call, len(layers)), layers[0]
        run._outside = not (stack.hooks_inside and layer_hooks.any_of(first))
        if run._outside and layer_hooks.change_arguments(first, call.args, call.kwargs):
            run._outside = False
        result = run._record(layers)
        if run._outside and layer_hooks.change_result(first, call.args, call.kwargs, result):
            run._outside = False
            torch.set_rng_state(seeds)
            result = run._record(layers)
        stack.hooks_inside = not run._outside
        run._write(0)
        return result

    def _record(self, layers: Sequence[nn.Module]) -> Any:
        """Records the loop; what the first layer returns."""
        stack, call, outside = self.stack, self._call, self._outside
        results = LayerResults([leaf for _, leaf in call.others])

        found = differences(layers, {ATTRIBUTE, *(layer_hooks.TABLES if outside else ())})
        caches = None if call.unknown is None else _caches_of(layers, call, found)

        def step(layer: nn.Module, x: Any, _: Any, rows: Sequence[torch.Tensor]) -> Any:
            cache = None if caches is None else caches.in_loop(rows)
            given = call if cache is None else call.replaced(call.cache, cache.cache)
            args, kwargs = given.with_x(x)
            with stack.recording(), layer_hooks.without(layer) if outside else nullcontext():
                returned = layer(*args, **kwargs)
            if cache is not None:
                cache.check()
            x, others = results.split(x, returned, layer)
            return x, (x, others)

        self._x, (each, self._others), written = run_layers(
            layers,
            step,
            call.x,
            states=() if caches is None else caches.states,
            guard=lambda: guarded(found, {} if caches is None else caches.numbers),
        )
        self._caches, self._written = caches, [*map(rows_of, written)]
        leaves, self._tree = pytree.tree_flatten(self._x)
        self._last, self._each = leaves, pytree.tree_leaves(each)
        self._results = results
        return self._returned(0)

    def _returned(self, index: int) -> Any:
        """What a layer returns."""
        leaves = self._last
        if index + 1 < self._count:
            leaves = [None if stack is None else stack[index] for stack in self._each]
            for i, leaf in enumerate(leaves):
                if leaf is not None:
                    leaf.__dict__[_GIVEN] = _Given(self, index, i, state_of(leaf))
        x = pytree.tree_unflatten(leaves, self._tree)
        return self._results.one(x, self._others, index)

    def _write(self, index: int) -> None:
        """Writes what a layer has written to its part of a cache."""
        if self._caches is not None:
            self._caches.write(index, self._written)

    def later(self, index: int, layer: nn.Module, call: LayerCall, before: int) -> Any:
        """What a later layer returns.

        Args:
            index: its position.
            layer: the layer.
            call: its call.
            before: the layer that has returned the first tensor that it gets.

        Raises:
            ControlFlowError: it gets something else than in the loop.
        """
        path = self.stack.path
        if index != before + 1:
            raise ControlFlowError(
                "layers that run as one loop are called one after another; got a call of layer "
                f"{index} of {path} with what layer {before} has returned. {_UNDO}."
            )
        leaves, tree = pytree.tree_flatten(call.x)
        wanted = [None if leaf is None else (self, before, i) for i, leaf in enumerate(self._last)]
        if tree != self._tree or [*map(_source, leaves)] != wanted:
            raise _changed(index, path)
        if other := self._call.difference(call):
            raise ControlFlowError(
                "layers that run as one loop get the same arguments, but for what they transform; "
                f"got another {other} for layer {index} of {path} than for layer 0. {_UNDO}; "
                "spmd.scan_layers takes arguments that differ, in per_layer."
            )
        args, kwargs = call.args, call.kwargs
        changed = self._outside and layer_hooks.change_arguments(layer, args, kwargs)
        result = self._returned(index)
        self._write(index)
        changed |= self._outside and layer_hooks.change_result(layer, args, kwargs, result)
        if changed:
            raise ControlFlowError(
                "a forward hook that changes what a layer gets or returns belongs to all layers "
                f"that run as one loop; got one of layer {index} of {path} that layer 0 has not. "
                f"Register it for each layer. {_UNDO}."
            )
        return result


def _source(leaf: Any) -> tuple[_Run, int, int] | None:
    """The loop, layer and position that have returned a tensor, if it is as it was then."""
    given = None if leaf is None else leaf.__dict__.get(_GIVEN)
    if given is None or given.state != state_of(leaf):
        return None
    return given.run, given.index, given.leaf
