"""Joining, repeating, reordering, padding and putting pieces back, against eager torch."""

from typing import Any

import pytest
import torch

from oracle import check
from spmd_core.ops import rearrange, registry  # noqa: F401  (importing the family registers it)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def values(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(size).numel()
    if dtype is torch.bool:
        return torch.arange(count).reshape(size) % 3 == 0
    return torch.arange(1, count + 1).reshape(size).to(dtype)


def label(x: Any) -> str:
    return (
        "-".join(str(y).replace(" ", "") for y in x)
        if isinstance(x, tuple)
        else str(x).removeprefix("torch.")
    )


def test_joining() -> None:
    a, b, empty = values(2, 3), values(2, 1) * 10, torch.empty(0)
    for name in ("cat", "stack", "_stack"):
        check(f"aten.{name}.default", [a, a], 1)
        check(f"aten.{name}.default", [a, a + 1], -1)
        check(f"aten.{name}.default", [a, a.double()])
    check("aten.cat.default", [a, b, a], -1)
    check("aten.cat.default", [a, empty, b], 1)
    check("aten.cat.default", [empty, empty])
    check("aten.cat.default", [a[:0], a])
    check("aten.cat.default", [a.to(torch.int64), b.to(torch.bfloat16)], 1)
    check("aten.cat.default", [a > 2, a.to(torch.uint8)])
    check("aten.stack.default", [torch.tensor(1), torch.tensor(2)], -1)
    check(
        "aten.block_diag.default", [a, torch.tensor(5), values(3), values(0, 2), a.to(torch.int64)]
    )
    check("aten._chunk_cat.default", [values(5, 2), values(3, 4), values(4)], 0, 2)
    check("aten._chunk_cat.default", [values(2, 5, 2), values(2, 3)], 1, 3)


# One row per case: (overload, shape of the first tensor, arguments).
CASES = [
    ("aten.repeat.default", (2, 3), [2, 1]),
    ("aten.repeat.default", (3,), [2, 0, 2]),
    ("aten.repeat.default", (), [2, 2]),
    ("aten.repeat.default", (), []),
    ("aten.roll.default", (2, 3), [1]),
    ("aten.roll.default", (2, 3), [-4], [-1]),
    ("aten.roll.default", (2, 3), [1, 5], [0, 1]),
    ("aten.roll.default", (2, 3), [1, 1], [1, 1]),
    ("aten.roll.default", (0, 3), [1], [0]),
    ("aten.flip.default", (2, 3), [0, -1]),
    ("aten.flip.default", (2, 3), []),
    ("aten.flip.default", (), [0]),
    ("aten.flip.default", (0, 3), [0]),
    ("aten.rot90.default", (2, 3)),
    ("aten.rot90.default", (2, 3, 2), 3, [1, 2]),
    ("aten.rot90.default", (2, 3, 2), -2, [2, 0]),
    ("aten.channel_shuffle.default", (2, 6, 2, 2), 3),
    ("aten.pixel_shuffle.default", (2, 12, 2, 3), 2),
    ("aten.pixel_shuffle.default", (4, 2, 3), 2),
    ("aten.pixel_unshuffle.default", (2, 3, 4, 6), 2),
    ("aten.pixel_unshuffle.default", (3, 4, 6), 2),
    ("aten.tril.default", (3, 4)),
    ("aten.tril.default", (2, 3, 4), -1),
    ("aten.tril.default", (0, 4), 1),
    ("aten.triu.default", (4, 3), 1),
    ("aten.triu.default", (3, 4), -7),
    ("aten.diag_embed.default", (2, 3)),
    ("aten.diag_embed.default", (2, 3), -1, 0, 2),
    ("aten.diag_embed.default", (3,), 2, 1, 0),
    ("aten.diag_embed.default", (0,), 1),
    ("aten.diagonal_backward.default", (2, 3), [2, 4, 3], 0, 1, 2),
    ("aten.diagonal_backward.default", (2, 2), [3, 2, 4], -1, 0, -1),
    ("aten.select_backward.default", (2, 3), [2, 4, 3], 1, -1),
    ("aten.select_backward.default", (), [4], 0, 2),
    ("aten.slice_backward.default", (2, 3), [2, 8], 1, 1, 7, 2),
    ("aten.slice_backward.default", (2, 3), [5, 3], 0, -2, 9223372036854775807, 1),
    ("aten.slice_backward.default", (0, 3), [5, 3], 0, 4, 2, 1),
    ("aten.slice_backward.default", (0, 3), [5, 3], 0, 2, 2, 3),
    ("aten.constant_pad_nd.default", (2, 3), [1, 2]),
    ("aten.constant_pad_nd.default", (2, 3), [1, -1, 0, 2], 3),
    ("aten.constant_pad_nd.default", (2, 3), [-1, -1]),
    ("aten.constant_pad_nd.default", (2, 0), [1, 1], 1),
]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_one_tensor(case: tuple[Any, ...]) -> None:
    name, size, *args = case
    check(name, values(*size), *args)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=label)
