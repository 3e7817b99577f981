"""SGD's momentum begins as zeros, so that the first step is the program of all steps.

torch's first step sets each momentum buffer to the gradient, and later steps compute
`momentum * buffer + (1 - dampening) * gradient`: two programs. From a buffer of -0.0, which changes
no sum, the second form without dampening gives the gradient to the last bit; only denormal numbers
become 0 where the device's arithmetic has none, as they do in later steps. With dampening the two
forms differ, and the first step stays a program of its own.
"""

import math
from typing import Any

import torch
from torch.optim import SGD

from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_init_group_of_torch: Any = SGD._init_group


def _init_group(
    optimizer: SGD,
    group: dict[str, Any],
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momentum_buffer_list: list[torch.Tensor | None],
) -> Any:
    """`SGD._init_group`, which collects the buffers of a group's parameters, None for no buffer."""
    result = _init_group_of_torch(optimizer, group, params, grads, momentum_buffer_list)
    momentum = group["momentum"]
    if (
        isinstance(momentum, float)
        and 0 < momentum < math.inf
        and group["dampening"] == 0
        and not group["differentiable"]
    ):
        for i, (grad, buffer) in enumerate(zip(grads, momentum_buffer_list)):
            if buffer is None and isinstance(grad, XLAShardedTensor):
                momentum_buffer_list[i] = torch.full_like(grad, -0.0)
    return result


def install() -> None:
    """Makes SGD begin with momentum buffers for gradients on the device."""
    SGD._init_group = _init_group  # type: ignore[method-assign]
