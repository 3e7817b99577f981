"""Operations with handlers of their own: batch norm's statistics."""

import torch
import torch.nn.functional as F


def test_batch_norm_updates_both_running_statistics():
    x = torch.arange(24.0).view(4, 3, 2) ** 1.5
    states = []
    for device in ("cpu", "xla"):
        mean, var = torch.full((3,), 0.5, device=device), torch.full((3,), 2.0, device=device)
        for _ in range(2):
            out = F.batch_norm(x.to(device), mean, var, training=True, momentum=0.3)
        states.append([out.cpu(), mean.cpu(), var.cpu()])
    for expected, got in zip(*states):
        torch.testing.assert_close(got, expected)
