"""Gradient checkpointing with barriers, so that the compiler keeps the two forward runs apart."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from spmd_core.modules.barrier import optimization_barrier
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


class _Barrier(torch.autograd.Function):
    """A differentiable `barrier`, through which gradients pass unchanged.

    It saves nothing: checkpointing counts what the two runs of a forward save.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        results = barrier(tensors)
        # A tensor that needs no gradient before the barrier must need none after it, or the second
        # run would save more than the first.
        ctx.mark_non_differentiable(
            *(r for r, needed in zip(results, ctx.needs_input_grad) if not needed)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def behind_barrier(tree: Any) -> Any:
    """Nested lists, tuples and dicts, with their tensors on device `xla` behind one barrier.

    Gradients pass through. Everything else stays as it is.
    """
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
    """Replaces a module's `forward`: what it saves is not kept, and backward runs it again.

    Attributes:
        module: the module.
        inner: computes the module's result: an earlier replacement of `forward`, or None for the
            method of the module's class.
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
    """What a replacement of `forward` calls: the earlier one, or the method of the module's class.

    The method is looked up at each call, so that a deep copy of the module runs its own method and
    not that of the module it was copied from.
    """
    if inner is not None:
        return inner
    method: Callable[..., Any] = type(module).forward.__get__(module)
    return method


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Makes a module run its forward again in backward, instead of keeping what it saved.

    In place. Apply it before `fully_shard` or a wrapper. Around `module.forward` this puts
    `torch.utils.checkpoint` (with `use_reentrant=False`), and barriers that keep the compiler from
    sharing the second run with the first. Random numbers are the same in both runs. `fully_shard`
    and `SpmdFullyShardedDataParallel` gather a checkpointed module's parameters for each run.

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
            f"second run; got a {type(module).__name__} that is "
            "sharded. Call checkpoint_module on the block first, and shard it then."
        )
    module.forward = CheckpointedForward(module, own)
    return module
