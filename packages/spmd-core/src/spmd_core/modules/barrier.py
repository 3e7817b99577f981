"""Optimization barriers: the compiler moves no computation from one side of them to the other."""

from collections.abc import Sequence
from typing import Any

import torch

from spmd_core.errors import DeviceMismatchError
from spmd_core.graph.storage import lock, read
from spmd_core.ops import registry
from spmd_core.recording.calls import NO_KWARGS, functional_handler
from spmd_core.recording.writes import write
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_lowering = registry.find(registry.resolve("spmd.optimization_barrier.default"))
assert _lowering is not None
_record = functional_handler(_lowering)


def optimization_barrier(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """New tensors of the same values, behind one barrier; not differentiable. All must be on device `xla`."""
    with torch.no_grad():
        behind: list[torch.Tensor] = _record((list(tensors),), NO_KWARGS)
    return behind


def optimization_barrier_(tensors: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Puts one barrier behind all tensors, in place: what is computed from any of them waits for all of them, and is not fused with what made them.

    The values do not change. So it is nothing to autograd either: gradients pass as if it were not there, and get no barrier of their own. Its use
    is in a backward pass, to keep what one layer recomputes or gathers from being computed early for all layers. Does not wait for the device.

    Raises:
        DeviceMismatchError: not a tensor on device `xla`.
    """
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    handles = []
    for t in given:
        if not isinstance(t, XLAShardedTensor):
            got = f"a tensor on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
            raise DeviceMismatchError(
                f"optimization_barrier_ needs tensors on device 'xla'; got {got}. Move it first: t = t.to('xla')."
            )
        handles.append(t._handle)
    if not given:
        return
    with lock:
        for handle, behind in zip(handles, optimization_barrier(given)):
            write(handle, read(behind._handle))  # type: ignore[attr-defined]


def apply_backward_optimization_barrier(module: torch.nn.Module) -> torch.nn.Module:
    """In every backward pass of the module, puts a barrier behind its parameters' gradients and the gradients of its inputs. Returns the module."""

    def hook(module: torch.nn.Module, grad_input: Any, grad_output: Any) -> None:
        inputs = grad_input if isinstance(grad_input, tuple) else (grad_input,)
        parameters = [p.grad for p in module.parameters() if p.grad is not None]
        optimization_barrier_([g for g in (*parameters, *inputs) if g is not None])

    module.register_full_backward_hook(hook)
    return module
