"""Special functions against eager torch on the CPU, at their poles and edges too."""

import math

import pytest
import torch
from tiers import exhaustive

import spmd_core as spmd
from oracle import check
from spmd_core.ops import bessel, gamma, special  # noqa: F401  (registers the lowerings)

INF, NAN = math.inf, math.nan
FLOATS = [torch.float32, torch.float64]
EDGES = [
    0.0,
    -0.0,
    INF,
    -INF,
    NAN,
    1e-30,
    1e-10,
    -1e-10,
    0.5,
    1.0,
    -1.0,
    2.0,
    5.0,
    8.0,
    2.09,
    -2.09,
    104.0,
]
BESSEL = [
    "airy_ai",
    "bessel_j0",
    "bessel_j1",
    "bessel_y0",
    "bessel_y1",
    "modified_bessel_i0",
    "modified_bessel_i1",
    "modified_bessel_k0",
    "modified_bessel_k1",
    "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1",
    "spherical_bessel_j0",
]


def points(dtype: torch.dtype) -> torch.Tensor:
    """Dense points in the usual range, sparse ones in a wider range, and edge cases."""
    return torch.cat(
        [
            torch.linspace(-12, 12, 481, dtype=dtype),
            torch.linspace(-60, 60, 61, dtype=dtype),
            torch.tensor(EDGES, dtype=dtype),
        ]
    )


@pytest.mark.parametrize("name", [*BESSEL, "erfcx", "log_ndtr"])
def test_of_one_argument(name: str) -> None:
    # In float32 both evaluate the same rational functions, whose terms cancel near the zeros.
    check(f"aten.special_{name}.default", points(torch.float32), rtol=2e-5, atol=3e-5)
    check(f"aten.special_{name}.default", points(torch.float64), rtol=1e-9, atol=1e-12)
    check(f"aten.special_{name}.default", torch.arange(-3, 4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_erfcx_does_not_overflow(dtype: torch.dtype) -> None:
    check("aten.special_erfcx.default", torch.tensor([1e3, 1e7, 1e9, 1e30, -1e3], dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_ndtri(dtype: torch.dtype) -> None:
    p = torch.cat(
        [
            torch.linspace(0, 1, 201, dtype=dtype),
            torch.tensor([1e-30, 1e-14, 1e-16, -0.1, 1.1, NAN, INF], dtype=dtype),
        ]
    )
    check("aten.special_ndtri.default", p)


# ---- gamma ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 25])
def test_polygamma(n: int) -> None:
    x = torch.cat(
        [
            torch.linspace(-9.95, 10.05, 201, dtype=torch.float64),
            torch.tensor([0.0, -0.0, INF, NAN, -2.0, 1e3], dtype=torch.float64),
        ]
    )
    # At the pole at -2 torch's trigamma is the square of an inexact sine.
    x = x if n != 1 else x[x != -2]
    check("aten.polygamma.default", n, x, rtol=1e-8)
    if n < 4:  # for larger n torch's float32 is less exact
        check("aten.polygamma.default", n, x.float(), rtol=1e-4, atol=1e-4)


def test_zeta() -> None:
    for dtype in FLOATS:
        s = torch.tensor([0, 0.5, 1, 1.1, 1.5, 2, 3, 8, 30, INF, NAN, -1], dtype=dtype)[:, None]
        q = torch.tensor(
            [-30.25, -3, -2.5, -1.75, -0.5, -0.0, 0, 0.1, 0.5, 1, 2.5, 10, 1e5, INF, -INF],
            dtype=dtype,
        )
        check("aten.special_zeta.default", s, q)
        check("aten.special_zeta.other_scalar", s, 0.5)
        check("aten.special_zeta.self_scalar", 3.0, q)


@pytest.mark.parametrize("name", ["igamma", "igammac"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_incomplete_gamma(name: str, dtype: torch.dtype) -> None:
    a = torch.tensor([0, 0.1, 0.5, 1, 2, 5, 20, 100, 1000, INF, -1, NAN], dtype=dtype)[:, None]
    x = torch.tensor(
        [0, 1e-10, 0.01, 0.3, 1, 1.5, 4, 10, 50, 99, 101, 990, 1100, 1e5, INF, -1], dtype=dtype
    )
    check(f"aten.{name}.default", a, x, rtol=3e-5 if dtype is torch.float32 else 1e-8)


def test_whole_powers_of_two_are_exact() -> None:
    check("aten.exp2.default", torch.arange(-120.0, 130.0), rtol=0, atol=0)
    check("aten.exp2.default", torch.tensor([INF, -INF, NAN, 0.5, 99.7, 1e30, -1e30]))
    check("aten.exp2.default", torch.tensor([1 + 2j, 0.5j]))


# ---- orthogonal polynomials ----------------------------------------------------------------------

POLYNOMIALS = [
    *(f"chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *(f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"),
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]
# The shifted ones are the others at 2x - 1, whatever their kind.
ALIKE = {f"shifted_chebyshev_polynomial_{kind}" for kind in "uvw"}


@pytest.mark.parametrize("name", [exhaustive(x) if x in ALIKE else x for x in POLYNOMIALS])
def test_orthogonal_polynomials(name: str) -> None:
    x = torch.cat(
        [
            torch.linspace(-2.5, 2.5, 51, dtype=torch.float64),
            torch.tensor([INF, -INF, 1e10], dtype=torch.float64),
        ]
    )
    n = torch.tensor([-3, -1, 0, 1, 2, 3, 6, 7, 8, 9, 10, 40, 513], dtype=torch.float64)[:, None]
    # The tolerance is for the third kind, a quotient of two small numbers near -1.
    check(f"aten.special_{name}.default", x, n, rtol=1e-7, atol=1e-7)
    check(f"aten.special_{name}.default", x.float(), n[:9].float(), rtol=1e-4, atol=1e-4)
    check(f"aten.special_{name}.n_scalar", x.float(), 3)
    check(f"aten.special_{name}.x_scalar", 0.7, n)
    check(f"aten.special_{name}.default", torch.arange(-3, 4), torch.arange(-1, 6))


def test_a_polynomial_of_nan_is_nan() -> None:
    got = torch.special.legendre_polynomial_p(torch.tensor([NAN, 0.5], device="xla"), 5)
    assert got.isnan().tolist() == [True, False]


# ---- on the device -------------------------------------------------------------------------------


def test_values_and_gradients_on_the_device(mesh_1d: spmd.Mesh) -> None:
    x = torch.linspace(0.3, 6, 16, dtype=torch.float64)
    functions = (
        torch.special.erfcx,
        torch.special.log_ndtr,
        lambda t: torch.special.ndtri(t / 8),
        torch.special.i0,
        lambda t: torch.special.polygamma(1, t),
        lambda t: torch.special.multigammaln(t + 1, 2),
        lambda t: torch.special.gammainc(torch.full_like(t, 2).detach(), t),
        lambda t: torch.special.zeta(2, t),
    )
    for function in functions:
        here = x.clone().requires_grad_()
        there = spmd.mark_sharding(x.to("xla"), mesh_1d, ("x",)).requires_grad_()
        with spmd.strict():
            right, got = function(here), function(there)
            right.sum().backward()
            got.sum().backward()
        torch.testing.assert_close(got.detach().cpu(), right.detach(), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-8, atol=1e-8)


def test_a_python_number_does_not_widen_the_result() -> None:
    x = torch.tensor(0.3, device="xla")
    assert torch.special.chebyshev_polynomial_t(x, 4).dtype == torch.float32
    assert torch.special.chebyshev_polynomial_t(0.5, x).dtype == torch.float32
