"""Indices that are tensors on the device, where no value can be read."""

import torch

from spmd_core.control_flow import scan

X = torch.arange(4 * 5 * 6).reshape(4, 5, 6)


def test_slices_at_positions_that_no_host_knows():
    def slices(x, i):
        return [
            x[i],
            x[:, i],
            x[i, i],
            x[..., i],
            x[1, i],
            x[i, ..., 2:4],
            x[None, i],
            x[i - 4],
            x[i, :, i],
            x[..., i, :],
            x[..., i, 2],
            x[[0, 1]],
        ]

    x = X.to("xla")
    first = torch.zeros((), device="xla")
    _, mine = scan(lambda c, i: (c, slices(x, i)), first, torch.arange(4, device="xla"))
    for at, right in enumerate(zip(*(slices(X, i) for i in range(4)))):
        assert torch.equal(mine[at].cpu(), torch.stack(right)), at
