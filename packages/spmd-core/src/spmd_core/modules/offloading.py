"""Keeps what autograd saves for backward in the memory of the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spmd_core.ops import registry
from spmd_core.recording.calls import NO_KWARGS, functional_handler
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def _recorder(overload: str) -> Callable[..., Any]:
    lowering = registry.find_lowering(registry.resolve(overload))
    assert lowering is not None
    return functional_handler(lowering)


_to_host = _recorder("spmd.to_host_memory.default")
_from_host = _recorder("spmd.from_host_memory.default")


@contextmanager
def save_on_host() -> Iterator[None]:
    """Inside of it, tensors that autograd saves are kept in the memory of the host.

    The program copies each to the host (`pinned_host` memory, shard by shard) once it is computed,
    and back when backward needs it. That saves device memory and costs transfers: most useful
    around a checkpointed block, whose input alone is saved. Gradients are the same to the last bit.
    Parameters and other leaves that need a gradient stay on the device, and so do tensors of other
    devices. Does not wait.

    It works within one program: a `sync()` between forward and backward moves what is on the host
    back to the device, as a result. CPU devices have no memory but the host's, so nothing moves
    there. The partitioner of jaxlib 0.10.0 refuses such programs of several devices, so a
    ProgramError is raised there; use jaxlib 0.10.2 or newer.

    Example:
        >>> x = torch.ones(2, 4, device="xla", requires_grad=True)
        >>> with save_on_host():
        ...     y = (x * 2).tanh()
        >>> y.sum().backward()
        >>> x.grad.shape
        torch.Size([2, 4])
    """
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor]:
    is_leaf = isinstance(x, nn.Parameter) or (x.is_leaf and x.requires_grad)
    if is_leaf or not isinstance(x, XLAShardedTensor):
        return x
    with torch.no_grad():
        return (_to_host((x,), NO_KWARGS),)


def _unpack(packed: torch.Tensor | tuple[torch.Tensor]) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    with torch.no_grad():
        found: torch.Tensor = _from_host(packed, NO_KWARGS)
    return found
