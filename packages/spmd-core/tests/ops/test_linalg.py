"""Matrix factorizations, solutions and spectra against eager torch on the CPU.

A result that is not unique is checked by what defines it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiers import by_tier, crossed, exhaustive

import spmd_core as spmd
from oracle import check, lower
from spmd_core import metrics, releases
from spmd_core.ops import factorizations, ldl, linalg, registry  # noqa: F401  (they register)
from spmd_core.ops.kernels import singular_values

REAL_AND_COMPLEX = [torch.float64, torch.complex128]
ALL = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def positive(dtype: torch.dtype, *batch: int, n: int = 4) -> torch.Tensor:
    x = values(dtype, *batch, n, n)
    return x @ x.mH + torch.eye(n, dtype=dtype)


def lowered(name: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The lowering's results, with the shapes and dtypes of eager torch's."""
    right = [x for x in registry.resolve(name)(*args, **kwargs) if isinstance(x, torch.Tensor)]
    outs = tuple(registry.Out(tuple(x.shape), x.dtype) for x in right)
    return [
        torch.tensor(x.tolist(), dtype=out.dtype).reshape(out.shape)
        for x, out in zip(lower(name, args, kwargs, outs), outs)
    ]


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    single = right.dtype in (torch.float32, torch.complex64)
    torch.testing.assert_close(
        got, right, rtol=1e-4 if single else 1e-9, atol=1e-4 if single else 1e-9
    )


# ---- Cholesky ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_cholesky(dtype: torch.dtype) -> None:
    a = positive(dtype, 3)
    for upper in (False, True):
        check("aten.linalg_cholesky_ex.default", a, upper=upper, rtol=1e-4, atol=1e-4)
        factor = torch.linalg.cholesky(a, upper=upper)
        check(
            "aten._cholesky_solve_helper.default",
            values(dtype, 3, 4, 2, seed=1),
            factor,
            upper,
            rtol=1e-3,
            atol=1e-3,
        )
        check("aten.cholesky_inverse.default", factor, upper, rtol=1e-3, atol=1e-3)
    check("aten.linalg_cholesky_ex.default", values(dtype, 0, 4, 4))
    check("aten.linalg_cholesky_ex.default", values(dtype, 2, 0, 0))


def test_cholesky_says_which_minor_is_not_positive() -> None:
    a = torch.eye(4).repeat(4, 1, 1)
    a[1, 2, 2], a[2, 0, 0], a[3, 3, 3] = -1, 0, torch.nan
    factor, info = lowered("aten.linalg_cholesky_ex.default", a)
    assert info.tolist() == torch.linalg.cholesky_ex(a).info.tolist() == [0, 3, 1, 4]
    close(factor[0], a[0])


# ---- LU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.complex128, exhaustive(torch.float64), exhaustive(torch.complex64)],
)
def test_lu(dtype: torch.dtype) -> None:
    for shape in ((4, 4), (2, 5, 3), (2, 3, 5), (2, 0, 3), (0, 3, 3)):
        a = values(dtype, *shape)
        check("aten.linalg_lu_factor_ex.default", a, rtol=1e-4, atol=1e-4)
        check("aten.linalg_lu.default", a, rtol=1e-4, atol=1e-4)
        packed, pivots, _ = torch.linalg.lu_factor_ex(a)
        check("aten.lu_unpack.default", packed, pivots)
        check("aten.lu_unpack.default", packed, pivots, unpack_data=False)
        check("aten.lu_unpack.default", packed, pivots, unpack_pivots=False)


@pytest.mark.parametrize("dtype", REAL_AND_COMPLEX)
def test_lu_solve(dtype: torch.dtype) -> None:
    packed, pivots = torch.linalg.lu_factor(values(dtype, 2, 4, 4))
    for left in (True, False):
        b = values(dtype, *((4, 3) if left else (3, 4)), seed=1)
        for adjoint in (True, False):
            check("aten.linalg_lu_solve.default", packed, pivots, b, left=left, adjoint=adjoint)
            check(
                "aten.linalg_lu_solve.default",
                packed,
                pivots,
                b[:, :0] if left else b[:0],
                left=left,
                adjoint=adjoint,
            )


