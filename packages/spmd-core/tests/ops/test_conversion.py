"""Copies, conversions and fills against eager torch on the CPU."""

import pytest
import torch
from samples import values

from oracle import check


@pytest.mark.parametrize(
    "target",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_to_copy(target: torch.dtype) -> None:
    check("aten._to_copy.default", torch.tensor([-1.9, 1.9, 0.0, 100.7]), dtype=target)
    check("aten._to_copy.default", torch.tensor([-1, 300, 0, 7]), dtype=target)
    check("aten._to_copy.default", torch.tensor([True, False]), dtype=target)
    check("aten._to_copy.default", values(torch.bfloat16), dtype=target)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # torch's, on the CPU
def test_to_copy_of_complex() -> None:
    check("aten._to_copy.default", torch.tensor([1.5, 2.0]), dtype=torch.complex64)
    check("aten._to_copy.default", torch.tensor([1j, 0j, 1 + 0j]), dtype=torch.bool)
    check("aten._to_copy.default", torch.tensor([1.5 + 2j]), dtype=torch.float32)


def test_clone_copy_fill_zero() -> None:
    x = values(torch.float32)
    check("aten.clone.default", x)
    check("aten.copy.default", x, torch.tensor([1, 2, 3, 4, 5]))
    check("aten.copy.default", values(torch.int64), values(torch.float32, shape=(3, 1)))
    for like in (x, values(torch.int64), values(torch.bool), values(torch.bfloat16)):
        check("aten.fill.Scalar", like, 2.7)
        check("aten.fill.Tensor", like, torch.tensor(3))
        check("aten.zero.default", like)


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_a_float8_cannot_hold(source, target):
    values = [0.1, 447, 448, 456, 464, 465, 500, -1e4, 6e4, float("inf"), float("-inf"), torch.nan]
    x = torch.tensor(values, dtype=source)
    right = x.to(target).float()
    torch.testing.assert_close(x.to("xla").to(target).cpu().float(), right, equal_nan=True)
    written = torch.zeros(len(x), dtype=target, device="xla").copy_(x.to("xla"))
    torch.testing.assert_close(written.cpu().float(), right, equal_nan=True)
