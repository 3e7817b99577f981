"""Views against eager torch: their values, and the base after a write through a view."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiers import crossed

from oracle import check
from spmd_core import dtypes
from spmd_core.ops import registry, views  # noqa: F401  (importing the family registers it)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def values(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct numbers, as far as the dtype has enough values."""
    if dtype is torch.bool:
        return torch.arange(int(np.prod(size))).reshape(size) % 3 == 0
    if dtype.is_complex:
        return torch.complex(values(size), -values(size) - 0.5).to(dtype)
    return torch.arange(1, int(np.prod(size)) + 1).reshape(size).to(dtype)


def check_write(name: str, base: torch.Tensor, *args: Any) -> None:
    """Asserts that a view write changes the base as a copy into torch's view does."""
    overload = registry.resolve(name)
    write = registry.find_view_write(overload)
    assert write is not None, f"{name} has no view write"
    right = base.clone()
    view = overload(right, *args)
    new = values(tuple(view.shape), view.dtype)
    new = new.logical_not() if view.dtype is torch.bool else (-new - 7).to(view.dtype)
    view.copy_(new)

    def array(x: torch.Tensor) -> np.ndarray:
        return dtypes.numpy_view(x.resolve_conj().resolve_neg().contiguous())

    with jax.enable_x64(True):
        mine = jax.jit(lambda b, v: write(b, v, *args))(
            jnp.asarray(array(base)), jnp.asarray(array(new))
        )
    assert mine.dtype == dtypes.to_jax(right.dtype) and mine.shape == tuple(right.shape)
    torch.testing.assert_close(
        dtypes.tensor_view(np.asarray(mine)), right, rtol=0, atol=0, equal_nan=True
    )


