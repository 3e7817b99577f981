"""Autocast on the device follows torch's policy: dtypes, nested and disabled regions, gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spmd_core.torch_backend import autocast


def x(*shape):
    return torch.randn(*shape, device="xla")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_policy(dtype):
    with torch.autocast("xla", dtype=dtype):
        assert (x(2, 2) @ x(2, 2)).dtype == dtype
        assert F.linear(x(2, 2), x(2, 2), x(2)).dtype == dtype
        assert F.conv2d(x(1, 1, 4, 4), x(1, 1, 3, 3)).dtype == dtype
        half = x(2, 2).to(dtype)
        assert F.softmax(half, -1).dtype == torch.float32
        assert F.layer_norm(half, (2,)).dtype == torch.float32
        assert half.sum().dtype == torch.float32 and half.exp().dtype == torch.float32
        assert F.cross_entropy(half, torch.tensor([0, 1], device="xla")).dtype == torch.float32
        assert torch.cat([half, x(2, 2)]).dtype == torch.float32
        assert F.gelu(half).dtype == dtype and (half + 1).dtype == dtype
        with torch.autocast("xla", enabled=False):
            assert (x(2, 2) @ x(2, 2)).dtype == torch.float32
        assert (x(2, 2).double() @ x(2, 2).double()).dtype == torch.float64
    assert (x(2, 2) @ x(2, 2)).dtype == torch.float32


def test_gradients_come_in_the_parameters_dtype():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).to("xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x(3, 4)), torch.tensor([0, 1, 0], device="xla"))
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(
        p.grad.dtype == torch.float32 and p.grad.abs().sum().item() > 0 for p in model.parameters()
    )


def test_close_to_the_cpus_autocast():
    torch.manual_seed(1)
    model, data = nn.Linear(16, 16), torch.randn(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(data)
    model.to("xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        got = model(data.to("xla"))
    torch.testing.assert_close(got.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_unsafe_loss_is_refused():
    with (
        torch.autocast("xla", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="Use binary_cross_entropy_with_logits"),
    ):
        F.binary_cross_entropy(torch.rand(2, device="xla"), torch.ones(2, device="xla"))


def test_every_listed_operation_has_one_policy():
    lists = (
        autocast._LOWER_PRECISION,
        autocast._FP32,
        autocast._FP32_SET_OPT_DTYPE,
        autocast._PROMOTE,
    )
    names = [n for names in lists for n in names]
    assert len(names) == len(set(names))
