"""Sorting, order statistics and binary search, against eager torch."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiers import crossed

from oracle import check, lower
from spmd_core import dtypes
from spmd_core.ops import registry, sort  # noqa: F401  (importing the family registers it)

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def shuffled(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct numbers out of order."""
    count = torch.Size(size).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).reshape(size)
    return (order % 2 == 0) if dtype is torch.bool else order.to(dtype)


def check_found(
    name: str, x: torch.Tensor, *args: Any, dim: int = -1, keepdim: bool = False, **kwargs: Any
) -> None:
    """Asserts that the values are torch's and that each index leads to its value.

    Of equal elements torch may return another index.
    """
    overload = registry.resolve(name)
    values, indices = overload(x, *args, **kwargs)
    got = lower(
        name,
        (x, *args),
        kwargs,
        tuple(registry.Out(tuple(y.shape), y.dtype) for y in (values, indices)),
    )
    mine, places = (dtypes.tensor_view(np.array(y)) for y in got)
    assert (mine.shape, mine.dtype, places.shape, places.dtype) == (
        values.shape,
        values.dtype,
        indices.shape,
        indices.dtype,
    )
    torch.testing.assert_close(mine, values.contiguous(), rtol=0, atol=0, equal_nan=True)
    if x.dim() and not keepdim and values.dim() < x.dim():
        mine, places = mine.unsqueeze(dim), places.unsqueeze(dim)
    torch.testing.assert_close(x.gather(dim, places), mine, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sort(dtype: torch.dtype, descending: bool) -> None:
    x = shuffled(4, 5, dtype=dtype)
    check("aten.sort.stable", x, stable=True, dim=0, descending=descending)
    check("aten.sort.stable", x, stable=None, descending=descending)
    if dtype is not torch.bool:
        check("aten.sort.default", x, 0, descending)


@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable_and_puts_nan_above_infinity(descending: bool) -> None:
    x = torch.tensor(
        [[2.0, NAN, 1, INF, 2, -INF, -0.0, 0.0, NAN, 1], [1, 1, 1, 0, 0, 0, 1, 1, 0, 0]]
    )
    for y in (x, x.T.contiguous(), x.to(torch.bfloat16), -x):
        check(
            "aten.sort.stable",
            y,
            stable=True,
            dim=-1 if y.shape[0] == 2 else 0,
            descending=descending,
        )
    check("aten.sort.stable", x[1].to(torch.int32), stable=True, descending=descending)
    check("aten.sort.stable", x[1].bool(), stable=True, descending=descending)
    lowest = torch.tensor([0, torch.iinfo(torch.int64).min, 5, torch.iinfo(torch.int64).max, 0])
    check("aten.sort.stable", lowest, stable=True, descending=descending)
    for y in (x[0, 0], x[:0], x[:, :0]):
        check("aten.sort.default", y, -1, descending)


@pytest.mark.parametrize(("dtype", "largest"), crossed([*DTYPES[:-1]], [True, False]))
def test_topk(dtype: torch.dtype, largest: bool) -> None:
    x = shuffled(4, 6, dtype=dtype)
    check("aten.topk.default", x, 3, -1, largest)
    check("aten.topk.default", x, 2, 0, largest)
    check("aten.topk.default", x, 6, 1, largest, True)
    check("aten.topk.default", x[0, 0], 1, -1, largest)
    check("aten.topk.default", x[:0], 2, 1, largest)


@pytest.mark.parametrize("largest", [True, False])
def test_topk_counts_nan_as_largest(largest: bool) -> None:
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)[0]
    x = torch.tensor([1.0, NAN, 3, negative_nan, -INF, INF])
    for dtype in (torch.float32, torch.bfloat16):
        for k in (0, 3, 6):
            check_found("aten.topk.default", x.to(dtype), k, 0, largest)
    lowest = torch.tensor([0, torch.iinfo(torch.int64).min, 5, torch.iinfo(torch.int64).max])
    check("aten.topk.default", lowest, 2, 0, largest)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_one_element_by_rank(dtype: torch.dtype) -> None:
    x = shuffled(3, 4, dtype=dtype)
    for dim, keepdim in ((0, True), (-1, False)):
        check("aten.kthvalue.default", x, 2, dim, keepdim)
        check("aten.median.dim", x, dim, keepdim)
        check("aten.nanmedian.dim", x, dim, keepdim)
    check("aten.median.default", x)
    check("aten.nanmedian.default", x)


def test_rank_of_0_dim_and_empty() -> None:
    x = shuffled(3, 4)
    for name, args in (
        ("kthvalue.default", (1,)),
        ("median.dim", (0,)),
        ("nanmedian.dim", (-1,)),
        ("median.default", ()),
        ("nanmedian.default", ()),
    ):
        check(f"aten.{name}", x[0, 0], *args)
    check("aten.median.dim", x[:, :0], 0)
    check("aten.kthvalue.default", x[:, :0], 1, 0)