# Views that can be written: (overload, shape of the base, arguments).
WRITABLE = [
    ("aten.view.default", (2, 6), [3, 4]),
    ("aten.view.default", (2, 6), [-1]),
    ("aten.view.default", (), [1, 1]),
    ("aten.view.default", (0, 3), [3, 0]),
    ("aten._reshape_alias.default", (2, 6), [4, 3], [3, 1]),
    ("aten.squeeze.default", (1, 3, 1)),
    ("aten.squeeze.default", ()),
    ("aten.squeeze.dim", (1, 3, 1), -1),
    ("aten.squeeze.dim", (1, 3, 1), 1),
    ("aten.squeeze.dim", (), -1),
    ("aten.squeeze.dims", (1, 3, 1), [0, 2]),
    ("aten.squeeze.dims", (1, 3, 1), [0, 1]),
    ("aten.unsqueeze.default", (2, 3), -1),
    ("aten.unsqueeze.default", (2, 3), 0),
    ("aten.unsqueeze.default", (), -1),
    ("aten.alias.default", (2, 3)),
    ("aten.detach.default", (2, 3)),
    ("aten.lift_fresh.default", (2, 3)),
    ("aten.t.default", (2, 3)),
    ("aten.t.default", (3,)),
    ("aten.t.default", ()),
    ("aten.transpose.int", (2, 3, 4), 0, -1),
    ("aten.transpose.int", (2, 3, 4), 1, 1),
    ("aten.transpose.int", (), 0, -1),
    ("aten.permute.default", (2, 3, 4), [2, 0, 1]),
    ("aten.permute.default", (2, 3, 4), [-1, 1, -3]),
    ("aten.permute.default", (), []),
    ("aten.select.int", (3, 4), 0, 1),
    ("aten.select.int", (3, 4), -1, -2),
    ("aten.select.int", (3,), 0, 0),
    ("aten.slice.Tensor", (5, 4)),
    ("aten.slice.Tensor", (5, 4), 0, 1, 3),
    ("aten.slice.Tensor", (5, 4), -1, -3, None),
    ("aten.slice.Tensor", (5, 4), 0, 1, 9223372036854775807, 2),
    ("aten.slice.Tensor", (5, 4), 0, -100, 100, 3),
    ("aten.slice.Tensor", (5, 4), 0, 4, 2),
    ("aten.slice.Tensor", (5, 4), 0, 7, 9),
    ("aten.slice.Tensor", (5, 4), 1, None, -1),
    ("aten.slice.Tensor", (0, 4), 0, 0, 3),
    ("aten.diagonal.default", (3, 3)),
    ("aten.diagonal.default", (3, 5), 1),
    ("aten.diagonal.default", (5, 3), -2),
    ("aten.diagonal.default", (2, 3, 4), 1, -1, 0),
    ("aten.diagonal.default", (2, 3, 4), 0, 1, 2),
    ("aten.diagonal.default", (3, 3), 5),
    ("aten.unfold.default", (7,), 0, 2, 2),
    ("aten.unfold.default", (7,), 0, 2, 3),
    ("aten.unfold.default", (8, 3), 0, 3, 5),
    ("aten.unfold.default", (2, 7), -1, 7, 1),
    ("aten.unfold.default", (2, 7, 3), 1, 3, 3),
    ("aten.unfold.default", (), 0, 1, 1),
    ("aten.as_strided.default", (2, 6), [2, 6], [6, 1]),
    ("aten.as_strided.default", (2, 6), [3, 4], [4, 1], 0),
    ("aten.as_strided.default", (2, 6), [6, 2], [1, 6]),
    ("aten.as_strided.default", (12,), [2, 3], [3, 1], 5),
    ("aten.as_strided.default", (12,), [5], [2], 3),
    ("aten.as_strided.default", (4, 4), [4], [5]),
    ("aten.as_strided.default", (24,), [2, 2, 3], [12, 1, 3], 2),
    ("aten.as_strided.default", (24,), [2, 1, 3], [12, 0, 3], 2),
    ("aten.as_strided.default", (24,), [], [], 7),
    ("aten.as_strided.default", (24,), [0, 3], [3, 1]),
    ("aten.as_strided.default", (24,), [3, 3], [5, 3]),
]
# Views that torch refuses to write to, or whose pieces are written one by one.
READABLE = [
    ("aten._unsafe_view.default", (2, 6), [3, 4]),
    ("aten.expand.default", (1, 3), [4, 3]),
    ("aten.expand.default", (3,), [2, -1]),
    ("aten.expand.default", (), [2, 2]),
    ("aten.expand.default", (1,), [0]),
    ("aten.unfold.default", (7,), 0, 3, 1),
    ("aten.unfold.default", (2, 7), 1, 3, 2),
    ("aten.unfold.default", (5,), 0, 0, 1),
    ("aten.as_strided.default", (9,), [4, 3], [2, 1]),
    ("aten.as_strided.default", (9,), [4, 3], [0, 2], 1),
    ("aten.split.Tensor", (7, 2), 3),
    ("aten.split.Tensor", (2, 6), 2, -1),
    ("aten.split.Tensor", (0, 2), 0),
    ("aten.unsafe_split.Tensor", (7, 2), 4),
    ("aten.split_with_sizes.default", (7, 2), [3, 0, 4]),
    ("aten.split_with_sizes.default", (2, 7), [5, 2], -1),
    ("aten.unsafe_split_with_sizes.default", (2, 7), [5, 2], 1),
    ("aten.unbind.int", (3, 2)),
    ("aten.unbind.int", (3, 2), -1),
    ("aten.lift.default", (3, 2)),
]
COPIES = [
    ("aten.view_copy.default", (2, 6), [3, 4]),
    ("aten._reshape_copy.default", (2, 6), [3, -1]),
    ("aten._reshape_alias_copy.default", (2, 6), [4, 3], [3, 1]),
    ("aten.squeeze_copy.default", (1, 3, 1)),
    ("aten.squeeze_copy.dim", (1, 3, 1), 0),
    ("aten.squeeze_copy.dims", (1, 3, 1), [0, 2]),
    ("aten.unsqueeze_copy.default", (2, 3), 1),
    ("aten.alias_copy.default", (2, 3)),
    ("aten.detach_copy.default", (2, 3)),
    ("aten.lift_fresh_copy.default", (2, 3)),
    ("aten.expand_copy.default", (1, 3), [4, 3]),
    ("aten.t_copy.default", (2, 3)),
    ("aten.transpose_copy.int", (2, 3, 4), 0, -1),
    ("aten.permute_copy.default", (2, 3, 4), [2, 0, 1]),
    ("aten.select_copy.int", (3, 4), 0, 1),
    ("aten.slice_copy.Tensor", (5, 4), 0, 1, 4, 2),
    ("aten.narrow_copy.default", (5, 4), 0, 1, 3),
    ("aten.narrow_copy.default", (5, 4), -1, -2, 2),
    ("aten.split_copy.Tensor", (7, 2), 3),
    ("aten.split_with_sizes_copy.default", (7, 2), [3, 4]),
    ("aten.unbind_copy.int", (3, 2), 1),
    ("aten.diagonal_copy.default", (3, 5), 1),
    ("aten.unfold_copy.default", (7,), 0, 3, 1),
    ("aten.as_strided_copy.default", (12,), [2, 3], [3, 1], 5),
]


def label(case: Any) -> str:
    return (
        "-".join(str(x).replace(" ", "") for x in case)
        if isinstance(case, tuple)
        else str(case).removeprefix("torch.")
    )


