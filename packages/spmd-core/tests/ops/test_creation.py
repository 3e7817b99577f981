"""New tensors, against eager torch."""

from typing import Any

import pytest
import torch
from tiers import crossed

from oracle import check, lower
from spmd_core import dtypes
from spmd_core.ops import creation, registry  # noqa: F401  (importing the family registers it)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
SIZES: list[list[int]] = [[2, 3], [], [0, 4]]


@pytest.mark.parametrize(("size", "dtype"), crossed([*SIZES], [*DTYPES]))
def test_one_value_everywhere(size: list[int], dtype: torch.dtype) -> None:
    like = torch.ones(size, dtype=torch.int32)
    for value in ("zeros", "ones"):
        check(f"aten.{value}.default", size, dtype=dtype)
        check(f"aten.{value}_like.default", like, dtype=dtype)
        check(f"aten.new_{value}.default", like, [3, 2], dtype=dtype)
        check(f"aten.{value}_like.default", like.to(dtype))
    for fill in (True, -2.75):
        if dtype is not torch.bool or fill is True:
            check("aten.full.default", size, fill, dtype=dtype)
            check("aten.full_like.default", like, fill, dtype=dtype)
            check("aten.new_full.default", like, [3, 2], fill, dtype=dtype)
    check("aten.scalar_tensor.default", 1, dtype=dtype)


def test_full_without_a_dtype() -> None:
    for fill in (1, True, 2.75, float("inf"), float("nan"), 1 + 2j):
        check("aten.full.default", [2], fill)
    check("aten.scalar_tensor.default", 2.5)
    check("aten.full_like.default", torch.ones(2, dtype=torch.bfloat16), 0.1)


EMPTY: list[tuple[str, tuple[Any, ...]]] = [
    ("aten.empty.memory_format", ([2, 3],)),
    ("aten.empty_like.default", (torch.ones(2, 3),)),
    ("aten.new_empty.default", (torch.ones(1), [2, 3])),
    ("aten.empty_permuted.default", ([2, 3], [1, 0])),
    ("aten.empty_strided.default", ([2, 3], [1, 2])),
    ("aten.new_empty_strided.default", (torch.ones(1), [2, 3], [1, 2])),
    ("aten._efficientzerotensor.default", ([2, 3],)),
]


@pytest.mark.parametrize(("name", "args"), EMPTY, ids=[name for name, _ in EMPTY])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_is_zeros(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    (got,) = lower(name, args, {"dtype": dtype}, (registry.Out((2, 3), dtype),))
    assert got.shape == (2, 3)
    assert got.dtype == dtypes.to_jax(dtype)
    assert not got.any()


@pytest.mark.parametrize(
    "dtype",
    [None, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8],
    ids=str,
)
def test_arange(dtype: torch.dtype | None) -> None:
    for end in (0, 5, 4.5):
        check("aten.arange.default", end, dtype=dtype)
        check("aten.arange.start", -2 if dtype is not torch.uint8 else 1, end + 2, dtype=dtype)
    check("aten.arange.start_step", 1, 20, 3, dtype=dtype)
    if dtype is not torch.uint8:
        check("aten.arange.start_step", 20, 1, -3, dtype=dtype)
    check("aten.arange.start_step", 0.5, 6, 1.5, dtype=dtype)


def test_arange_of_large_and_fine_steps() -> None:
    check("aten.arange.start_step", 0, 1, 0.1)
    check("aten.arange.start_step", 0, 1000, 0.1, dtype=torch.float64)
    check("aten.arange.start", 2**53 + 1, 2**53 + 5)
    check("aten.arange.start", 2**24, 2**24 + 6, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_linspace(dtype: torch.dtype | None) -> None:
    for steps in (0, 1, 2, 7):
        check("aten.linspace.default", -3, 9.5, steps, dtype=dtype)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_linspace_between_tensors(dtype: torch.dtype | None) -> None:
    check("aten.linspace.Tensor_Tensor", torch.tensor(1.0), torch.tensor(4), 5, dtype=dtype)
    check("aten.linspace.Tensor_Scalar", torch.tensor(1), 4.5, 5, dtype=dtype)
    check("aten.linspace.Scalar_Tensor", 1, torch.tensor(4.5), 5, dtype=dtype)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.complex128], ids=str)
def test_logspace(dtype: torch.dtype | None) -> None:
    for steps in (0, 1, 6):
        check("aten.logspace.default", -1, 2.5, steps, dtype=dtype)
        check("aten.logspace.default", 3, 0, steps, 2.0, dtype=dtype)
    check("aten.logspace.Tensor_Tensor", torch.tensor(1.0), torch.tensor(4), 5, dtype=dtype)
    check("aten.logspace.Tensor_Scalar", torch.tensor(1), 2.5, 5, 3.0, dtype=dtype)
    check("aten.logspace.Scalar_Tensor", 1, torch.tensor(2.5), 5, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eye(dtype: torch.dtype) -> None:
    for n in (0, 3):
        check("aten.eye.default", n, dtype=dtype)
        check("aten.eye.m", n, 2, dtype=dtype)


@pytest.mark.parametrize("size", [(3, 3), (2, 5), (5, 2), (0, 3), (3, 0)], ids=str)
def test_triangle_indices(size: tuple[int, int]) -> None:
    for offset, dtype in (
        (-6, torch.int64),
        (-2, torch.int32),
        (0, torch.int64),
        (1, torch.int64),
        (7, torch.int32),
    ):
        check("aten.tril_indices.default", *size, offset, dtype=dtype)
        check("aten.triu_indices.default", *size, offset, dtype=dtype)
