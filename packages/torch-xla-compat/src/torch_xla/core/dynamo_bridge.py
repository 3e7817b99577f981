"""What Dynamo's backends call to compile a graph of the device, with torch_xla's names."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from spmd_core.dynamo.backend import openxla
from torch_xla.core.xla_model import is_xla_tensor as is_xla_tensor


def extract_compiled_graph(
    xla_model: torch.fx.GraphModule, xla_args: Sequence[Any]
) -> Callable[..., Any]:
    """The compiled form of a graph: a function of its inputs, which records its operations.

    Args:
        xla_model: the graph, of torch's or of ATen's operations.
        xla_args: tensors like those that it will be called with; not used.
    """
    return openxla(xla_model, xla_args)


def partition_fx_func_for_cpu_fallback(xla_model: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph itself: an operation without a lowering runs on the CPU when it is recorded."""
    return xla_model


def all_tensors_on_xla_device(value: Any) -> bool:
    """Whether every tensor of a nested structure is on the device."""
    return all(is_xla_tensor(t) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


@contextmanager
def alias_with_buffer_donor_config(should_alias: bool = True) -> Iterator[None]:
    """A context without effect: a buffer that no tensor holds is always taken over."""
    yield
