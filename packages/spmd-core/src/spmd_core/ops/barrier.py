"""The optimization barrier: an identity of several arrays that XLA does not move or fuse across."""

from collections.abc import Sequence
from typing import Any

import jax
import torch

from spmd_core.ops.registry import Context, lowering

# The operation, as recorded entries name it. Each result is the operand of its position.
BARRIER = "spmd::optimization_barrier"

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("optimization_barrier(Tensor[] tensors) -> Tensor[]")
_library.impl(
    "optimization_barrier", lambda tensors: [x.new_empty(x.shape) for x in tensors], "Meta"
)


@lowering("spmd.optimization_barrier.default")
def _optimization_barrier(ctx: Context, tensors: Sequence[Any]) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.optimization_barrier(tuple(tensors)))