def test_info_of_a_singular_matrix() -> None:
    a = torch.eye(3).repeat(2, 1, 1)
    a[1, 1, 1] = 0
    assert lowered("aten.linalg_lu_factor_ex.default", a)[2].tolist() == [0, 2]
    assert lowered("aten.linalg_inv_ex.default", a)[1].tolist() == [0, 2]


def test_lu_without_pivots() -> None:
    # Eager torch supports it on GPUs only.
    a = positive(torch.float64, n=4).to("xla")
    p, low, up = torch.linalg.lu(a, pivot=False)
    assert p.shape == (0,)
    close((low @ up).cpu(), a.cpu())


@pytest.mark.parametrize("dtype", ALL)
def test_inverse(dtype: torch.dtype) -> None:
    check("aten.linalg_inv_ex.default", positive(dtype, 2), rtol=1e-3, atol=1e-3)
    check("aten.linalg_inv_ex.default", values(dtype, 2, 0, 0))


# ---- triangular ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("dtype", REAL_AND_COMPLEX)
def test_triangular(dtype: torch.dtype) -> None:
    a, b = positive(dtype, 2), values(dtype, 4, 4, seed=1)
    for upper in (True, False):
        for flag in (True, False):
            check("aten.linalg_solve_triangular.default", a, b, upper=upper, unitriangular=flag)
            check("aten.linalg_solve_triangular.default", a, b, upper=upper, left=flag)
            check("aten.triangular_solve.default", b.expand(2, 4, 4), a, upper, flag, False)
            check("aten.triangular_solve.default", b.expand(2, 4, 4), a, upper, False, flag)
    check("aten.linalg_solve_triangular.default", a, b[:, :0], upper=True)


# ---- QR ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("dtype", REAL_AND_COMPLEX)
def test_qr(dtype: torch.dtype, mode: str) -> None:
    for shape in ((4, 4), (2, 5, 3), (2, 3, 5), (2, 0, 3), (2, 3, 0)):
        a = values(dtype, *shape)
        q, r = lowered("aten.linalg_qr.default", a, mode)
        close(r.abs(), torch.linalg.qr(a, mode=mode).R.abs())
        if mode != "r":
            close(q @ r, a)
            close(
                q.mH @ q, torch.eye(q.shape[-1], dtype=dtype).expand(q.mH.shape[:-1] + q.shape[-1:])
            )


@pytest.mark.parametrize("dtype", REAL_AND_COMPLEX)
def test_householder_reflections(dtype: torch.dtype) -> None:
    for shape in ((2, 5, 3), (4, 4)):
        a = values(dtype, *shape)
        check("aten.geqrf.default", a)
        reflections, tau = torch.geqrf(a)
        check("aten.linalg_householder_product.default", reflections, tau)
        check("aten.linalg_householder_product.default", reflections, tau[..., :-1])
        for left in (True, False):
            for transpose in (True, False):
                m = a.shape[-2]
                c = values(dtype, *a.shape[:-2], *((m, 2) if left else (2, m)), seed=1)
                check("aten.ormqr.default", reflections, tau, c, left, transpose)


# ---- spectra -------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", REAL_AND_COMPLEX)
def test_svd(dtype: torch.dtype, full: bool) -> None:
    for shape in ((4, 4), (2, 5, 3), (2, 3, 5), (2, 0, 3), (0, 3, 3)):
        a = values(dtype, *shape)
        u, s, vh = lowered("aten._linalg_svd.default", a, full)
        close(s, torch.linalg.svdvals(a))
        k = min(shape[-2:])
        close((u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :], a)
        close(
            u.mH @ u,
            torch.eye(u.shape[-1], dtype=dtype).expand(*u.shape[:-2], u.shape[-1], u.shape[-1]),
        )
        check("aten._linalg_svd.default", a, full, False)


