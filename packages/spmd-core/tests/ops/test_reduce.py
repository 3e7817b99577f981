"""Reductions and cumulative operations against eager torch on the CPU."""

import math

import pytest
import torch
from tiers import crossed

import spmd_core
from oracle import check
from spmd_core.ops import reduce  # noqa: F401  (registers the lowerings)

NAN, INF = math.nan, math.inf
FLOATS = [torch.float32, torch.bfloat16]
DIMS = [[1], [-1], [0, 2], [], None, [0, 1, 2]]


def values(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3, 4), seed: int = 0) -> torch.Tensor:
    x = (
        torch.randn(
            shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=dtype if dtype.is_complex else None,
        )
        * 3
    )
    return x > 0 if dtype is torch.bool else x.to(dtype)


# ---- sums and products ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.bool])
def test_sum(dtype: torch.dtype) -> None:
    check("aten.sum.default", values(dtype))
    check("aten.sum.default", values(dtype, ()))
    check("aten.sum.default", values(dtype), dtype=torch.float64)
    for dim in DIMS if dtype is torch.float32 else DIMS[:1]:
        check("aten.sum.dim_IntList", values(dtype), dim)
    check("aten.sum.dim_IntList", values(dtype), [-2], True)
    check("aten.sum.dim_IntList", values(dtype, ()), [-1])
    check("aten.sum.dim_IntList", values(dtype, (0, 3)), [0])