@pytest.mark.parametrize("case", list({case[0]: case for case in CASES}.values()), ids=label)
def test_other_dtypes(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    name, size, *args = case
    check(name, values(*size, dtype=dtype), *args)


def test_repeat_interleave_of_counts() -> None:
    for counts in (
        torch.tensor([2, 0, 3]),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([0, 0]),
        torch.tensor([], dtype=torch.int64),
    ):
        check("aten.repeat_interleave.Tensor", counts, output_size=int(counts.sum()))


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_scatters_along_a_view(dtype: torch.dtype) -> None:
    x, src = values(4, 5, dtype=dtype), values(4, 5, dtype=dtype).logical_not().to(dtype)
    check("aten.select_scatter.default", x, src[0], 0, -2)
    check("aten.select_scatter.default", x, src[:, 1], -1, 3)
    check("aten.slice_scatter.default", x, src[:2], 0, 1, 3)
    check("aten.slice_scatter.default", x, src[:, :3], 1, 0, 9223372036854775807, 2)
    check("aten.slice_scatter.default", x, src)
    check("aten.as_strided_scatter.default", x, torch.ones(2, 2), (2, 2), (5, 1), 1)
    check("aten.slice_scatter.default", x, src[:0], 0, 3, 1)
    check("aten.diagonal_scatter.default", x, src[0, :4])
    check("aten.diagonal_scatter.default", x, src[0, :3], -1, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
def test_gradient_of_unfold(dtype: torch.dtype) -> None:
    check("aten.unfold_backward.default", values(3, 3, dtype=dtype), [7], 0, 3, 2)
    check("aten.unfold_backward.default", values(2, 4, 5, 3, dtype=dtype), [2, 6, 5], 1, 3, 1)
    check("aten.unfold_backward.default", values(2, 2, dtype=dtype), [7], 0, 2, 4)


PADS = [
    ("1d", (2, 5), [2, 1]),
    ("1d", (2, 3, 5), [0, 4]),
    ("1d", (2, 3, 5), [3, -1]),
    ("2d", (2, 4, 5), [1, 2, 3, 0]),
    ("2d", (1, 2, 4, 5), [-1, 2, 1, -2]),
    ("3d", (1, 2, 3, 4, 5), [1, 0, 2, 1, 0, 2]),
    ("3d", (2, 3, 4, 5), [4, 4, 3, 3, 2, 2]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("mode", ["reflection", "replication"])
@pytest.mark.parametrize("case", PADS, ids=label)
def test_padding_from_the_tensor_itself(
    case: tuple[Any, ...], mode: str, dtype: torch.dtype
) -> None:
    dims, size, padding = case
    # Small numbers: torch sums bfloat16 gradients in bfloat16, where only small sums are exact.
    x = values(*size) % 7
    check(f"aten.{mode}_pad{dims}.default", x.to(dtype), padding)
    grad = torch.ones_like(registry.resolve(f"aten.{mode}_pad{dims}.default")(x, padding)).to(dtype)
    check(f"aten.{mode}_pad{dims}_backward.default", grad, x.to(dtype), padding)
    if dtype is torch.float32:
        check(f"aten.{mode}_pad{dims}_backward.default", grad * values(*grad.shape), x, padding)
