"""Random chains of views and in-place writes: every live alias is compared with eager torch.

The steps are drawn as plain numbers and interpreted on the CPU tensors, so that both devices make
the same calls. All aliases are compared after one cut, through a copy made on the device and
through a read of the alias itself.
"""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tiers import examples

import spmd_core as spmd

DTYPES = [torch.float32, torch.int64, torch.complex64, torch.bfloat16, torch.bool]
SHAPES = [(4, 6), (2, 3, 4), (24,), (1, 8, 3)]
Draw = Any  # a function (n) -> a number below n


def _axis(x: torch.Tensor, draw: Draw) -> int:
    return draw(x.dim()) - (x.dim() if draw(2) else 0)


def _factors(n: int) -> list[tuple[int, ...]]:
    return [(n,), (1, n), *((d, n // d) for d in range(2, n) if n % d == 0)][:5]


def _pick(items: list[Any], draw: Draw) -> Any:
    return items[draw(len(items))]


def _strided(x: torch.Tensor, draw: Draw) -> Any:
    """(size, strides, offset) of a region of the storage, at times interleaved or overlapping."""
    n = x.untyped_storage().nbytes() // x.element_size()
    if n < 8:
        return None
    size, strides = [
        ((2, 2), (4, 1)),
        ((2, 2), (1, 4)),
        ((2, 3), (3, 2)),
        ((2, 3), (1, 2)),
        ((2, 2), (1, 1)),
        ((3,), (0,)),
        ((2,), (3,)),
    ][draw(7)]
    reach = sum((m - 1) * s for m, s in zip(size, strides))
    return (size, strides, draw(n - reach)) if reach < n else None


# Each takes a CPU tensor and a source of numbers, and returns a function from a tensor to a view of
# it, or None where this view does not apply.
VIEWS: dict[str, Any] = {
    "view": lambda x, d: (
        (lambda s: lambda t: t.view(s))(_pick(_factors(x.numel()), d))
        if x.is_contiguous() and x.numel()
        else None
    ),
    "reshape": lambda x, d: (
        (lambda s: lambda t: t.reshape(s))(_factors(x.numel())[d(2)]) if x.numel() else None
    ),
    "flatten": lambda x, d: (lambda t: t.view(-1)) if x.is_contiguous() else None,
    "view.dtype": lambda x, d: {
        torch.float32: lambda t: t.view(torch.int32),
        torch.int32: lambda t: t.view(torch.float32),
        torch.int64: lambda t: t.view(torch.float64),
        torch.float64: lambda t: t.view(torch.int64),
        torch.bfloat16: lambda t: t.view(torch.int16),
        torch.int16: lambda t: t.view(torch.bfloat16),
    }.get(None if x.is_neg() else x.dtype),
    "view.narrower": lambda x, d: (
        (
            lambda t: t.view(
                {
                    torch.int64: torch.int32,
                    torch.float32: torch.int16,
                    torch.complex64: torch.float32,
                }[x.dtype]
            )
        )
        if x.dtype in (torch.int64, torch.float32, torch.complex64)
        and x.dim()
        and x.stride(-1) == 1
        and not x.is_conj()
        and not x.is_neg()
        else None
    ),
    "view.wider": lambda x, d: (
        (lambda t: t.view({torch.int32: torch.int64, torch.int16: torch.float32}[x.dtype]))
        if x.dtype in (torch.int32, torch.int16)
        and x.dim()
        and x.stride(-1) == 1
        and x.shape[-1] % 2 == 0
        and x.storage_offset() % 2 == 0
        and all(s % 2 == 0 for s in x.stride()[:-1])
        else None
    ),
    "as_strided": lambda x, d: (lambda a: a and (lambda t: t.as_strided(*a)))(_strided(x, d)),
    "select": lambda x, d: (
        (lambda a, i: lambda t: t.select(a, i))(_some(x, d), d(2) - d(2))
        if _some(x, d) is not None
        else None
    ),
    "slice": lambda x, d: (
        (lambda a, b, c: lambda t: t[a : -1 if b else None : c])(d(3), d(2), 1 + d(2))
        if x.dim()
        else None
    ),
    "slice of the last": lambda x, d: (
        (lambda a, c: lambda t: t[..., a::c])(d(3), 1 + d(3)) if x.dim() else None
    ),
    "narrow": lambda x, d: (
        (lambda t: t.narrow(-1, 1, x.shape[-1] - 1)) if x.dim() and x.shape[-1] > 1 else None
    ),
    "transpose": lambda x, d: (
        (lambda a, b: lambda t: t.transpose(a, b))(_axis(x, d), _axis(x, d)) if x.dim() else None
    ),
    "t": lambda x, d: (lambda t: t.t()) if x.dim() <= 2 else None,
    "mT": lambda x, d: (lambda t: t.mT) if x.dim() >= 2 else None,
    "mH": lambda x, d: (lambda t: t.mH) if x.dim() >= 2 else None,
    "adjoint": lambda x, d: (lambda t: t.adjoint()) if x.dim() >= 2 else None,
    "permute": lambda x, d: (lambda p: lambda t: t.permute(p))(
        list(range(x.dim()))[:: -1 if d(2) else 1]
    ),
    "movedim": lambda x, d: (
        (lambda a, b: lambda t: t.movedim(a, b))(_axis(x, d), _axis(x, d)) if x.dim() else None
    ),
    "swapaxes": lambda x, d: (lambda t: t.swapaxes(0, -1)) if x.dim() else None,
    "squeeze": lambda x, d: lambda t: t.squeeze(),
    "squeeze.dim": lambda x, d: (
        (lambda a: lambda t: t.squeeze(a))(_axis(x, d)) if x.dim() else None
    ),
    "squeeze.dims": lambda x, d: (lambda t: t.squeeze((0, -1))) if x.dim() > 1 else None,
    "unsqueeze": lambda x, d: (
        (lambda a: lambda t: t.unsqueeze(a))(d(x.dim() + 1)) if x.dim() < 4 else None
    ),
    "unflatten": lambda x, d: (
        (lambda t: t.unflatten(0, (2, -1)))
        if x.dim() and x.shape[0] and x.shape[0] % 2 == 0 and x.dim() < 4
        else None
    ),
    "expand": lambda x, d: (lambda t: t.unsqueeze(0).expand(2, *x.shape)) if x.dim() < 3 else None,
    "expand of one": lambda x, d: (lambda t: t.expand(1, *x.shape)) if x.dim() < 4 else None,
    "unfold": lambda x, d: (
        (lambda a, n, s: lambda t: t.unfold(a, n, s))(0, 2, 1 + d(3))
        if x.dim() and x.shape[0] >= 2 and x.dim() < 4
        else None
    ),
    "diagonal": lambda x, d: (
        (lambda o: lambda t: t.diagonal(o, 0, -1))(d(3) - 1) if x.dim() >= 2 else None
    ),
    "chunk": lambda x, d: (lambda t: t.chunk(2, -1)[-1]) if x.dim() and x.shape[-1] else None,
    "split": lambda x, d: (lambda t: t.split(2)[0]) if x.dim() and x.shape[0] else None,
    "split_with_sizes": lambda x, d: (
        (lambda t: t.split([1, x.shape[0] - 1])[1]) if x.dim() and x.shape[0] else None
    ),
    "tensor_split": lambda x, d: (lambda t: t.tensor_split(3, -1)[1]) if x.dim() else None,
    "hsplit": lambda x, d: (lambda t: torch.hsplit(t, [1])[1]) if x.dim() else None,
    "unbind": lambda x, d: (lambda t: t.unbind(0)[-1]) if x.dim() and x.shape[0] else None,
    "real": lambda x, d: lambda t: t.real,
    "imag": lambda x, d: (lambda t: t.imag) if x.is_complex() else None,
    "conj": lambda x, d: (lambda t: t.conj()) if x.is_complex() else None,
    "neg_view": lambda x, d: (lambda t: torch._neg_view(t)) if x.dtype is torch.float32 else None,
    "view_as_real": lambda x, d: (
        (lambda t: torch.view_as_real(t))
        if x.is_complex() and not x.is_conj() and x.dim() < 4
        else None
    ),
    "view_as_complex": lambda x, d: (
        (lambda t: torch.view_as_complex(t))
        if x.dtype is torch.float32
        and x.dim()
        and x.shape[-1] == 2
        and x.stride(-1) == 1
        and x.storage_offset() % 2 == 0
        and all(s % 2 == 0 for s in x.stride()[:-1])
        and not x.is_neg()
        else None
    ),
    "detach": lambda x, d: lambda t: t.detach(),
    "data": lambda x, d: lambda t: t.data,
    "contiguous": lambda x, d: lambda t: t.contiguous(),
    "resolve_conj": lambda x, d: lambda t: t.resolve_conj(),
}


def _some(x: torch.Tensor, draw: Draw) -> int | None:
    return None if not x.dim() or x.shape[0] < 2 else 0


def _value(x: torch.Tensor, draw: Draw) -> Any:
    return (
        (draw(2) == 1)
        if x.dtype is torch.bool
        else (complex(draw(5), 1) if x.is_complex() else draw(5))
    )


def _takes_foreach(x: torch.Tensor) -> bool:
    # torch's fallbacks for lazy conjugates and negations do not support lists.
    return (
        x.dim() > 0
        and x.shape[0] > 1
        and x.dtype is not torch.bool
        and not x.is_neg()
        and not x.is_conj()
    )


def _index(t: torch.Tensor, *values: int) -> torch.Tensor:
    return torch.tensor(values).to(t.device)


WRITES: dict[str, Any] = {
    "add_": lambda x, d: (
        (lambda v: lambda t: t.add_(v))(_value(x, d)) if x.dtype is not torch.bool else None
    ),
    "mul_": lambda x, d: (lambda v: lambda t: t.mul_(v))(_value(x, d)),
    "copy_": lambda x, d: (
        lambda v: lambda t: t.copy_(torch.full(tuple(x.shape), v, dtype=x.dtype))
    )(_value(x, d)),
    "copy_ of a clone": lambda x, d: (
        lambda t: t.copy_(t.flip(0).clone()) if x.dim() else t.copy_(t.clone())
    ),
    "copy_ of a row": lambda x, d: (
        (lambda t: t.copy_(t[0].clone())) if x.dim() and x.shape[0] else None
    ),
    "fill_": lambda x, d: (lambda v: lambda t: t.fill_(v))(_value(x, d)),
    "zero_": lambda x, d: lambda t: t.zero_(),
    "masked_fill_": lambda x, d: (lambda v: lambda t: t.masked_fill_(t != t.clone().fill_(1), v))(
        _value(x, d)
    ),
    "x[i] =": lambda x, d: (
        (lambda v: lambda t: t.__setitem__(-1, v))(_value(x, d)) if x.dim() and x.shape[0] else None
    ),
    "x[::2] =": lambda x, d: (
        (lambda v: lambda t: t.__setitem__(slice(None, None, 2), v))(_value(x, d))
        if x.dim()
        else None
    ),
    "x[tensor] =": lambda x, d: (
        (lambda v: lambda t: t.__setitem__((_index(t, 0, -1),), v))(_value(x, d))
        if x.dim() and x.shape[0]
        else None
    ),
    "x[mask] =": lambda x, d: (
        (lambda v: lambda t: t.__setitem__(t == t.clone().zero_(), v))(_value(x, d))
        if x.dim()
        else None
    ),
    "index_fill_": lambda x, d: (
        (lambda v: lambda t: t.index_fill_(0, _index(t, 0), v))(_value(x, d))
        if x.dim() and x.shape[0]
        else None
    ),
    "neg_": lambda x, d: (lambda t: t.neg_()) if x.dtype is not torch.bool else None,
    "add_ of another": lambda x, d: (
        (lambda t: t.add_(t.clone())) if x.dtype is not torch.bool else None
    ),
    "partial": lambda x, d: (
        (lambda t: t[1:].copy_(t[:-1])) if x.dim() == 1 and x.is_contiguous() else None
    ),
    "conj_physical_": lambda x, d: (lambda t: t.conj_physical_()) if x.is_complex() else None,
    "foreach": lambda x, d: (
        (lambda t: torch._foreach_mul_([t[0], t[-1]], 2)) if _takes_foreach(x) else None
    ),
}
STEPS = [*VIEWS, *WRITES, *WRITES, "sync"]


def _ordinary(x: torch.Tensor) -> bool:
    """Whether arithmetic keeps the bits: all values are finite, and none is subnormal.

    XLA flushes subnormal numbers, such as small integers viewed as floats, to zero.
    """
    if not x.is_floating_point() and not x.is_complex():
        return True
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return bool(
        (parts.isfinite() & ((parts == 0) | (parts.abs() >= torch.finfo(parts.dtype).tiny))).all()
    )


def _attempt(function: Any, x: torch.Tensor) -> Any:
    try:
        return function(x)
    except RuntimeError as error:
        return error


def _run(
    dtype: torch.dtype, shape: tuple[int, ...], steps: list[tuple[str, int, int]], mark: Any = None
) -> None:
    start = (torch.arange(24) % 7).reshape(shape).to(dtype)
    if dtype.is_complex:
        start = torch.complex(start.real, start.real.flip(0) - 2)
    base = start.to("xla")
    if mark is not None:
        mark(base)
    live = [(start, base)]
    history: list[Any] = []
    seen: list[tuple[list[Any], torch.Tensor, torch.Tensor]] = []
    for name, which, seed in steps:
        if name == "sync":
            spmd.sync()
            continue
        cpu, xla = live[which % len(live)]
        numbers = seed

        def draw(n: int) -> int:
            nonlocal numbers
            numbers, rest = divmod(numbers, max(n, 1))
            return rest

        function = {**VIEWS, **WRITES}[name](cpu, draw)
        if function is None or (name in WRITES and not _ordinary(cpu)):
            continue
        history.append((name, which % len(live), seed))
        right, got = _attempt(function, cpu), _attempt(function, xla)
        if isinstance(got, RuntimeError) and name in WRITES and not isinstance(right, RuntimeError):
            # torch writes to overlapping windows in some order. The device refuses such a write,
            # and the chain ends.
            assert "one memory location" in str(got), (history, got)
            return
        assert isinstance(right, RuntimeError) == isinstance(got, RuntimeError), (
            history,
            right,
            got,
        )
        if name in VIEWS and isinstance(right, torch.Tensor) and isinstance(got, torch.Tensor):
            assert (got.dtype, got.shape) == (right.dtype, right.shape), history
            assert (
                got.stride() == right.stride() and got.storage_offset() == right.storage_offset()
            ), (history, got.stride(), right.stride())
            live.append((right, got))
        # The value of every alias after this step. It is compared below, after the last step, so
        # that one program computes all of them.
        seen += [
            (history[:], _plain(c), x.clone(memory_format=torch.contiguous_format)) for c, x in live
        ]
    spmd.sync()
    seen += [(history, _plain(c), x) for c, x in live]
    for past, right, got in seen:
        torch.testing.assert_close(
            got.cpu(),
            right,
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda m, past=past: f"{m}\n{past}",
        )


def _plain(cpu: torch.Tensor) -> torch.Tensor:
    return cpu.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


_steps = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.integers(0, 10**4)),
    min_size=1,
    max_size=8,
)


@pytest.mark.filterwarnings("ignore:.*expanded tensors is deprecated")
@hypothesis.given(st.sampled_from(DTYPES), st.sampled_from(SHAPES), _steps)
@hypothesis.settings(max_examples=examples(250), deadline=None, derandomize=True)
def test_random_chains(dtype, shape, steps):
    _run(dtype, shape, steps)


@pytest.mark.filterwarnings("ignore:.*expanded tensors is deprecated")
@hypothesis.given(st.sampled_from(DTYPES[:3]), st.sampled_from([(8, 3), (24,)]), _steps)
@hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_random_chains_over_a_sharded_base(mesh_1d, dtype, shape, steps):
    _run(dtype, shape, steps, lambda x: spmd.mark_sharding(x, mesh_1d, ("x",)))