def test_ranks_among_nan_and_equal_elements() -> None:
    x = torch.tensor([[3.0, NAN, 1, 1], [NAN, NAN, 2, 9], [1, 1, 1, 4], [NAN, NAN, NAN, NAN]])
    for name, args in (("kthvalue.default", (3,)), ("median.dim", ()), ("nanmedian.dim", ())):
        check_found(f"aten.{name}", x, *args, 1, dim=1)
        check_found(f"aten.{name}", x, *args, 0, dim=0)
        check_found(f"aten.{name}", x, *args, -1, True, dim=-1, keepdim=True)
    for y in (x, x[0], x[2], x[3], x.to(torch.bfloat16), x[:0]):
        check("aten.median.default", y)
        check("aten.nanmedian.default", y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mode(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, 1, 3, 1, 2], [0, 0, 0, 1, 1], [4, 3, 2, 1, 0]]).to(dtype)
    for dim in (0, 1):
        for keepdim in (False, True):
            check_found("aten.mode.default", x, dim, keepdim, dim=dim, keepdim=keepdim)
    check("aten.mode.default", x[0, 0])


@pytest.mark.parametrize(
    ("dtype", "right"),
    crossed([torch.float32, torch.float64, torch.bfloat16, torch.int64], [False, True]),
    ids=str,
)
def test_binary_search(dtype: torch.dtype, right: bool) -> None:
    sequence, x = (
        torch.tensor([1, 3, 3, 3, 7, 9]).to(dtype),
        torch.arange(-1, 11).reshape(3, 4).to(dtype),
    )
    check("aten.searchsorted.Tensor", sequence, x, right=right)
    check("aten.searchsorted.Scalar", sequence, 3.5, out_int32=True, right=right)
    check("aten.bucketize.Tensor", x, sequence, out_int32=True, right=right)
    check("aten.bucketize.Scalar", 3, sequence, right=right)


@pytest.mark.parametrize("right", [False, True])
def test_binary_search_of_0_dim_and_empty(right: bool) -> None:
    sequence, x = torch.tensor([1.0, 3, 3]), torch.tensor([[0.0, 1, 3, 4]])
    check("aten.searchsorted.Tensor", sequence, x[0, 0], right=right)
    check("aten.searchsorted.Tensor", sequence, x[:0], right=right)
    check("aten.searchsorted.Tensor", sequence[:0], x, right=right)
    check("aten.searchsorted.Tensor", sequence[:1], x, right=right)


def test_binary_search_by_rows_sides_and_sorters() -> None:
    sequence = torch.tensor([[1.0, 3, 5, 7], [2, 2, 2, 9]])
    x = torch.tensor([[0.0, 3, 8], [2, 1, 9]])
    check("aten.searchsorted.Tensor", sequence, x)
    check("aten.searchsorted.Tensor", sequence, x, side="right")
    check("aten.searchsorted.Tensor", sequence, x, side="left")
    check(
        "aten.searchsorted.Tensor",
        sequence.flip(1),
        x,
        sorter=torch.arange(3, -1, -1).expand(2, 4).contiguous(),
    )
    check("aten.searchsorted.Tensor", sequence[0], torch.tensor([NAN, INF, -INF, 3]))
    check(
        "aten.searchsorted.Tensor",
        torch.tensor([1.0, 2, INF, NAN]),
        torch.tensor([NAN, INF, 1.5, 3]),
        right=True,
    )
    check(
        "aten.searchsorted.Tensor",
        torch.tensor([1.0, 2, INF, NAN]),
        torch.tensor([NAN, INF, 1.5, 3]),
    )


def test_searches_in_and_for_nothing() -> None:
    for shape, wanted in (
        ((0,), (3,)),
        ((0,), ()),
        ((3,), (2, 0)),
        ((2, 0), (2, 3)),
        ((0, 3), (0, 2)),
        ((2, 3), (2, 0)),
        ((0, 0), (0, 0)),
    ):
        sequence = torch.arange(float(math.prod(shape))).reshape(shape)
        check("aten.searchsorted.Tensor", sequence, torch.rand(wanted))
        if len(shape) == 1:
            check("aten.bucketize.Tensor", torch.rand(wanted), sequence)
    check("aten.searchsorted.Scalar", torch.zeros(0), 2.0)


def test_boundaries_of_rows_are_refused() -> None:
    boundaries = torch.rand(2, 2).to("xla")
    with pytest.raises(RuntimeError, match="boundaries tensor must be 1 dimension"):
        torch.bucketize(boundaries, boundaries)
    torch.searchsorted(boundaries, boundaries)


@pytest.mark.parametrize("invert", [False, True])
def test_isin(invert: bool) -> None:
    x = torch.tensor([[1, 2], [3, 4]])
    check("aten.isin.Tensor_Tensor", x, torch.tensor([[1], [4]]), invert=invert)
    check("aten.isin.Tensor_Tensor", x, torch.empty(0), invert=invert)
    check("aten.isin.Tensor_Scalar", x, 3, invert=invert)
    check("aten.isin.Scalar_Tensor", 3, x, invert=invert)


@pytest.mark.parametrize("num", [32, 33, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_isin_of_many_values(num, dtype):
    """More than a few values are sorted."""
    x = torch.randint(-300, 300, (7, 9)).to(dtype)
    tests = torch.randint(-300, 300, (num,)).to(dtype)
    check("aten.isin.Tensor_Tensor", x, tests)
    if dtype.is_floating_point:
        odd = torch.tensor([math.nan, math.inf, -0.0], dtype=dtype)
        check("aten.isin.Tensor_Tensor", torch.cat([x[0], odd]), torch.cat([tests, odd.abs()]))