DECOMPOSED = {
    "tall": lambda dtype: values(dtype, 2, 5, 3),
    "wide": lambda dtype: values(dtype, 3, 5),
    "square": lambda dtype: values(dtype, 4, 4),
    "of rank 2": lambda dtype: values(dtype, 5, 2) @ values(dtype, 2, 4, seed=1),
    "zeros": lambda dtype: torch.zeros(4, 3, dtype=dtype),
    "equal values": lambda dtype: torch.eye(4, dtype=dtype) * 3,
}


@pytest.mark.parametrize(
    ("name", "dtype", "full"),
    crossed([*DECOMPOSED], [torch.float32, torch.complex128], [True, False]),
)
def test_the_svd_of_tpus(name: str, dtype: torch.dtype, full: bool) -> None:
    """The form that TPUs get, carried out on the CPU."""
    a = DECOMPOSED[name](dtype)
    expected = torch.linalg.svd(a, full_matrices=full)
    with jax.enable_x64(True):
        u, s, vh = (
            torch.from_numpy(np.array(x))
            for x in singular_values.by_polar_form(jnp.asarray(a.numpy()), full_matrices=full)
        )
    for got, right in zip((u, s, vh), expected):
        assert (got.shape, got.dtype) == (right.shape, right.dtype)
    close(s, expected.S)
    k = s.shape[-1]
    close((u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :], a)
    close(u.mH @ u, torch.eye(u.shape[-1], dtype=dtype).expand(u.mH.shape[:-1] + u.shape[-1:]))
    close(vh @ vh.mH, torch.eye(vh.shape[-2], dtype=dtype).expand(vh.shape[:-1] + vh.shape[-2:-1]))


@pytest.mark.one_device
def test_the_svd_of_tpus_of_a_matrix_that_is_not_finite() -> None:
    a = values(torch.float32, 2, 3, 3)
    a[1, 0, 0] = torch.inf
    with jax.enable_x64(True):
        results = singular_values.by_polar_form(jnp.asarray(a.numpy()), full_matrices=False)
    for x in results:
        assert np.isfinite(x[0]).all() and np.isnan(x[1]).all()


@pytest.mark.parametrize("uplo", ["L", "U"])
@pytest.mark.parametrize("dtype", REAL_AND_COMPLEX)
def test_eigh_reads_one_triangle(dtype: torch.dtype, uplo: str) -> None:
    a = values(dtype, 2, 4, 4)
    w, v = lowered("aten._linalg_eigh.default", a, uplo)
    close(w, torch.linalg.eigvalsh(a, UPLO=uplo))
    half = a.tril(-1) if uplo == "L" else a.triu(1)
    whole = half + half.mH + torch.diag_embed(a.diagonal(0, -2, -1).real).to(dtype)
    close(whole @ v, v * w.unsqueeze(-2))
    check("aten._linalg_eigh.default", a, uplo, False)
    check("aten._linalg_eigh.default", values(dtype, 2, 0, 0), uplo)


@pytest.mark.parametrize("dtype", REAL_AND_COMPLEX)
def test_general_eigenvalues(dtype: torch.dtype) -> None:
    a = values(dtype, 2, 4, 4)
    w, v = lowered("aten.linalg_eig.default", a)
    close(a.to(v.dtype) @ v, v * w.unsqueeze(-2))
    close(v.norm(dim=-2), torch.ones(2, 4, dtype=torch.float64))
    (values_only,) = lower(
        "aten._linalg_eigvals.default", (a,), {}, (registry.Out((2, 4), torch.complex128),)
    )
    close(torch.tensor(values_only.tolist(), dtype=w.dtype).sum(1), w.sum(1))


# ---- functions of a matrix, products -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [exhaustive(ALL[0]), ALL[1], ALL[2], exhaustive(ALL[3])])
def test_matrix_exp(dtype: torch.dtype) -> None:
    for size in (0.01, 1, 10):
        a = values(dtype, 2, 4, 4) * size
        check("aten.linalg_matrix_exp.default", a - a.mH, rtol=1e-4, atol=1e-4)
    check(
        "aten.linalg_matrix_exp.default",
        torch.stack([torch.zeros(3, 3), 30 * torch.eye(3)]).to(dtype),
        rtol=1e-4,
    )
    check("aten.linalg_matrix_exp.default", torch.zeros(2, 0, 0, dtype=dtype))


