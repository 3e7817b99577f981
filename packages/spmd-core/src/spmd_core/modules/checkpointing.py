"""Gradient checkpointing that a compiler keeps: a second run of a forward stands behind barriers, over which it shares nothing with the first."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from spmd_core.modules.barrier import optimization_barrier
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread, so that a forward is one that is computed again."""
    return torch._C._current_graph_task_id() != -1


def barrier(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors (on device `xla`, any shapes and dtypes), none of which the program uses before all are there.

    The compiler takes them for other values than those given, so it does not share what is computed from them. Not differentiable. Does not wait.
    """
    return optimization_barrier(tensors)


class _Barrier(torch.autograd.Function):
    """`barrier`, through which gradients pass unchanged. It saves nothing: checkpointing counts what the two runs of a forward save."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        results = barrier(tensors)
        # One that autograd need not follow before may not be one that it must follow after: the second run would save more than the first.
        ctx.mark_non_differentiable(
            *(r for r, needed in zip(results, ctx.needs_input_grad) if not needed)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def behind_barrier(tree: Any) -> Any:
    """Nested lists, tuples and dicts with their tensors on device `xla` behind one barrier; gradients pass through. The rest as it is."""
    leaves, structure = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, XLAShardedTensor)]
    if not tensors:
        return tree
    results = iter(_Barrier.apply(*tensors))
    return pytree.tree_unflatten(
        [next(results) if isinstance(leaf, XLAShardedTensor) else leaf for leaf in leaves],
        structure,
    )


class CheckpointedForward:
    """Stands in a module's `forward`: what the forward saves is not kept, but computed again in backward.

    Attributes:
        inner: what computes the module's result: an earlier stand-in of `forward`, or None for the method of the module's class.
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies
    __qualname__ = "_CheckpointedForward"

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None) -> None:
        self.module, self.inner = module, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, *args, use_reentrant=False, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            args, kwargs = behind_barrier((args, kwargs))
        return inner_forward(self.module, self.inner)(*args, **kwargs)


def inner_forward(module: nn.Module, inner: Callable[..., Any] | None) -> Callable[..., Any]:
    """What a stand-in calls: the earlier stand-in, or the method of the module's class.

    Looked up at each call, so that a deep copy of the module runs its own method and not that of the module it was copied from.
    """
    if inner is not None:
        return inner
    method: Callable[..., Any] = type(module).forward.__get__(module)
    return method


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Makes a module run its forward again in backward, instead of keeping what it saved; in place, returns the module. Apply it before wrapping.

    It is `torch.utils.checkpoint` (without re-entrance) round `module.forward`, whose second run the compiler may not share with the first. Random
    numbers are the same in both. `fully_shard` and `SpmdFullyShardedDataParallel` gather a checkpointed module's parameters for each run.

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
            f"checkpoint_module takes a torch.nn.Module; got {type(module).__name__}. Pass the block whose activations are not to be kept."
        )
    own = module.__dict__.get("forward")
    if isinstance(own, CheckpointedForward):
        raise ValueError(
            f"a module is checkpointed once; got a {type(module).__name__} that is already. Call checkpoint_module once for each block."
        )
    if getattr(own, "gathers", False) or getattr(module, "is_sharded_wrapper", False) is True:
        raise ValueError(
            f"checkpointing comes before sharding, so that parameters are gathered anew for the second run; got a {type(module).__name__} that is "
            "sharded. Call checkpoint_module on the block first, and shard it then."
        )
    module.forward = CheckpointedForward(module, own)
    return module
