"""`prime_optimizer`: an optimizer's state, so that a checkpoint has somewhere to go."""

import torch

import torch_xla
from spmd_core.arguments import require_kind


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Has an optimizer make its state, by a step with gradients of zero. Returns the optimizer.

    torch.distributed.checkpoint loads into tensors that are there, and an optimizer has none before
    its first step. The state is sharded as its parameters. This is destructive: weight decay
    changes the parameters, and a state that is there goes on by a step. Load right after it.

    Raises:
        TypeError: `optimizer` is none.
    """
    require_kind("optimizer", optimizer, torch.optim.Optimizer, write="a torch.optim.Optimizer")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return optimizer
