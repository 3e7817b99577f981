"""Normalisations against eager torch on the CPU."""

import math

import pytest
import torch
from samples import normal

from oracle import check, lower
from spmd_core import dtypes
from spmd_core.ops import norm, registry  # noqa: F401  (registers the lowerings)

INF = math.inf
# (tensor, weights): torch's mixed precision has float32 weights and bfloat16 activations.
PRECISIONS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
LOOSE = {"rtol": 2e-2, "atol": 5e-2}


def check_masked(name: str, *args: object, mask: list[bool], **tolerance: float) -> None:
    """`check` for an op that returns None where `mask` is False."""
    overload = registry.resolve(name)
    expected = overload(*args, mask)
    outs = tuple(registry.Out(tuple(x.shape), x.dtype) for x in expected if x is not None)
    got = lower(name, (*args, mask), {}, outs)
    assert [x is None for x in got] == [x is None for x in expected]
    for mine, right in zip(got, expected):
        if right is not None:
            assert dtypes.to_torch(mine.dtype) == right.dtype
            torch.testing.assert_close(
                torch.tensor(mine.tolist()),
                right.float(),
                **({"rtol": 1e-4, "atol": 1e-4} | tolerance),
                check_dtype=False,
            )


ALL_MASKS_AND_PRECISIONS = [
    (PRECISIONS[0], [True, True, True]),
    (PRECISIONS[0], [True, False, False]),
    (PRECISIONS[1], [False, True, True]),
    (PRECISIONS[1], [True, True, True]),
    (PRECISIONS[2], [True, True, True]),
]

# ---- batch norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "shape"),
    [*((p, (4, 3, 5, 2)) for p in PRECISIONS), (PRECISIONS[0], (6, 3)), (PRECISIONS[1], (2, 3, 4))],
)
def test_batch_norm(precision: tuple[torch.dtype, torch.dtype], shape: tuple[int, ...]) -> None:
    dtype, weights = precision
    x = normal(dtype, *shape) * 2 + 1
    weight, bias, mean = (normal(weights, 3, seed=s) for s in (1, 2, 3))
    var = normal(weights, 3, seed=4).abs() + 0.5
    tolerance = {} if dtype is torch.float32 else LOOSE
    for training in (True, False):
        check(
            "aten._native_batch_norm_legit_functional.default",
            x,
            weight,
            bias,
            mean,
            var,
            training,
            0.1,
            1e-5,
            **tolerance,
        )
    check(
        "aten._native_batch_norm_legit_functional.default",
        x,
        None,
        None,
        mean,
        var,
        True,
        0.3,
        1e-5,
        **tolerance,
    )
    check(
        "aten._native_batch_norm_legit_no_training.default",
        x,
        weight,
        bias,
        mean,
        var,
        0.1,
        1e-5,
        **tolerance,
    )
    check("aten._native_batch_norm_legit.no_stats", x, weight, bias, True, 0.1, 1e-5, **tolerance)
    check(
        "aten._batch_norm_with_update_functional.default",
        x,
        weight,
        bias,
        mean,
        var,
        0.1,
        1e-5,
        **tolerance,
    )
    check("aten._batch_norm_no_update.default", x, weight, bias, mean, var, 0.1, 1e-5, **tolerance)
    check(
        "aten.native_batch_norm.default", x, weight, bias, mean, var, False, 0.1, 1e-5, **tolerance
    )
    check(
        "aten.native_batch_norm.default", x, weight, bias, None, None, True, 0.1, 1e-5, **tolerance
    )


def test_native_batch_norm_says_that_it_would_have_to_update_statistics() -> None:
    x, one = torch.ones(2, 3), torch.ones(3)
    with pytest.raises(NotImplementedError, match="_native_batch_norm_legit_functional"):
        lower("aten.native_batch_norm.default", (x, one, one, one, one, True, 0.1, 1e-5), {}, ())


def test_batch_norm_without_statistics_outside_training_is_an_error() -> None:
    with pytest.raises(ValueError, match="training=False"):
        lower(
            "aten._native_batch_norm_legit.no_stats",
            (torch.ones(2, 3), None, None, False, 0.1, 1e-5),
            {},
            (),
        )


def test_batch_norm_outside_training_saves_statistics_of_the_shape_that_torch_says() -> None:
    x, one = normal(torch.float32, 2, 3), torch.ones(3)
    for size in (0, 3):  # the sizes of torch's CPU kernel and of its meta kernel
        outs = (
            registry.Out((2, 3), torch.float32),
            registry.Out((size,), torch.float32),
            registry.Out((size,), torch.float32),
        )
        got = lower(
            "aten.native_batch_norm.default", (x, one, one, one, one, False, 0.1, 1e-5), {}, outs
        )
        assert [t.shape for t in got] == [out.shape for out in outs]