def test_matrix_exp_of_16_bits_is_rounded_once() -> None:
    # Eager torch's bfloat16 result is nan on some CPUs.
    a = values(torch.float32, 4, 4).to(torch.bfloat16)
    got = torch.linalg.matrix_exp(a.to("xla")).cpu()
    torch.testing.assert_close(got, torch.linalg.matrix_exp(a.float()).to(torch.bfloat16))


def test_cross() -> None:
    for dtype in (torch.float32, torch.int64, torch.complex64):
        a, b = (values(torch.float32, 2, 3, 4, seed=s).mul(4).to(dtype) for s in (0, 1))
        check("aten.linalg_cross.default", a, b, dim=1)
        check("aten.linalg_cross.default", a.mT, b[:1].mT[:, :1], dim=-1)


@pytest.mark.parametrize(
    ("dtype", "hermitian"),
    # Only of complex matrices the two differ.
    [
        (torch.complex128, True),
        (torch.complex128, False),
        exhaustive(torch.float64, True),
        exhaustive(torch.float64, False),
    ],
)
def test_ldl(dtype: torch.dtype, hermitian: bool) -> None:
    for n in by_tier((1, 5), in_all=(1, 2, 5, 9)):
        a = values(dtype, 3, n, n, seed=n)
        a = a + (a.mH if hermitian else a.mT)
        a[1].diagonal().zero_()  # makes blocks of size 2
        check("aten.linalg_ldl_factor_ex.default", a, hermitian=hermitian)
        packed, pivots = (
            torch.linalg.ldl_factor(a, hermitian=hermitian)
            if n > 1
            else torch.linalg.ldl_factor(a[:1], hermitian=hermitian)
        )
        check(
            "aten.linalg_ldl_solve.default",
            packed,
            pivots,
            values(dtype, 1, n, 2, seed=9).expand(len(packed), n, 2),
            hermitian=hermitian,
        )


# ---- on the device -------------------------------------------------------------------------------


def on_device(
    function: Callable[..., torch.Tensor], *args: torch.Tensor, dtype: torch.dtype = torch.float64
) -> None:
    """Asserts eager torch's values and gradients on the device, without host fallbacks."""
    here = [a.clone().requires_grad_() for a in args]
    there = [a.detach().to("xla").requires_grad_() for a in args]
    before = metrics.host_fallbacks()
    right, got = function(*here), function(*there)
    close(got.detach().cpu(), right.detach())
    (right.abs() ** 2).sum().backward()
    (got.abs() ** 2).sum().backward()
    for a, b in zip(here, there):
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-7, atol=1e-7)
    assert metrics.host_fallbacks() == before


@pytest.mark.parametrize(
    ("dtype", "transposed"),
    [
        exhaustive(REAL_AND_COMPLEX[0], False),
        (REAL_AND_COMPLEX[0], True),
        (REAL_AND_COMPLEX[1], False),
        exhaustive(REAL_AND_COMPLEX[1], True),
    ],
)
def test_gradients_of_what_shares_its_lu(dtype: torch.dtype, transposed: bool) -> None:
    # For a determinant, torch factors the matrix or its transpose, depending on the layout. Its
    # backward formulas rely on that.
    def arranged(a: torch.Tensor) -> torch.Tensor:
        return a.mT if transposed else a

    a, b = values(dtype, 2, 4, 4), values(dtype, 2, 4, 3, seed=1)
    on_device(lambda a: torch.linalg.det(arranged(a)), a)
    on_device(lambda a: torch.linalg.slogdet(arranged(a))[1], a)
    on_device(lambda a, b: torch.linalg.solve(arranged(a), b), a, b)
    on_device(lambda a, b: torch.linalg.solve(arranged(a), b.mT, left=False), a, b)
    on_device(lambda a, b: torch.linalg.solve(arranged(a), b[..., 0]), a, b)