@pytest.mark.parametrize("case", WRITABLE + READABLE + COPIES, ids=label)
def test_the_value_of_a_view(case: tuple[Any, ...]) -> None:
    name, size, *args = case
    check(name, values(size), *args)


@pytest.mark.parametrize("case", WRITABLE, ids=label)
def test_a_write_through_a_view(case: tuple[Any, ...]) -> None:
    name, size, *args = case
    check_write(name, values(size), *args)


ONE_OF_EACH = list({case[0]: case for case in WRITABLE}.values())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=label)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=label)
def test_values_and_writes_in_other_dtypes(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    name, size, *args = case
    check(name, values(size, dtype), *args)
    check_write(name, values(size, dtype), *args)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten.unfold.default", (0, 3, 1)),
        ("aten.as_strided.default", ([4, 3], [2, 1])),
        ("aten.as_strided.default", ([2, 3], [0, 1])),
    ],
)
def test_a_write_to_shared_elements_is_refused(name: str, args: tuple[Any, ...]) -> None:
    view = registry.resolve(name)(values((9,)), *args)
    write = registry.find_view_write(registry.resolve(name))
    with pytest.raises(NotImplementedError, match="Clone the view"):
        write(jnp.zeros(9), jnp.zeros(tuple(view.shape)), *args)


BITS = [
    (torch.float32, torch.int32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.uint8),
    (torch.bfloat16, torch.int16),
    (torch.bfloat16, torch.float32),
    (torch.int64, torch.float64),
    (torch.int64, torch.int32),
    (torch.int16, torch.int64),
    (torch.uint8, torch.bool),
    (torch.bool, torch.uint8),
    (torch.complex64, torch.float32),
    (torch.complex64, torch.float64),
    (torch.complex128, torch.int64),
    (torch.float32, torch.complex64),
    (torch.uint8, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("before", "after"), BITS, ids=label)
def test_the_same_bits_as_another_dtype(before: torch.dtype, after: torch.dtype) -> None:
    base = values((2, 8), before) % 2 if after is torch.bool else values((2, 8), before)
    if after is torch.float8_e4m3fn:
        check("aten.view.dtype", base, after, rtol=0, atol=0)
        return
    for name in ("aten.view.dtype", "aten.view_copy.dtype"):
        check(name, base, after, rtol=0, atol=0)
        check(name, base[:0], after)
    if base.element_size() == after.itemsize and not before.is_complex:
        check("aten.view.dtype", base[0, 0], after, rtol=0, atol=0)
    check_write("aten.view.dtype", base, after)


@pytest.mark.parametrize(
    ("size", "dtype"),
    crossed([(2, 3), (), (0, 2)], [torch.complex64, torch.complex128]),
    ids=label,
)
def test_complex_numbers_and_pairs(size: tuple[int, ...], dtype: torch.dtype) -> None:
    pairs = torch.view_as_real(values(size, dtype))
    for name, base in (
        ("view_as_real", values(size, dtype)),
        ("view_as_complex", pairs),
        ("_conj", values(size, dtype)),
        ("_neg_view", pairs),
    ):
        if name != "_conj":  # its lowering is tested with the elementwise operations
            check(f"aten.{name}.default", base)
        check(f"aten.{name}_copy.default", base)
        check_write(f"aten.{name}.default", base)


@pytest.mark.parametrize(
    ("dtype", "first", "second"),
    [
        (torch.int32, torch.int16, torch.uint8),
        (torch.int64, torch.int32, torch.int16),
        (torch.float64, torch.int32, torch.uint8),
        (torch.uint8, torch.int16, torch.int64),
        (torch.int16, torch.uint8, torch.float32),
    ],
)
def test_views_of_two_other_widths(dtype, first, second):
    """One view of the other, with a write through it; XLA joins the conversions wrongly."""

    def viewed(device):
        x = torch.arange(1, 17).to(dtype).to(device)
        y = x.view(first)
        y.add_(1)
        z = y.view(second)
        z.add_(1)
        return (
            x.view(torch.uint8),
            x.view(second).view(torch.uint8),
            y.view(dtype).view(torch.uint8),
        )

    for mine, right in zip(viewed("xla"), viewed("cpu")):
        assert torch.equal(mine.cpu(), right)


def test_the_parts_of_an_unsafe_split_share_memory():
    def write(device):
        x = torch.arange(4.0, device=device)
        torch.unsafe_split(x, 2)[1].add_(10)
        x.unsafe_split_with_sizes([1, 3])[1][0] = 77
        torch.unsafe_chunk(x, 2)[0].sub_(5)
        return x.tolist()

    assert write("xla") == write("cpu")
