"""Composite operations that are recorded whole: kernels above autograd, for what torch would otherwise take apart before we see it."""

from collections.abc import Sequence

import torch

from spmd_core.ops import registry
from spmd_core.recording import NO_KWARGS, functional_handler
from spmd_core.tensor import XLAShardedTensor

_lowering = registry.find(torch.ops.aten.layer_norm.default)
assert _lowering is not None
_record_layer_norm = functional_handler(_lowering)


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """`aten::layer_norm`. Its parts return the statistics that a backward needs, as two more tensors; without one they only cost."""
    if torch.is_grad_enabled() or not isinstance(x, XLAShardedTensor):
        return torch.native_layer_norm(x, normalized_shape, weight, bias, eps)[0]
    return _record_layer_norm((x, normalized_shape, weight, bias, eps), NO_KWARGS)


def install() -> torch.library.Library:
    """Registers the kernels; they live as long as the library that is returned."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("layer_norm", layer_norm, "AutogradXLA")
    return library