@pytest.mark.parametrize("dtype", REAL_AND_COMPLEX)
def test_gradients(dtype: torch.dtype) -> None:
    a, tall = values(dtype, 2, 4, 4), values(dtype, 2, 5, 3)
    eye = torch.eye(4, dtype=dtype)
    on_device(torch.linalg.inv, a)
    on_device(lambda a: torch.linalg.cholesky(a @ a.mH + eye.to(a.device)), a)
    on_device(lambda a: torch.linalg.qr(a).R.abs(), tall)
    on_device(torch.linalg.svdvals, tall)
    on_device(lambda a: torch.linalg.svd(a, full_matrices=False).U.abs(), tall)
    on_device(lambda a: torch.linalg.eigh(a + a.mH).eigenvectors.abs(), a)
    on_device(lambda a: torch.linalg.lu(a)[2], a)
    on_device(torch.matrix_exp, a)
    on_device(torch.linalg.pinv, tall)
    on_device(lambda a: torch.linalg.matrix_norm(a, "nuc"), tall)


def test_pseudo_inverse() -> None:
    a, square = values(torch.float64, 2, 5, 3), values(torch.complex128, 3, 3)
    for tolerances in (
        {},
        {"rtol": 0.6},
        {"atol": 1.5},
        {"atol": torch.tensor([0.1, 1.5])},
        {"atol": 0.1, "rtol": 0.6},
    ):
        there = {
            name: t.to("xla") if isinstance(t, torch.Tensor) else t
            for name, t in tolerances.items()
        }
        close(torch.linalg.pinv(a.to("xla"), **there).cpu(), torch.linalg.pinv(a, **tolerances))
    close(
        torch.linalg.pinv(square.to("xla"), hermitian=True).cpu(),
        torch.linalg.pinv(square, hermitian=True),
    )
    assert torch.linalg.pinv(torch.zeros(2, 0, 3, device="xla")).shape == (2, 3, 0)


@pytest.mark.parametrize(
    ("dtype", "driver"), crossed([*REAL_AND_COMPLEX], [None, "gels", "gelsd", "gelss"])
)
def test_least_squares(dtype: torch.dtype, driver: str | None) -> None:
    for shape in ((2, 5, 3), (2, 3, 5)):
        a, b = values(dtype, *shape), values(dtype, 2, shape[1], 2, seed=1)
        right = torch.linalg.lstsq(a, b, driver=driver)
        got = torch.linalg.lstsq(a.to("xla"), b.to("xla"), driver=driver)
        for mine, other in zip(got, right):
            assert mine.dtype == other.dtype
            close(mine.cpu(), other)
    on_device(
        lambda a, b: torch.linalg.lstsq(a, b, driver=driver).solution,
        values(dtype, 5, 3),
        values(dtype, 5, 2, seed=1),
    )


def test_least_squares_below_full_rank_has_no_residuals() -> None:
    a, b = torch.ones(4, 2), torch.arange(4.0)[:, None]
    for device in ("cpu", "xla"):
        solution, residuals, rank, _ = torch.linalg.lstsq(
            a.to(device), b.to(device), driver="gelsd"
        )
        assert (rank.item(), residuals.numel()) == (1, 0)
        close(solution.cpu(), torch.full((2, 1), 0.75))


@pytest.mark.parametrize(
    ("shape", "other", "driver"),
    [((3,), (3,), None), ((3, 2), (4, 1), None), ((3, 2), (3, 1), "fast"), ((2, 3, 2), (3,), None)],
)
def test_least_squares_refuses_what_does_not_fit(
    shape: tuple[int, ...], other: tuple[int, ...], driver: str | None
) -> None:
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError, match=r"torch\.linalg\.lstsq"):
            torch.linalg.lstsq(
                torch.zeros(shape, device=device), torch.zeros(other, device=device), driver=driver
            )


SINGULAR = torch.eye(3).repeat(2, 1, 1)
SINGULAR[1, 1, 1] = 0


