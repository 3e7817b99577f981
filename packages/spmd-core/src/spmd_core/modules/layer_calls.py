"""Calls of layers one after another, noticed as they happen, and run as one loop by the last one.

The first layer is called as ever. A layer that gets what the one before returned, and the same
further arguments, returns a `LayerOutput`, which stands for its result; the call of the last layer
runs all as one loop. Whatever else is done with such a stand-in, by a function of torch or as the
argument of another module, calls the layers one after another, as if nothing had been deferred. So
a model's own code decides what is computed, and the loop is only a way to compute it.
"""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core import counters
from spmd_core.errors import ControlFlowError, WrapError
from spmd_core.manual.region import current_region
from spmd_core.modules.layer_loop import run_layers
from spmd_core.modules.scan_layers import Results
from spmd_core.tensor.sharded_tensor import DeferredTensor, XLAShardedTensor

# What may be asked of a stand-in without its value: each layer's result is like the first one's.
_FORM = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_xla")
    ),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
}
_top_hooks: Any = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: None
)
_FIRST = "_first_of_layers"  # the attribute of what a first layer returned


class LayerOutput(DeferredTensor):
    """Stands for a tensor that a layer returns, whose call is deferred.

    Attributes:
        call: the deferred call.
        position: among the leaves of what it returns.
        like: the same leaf of the first layer's result.
    """

    call: "DeferredCall"
    position: int
    like: torch.Tensor

    @staticmethod
    def of(call: "DeferredCall", position: int, like: torch.Tensor) -> "LayerOutput":
        # What does not ask torch, such as `torch.autograd.Function`, fails in its backward.
        made: LayerOutput = torch.Tensor._make_subclass(
            LayerOutput, torch.empty(0, dtype=like.dtype, device="meta"), like.requires_grad
        )
        made.call, made.position, made.like = call, position, like
        return made

    def resolved(self) -> torch.Tensor:
        """The tensor, for which all deferred calls up to this one are made."""
        return self.call.result(self.position)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        def real(leaf: Any) -> Any:
            if not isinstance(leaf, LayerOutput):
                return leaf
            return leaf.like if func in _FORM else leaf.resolved()

        own, named = pytree.tree_map(real, (tuple(args), kwargs or {}))
        return func(*own, **named)


@dataclass(frozen=True)
class _Conditions:
    """What holds while a layer is called, besides its arguments."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype
    hooks: tuple[int, ...]

    @staticmethod
    def now() -> "_Conditions":
        return _Conditions(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("xla"),
            torch.get_autocast_dtype("xla"),
            tuple(map(id, _top_hooks(True) or ())),
        )


@dataclass(frozen=True)
class _First:
    """The call of a first layer; kept by what it returned."""

    group: "LayerGroup"
    x: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    conditions: _Conditions
    others: tuple[Any, ...] | None  # what it returned behind the next x; None if it was no tuple

    def returned(self, x: torch.Tensor) -> Any:
        """What it returned."""
        return x if self.others is None else (x, *self.others)


class LayerGroup:
    """Layers of one structure that a model may call one after another.

    Attributes:
        layers: the layers.
        name: what they are, in warnings: "the 12 layers of h".

    Args:
        layers: the layers.
        name: their name.
    """

    def __init__(self, layers: Sequence[nn.Module], name: str) -> None:
        self.layers, self.name = [*layers], name
        self._is_running = False
        self._is_apart = False  # since the last call of the first layer
        self._noted: set[str] = set()

    def call(self, index: int, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a layer returns.

        Args:
            index: of the layer.
            plain: calls it.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        x: Any = args[0] if args else None
        if self._is_running or torch.compiler.is_compiling() or current_region.get() is not None:
            return plain(*args, **kwargs)
        if isinstance(x, LayerOutput):
            deferred = x.call
            chain = deferred.chain
            is_own = chain.first.group is self
            is_next = is_own and deferred.is_last and deferred.index + 1 == index
            if is_next and chain.goes_on(x, args[1:], kwargs):
                return chain.next()
            if is_own:
                self.note(f"layer {index} is not called as the layers before it")
            return plain(deferred.result(x.position), *args[1:], **kwargs)
        if index == 0 and x.__class__ is XLAShardedTensor:
            self._is_apart = False
            return self._begin(plain, args, kwargs)
        first = getattr(x, _FIRST, None) if index == 1 else None
        if first is not None and first.group is self:
            delattr(x, _FIRST)
            chain = Chain(first, x, self.layers)
            if chain.goes_on(x, args[1:], kwargs):
                return chain.next()
            self.note("layers 0 and 1 are called with different arguments")
        elif index and x.__class__ is XLAShardedTensor and not self._is_apart:
            self.note(f"layer {index} is called with what the layer before it did not return")
        return plain(*args, **kwargs)

    def _begin(self, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        conditions = _Conditions.now()
        returned = plain(*args, **kwargs)
        is_tuple = type(returned) is tuple and bool(returned)
        x = returned[0] if is_tuple else returned
        if x.__class__ is XLAShardedTensor and x is not args[0]:
            others = returned[1:] if is_tuple else None
            setattr(x, _FIRST, _First(self, args[0], args[1:], kwargs, conditions, others))
        return returned

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, layers are called as they are."""
        before, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = before

    def note(self, reason: str) -> None:
        """Counts layers that are called one after another, and warns of each reason once."""
        self._is_apart = True
        counters.count("layers_called_apart")
        if reason not in self._noted:
            self._noted.add(reason)
            warnings.warn(
                f"scan_model: {self.name} are called one after another, not as one loop: {reason}",
                stacklevel=5,
            )


