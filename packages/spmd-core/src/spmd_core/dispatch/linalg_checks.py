"""Handlers of matrix operations whose errors depend on values, or whose results on strides.

A program cannot raise, so a factorization returns `info`. Where torch raises for a singular matrix,
`info` is read on the host, which cuts the program and waits, as on any device. The reads are
counted in the metrics as `host_reads_of_info`. The `_ex` functions do not read it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from spmd_core import counters, releases
from spmd_core.ops import registry
from spmd_core.recording import inference, schema
from spmd_core.recording.calls import Handler, functional_handler
from spmd_core.tensor.sharded_tensor import spec_of

aten = torch.ops.aten


def _recorded(func: torch._ops.OpOverload) -> Handler:
    lowering = registry.find_lowering(func)
    assert lowering is not None, f"{func} has no lowering"
    return functional_handler(lowering)


def check_info(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Raises torch's LinAlgError for `api_name` if an int32 `info` is not 0. Waits."""
    counters.count("host_reads_of_info")
    torch._linalg_check_errors(info.cpu(), api_name, is_matrix=is_matrix)


def _check_errors(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    check_info(args[0], args[1], is_matrix=kwargs["is_matrix"])


def _ex(record: Handler, api_name: str) -> Handler:
    """A factorization whose last result is `info`, which `check_errors` reads."""

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        results = record(args, {name: a for name, a in kwargs.items() if name != "check_errors"})
        if kwargs.get("check_errors"):
            check_info(results[-1], api_name, is_matrix=args[0].dim() == 2)
        return results

    return handler


def _first(bad: torch.Tensor) -> torch.Tensor:
    """1 + the position of the first True in the last dim, or 0: LAPACK's `info`."""
    return torch.where(bad.any(-1), bad.to(torch.int32).argmax(-1) + 1, 0).to(torch.int32)


def _cholesky(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    inference.infer(aten.cholesky.default, args, kwargs, spec_of)
    a, upper = args[0], args[1] if len(args) > 1 else kwargs.get("upper", False)
    factor, info = aten.linalg_cholesky_ex(a, upper=upper)
    check_info(info, "cholesky", is_matrix=a.dim() == 2)
    return factor


def _cholesky_inverse(record: Handler) -> Handler:
    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        inverse = record(args, kwargs)
        if args[0].numel():
            check_info(
                _first(args[0].diagonal(0, -2, -1) == 0),
                "cholesky_inverse",
                is_matrix=args[0].dim() == 2,
            )
        return inverse

    return handler


def _svd(record: Handler) -> Handler:
    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("driver") is not None:
            raise RuntimeError(
                "torch.linalg.svd: "
                "keyword argument `driver=` is only supported on CUDA inputs with "
                f"cuSOLVER backend; got {kwargs['driver']!r} for a tensor on xla. Leave it out."
            )
        return record(args, kwargs)

    return handler


# Operations that share their LU factorization with their backward.


def _factored(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The LU factorization that the backward of a determinant takes from its forward.

    It is that of the transpose if the matrix is real and contiguous.
    """
    return aten.linalg_lu_factor_ex(a.mT if a.is_contiguous() and not a.is_complex() else a)


def _parity(pivots: torch.Tensor) -> torch.Tensor:
    """The sign of a permutation: each pivot that is not its own position is one exchange."""
    exchanges = (
        pivots != torch.arange(1, pivots.shape[-1] + 1, dtype=torch.int32, device=pivots.device)
    ).sum(-1)
    return 1 - 2 * (exchanges % 2)


def _det(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    inference.infer(aten._linalg_det.default, args, kwargs, spec_of)
    packed, pivots, _ = _factored(args[0])
    return packed.diagonal(0, -2, -1).prod(-1) * _parity(pivots), packed, pivots


def _slogdet(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    inference.infer(aten._linalg_slogdet.default, args, kwargs, spec_of)
    packed, pivots, _ = _factored(args[0])
    diagonal = packed.diagonal(0, -2, -1)
    return diagonal.sgn().prod(-1) * _parity(pivots), diagonal.abs().log().sum(-1), packed, pivots


def _solve(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    inference.infer(aten._linalg_solve_ex.default, args, kwargs, spec_of)
    a, b = args
    packed, pivots, info = aten.linalg_lu_factor_ex(a)
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    b = b.unsqueeze(-1) if is_vector else b
    x = aten.linalg_lu_solve(packed, pivots, b, left=kwargs.get("left", True))
    return x.squeeze(-1) if is_vector else x, packed, pivots, info


# Least squares.

_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")


def _check_least_squares(a: torch.Tensor, b: torch.Tensor, driver: str) -> bool:
    """Raises for arguments that torch refuses; otherwise returns whether `b` holds vectors."""
    rule = None
    is_vector = a.dim() >= 2 and a.dim() - 1 == b.dim() and b.shape == a.shape[:-1]
    if a.dim() < 2:
        rule = "input must have at least 2 dimensions"
    elif b.dim() < 1:
        rule = "other must have at least 1 dimension"
    elif a.dtype != b.dtype:
        rule = (
            "expected input and other to have the same dtype, "
            f"but got input's dtype {a.dtype} and other's dtype {b.dtype}"
        )
    elif not (a.is_floating_point() or a.is_complex()):
        rule = "expected a floating or complex dtype"
    elif a.dtype.itemsize < 4:
        rule = "This function doesn't handle types other than float and double"
    elif driver not in _DRIVERS:
        rule = f"parameter `driver` should be one of ({', '.join(_DRIVERS)}), but got {driver!r}"
    elif (
        b.dim() not in (a.dim(), a.dim() - 1)
        or (b.shape[-1] if is_vector else b.shape[-2]) != a.shape[-2]
    ):
        rule = "the rows of input and other must agree"
    if rule is not None:
        raise RuntimeError(
            f"torch.linalg.lstsq: {rule}; input has shape {tuple(a.shape)}, other "
            f"{tuple(b.shape)}. Give it a matrix and as many rows of other, in one floating dtype."
        )
    return is_vector


def _least_squares(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """`linalg_lstsq`, which has no meta kernel: by QR or by the pseudo-inverse.

    `gels` assumes full rank and uses QR; the other drivers use the pseudo-inverse over the singular
    values. `gelsy` is the default, as on the CPU; its rank is counted from the singular values too,
    where LAPACK estimates it from a pivoted QR.
    """
    a, b = args[:2]
    rcond = args[2] if len(args) > 2 else kwargs.get("rcond")
    driver = kwargs.get("driver") or "gelsy"
    is_vector = _check_least_squares(a, b, driver)
    m, n = a.shape[-2:]
    rcond = torch.finfo(a.dtype).eps * max(m, n) if rcond is None else rcond
    b = b.unsqueeze(-1) if is_vector else b
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    values = a.new_empty(0, dtype=a.real.dtype)
    rank = torch.empty(0, dtype=torch.int64, device=a.device)
    if driver == "gels":
        x = _full_rank(a, b)
    else:
        u, sizes, vh = aten._linalg_svd(a)
        kept = sizes > rcond * (sizes[..., :1] if sizes.shape[-1] else sizes)
        inverse = torch.where(kept, 1 / sizes, 0).unsqueeze(-1).to(a.dtype)
        x = vh.mH @ (inverse * (u.mH @ b))
        rank = kept.sum(-1)
        values = values if driver == "gelsy" else sizes
    residuals = values.new_empty(0)
    if m > n and driver != "gelsy" and (driver == "gels" or bool((rank == n).all())):
        residuals = (a @ x - b).abs().square().sum(-2).broadcast_to(*batch, b.shape[-1])
        residuals = residuals.squeeze(-1) if is_vector else residuals
    # LAPACK's results are column-major.
    x = x.mT.contiguous().mT
    return x.squeeze(-1) if is_vector else x, residuals, rank, values


def _full_rank(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The least-squares solution of a tall system, the shortest solution of a wide one."""
    if a.shape[-2] >= a.shape[-1]:
        q, r = aten.linalg_qr(a)
        return aten.linalg_solve_triangular(r, q.mH @ b, upper=True)
    q, r = aten.linalg_qr(a.mH)
    return q @ aten.linalg_solve_triangular(r.mH, b, upper=False)


# torch's composition of `matrix_rank(out=)` ends by binding its own name `out` to another tensor,
# so that on a device below it `out` stays unwritten.
_library = torch.library.Library("aten", "IMPL")


def _write_rank(func: torch._ops.OpOverload) -> None:
    form = schema.functional(func)
    assert form is not None, f"{func} has no functional form"

    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        ranks = form(*args, **kwargs)
        if not torch.can_cast(ranks.dtype, out.dtype):
            raise RuntimeError(
                f"Expected result to be safely castable from {ranks.dtype}, but got {out.dtype}. "
                f"Give `out` the dtype {ranks.dtype}."
            )
        if out.shape != ranks.shape:
            out.resize_(ranks.shape)
        return out.copy_(ranks)

    _library.impl(func, kernel, "AutogradXLA")


for _name in ("atol_rtol_tensor_out", "atol_rtol_float_out", "out", "out_tol_tensor"):
    _func = releases.overload(f"aten.linalg_matrix_rank.{_name}")
    if _func is not None:
        _write_rank(_func)


_HANDLERS: dict[str, Handler] = {
    "aten._linalg_check_errors.default": _check_errors,
    "aten._linalg_solve_ex.default": _ex(_solve, "torch.linalg.solve_ex"),
    "aten.cholesky.default": _cholesky,
    "aten._linalg_det.default": _det,
    "aten._linalg_slogdet.default": _slogdet,
    "aten.linalg_lstsq.default": _least_squares,
}
# Each makes a handler from the one that records the overload.
_AROUND: dict[str, Callable[[Handler], Handler]] = {
    "aten.linalg_cholesky_ex.default": partial(_ex, api_name="linalg.cholesky_ex"),
    "aten.linalg_inv_ex.default": partial(_ex, api_name="linalg.inv_ex"),
    "aten.linalg_lu_factor_ex.default": partial(_ex, api_name="torch.linalg.lu_factor_ex"),
    "aten.linalg_ldl_factor_ex.default": partial(_ex, api_name="torch.linalg.ldl_factor_ex"),
    "aten.cholesky_inverse.default": _cholesky_inverse,
    "aten._linalg_svd.default": _svd,
}
HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    **releases.overloads(_HANDLERS),
    **{func: around(_recorded(func)) for func, around in releases.overloads(_AROUND).items()},
}