def test_sum_of_sixteen_bits_accumulates_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check("aten.sum.default", torch.ones(3000, dtype=dtype), rtol=1e-2)
        check("aten.sum.default", torch.ones(30, dtype=dtype) * 0.1, dtype=torch.float32, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_mean(dtype: torch.dtype) -> None:
    check("aten.mean.default", values(dtype))
    check("aten.mean.default", values(dtype, (0,)))
    for dim in DIMS if dtype is torch.float32 else DIMS[:1]:
        check("aten.mean.dim", values(dtype), dim, True)
    check("aten.mean.dim", values(dtype, ()), [0])
    check("aten.mean.dim", values(torch.int64), [1], dtype=dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_prod(dtype: torch.dtype) -> None:
    check("aten.prod.default", values(dtype, (4,)))
    check("aten.prod.default", values(dtype, (0,)))
    check("aten.prod.dim_int", values(dtype), -1)
    check("aten.prod.dim_int", values(dtype), 1, True, dtype=torch.float32)
    check("aten.prod.dim_int", values(dtype, ()), 0)


def test_nansum() -> None:
    x = torch.tensor([[1.0, NAN, 3.0], [NAN, NAN, NAN]])
    check("aten.nansum.default", x)
    check("aten.nansum.default", x, [1], True)
    check("aten.nansum.default", torch.tensor([[1, 2]]), [0])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_count_nonzero(dtype: torch.dtype) -> None:
    check("aten.count_nonzero.default", values(dtype))
    check("aten.count_nonzero.default", values(dtype), -1)
    check("aten.count_nonzero.dim_IntList", values(dtype), [0, 1])


# ---- logic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "op"),
    crossed([torch.float32, torch.int64, torch.bool, torch.uint8], ["any", "all"]),
)
def test_any_and_all(op: str, dtype: torch.dtype) -> None:
    x = values(torch.bool).to(dtype)
    check(f"aten.{op}.default", x)
    check(f"aten.{op}.dim", x, -1)
    check(f"aten.{op}.dim", x, 0, True)
    check(f"aten.{op}.default", x[:0])
    check(f"aten.{op}.dim", x[0, 0, 0], 0)
    for dim in DIMS if dtype is torch.float32 else DIMS[:1]:
        check(f"aten.{op}.dims", x, dim)
    check(f"aten.{op}.dims", x, [1], True)


@pytest.mark.parametrize("op", ["_is_all_true", "_is_any_true"])
def test_boolean_summaries(op: str) -> None:
    check(f"aten.{op}.default", torch.tensor([True, False]))
    check(f"aten.{op}.default", torch.tensor([], dtype=torch.bool))


# ---- extrema -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool, torch.uint8])
def test_extrema(op: str, dtype: torch.dtype) -> None:
    x = values(torch.float32).abs().to(dtype) if dtype is torch.uint8 else values(dtype)
    check(f"aten.{op}.default", x)
    check(f"aten.{op}.dim", x, -1)
    check(f"aten.a{op}.default", x, [0, -1])
    if dtype is not torch.bool:
        check(f"aten.arg{op}.default", x, -2)


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_over_any_dims(op: str) -> None:
    x = values(torch.float32)
    check(f"aten.{op}.default", x[0, 0, 0])
    check(f"aten.{op}.dim", x, 0, True)
    check(f"aten.{op}.dim", x[0, 0, 0], 0)
    for dim in ([1], []):
        check(f"aten.a{op}.default", x, dim)
    check(f"aten.a{op}.default", x, [1], True)
    for dim in (None, 1):
        check(f"aten.arg{op}.default", x, dim)
        check(f"aten.arg{op}.default", x, dim, True)
    check(f"aten.arg{op}.default", x[0, 0, 0], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_aminmax(dtype: torch.dtype) -> None:
    check("aten.aminmax.default", values(dtype))
    check("aten.aminmax.default", values(dtype), dim=-1, keepdim=True)


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_of_equal_values_and_nan(op: str) -> None:
    ties = torch.tensor([[1, 3, 3, 1], [2, 2, 2, 2], [5, 0, 0, 5]])
    check(f"aten.{op}.dim", ties, 1)
    check(f"aten.arg{op}.default", ties)
    check(f"aten.arg{op}.default", ties.float(), 0)
    nans = torch.tensor([[1.0, NAN, 3.0, NAN], [INF, 2.0, -INF, 2.0], [NAN, INF, 1.0, 0.0]])
    for name in (f"a{op}", op, f"arg{op}"):
        check(f"aten.{name}.default", nans)
    check(f"aten.{op}.dim", nans, 1)
    check(f"aten.a{op}.default", nans, [1])
    check(f"aten.arg{op}.default", nans, 1)


# ---- moments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_moments(op: str, dtype: torch.dtype) -> None:
    x = values(dtype) + 10
    check(f"aten.{op}.correction", x)
    for dim in DIMS if op == "var_mean" else DIMS[:1]:
        check(f"aten.{op}.correction", x, dim, correction=0)
    check(f"aten.{op}.correction", x, [-1], correction=1, keepdim=True)
    check(f"aten.{op}.correction", x, [0], correction=0.5)


def test_variance_of_complex_numbers() -> None:
    check(
        "aten.var.correction",
        torch.complex(values(torch.float32), values(torch.float32, seed=1)),
        [1],
    )


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variance_of_too_few_values_is_not_a_number() -> None:
    check("aten.var.correction", torch.tensor([[1.0], [2.0]]), [1])
    check("aten.var.correction", torch.empty(0, 2), [0])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_logsumexp(dtype: torch.dtype) -> None:
    for dim in ([1], [-1, 0], [0, 1, 2]):
        check("aten.logsumexp.default", values(dtype), dim)
    check("aten.logsumexp.default", values(dtype), [1], True)
    check("aten.logsumexp.default", values(dtype, ()), [0])


def test_logsumexp_of_infinities() -> None:
    check(
        "aten.logsumexp.default",
        torch.tensor([[-INF, -INF], [INF, 1.0], [NAN, 1.0], [1e30, 1e30], [INF, -INF]]),
        [1],
    )
    check("aten.logsumexp.default", torch.empty(2, 0), [1])


# ---- norms ---------------------------------------------------------------------------------------

ORDERS = [2, 1, 0, INF, -INF, 3, 0.5, -1.5]


@pytest.mark.parametrize("order", ORDERS)
def test_vector_norm(order: float) -> None:
    check("aten.linalg_vector_norm.default", values(torch.float32), order)
    check("aten.linalg_vector_norm.default", values(torch.bfloat16), order, [0, -1], True)
    check("aten.norm.Scalar", values(torch.float32), order)


@pytest.mark.parametrize("dtype", FLOATS)
def test_vector_norm_overloads(dtype: torch.dtype) -> None:
    x = values(dtype)
    check(
        "aten.linalg_vector_norm.default",
        x,
        2,
        [1],
        dtype=torch.float64 if dtype is torch.float32 else torch.float32,
    )
    check("aten.norm.ScalarOpt_dim", x, 3, [1], True)
    check("aten.norm.ScalarOpt_dtype", x, 2, dtype=torch.float32)
    check("aten.norm.ScalarOpt_dim_dtype", x, 1, [-1], False, dtype=torch.float32)


def test_vector_norm_of_edge_cases() -> None:
    check("aten.linalg_vector_norm.default", values(torch.float32, ()))
    check("aten.linalg_vector_norm.default", torch.empty(0))
    check("aten.linalg_vector_norm.default", torch.empty(2, 0), 1, [1])
    check("aten.linalg_vector_norm.default", torch.tensor([1.0, NAN]), INF)
    check(
        "aten.linalg_vector_norm.default",
        torch.complex(values(torch.float32), values(torch.float32)),
    )
    check("aten.norm.ScalarOpt_dim", values(torch.float32), None, [0])


@pytest.mark.parametrize("p", [2, 1, INF])
def test_dist(p: float) -> None:
    check("aten.dist.default", values(torch.float32), values(torch.float32, (4,), 1), p)
    check("aten.dist.default", values(torch.complex64), values(torch.float32, (4,), 1), p)


# ---- cumulative ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "op"), crossed([*FLOATS, torch.int64, torch.int32, torch.bool], ["cumsum", "cumprod"])
)
def test_cumulative(op: str, dtype: torch.dtype) -> None:
    for dim in (0, -1):
        check(f"aten.{op}.default", values(dtype), dim)
    check(f"aten.{op}.default", values(dtype), 1, dtype=torch.float32)
    check(f"aten.{op}.default", values(dtype, ()), 0)
    check(f"aten.{op}.default", values(dtype, (0, 2)), 0)


@pytest.mark.parametrize("op", ["cummax", "cummin"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_running_extrema(op: str, dtype: torch.dtype) -> None:
    check(f"aten.{op}.default", values(dtype), -1)
    check(f"aten.{op}.default", values(dtype), 0)
    check(f"aten.{op}.default", values(dtype, ()), 0)


@pytest.mark.parametrize("op", ["cummax", "cummin"])
def test_running_extrema_of_equal_values_and_nan(op: str) -> None:
    check(f"aten.{op}.default", torch.tensor([1, 3, 3, 1, 0, 0]), 0)
    check(f"aten.{op}.default", torch.tensor([1.0, NAN, 3.0, NAN, -INF, INF]), 0)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32])
def test_trace(dtype: torch.dtype) -> None:
    x = values(dtype, (3, 5))
    try:
        x.trace()
    except NotImplementedError as error:
        pytest.skip(f"torch {torch.__version__} on the CPU: {error}")
    check("aten.trace.default", x)
    check("aten.trace.default", values(dtype, (0, 2)))


@pytest.mark.parametrize(
    "dtype",
    [*FLOATS, torch.float64, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool],
)
def test_hash(dtype: torch.dtype) -> None:
    x = values(dtype, (3, 4))
    check("aten.hash_tensor.default", x)
    check("aten.hash_tensor.default", x, [1])
    check("aten.hash_tensor.default", x, [0, 1], keepdim=True)
    check("aten.hash_tensor.default", x[:, :0], [0])


@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN, -NAN, 1e-40, -1.4e-45, 1.2e-38, 3e38])
def test_hash_of_special_floats(value: float) -> None:
    check("aten.hash_tensor.default", torch.tensor(value))
    check("aten.hash_tensor.default", torch.tensor(value).half())


def test_hash_over_several_devices(mesh_2d: spmd_core.Mesh) -> None:
    x = values(torch.float32, (16, 8, 3))
    split = spmd_core.mark_sharding(x.to("xla"), mesh_2d, ("a", "b", None))
    for dims in ([], [0], [1, 2]):
        assert torch.equal(torch.hash_tensor(split, dims).cpu(), torch.hash_tensor(x, dims))


def test_hash_has_one_mode() -> None:
    with pytest.raises(RuntimeError, match="Unknown hash_tensor mode"):
        torch.hash_tensor(torch.ones(2, device="xla"), mode=1).cpu()