@pytest.mark.parametrize("is_matrix", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.inv,
        torch.linalg.cholesky,
        torch.cholesky_inverse,
        torch.linalg.lu_factor,
        lambda a: torch.linalg.solve(a, a),
        lambda a: torch.linalg.inv_ex(a, check_errors=True),
        lambda a: torch.linalg.cholesky_ex(a, check_errors=True),
        lambda a: torch.linalg.solve_ex(a, a, check_errors=True),
        lambda a: torch.linalg.lu_factor_ex(a, check_errors=True),
    ],
)
def test_a_singular_matrix_raises_what_eager_torch_raises(
    function: Callable[..., Any], is_matrix: bool
) -> None:
    a = SINGULAR[1] if is_matrix else SINGULAR
    with pytest.raises(RuntimeError) as right:
        function(a)
    reads = metrics.counter("host_reads_of_info")
    with pytest.raises(type(right.value)) as got:
        function(a.to("xla"))
    assert str(got.value) == str(right.value)
    assert metrics.counter("host_reads_of_info") == reads + 1


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("upper", [True, False])
def test_the_deprecated_cholesky(upper: bool) -> None:
    """torch 2.15 has its name only, which says what to call instead."""
    regular = SINGULAR[0] * 4
    wrong = [SINGULAR, SINGULAR[1]]
    if releases.overload("aten.cholesky.default") is None:
        wrong.append(regular)
    else:
        close(torch.cholesky(regular.to("xla"), upper).cpu(), torch.cholesky(regular, upper))
    for a in wrong:
        with pytest.raises(RuntimeError) as right:
            torch.cholesky(a, upper)
        with pytest.raises(RuntimeError) as got:
            torch.cholesky(a.to("xla"), upper)
        assert str(got.value) == str(right.value)


def test_geqrf_on_the_device() -> None:
    a = values(torch.float64, 2, 5, 3)
    for mine, right in zip(torch.geqrf(a.to("xla")), torch.geqrf(a)):
        assert mine.stride() == right.stride()
        close(mine.cpu(), right)
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        torch.geqrf(torch.zeros(3, device="xla"))


def test_without_the_check_nothing_is_read() -> None:
    reads = metrics.counter("host_reads_of_info")
    inverse, info = torch.linalg.inv_ex(SINGULAR.to("xla"))
    assert metrics.counter("host_reads_of_info") == reads
    assert info.tolist() == [0, 2]
    close(inverse[0].cpu(), torch.eye(3))


def test_a_driver_is_refused_as_on_the_cpu() -> None:
    with pytest.raises(RuntimeError, match=r"`driver=` is only supported on CUDA.*Leave it out"):
        torch.linalg.svd(torch.eye(3, device="xla"), driver="gesvd")
    torch.linalg.svd(torch.eye(3, device="xla"))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # torch's own
def test_results_into_a_given_tensor() -> None:
    out = torch.empty(0, device="xla")
    a = positive(torch.float32)
    torch.linalg.inv(a.to("xla"), out=out)
    close(out.cpu(), torch.linalg.inv(a))
    rank = torch.empty(0, dtype=torch.int64, device="xla")
    torch.linalg.matrix_rank(a.to("xla"), out=rank)
    assert rank.item() == 4
    with pytest.raises(RuntimeError, match=r"safely castable.*Give `out` the dtype torch.int64"):
        torch.linalg.matrix_rank(a.to("xla"), out=torch.empty(0, dtype=torch.bool, device="xla"))
    info = torch.empty(0, dtype=torch.int32, device="xla")
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv_ex(SINGULAR.to("xla"), check_errors=True, out=(out, info))


def test_a_split_batch(mesh_1d: spmd.Mesh) -> None:
    a = positive(torch.float32, 8)
    marked = spmd.mark_sharding(a.to("xla"), mesh_1d, ("x", None, None))
    close(torch.linalg.cholesky(marked).cpu(), torch.linalg.cholesky(a))
    close(torch.linalg.inv(marked).cpu(), torch.linalg.inv(a))
    close(torch.linalg.svdvals(marked).cpu(), torch.linalg.svdvals(a))
    close(torch.linalg.solve(marked, marked).cpu(), torch.eye(4).expand(8, 4, 4))
