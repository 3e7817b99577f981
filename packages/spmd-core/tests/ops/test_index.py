"""Reads at positions given by tensors, against eager torch."""

from typing import Any

import jax.numpy as jnp
import pytest
import torch
from tiers import crossed

from oracle import check, lower
from spmd_core.ops import index, registry  # noqa: F401  (importing the family registers it)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
ROW = torch.tensor([2, 0, 1, -1])
COLUMN = torch.tensor([[1], [0]])


def values(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(size).numel()
    if dtype is torch.bool:
        return torch.arange(count).reshape(size) % 3 == 0
    return torch.arange(1, count + 1).reshape(size).to(dtype)


INDEXED = [
    ((3, 4), [ROW]),
    ((3, 4), [None, ROW]),
    ((3, 4), [COLUMN, ROW]),
    ((3, 4), [ROW.to(torch.int32), ROW]),
    ((3, 4, 5), [ROW, None, ROW]),
    ((3, 4, 5), [None, ROW, COLUMN]),
    ((3, 4, 5), [COLUMN, None, None]),
    ((3, 4, 5), [torch.tensor(1), None, ROW]),
    ((3, 4, 5), [None, torch.tensor(-1)]),
    ((3, 4, 5, 6), [None, ROW, None, COLUMN]),
    ((3, 4, 5, 6), [None, COLUMN, ROW]),
    ((3, 4), [ROW[:0]]),
    ((3, 4), [ROW[:0], torch.tensor(0)]),
    ((3, 0), [ROW]),
]


@pytest.mark.parametrize("case", range(len(INDEXED)))
@pytest.mark.parametrize("name", ["aten.index.Tensor", "aten._unsafe_index.Tensor"])
def test_advanced_indexing(name: str, case: int) -> None:
    size, indices = INDEXED[case]
    check(name, values(*size), indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_read_in_every_dtype(dtype: torch.dtype) -> None:
    x = values(3, 4, dtype=dtype)
    check("aten.index.Tensor", x, [ROW, COLUMN])
    check("aten.index_select.default", x, 1, ROW[:3])
    check("aten.gather.default", x, 1, ROW[:3].reshape(3, 1))
    check("aten.take.default", x, ROW)
    check("aten.nonzero_static.default", x, size=5)
    if dtype is not torch.bool:
        check("aten.embedding.default", x, COLUMN)


@pytest.mark.parametrize(
    "mask",
    [torch.tensor([True, False, True]), torch.tensor([1, 0, 1], dtype=torch.uint8)],
    ids=["bool", "uint8"],
)
def test_a_mask_goes_to_the_host(mask: torch.Tensor) -> None:
    with pytest.raises(NotImplementedError, match="depends on the mask's values"):
        lower(
            "aten.index.Tensor", (values(3, 4), [mask]), {}, (registry.Out((2, 4), torch.float32),)
        )


def test_masked_index() -> None:
    where, mask = torch.tensor([0, 9, 2, -4]), torch.tensor([True, False, True, False])
    check("aten._unsafe_masked_index.default", values(3, 4), mask.reshape(4, 1), [where], 7)
    check(
        "aten._unsafe_masked_index.default",
        values(3, 4).to(torch.bfloat16),
        mask,
        [where.clamp(0, 2), where],
        0.5,
    )


def test_index_select() -> None:
    for dim in (0, 2, -1, -2):
        check(
            "aten.index_select.default",
            values(3, 4, 5),
            dim,
            torch.tensor([2, 0, 0], dtype=torch.int32),
        )
    check("aten.index_select.default", values(3), 0, torch.tensor(2))
    check("aten.index_select.default", values(3, 4), 0, ROW[:0])
    check("aten.index_select.default", torch.tensor(5.0), 0, torch.tensor([0]))


def test_gather() -> None:
    x = values(3, 4, 5)
    check("aten.gather.default", x, 1, torch.randint(4, (3, 7, 5)))
    check("aten.gather.default", x, -1, torch.randint(5, (2, 1, 9)))
    check("aten.gather.default", x, 0, torch.randint(3, (1, 4, 1)), sparse_grad=False)
    check("aten.gather.default", x, 0, torch.zeros(0, 4, 5, dtype=torch.int64))
    check("aten.gather.default", x, 0, torch.zeros(0, dtype=torch.int64))
    check("aten.gather.default", values(1), 0, torch.tensor(0))
    check("aten.gather.default", torch.tensor(4.0), 0, torch.tensor([0, 0]))
    check("aten.gather.default", torch.tensor(4.0), -1, torch.tensor(0))


def test_take() -> None:
    check("aten.take.default", values(3, 4), torch.tensor([[11, -12], [0, -1]]))
    check("aten.take.default", torch.tensor(3.0), torch.tensor([0, 0]))
    check("aten.take.default", values(3), torch.tensor(1))


def test_nonzero_static() -> None:
    x = torch.tensor([[0.0, 1, 2], [3, 0, 0]])
    check("aten.nonzero_static.default", x, size=3)
    check("aten.nonzero_static.default", x, size=2)
    check("aten.nonzero_static.default", x, size=6, fill_value=7)
    check("aten.nonzero_static.default", x[0] == 9, size=2)
    check("aten.nonzero_static.default", x[:0], size=2, fill_value=7)


def test_embedding() -> None:
    weight = values(7, 3)
    check("aten.embedding.default", weight, torch.tensor([[6, 0], [3, 3]]))
    check("aten.embedding.default", weight, torch.tensor(4), 2)
    check("aten.embedding.default", weight, torch.tensor([4, 1], dtype=torch.int32), 2, True)
    check("aten.embedding.default", weight, torch.zeros(2, 0, dtype=torch.int64))


@pytest.mark.parametrize(
    ("padding", "by_freq", "dtype"),
    crossed([-1, 2], [False, True], [torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_gradient_of_embedding(padding: int, by_freq: bool, dtype: torch.dtype) -> None:
    indices = torch.tensor([[2, 0, 0], [6, 2, 0]])
    check(
        "aten.embedding_dense_backward.default",
        (values(2, 3, 4) / 8).to(dtype),
        indices,
        7,
        padding,
        by_freq,
    )
    check(
        "aten.embedding_dense_backward.default",
        (values(4) / 8).to(dtype),
        torch.tensor(3, dtype=torch.int32),
        7,
        padding,
        by_freq,
    )
    check(
        "aten.embedding_dense_backward.default",
        torch.ones(0, 4, dtype=dtype),
        indices[0, :0],
        7,
        padding,
        by_freq,
    )


def test_many_equal_rows_are_summed_in_float32() -> None:
    grad = torch.ones(1000, 1, dtype=torch.bfloat16)
    out = (registry.Out((1, 1), torch.bfloat16),)
    (total,) = lower(
        "aten.embedding_dense_backward.default",
        (grad, torch.zeros(1000, dtype=torch.int64), 1, -1, False),
        {},
        out,
    )
    assert float(total[0, 0]) == 1000  # bfloat16 alone would stop at 256


def test_an_index_outside_reads_inside_and_writes_nothing() -> None:
    x, outside = values(3), torch.tensor([7])
    reads: tuple[tuple[str, Any], ...] = (
        ("aten.index_select.default", (x, 0, outside)),
        ("aten.gather.default", (x, 0, outside)),
        ("aten.index.Tensor", (x, [outside])),
    )
    for name, args in reads:
        (got,) = lower(name, args, {}, (registry.Out((1,), torch.float32),))
        assert float(got[0]) == 3
    args: tuple[Any, ...] = (torch.ones(2, 1), torch.tensor([7, -1]), 3, -1, False)
    (gradient,) = lower(
        "aten.embedding_dense_backward.default", args, {}, (registry.Out((3, 1), torch.float32),)
    )
    assert not jnp.any(gradient)
