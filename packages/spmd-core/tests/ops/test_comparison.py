"""Comparison, logic and selection against eager torch on the CPU."""

import pytest
import torch
from samples import FLOATS, INF, NAN, SPECIAL, values

from oracle import check
from spmd_core.ops import comparison


@pytest.mark.parametrize("op", sorted(comparison._COMPARISONS))
def test_comparisons(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        check(
            f"aten.{op}.Tensor",
            values(dtype).round() if dtype.is_floating_point else values(dtype),
            values(dtype, seed=1),
        )
    check(f"aten.{op}.Tensor", torch.tensor(SPECIAL)[:, None], torch.tensor(SPECIAL))
    check(f"aten.{op}.Scalar", torch.tensor([1, 2, 3]), 2.5)
    check(f"aten.{op}.Scalar", torch.tensor([1, 2, 3]), 2)
    check(f"aten.{op}.Scalar", torch.tensor([1.0, 2.0]), 2)
    check(f"aten.{op}.Scalar", torch.tensor([0.1, 0.2], dtype=torch.bfloat16), 0.1)


def test_integers_are_compared_with_fractions() -> None:
    check("aten.eq.Scalar", torch.tensor([1, 2, 3]), 2.5)
    check("aten.lt.Tensor", torch.tensor([1, 2, 3]), torch.tensor(2.5).view(1))


@pytest.mark.parametrize("op", ["logical_and", "logical_or", "logical_xor"])
def test_logic(op: str) -> None:
    a, b = torch.tensor([0.0, 1.0, NAN, 0.0])[:, None], torch.tensor([0, 0, 2, -1])
    check(f"aten.{op}.default", a, b)
    check(f"aten.{op}.default", b.bool(), a)


def test_not() -> None:
    check("aten.logical_not.default", torch.tensor([0.0, 1.0, NAN]))
    check("aten.bitwise_not.default", torch.tensor([0, 1, -9]))
    check("aten.bitwise_not.default", torch.tensor([0, 7], dtype=torch.uint8))
    check("aten.bitwise_not.default", torch.tensor([True, False]))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_clamp(dtype: torch.dtype) -> None:
    x = values(dtype, -9, 9)
    check("aten.clamp.default", x, -2, 3)
    check("aten.clamp.default", x, min=0.5)
    check("aten.clamp.default", x, None, 1)
    check("aten.clamp.default", x, 5, 2)
    check("aten.clamp.Tensor", x, values(dtype, -9, 9, (5,), 1), None)
    check("aten.clamp.Tensor", x, values(dtype, -9, 9, (5,), 1), torch.tensor(2.5))
    check("aten.clamp_min.default", x, 1)
    check("aten.clamp_max.default", x, 1)
    check("aten.clamp_min.Tensor", x, values(dtype, -9, 9, (1, 5), 1))
    check("aten.clamp_max.Tensor", x, values(dtype, -9, 9, (1, 5), 1))


def test_clamp_keeps_nan() -> None:
    check("aten.clamp.default", torch.tensor(SPECIAL), -1.5, 2.0)
    check("aten.clamp.Tensor", torch.tensor(SPECIAL), torch.tensor(NAN), None)


def test_where() -> None:
    condition = values(torch.bool)
    check("aten.where.self", condition, values(torch.float32), torch.tensor(2.0))
    check("aten.where.self", condition, values(torch.bfloat16), values(torch.float32, shape=(5,)))
    check("aten.where.self", condition[0], torch.tensor(1), values(torch.int32, -9, 9))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_masked_fill(dtype: torch.dtype) -> None:
    value = True if dtype is torch.bool else 7
    check("aten.masked_fill.Scalar", values(dtype), values(torch.bool, shape=(5,), seed=1), value)
    check(
        "aten.masked_fill.Tensor",
        values(dtype),
        values(torch.bool, shape=(3, 1), seed=1),
        torch.tensor(value),
    )
    if dtype.is_floating_point:
        check("aten.masked_fill.Scalar", values(dtype), values(torch.bool, seed=1), -INF)
