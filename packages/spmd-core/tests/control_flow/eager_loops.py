"""The loops of `spmd_core.control_flow` in plain Python, on tensors of the CPU."""

import torch
from torch.utils import _pytree as pytree

import spmd_core as spmd


def scan(fn, init, xs, *, reverse=False):
    """As `control_flow.scan`, for at least one iteration."""
    count = len(pytree.tree_leaves(xs)[0])
    ys = []
    for i in reversed(range(count)) if reverse else range(count):
        init, y = fn(init, pytree.tree_map(lambda x, i=i: x[i], xs))
        ys.append(y)
    ys = ys[::-1] if reverse else ys
    return init, pytree.tree_map(lambda *each: torch.stack(each), *ys)


def cond(pred, true_fn, false_fn, *operands):
    return (true_fn if pred else false_fn)(*operands)


def on(device):
    """`scan` and `cond` for tensors on a device."""
    if device == "cpu":
        return scan, cond
    return spmd.control_flow.scan, spmd.control_flow.cond


def both(compute, *tensors, rtol=1e-4, atol=1e-5):
    """Compares `compute(device, *tensors)`, a list of tensors, on the device with the CPU."""
    results = []
    for device in ("cpu", "xla"):
        given = [t.clone().to(device) for t in tensors]
        given = [t.requires_grad_() if t.is_floating_point() else t for t in given]
        results.append([t.detach().cpu() for t in compute(device, *given)])
    for right, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=rtol, atol=atol)
