"""Gradient checkpointing: keeps the compiler from merging a forward with its recomputation.

`torch.utils.checkpoint` runs a function again in backward. If the function's tensors are on the
device, the recomputation waits for the gradient of the first run's result, and shares no value with
the first run (`recording.recomputation`).

Policies of selective checkpointing work as they are, as the values that they keep come from the
first run.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.arguments import checked
from spmd_core.modules.barrier import optimization_barrier
from spmd_core.modules.offloading import save_on_host
from spmd_core.recording import split_sequences
from spmd_core.recording.recomputation import recomputing
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread, where a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def barrier(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors (on device `xla`, any shapes and dtypes), behind one barrier.

    The program uses none of them before all are computed. The compiler does not know that the
    values are those given, so it does not share what is computed from them. Not differentiable.
    Does not wait.
    """
    return optimization_barrier(tensors)


class _Rerun:
    """A function that a checkpoint runs twice.

    Attributes:
        function: the function.
        gradient: of a result of the first run, once it has arrived.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.gradient: torch.Tensor | None = None
        self._split = split_sequences.current.get()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            gradient, self.gradient = self.gradient, None
            token = split_sequences.current.set(self._split)
            try:
                with recomputing(pytree.tree_leaves((args, kwargs)), gradient):
                    return self.function(*args, **kwargs)
            finally:
                split_sequences.current.reset(token)
        results = self.function(*args, **kwargs)
        for result in pytree.tree_leaves(results):
            if isinstance(result, XLAShardedTensor) and result.grad_fn is not None:
                result.register_hook(self._keep)
        return results

    def _keep(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient


# What `checkpoint` calls for a forward that is not reentrant: torch 2.15's name, or an earlier one.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
_generator = next(name for name in _GENERATORS if hasattr(torch.utils.checkpoint, name))
_without_reentrant = getattr(torch.utils.checkpoint, _generator)
_Reentrant = torch.utils.checkpoint.CheckpointFunction
_reentrant_forward, _reentrant_backward = _Reentrant.forward, _Reentrant.backward


@functools.wraps(_without_reentrant)
def _rerunning(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Wrap only if not wrapped already: torch calls an unwrapped function itself the first time.
    return _without_reentrant(fn if isinstance(fn, _Rerun) else _Rerun(fn), *args, **kwargs)


def checkpointed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` without reentrance, of a function of tensors.

    The recomputation waits for the gradient of the first run's result.

    Args:
        function: computes the result.
        args: of the function.
        options: keyword arguments of the function, and of torch's checkpoint.
    """
    return torch.utils.checkpoint.checkpoint(
        _Rerun(function), *args, use_reentrant=False, **options
    )


def _forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
    return _reentrant_forward(ctx, _Rerun(run_function), *args)


def _backward(ctx: Any, *gradients: Any) -> Any:
    ctx.run_function.gradient = next((g for g in gradients if isinstance(g, torch.Tensor)), None)
    return _reentrant_backward(ctx, *gradients)


# `torch.utils.checkpoint.checkpoint`, which programs import by name, looks these up at each call.
setattr(torch.utils.checkpoint, _generator, _rerunning)
_Reentrant.forward = staticmethod(_forward)  # type: ignore[method-assign]
_Reentrant.backward = staticmethod(_backward)  # type: ignore[method-assign]


class CheckpointedForward:
    """Replaces a module's `forward`: keeps no activations, and recomputes them in backward.

    Attributes:
        module: the module.
        inner: computes the module's result: an earlier replacement of `forward`, or None for the
            method of the module's class.
        on_host: whether the module's inputs are kept in the memory of the host.
        options: more arguments of `torch.utils.checkpoint.checkpoint`.
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies
    __qualname__ = "_CheckpointedForward"
    options: Mapping[str, Any] = MappingProxyType({})  # of pickles without options
    on_host = False  # of pickles without it

    def __init__(
        self,
        module: nn.Module,
        inner: Callable[..., Any] | None,
        *,
        on_host: bool = False,
        **options: Any,
    ) -> None:
        self.module, self.inner, self.on_host, self.options = module, inner, on_host, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = inner_forward(self.module, self.inner)
        with save_on_host() if self.on_host else nullcontext():
            return checkpointed(forward, *args, **self.options, **kwargs)


def inner_forward(module: nn.Module, inner: Callable[..., Any] | None) -> Callable[..., Any]:
    """What a replacement of `forward` calls: the earlier one, or the method of the module's class.

    The method is looked up at each call, so that a deep copy of the module runs its own method and
    not that of the module it was copied from.
    """
    if inner is not None:
        return inner
    method: Callable[..., Any] = type(module).forward.__get__(module)
    return method


@checked()
def checkpoint_module(
    module: nn.Module,
    *,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    on_host: bool = False,
) -> nn.Module:
    """Makes a module run its forward again in backward, instead of keeping what it saved.

    In place. Apply it before `fully_shard` or a wrapper. Around `module.forward` this puts
    `torch.utils.checkpoint` (with `use_reentrant=False`). Random numbers are the same in both runs.
    `fully_shard` and `SpmdFullyShardedDataParallel` gather a checkpointed module's parameters for
    each run.

    Args:
        module: such as one block of a model.
        context_fn: as of `torch.utils.checkpoint.checkpoint`; with
            `create_selective_checkpoint_contexts` a policy decides which results of the first run
            are kept. It sees a linear layer as `aten.linear`, attention as `spmd.attention`.
        on_host: keep the module's inputs in the memory of the host, as `save_on_host` does.

    Returns:
        The module.

    Raises:
        ValueError: the module is checkpointed or sharded already.
        TypeError: not a module.

    Example:
        >>> block = checkpoint_module(torch.nn.Linear(4, 4).to("xla"))
        >>> block(torch.ones(2, 4, device="xla")).shape
        torch.Size([2, 4])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"checkpoint_module takes a torch.nn.Module; got {type(module).__name__}. "
            "Pass the block whose activations are not to be kept."
        )
    own = module.__dict__.get("forward")
    if isinstance(own, CheckpointedForward):
        raise ValueError(
            f"a module is checkpointed once; got a {type(module).__name__} that is already. "
            "Call checkpoint_module once for each block."
        )
    if getattr(own, "gathers", False) or getattr(module, "is_sharded_wrapper", False) is True:
        raise ValueError(
            "checkpointing comes before sharding, so that parameters are gathered anew for the "
            f"recomputation; got a {type(module).__name__} that is "
            "sharded. Call checkpoint_module on the block first, and shard it then."
        )
    options = {} if context_fn is None else {"context_fn": context_fn}
    module.forward = CheckpointedForward(module, own, on_host=on_host, **options)
    return module
