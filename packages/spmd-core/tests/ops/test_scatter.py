"""Writes at positions given by tensors, against eager torch."""

from typing import Any

import pytest
import torch

from oracle import check, lower
from spmd_core.ops import registry, scatter  # noqa: F401  (importing the family registers it)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
REDUCTIONS = ["sum", "prod", "mean", "amax", "amin"]


def values(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(size).numel()
    if dtype is torch.bool:
        return torch.arange(count).reshape(size) % 3 == 0
    return torch.arange(1, count + 1).reshape(size).to(dtype)


def permuted(*size: int, dim: int) -> torch.Tensor:
    """Indices along `dim` without repeats, so that plain writes have a unique result."""
    return torch.rand(size, generator=torch.Generator().manual_seed(0)).argsort(dim)


# One row per case: shapes of the base, the index and the source, and the dim.
SCATTERED = [
    ((4, 5), (4, 5), (4, 5), 0),
    ((4, 5), (4, 5), (4, 5), -1),
    ((4, 5), (3, 2), (4, 4), 1),
    ((6, 5), (3, 2), (3, 2), 0),
    ((4, 3, 5), (2, 3, 1), (2, 3, 4), 1),
    ((4,), (4,), (4,), 0),
    ((4, 5), (0, 5), (4, 5), 0),
    ((), (), (), -1),
    ((), (1,), (1,), 0),
]


@pytest.mark.parametrize("case", SCATTERED, ids=str)
def test_scatter(case: tuple[Any, ...]) -> None:
    size, index_size, source_size, dim = case
    x, source = values(*size), -values(*source_size)
    index = permuted(*index_size, dim=dim)
    check("aten.scatter.src", x, dim, index, source)
    check("aten.scatter.value", x, dim, index, 2.5)
    check("aten.scatter_add.default", x, dim, index // 2, source)
    check("aten.scatter_reduce.two", x, dim, index // 2, source, "mean", include_self=False)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")  # torch's own
def test_scatter_that_reduces() -> None:
    x, source, index = values(6, 5), -values(3, 3), torch.tensor([[1, 1], [1, 4], [0, 4]])
    for reduce in ("add", "multiply"):
        check("aten.scatter.reduce", x, 0, index, source, reduce=reduce)
        check("aten.scatter.value_reduce", x, 1, index, 2.5, reduce=reduce)
    for reduce in REDUCTIONS:
        check("aten.scatter_reduce.two", x, 1, index, source, reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_in_other_dtypes(dtype: torch.dtype) -> None:
    x, source, index = values(4, 5, dtype=dtype), values(4, 5, dtype=dtype), permuted(4, 5, dim=0)
    check("aten.scatter.src", x, 0, index, source)
    check("aten.scatter.value", x, 0, index, 1)
    check("aten.scatter_add.default", x, 0, index // 2, source)
    if dtype is torch.bool:
        return
    for reduce in REDUCTIONS:
        for include_self in (True, False) if dtype is torch.float32 else (False,):
            check(
                "aten.scatter_reduce.two",
                -x,
                0,
                index // 2,
                source % 7 - 2,
                reduce,
                include_self=include_self,
            )


def test_scatter_reduce_of_nan_and_infinity() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    source = torch.tensor([float("nan"), 2.0, float("-inf"), 5.0])
    for reduce in REDUCTIONS:
        for include_self in (True, False):
            check(
                "aten.scatter_reduce.two",
                x,
                0,
                torch.tensor([0, 1, 2, 2]),
                source,
                reduce,
                include_self=include_self,
            )


def test_many_addends_of_16_bits_are_summed_in_float32() -> None:
    ones, zeros = torch.ones(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.int64)
    out = (registry.Out((1,), torch.bfloat16),)
    for name, args in (
        ("aten.scatter_add.default", (ones[:1], 0, zeros, ones)),
        ("aten.index_add.default", (ones[:1], 0, zeros, ones)),
        ("aten.index_put.default", (ones[:1], [zeros], ones, True)),
    ):
        (total,) = lower(name, args, {}, out)
        assert abs(float(total[0]) - 1001) <= 4  # bfloat16 alone would stop at 256


@pytest.mark.filterwarnings("ignore:index_reduce\\(\\) is in beta")  # torch's own
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_add_copy_and_fill(dtype: torch.dtype) -> None:
    x, index = values(4, 5, dtype=dtype), torch.tensor([3, 0])
    check("aten.index_copy.default", x, 0, index, x[:2])
    check("aten.index_copy.default", x, -1, index, x[:, 1:3])
    check("aten.index_fill.int_Scalar", x, 1, index, 1)
    check("aten.index_fill.int_Tensor", x, 0, torch.tensor([-1]), torch.tensor(1, dtype=dtype))
    check("aten.index_add.default", x, 0, torch.tensor([1, 1, 0]), x[:3])
    check("aten.index_add.default", torch.zeros_like(x), 0, torch.tensor([1, 1, 0]), x[:3], alpha=0)
    if dtype is not torch.bool:
        check(
            "aten.index_add.default",
            x,
            -1,
            torch.tensor([1, 1, 0], dtype=torch.int32),
            x[:, :3],
            alpha=2,
        )
        for reduce in REDUCTIONS[1:]:
            for include_self in (True, False) if dtype is torch.float32 else (False,):
                check(
                    "aten.index_reduce.default",
                    x,
                    0,
                    torch.tensor([1, 1, 3]),
                    x[:3] % 4 + 1,
                    reduce,
                    include_self=include_self,
                )


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_index_writes_of_0_dim_and_empty() -> None:
    point, zero, none = torch.tensor(3.0), torch.tensor([0]), torch.zeros(0, dtype=torch.int64)
    check("aten.index_add.default", point, 0, zero, torch.tensor(4.0), alpha=0.5)
    check("aten.index_add.default", values(3), 0, torch.tensor(1), torch.tensor([4.0]))
    check("aten.index_copy.default", point, 0, zero, torch.tensor(4.0))
    check("aten.index_copy.default", values(3), 0, torch.tensor(1), torch.tensor(4.0))
    check("aten.index_fill.int_Scalar", point, 0, zero, 7)
    check("aten.index_fill.int_Scalar", values(3, 2), 0, none, 7)
    check("aten.index_add.default", values(3, 2), 0, none, torch.ones(0, 2))
    check("aten.index_reduce.default", values(3, 2), 0, none, torch.ones(0, 2), "amax")


ROW, COLUMN = torch.tensor([2, 0, -2]), torch.tensor([[1], [3]])
# One row per case: shapes of the base and of the values, and the indices.
PUT = [
    ((3, 4), (3, 4), [ROW]),
    ((3, 4), (), [ROW]),
    ((3, 4), (4,), [ROW]),
    ((3, 4), (3, 1), [None, ROW]),
    ((3, 4), (2, 3), [ROW, COLUMN]),
    ((3, 4), (1,), [ROW.to(torch.int32), COLUMN]),
    ((3, 4, 5), (2, 3, 4), [ROW, None, COLUMN]),
    ((3, 4, 5), (3, 2, 3), [None, COLUMN, ROW]),
    ((3, 4, 5), (3, 1), [torch.tensor(1), None, ROW]),
    ((3, 4, 5), (3, 5), [None, torch.tensor(-1)]),
    ((3, 4), (0, 4), [ROW[:0]]),
]


@pytest.mark.parametrize("case", range(len(PUT)))
def test_index_put(case: int) -> None:
    size, values_size, indices = PUT[case]
    x, new = values(*size), -values(*values_size)
    check("aten.index_put.default", x, indices, new)
    check("aten.index_put.default", x, indices, new, True)
    if case == 0:
        check("aten._unsafe_index_put.default", x, indices, new)
        check("aten._index_put_impl.default", x, indices, new, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_put_in_other_dtypes(dtype: torch.dtype) -> None:
    x = values(3, 4, dtype=dtype)
    check("aten.index_put.default", x, [ROW], x[0])
    check(
        "aten.index_put.default",
        x,
        [torch.tensor([1, 1, 2]), torch.tensor([0, 0, 3])],
        x[0, 0],
        True,
    )
    check("aten.put.default", x, torch.tensor([0, -1]), x[0, :2])
    check("aten.put.default", x, torch.tensor([[0, -1], [0, 5]]), x[:2, :2], True)


FLAT, FULL = (
    torch.tensor([True, False, True]),
    torch.tensor([[True, False], [False, False], [True, True]]),
)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_through_a_mask(accumulate: bool) -> None:
    x = values(3, 2)
    for indices, new in (
        ([FULL], torch.tensor(9.0)),
        ([FULL], torch.tensor([9.0])),
        ([FLAT], torch.tensor(9.0)),
        ([FLAT], torch.tensor([8.0, 9.0])),
        ([FLAT], torch.tensor([[8.0, 9.0]])),
        ([~FULL & FULL], torch.tensor(9.0)),
    ):
        check("aten.index_put.default", x, indices, new, accumulate)
    check("aten.index_put.default", x, [torch.tensor(True)], torch.tensor(9.0))
    check("aten.index_put.default", values(4, 3, 5), [None, FLAT], torch.tensor(9.0), accumulate)
    check(
        "aten.index_put.default",
        values(4, 3, 5),
        [None, FLAT],
        torch.arange(20.0).reshape(4, 1, 5),
        accumulate,
    )
    check(
        "aten.index_put.default",
        values(4, 3, 2),
        [None, FULL],
        torch.arange(4.0).reshape(4, 1),
        accumulate,
    )
    check("aten.index_put.default", values(3, 2, 4), [FULL], torch.arange(4.0), accumulate)


@pytest.mark.parametrize(
    ("indices", "new", "reason"),
    [
        ([FLAT], torch.ones(2, 2), "one value per True"),
        ([FLAT, torch.tensor([0, 1])], torch.ones(2), "beside other indices"),
        ([FLAT.to(torch.uint8)], torch.ones(2), "uint8"),
    ],
    ids=["values", "mixed", "uint8"],
)
def test_masks_whose_number_of_trues_matters_go_to_the_host(
    indices: list[torch.Tensor], new: torch.Tensor, reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        lower(
            "aten.index_put.default",
            (values(3, 2), indices, new),
            {},
            (registry.Out((3, 2), torch.float32),),
        )


def test_masked_put_that_accumulates() -> None:
    mask, index = torch.tensor([True, False, True, True]), torch.tensor([0, 9, 2, 0])
    check(
        "aten._unsafe_masked_index_put_accumulate.default",
        values(3, 4),
        mask.reshape(4, 1),
        [index],
        values(4, 4),
    )
    check("aten._unsafe_masked_index_put_accumulate.default", values(3), mask, [index], values(4))


def test_put_of_0_dim_and_empty() -> None:
    check("aten.put.default", torch.tensor(3.0), torch.tensor([0]), torch.tensor([4.0]))
    check("aten.put.default", values(3), torch.tensor(1), torch.tensor(4.0))
    check("aten.put.default", values(3), torch.zeros(0, dtype=torch.int64), torch.zeros(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_scatter(dtype: torch.dtype) -> None:
    x, source = values(3, 2, dtype=dtype), values(7, dtype=dtype).logical_not().to(dtype)
    check("aten.masked_scatter.default", x, FULL, source)
    check("aten.masked_scatter.default", x, FLAT.reshape(3, 1), source)
    check("aten.masked_scatter.default", x, ~FULL & FULL, source[:0])
    check("aten.masked_scatter.default", x[0, 0], torch.tensor(True), source)
    check("aten.masked_scatter_backward.default", x, FULL, [7])
    check("aten.masked_scatter_backward.default", x, FULL, [2, 2])


def test_slices_that_do_not_fit_are_refused() -> None:
    x, index, source = torch.ones(3, 2), torch.tensor([0, 1]), torch.ones(2)
    outs = (registry.Out((3, 2), torch.float32),)
    for name, options in (("aten.index_add.default", ()), ("aten.index_reduce.default", ("prod",))):
        with pytest.raises(RuntimeError, match="Expand the source"):
            lower(name, (x, 0, index, source, *options), {}, outs)
        lower(name, (x, 0, index, source.expand(2, 2), *options), {}, outs)
        with pytest.raises(RuntimeError, match="Give one index for each slice"):
            lower(name, (x, 0, index[:1], source.expand(2, 2), *options), {}, outs)
    mine = x.to("xla")
    for write in (torch.index_add, mine.index_reduce, mine.index_add_, mine.index_reduce_):
        arguments = (
            0,
            index.to("xla"),
            source.to("xla"),
            *(("prod",) if "reduce" in write.__name__ else ()),
        )
        with pytest.raises(RuntimeError, match="source tensor shape must match self tensor shape"):
            write(mine, *arguments) if write is torch.index_add else write(*arguments)


def test_a_write_outside_is_dropped() -> None:
    x, outside, one = values(3), torch.tensor([7]), torch.tensor([-5.0])
    out = (registry.Out((3,), torch.float32),)
    for name, args in (
        ("aten.scatter.src", (x, 0, outside, one)),
        ("aten.scatter_add.default", (x, 0, -outside, one)),
        ("aten.index_add.default", (x, 0, outside, one)),
        ("aten.index_put.default", (x, [outside], one)),
        ("aten.put.default", (x, outside, one)),
    ):
        (got,) = lower(name, args, {}, out)
        assert got.tolist() == [1, 2, 3]