class Chain:
    """The calls of layers that went on from the first one.

    Attributes:
        first: the first one's.
        x: what it returned for the next one.
        calls: those of the layers behind it, which are deferred.
        is_over: whether all layers ran as a loop.
    """

    def __init__(self, first: _First, x: torch.Tensor, layers: Sequence[nn.Module]) -> None:
        self.first, self.x, self.layers = first, x, layers
        self.calls: list[DeferredCall] = []
        self.is_over = False
        self._inner: list[weakref.ref[torch.Tensor]] = []

    def goes_on(self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a layer is called as the first one was, but for x."""
        first = self.first
        position = x.position if isinstance(x, LayerOutput) else 0
        if position or first.conditions != _Conditions.now():
            return False
        leaves, tree = pytree.tree_flatten((args, kwargs))
        mine, own = pytree.tree_flatten((first.args, first.kwargs))
        return bool(tree == own) and all(map(_is_same, leaves, mine))

    def next(self) -> Any:
        """What the next layer returns: a stand-in; or the result of all, behind the last one."""
        call = DeferredCall(self, len(self.calls) + 1)
        self.calls.append(call)
        if call.index + 1 < len(self.layers):
            return call.stand_in()
        try:
            result = self._run()
        except (WrapError, ControlFlowError) as error:
            self.first.group.note(str(error))
            return call.returned()
        self.is_over = True
        self.calls.clear()
        if any(tensor() is not None for tensor in self._inner):
            raise ControlFlowError(
                "layers that run as one loop are called once for all, so nothing can keep what "
                f"each of them gets or returns; {self.first.group.name} have a hook that does, as "
                "of output_hidden_states=True, or something else that keeps it. Leave that out, "
                "or scan_model."
            )
        return result

    def _run(self) -> Any:
        """All layers as one loop; returns what the last one returns."""
        first = self.first
        results = Results((first.args, first.kwargs))

        given = {*map(id, pytree.tree_leaves((first.args, first.kwargs)))}
        inner: list[weakref.ref[torch.Tensor]] = []  # what the layer gets and returns in the loop

        def step(layer: Any, x: Any, _: Any) -> tuple[Any, Any]:
            returned = layer(x, *first.args, **first.kwargs)
            made = (t for t in pytree.tree_leaves((x, returned)) if isinstance(t, torch.Tensor))
            inner.extend(weakref.ref(t) for t in made if id(t) not in given)
            try:
                return results.split(x, returned, layer)
            except TypeError as error:
                raise WrapError(str(error)) from error

        with first.group.running():
            x, others = run_layers(self.layers, step, first.x)
        self._inner = inner
        made = results.joined(x, others, len(self.layers))
        if first.others is None:
            return made
        stacks = made[1:] if isinstance(made, tuple) else ()
        return (x, *pytree.tree_map_only(torch.Tensor, lambda t: t[-1], stacks))


class DeferredCall:
    """The call of a layer behind the first one.

    Attributes:
        chain: the calls that it belongs to.
        index: of the layer.
    """

    def __init__(self, chain: Chain, index: int) -> None:
        self.chain, self.index = chain, index
        self._returned: Any = None

    @property
    def is_last(self) -> bool:
        """Whether no later layer was called, and this one's result is not known."""
        chain = self.chain
        return self._returned is None and not chain.is_over and chain.calls[-1] is self

    def stand_in(self) -> Any:
        """What stands for what the layer returns."""
        leaves, tree = pytree.tree_flatten(self.chain.first.returned(self.chain.x))
        made = [
            LayerOutput.of(self, i, leaf) if isinstance(leaf, torch.Tensor) else leaf
            for i, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(made, tree)

    def returned(self) -> Any:
        """What the layer returns, called after those before it."""
        chain = self.chain
        if self._returned is None:
            if chain.is_over:
                raise ControlFlowError(
                    "of layers that ran as one loop, only the last one's result exists; got a use "
                    f"of that of layer {self.index} of {len(chain.layers)} after the last one was "
                    "called. Leave scan_model out where the results of layers are looked at."
                )
            x: Any = chain.x
            if self.index > 1:
                x = chain.calls[self.index - 2].returned()
                x = x if chain.first.others is None else x[0]
            with chain.first.group.running():
                layer: Any = chain.layers[self.index]
                self._returned = layer(x, *chain.first.args, **chain.first.kwargs)
        return self._returned

    def result(self, position: int) -> torch.Tensor:
        """A leaf of what the layer returns."""
        if self._returned is None and not self.chain.is_over:
            self.chain.first.group.note(
                f"what layer {self.index} returns is used before all layers were called"
            )
        leaf: torch.Tensor = pytree.tree_leaves(self.returned())[position]
        return leaf


def _is_same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same object, or equal plain values."""
    if a is b:
        return True
    plain = (bool, int, float, complex, str, torch.dtype, torch.device)
    return type(a) is type(b) and isinstance(a, plain) and a == b
