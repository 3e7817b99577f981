"""Softmax, plain and over a mask, against eager torch on the CPU."""

import pytest
import torch
from samples import INF, normal

from oracle import check, lower
from spmd_core.ops import registry


@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax(op: str, dtype: torch.dtype) -> None:
    for dim in (0, 1, -1):
        check(f"aten.{op}.default", normal(dtype, 2, 3, 4) * 10, dim, False)
    check(f"aten.{op}.default", normal(dtype), 0, False)
    check(f"aten.{op}.default", normal(dtype, 0, 3), 1, False)
    check(
        f"aten.{op}.default",
        torch.tensor([[1e4, 0.0, -1e4], [-INF, 0.0, 1.0], [-INF, -INF, -INF]], dtype=dtype),
        1,
        False,
    )


@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
def test_softmax_from_sixteen_bits_to_float32(op: str) -> None:
    # torch supports half_to_float on GPUs only; converting the input first gives the same values.
    x = normal(torch.bfloat16, 3, 4)
    (got,) = lower(f"aten.{op}.default", (x, -1, True), {}, (registry.Out((3, 4), torch.float32),))
    torch.testing.assert_close(
        torch.tensor(got.tolist()), getattr(torch.ops.aten, op)(x.float(), -1, False)
    )


def test_safe_softmax() -> None:
    x = torch.tensor([[1.0, 2.0, -INF], [-INF, -INF, -INF]])
    check("aten._safe_softmax.default", x, -1)
    check("aten._safe_softmax.default", x.bfloat16(), 0, torch.float32)


@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_backward(op: str, dtype: torch.dtype) -> None:
    for dim in (0, -1):
        output = getattr(torch.ops.aten, op)(normal(dtype, 2, 3, 4), dim, False)
        check(
            f"aten.{op}_backward_data.default", normal(dtype, 2, 3, 4, seed=1), output, dim, dtype
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_softmax(dtype: torch.dtype) -> None:
    x, grad = normal(dtype, 2, 3, 4, 4), normal(dtype, 2, 3, 4, 4, seed=1)
    mask = normal(torch.float32, 2, 3, 4, 4, seed=2) > 1
    output = torch.softmax(x, -1)
    for dim in (None, -1, 0, 2):
        check("aten._masked_softmax.default", x, mask, dim, 2)
        check("aten._masked_softmax_backward.default", grad, output, mask, dim)
    check("aten._masked_softmax.default", x, mask[0, 0], -1, 0)
    check("aten._masked_softmax.default", x, mask[:, 0, 0], None, 1)
    check("aten._masked_softmax.default", x, torch.ones_like(mask))


def test_masks_that_are_refused() -> None:
    x = torch.ones(2, 4, 4, 4, device="xla")
    with pytest.raises(RuntimeError, match="Mask should be a boolean tensor"):
        torch.ops.aten._masked_softmax(x, x, -1, 2)
    torch.ops.aten._masked_softmax(x, x.bool(), -1, 2)
    with pytest.raises(RuntimeError, match=r"mask shape should be \(B, L\)"):
        torch.ops.aten._masked_softmax(x, x[0, 0].bool(), -1, 1)
    torch.ops.aten._masked_softmax(x, x[:, 0, 0].bool(), -1, 1)
