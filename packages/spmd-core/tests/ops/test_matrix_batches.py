"""Large batches of matrices against eager torch, and how many of them a call of LAPACK gets."""

import math
import re

import pytest
import torch
from tiers import crossed

import spmd_core as spmd
from spmd_core.ops.kernels import matrix_batches

COUNT = 2051  # with matrices of 3 x 3 a few parts, the last of them not full


def matrices(*batch, n=3, dtype=torch.float32):
    x = torch.randn(*batch, n, n, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x + n * torch.eye(n, dtype=dtype)


def solve_triangular(a):
    return torch.linalg.solve_triangular(a.tril(), a.mT + 1, upper=False)


def lu(a):
    return torch.linalg.lu(a)


def solve(a):
    return torch.linalg.solve(a, a.mT[..., :1])


def cholesky(a):
    return torch.linalg.cholesky(a @ a.mH)


def qr(a):
    q, r = torch.linalg.qr(a)
    return q @ r


def householder_product(a):
    return torch.linalg.householder_product(a.tril(-1), (1 / (1 + a[..., 0].abs())).to(a.dtype))


def singular_values(a):
    return torch.linalg.svdvals(a)


def svd(a):
    u, s, v = torch.linalg.svd(a)
    return u @ torch.diag_embed(s).to(a.dtype) @ v


def eigh(a):
    values, vectors = torch.linalg.eigh(a + a.mH)
    return values, vectors @ torch.diag_embed(values).to(a.dtype) @ vectors.mH


def eigenvalues(a):
    return torch.linalg.eigvals(a).abs().sort().values


FUNCTIONS = [
    solve_triangular, lu, solve, cholesky, qr, householder_product, singular_values, svd, eigh,
    eigenvalues,
]  # fmt: skip


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize(
    ("dtype", "function"), crossed([torch.float32, torch.complex128], [*FUNCTIONS])
)
def test_values_of_a_large_batch(function, dtype):
    a = matrices(7, COUNT // 7, dtype=dtype)
    for got, right in zip(as_tuple(function(a.to("xla"))), as_tuple(function(a))):
        torch.testing.assert_close(got.cpu(), right, rtol=1e-3, atol=1e-3)


def test_matrices_too_large_for_a_part_of_two():
    a = matrices(5, n=20)
    torch.testing.assert_close(torch.linalg.inv(a.to("xla")).cpu(), torch.linalg.inv(a))


@pytest.mark.parametrize("count", [2048, COUNT])
def test_a_large_batch_that_is_split(mesh_1d, count):
    a = matrices(count)
    x = spmd.mark_sharding(a.to("xla"), mesh_1d, ("x", None, None))
    result = torch.linalg.solve(x * 1, x.mT)
    torch.testing.assert_close(result.cpu(), torch.linalg.solve(a, a.mT), rtol=1e-3, atol=1e-3)


def test_a_split_batch_is_not_gathered(mesh_1d):
    a, sharding = matrices(2048), (mesh_1d, ("x", None, None))
    x = spmd.mark_sharding(a.to("xla"), *sharding)
    text = spmd.debugging.hlo(spmd.mark_sharding(solve_triangular(x), *sharding))
    assert "lapack_" in text
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)


def calls(text):
    """The number of matrices in each call of LAPACK."""
    shapes = re.findall(r"= \(?\w+\[([\d,]+)\]\S* custom-call\(.*lapack_", text)
    assert shapes
    return [math.prod(int(n) for n in shape.split(",")[:-2]) for shape in shapes]


@pytest.mark.skipif(not matrix_batches._WAITS, reason="this jaxlib's calls do not wait")
def test_no_call_is_dealt_out_to_threads():
    a = matrices(30_000).to("xla")
    text = spmd.debugging.hlo(torch.stack([solve_triangular(a * i) for i in range(3)]))
    # jaxlib 0.10 estimates 27 operations for a solve with three columns.
    assert len(calls(text)) == 3 and max(calls(text)) * 27 < 200_000


def test_a_small_batch_is_one_call():
    text = spmd.debugging.hlo(solve_triangular(matrices(8).to("xla")))
    assert calls(text) == [8]
