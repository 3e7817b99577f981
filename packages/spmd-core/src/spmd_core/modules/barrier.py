"""Optimization barriers, across which the compiler moves no computation."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from spmd_core.arguments import require_kind
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import read
from spmd_core.ops import registry
from spmd_core.recording.calls import NO_KWARGS, functional_handler
from spmd_core.recording.writes import write
from spmd_core.tensor.sharded_tensor import device_tensor

_lowering = registry.find_lowering(registry.resolve("spmd.optimization_barrier.default"))
assert _lowering is not None
_record = functional_handler(_lowering)

# What torch passes to a backward hook.
_Gradients: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...] | None


def optimization_barrier(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """New tensors with the same values, behind one barrier.

    Not differentiable. All tensors must be on device `xla`.
    """
    with torch.no_grad():
        results: list[torch.Tensor] = _record((list(tensors),), NO_KWARGS)
    return results


def optimization_barrier_(tensors: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Puts one barrier after all tensors, in place.

    Operations on any of the tensors run after all of them are computed, and are not fused with the
    operations that computed them. The values do not change, so autograd does not see the barrier:
    gradients pass unchanged, and get no barrier themselves. Used in a backward pass, it keeps
    what one layer recomputes or gathers from being computed early for all layers. Does not wait
    for the device.

    Raises:
        TypeError: not a tensor or a list of them.
        DeviceMismatchError: not on device `xla`.
    """
    require_kind("tensors", tensors, torch.Tensor, list, tuple, write="the tensors in a list")
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    handles = [device_tensor(t, "optimization_barrier_")._handle for t in given]
    if not given:
        return
    with lock:
        for handle, result in zip(handles, optimization_barrier(given)):
            write(handle, read(result._handle))  # type: ignore[attr-defined]


def apply_backward_optimization_barrier(module: torch.nn.Module) -> torch.nn.Module:
    """Puts a barrier after the module's gradients in every backward pass. Returns the module.

    These are the gradients of its parameters and of its inputs, behind one barrier.

    Raises:
        TypeError: `module` is none.
    """
    require_kind("module", module, torch.nn.Module, write="a torch.nn.Module")

    def hook(module: torch.nn.Module, grad_input: _Gradients, grad_output: _Gradients) -> None:
        inputs = grad_input if isinstance(grad_input, tuple) else (grad_input,)
        parameters = [p.grad for p in module.parameters() if p.grad is not None]
        optimization_barrier_([g for g in (*parameters, *inputs) if g is not None])

    module.register_full_backward_hook(hook)
    return module