@pytest.mark.parametrize(("precision", "mask"), ALL_MASKS_AND_PRECISIONS)
def test_batch_norm_backward(precision: tuple[torch.dtype, torch.dtype], mask: list[bool]) -> None:
    dtype, weights = precision
    x, grad = normal(dtype, 4, 3, 5) * 2 + 1, normal(dtype, 4, 3, 5, seed=9)
    weight, mean, var = (
        normal(weights, 3, seed=1),
        normal(weights, 3, seed=2),
        normal(weights, 3, seed=4).abs() + 0.5,
    )
    saved = torch.ops.aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)[1:]
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 0.2}
    for train in (True, False):
        check_masked(
            "aten.native_batch_norm_backward.default",
            grad,
            x,
            weight,
            mean,
            var,
            *saved,
            train,
            1e-5,
            mask=mask,
            **tolerance,
        )


def test_batch_norm_backward_with_reserve() -> None:
    x, grad, weight = (
        normal(torch.float32, 4, 3, 5),
        normal(torch.float32, 4, 3, 5, seed=1),
        normal(torch.float32, 3),
    )
    mean, var, reserve = torch.zeros(3), torch.ones(3), torch.empty(0, dtype=torch.uint8)
    saved = torch.ops.aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)[1:]
    check(
        "aten.batch_norm_backward.default",
        grad,
        x,
        weight,
        mean,
        var,
        *saved,
        True,
        1e-5,
        [True, True, True],
        reserve,
    )


# ---- layer, group and weight norm ----------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dims", [1, 2])
def test_layer_norm(precision: tuple[torch.dtype, torch.dtype], dims: int) -> None:
    dtype, weights = precision
    x = normal(dtype, 2, 3, 8) * 3 + 5
    shape = list(x.shape[-dims:])
    tolerance = {} if dtype is torch.float32 else LOOSE
    check(
        "aten.native_layer_norm.default",
        x,
        shape,
        normal(weights, *shape),
        normal(weights, *shape, seed=1),
        1e-5,
        **tolerance,
    )
    check("aten.native_layer_norm.default", x, shape, None, None, 1e-5, **tolerance)
    check(
        "aten.native_layer_norm.default",
        x[:0],
        shape,
        normal(weights, *shape),
        normal(weights, *shape, seed=1),
        1e-5,
    )


@pytest.mark.parametrize(("precision", "mask"), ALL_MASKS_AND_PRECISIONS)
def test_layer_norm_backward(precision: tuple[torch.dtype, torch.dtype], mask: list[bool]) -> None:
    dtype, weights = precision
    x, grad = normal(dtype, 2, 3, 8) * 3 + 5, normal(dtype, 2, 3, 8, seed=1)
    weight, bias = normal(weights, 8), normal(weights, 8, seed=1)
    saved = torch.ops.aten.native_layer_norm(x, [8], weight, bias, 1e-5)[1:]
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 0.15}
    check_masked(
        "aten.native_layer_norm_backward.default",
        grad,
        x,
        [8],
        *saved,
        weight,
        bias,
        mask=mask,
        **tolerance,
    )


def test_layer_norm_backward_without_weight() -> None:
    x, grad = normal(torch.float32, 2, 3, 8), normal(torch.float32, 2, 3, 8, seed=1)
    saved = torch.ops.aten.native_layer_norm(x, [3, 8], None, None, 1e-5)[1:]
    check_masked(
        "aten.native_layer_norm_backward.default",
        grad,
        x,
        [3, 8],
        *saved,
        None,
        None,
        mask=[True, False, False],
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(precision: tuple[torch.dtype, torch.dtype], groups: int) -> None:
    dtype, weights = precision
    x = normal(dtype, 3, 4, 5, 2) * 2 + 1
    tolerance = {} if dtype is torch.float32 else LOOSE
    check(
        "aten.native_group_norm.default",
        x,
        normal(weights, 4),
        normal(weights, 4, seed=1),
        3,
        4,
        10,
        groups,
        1e-5,
        **tolerance,
    )
    check("aten.native_group_norm.default", x, None, None, 3, 4, 10, groups, 1e-5, **tolerance)


# Without the case of bfloat16 alone, which torch's CPU kernel refuses.
@pytest.mark.parametrize(("precision", "mask"), ALL_MASKS_AND_PRECISIONS[:-1])
def test_group_norm_backward(precision: tuple[torch.dtype, torch.dtype], mask: list[bool]) -> None:
    dtype, weights = precision
    x, grad, weight = (
        normal(dtype, 3, 4, 5, 2) * 2 + 1,
        normal(dtype, 3, 4, 5, 2, seed=1),
        normal(weights, 4),
    )
    saved = torch.ops.aten.native_group_norm(x, weight, weight, 3, 4, 10, 2, 1e-5)[1:]
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 0.15}
    check_masked(
        "aten.native_group_norm_backward.default",
        grad,
        x,
        *saved,
        weight,
        3,
        4,
        10,
        2,
        mask=mask,
        **tolerance,
    )


@pytest.mark.parametrize("dim", [0, 2])  # torch's CPU kernel takes the first or the last
def test_weight_norm(dim: int) -> None:
    v = normal(torch.float32, 3, 4, 5)
    g = normal(torch.float32, *(n if d == dim else 1 for d, n in enumerate(v.shape)), seed=1)
    check("aten._weight_norm_interface.default", v, g, dim)
    norms = torch.ops.aten._weight_norm_interface(v, g, dim)[1]
    check(
        "aten._weight_norm_interface_backward.default",
        normal(torch.float32, 3, 4, 5, seed=2),
        v,
        g,
        norms,
        dim,
    )
