"""Trains a model with eager torch on the CPU and sharded on the device, and compares the two.

Losses, gradients and buffers are compared.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import spmd_core as spmd

Batch = dict[str, Any]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD without momentum: these tests spend most of their time compiling."""
    return torch.optim.SGD(parameters, lr=1e-2)


def hugging_face(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def shard_parameters(model: nn.Module, mesh: spmd.Mesh, num_devices: int) -> None:
    """Splits each parameter over axis `x` along its first dim that `num_devices` divides.

    A parameter without such a dim is replicated.
    """
    for p in model.parameters():
        dim = next((d for d, n in enumerate(p.shape) if n and n % num_devices == 0), None)
        spmd.mark_sharding(p, mesh, tuple("x" if d == dim else None for d in range(p.dim())))


def to_device(batch: Batch, mesh: spmd.Mesh, num_devices: int) -> Batch:
    """The batch on the device; tensors are split over axis `x` along dim 0 where it divides."""
    moved = {}
    for name, x in batch.items():
        moved[name] = x.to("xla") if isinstance(x, torch.Tensor) else x
        if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] % num_devices == 0:
            spmd.mark_sharding(moved[name], mesh, ("x",))
    return moved


def check_training(
    model: nn.Module,
    batch: Batch,
    mesh: spmd.Mesh,
    *,
    loss_of: Callable[[nn.Module, Batch], torch.Tensor] = hugging_face,
    optimizer: Optimizer = sgd,
    steps: int = 3,
    rtol: float = 1e-4,
    grad_rtol: float = 1e-3,
) -> None:
    """Asserts that `steps` training steps agree with eager torch.

    Losses, first gradients and buffers are compared. No step after the first may compile.

    `grad_rtol` is relative to the largest gradient of the same tensor, because sums that cancel
    leave only rounding errors. The absolute tolerance is at least `grad_rtol` times a thousandth of
    the model's largest gradient: some gradients, such as that of a key's bias under a softmax, are
    0 except for rounding.
    """
    device_model = copy.deepcopy(model).to("xla")
    shard_parameters(device_model, mesh, mesh.size())
    gradients: list[list[dict[str, torch.Tensor]]] = [[], []]
    losses: list[list[torch.Tensor]] = [[], []]
    compiles: list[int] = []
    for i, m in enumerate((model, device_model)):
        inputs = to_device(batch, mesh, mesh.size()) if i else batch
        update = optimizer(m.parameters())
        for _ in range(steps):
            loss = loss_of(m, inputs)
            loss.backward()
            # Keep the gradients of every step, so that all steps have the same results and can
            # share one program.
            gradients[i].append(
                {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
            )
            update.step()
            update.zero_grad()
            losses[i].append(loss.detach())
            if i:
                spmd.sync()
                compiles.append(spmd.metrics.counter("compiles"))
    assert compiles == compiles[:1] * steps, f"compiled after the first step: {compiles}"
    for right, ours in zip(*losses):
        torch.testing.assert_close(ours.cpu(), right, rtol=rtol, atol=1e-6)
    first, device_first = gradients[0][0], gradients[1][0]
    assert first.keys() == device_first.keys()
    largest = max(float(g.abs().max()) for g in first.values())
    for name, right in first.items():
        atol = grad_rtol * max(float(right.abs().max()), 1e-3 * largest)
        torch.testing.assert_close(
            device_first[name].cpu(),
            right,
            rtol=0,
            atol=atol,
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )
    for (name, right), (_, ours) in zip(model.named_buffers(), device_model.named_buffers()):
        assert ours.device.type == "xla"
        torch.testing.assert_close(
            ours.cpu(),
            right,
            rtol=1e-3,
            atol=1e-4,
            msg=lambda text, name=name: f"buffer {name}: {text}",
        )
