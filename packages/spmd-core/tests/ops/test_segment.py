"""Reductions of segments against eager torch on the CPU."""

import math

import pytest
import torch
from tiers import crossed

import spmd_core
from oracle import check, lower
from spmd_core.ops import registry, segment  # noqa: F401  (registers the lowerings)

REDUCTIONS = ["sum", "mean", "max", "min", "prod"]
NAN = math.nan
# Segments with ties, with one or more zeros, with NaN alone or beside numbers, and empty ones.
DATA = torch.tensor([1, 2, 2, 0, 3, 0, 0, 4, NAN, 2, NAN, NAN])
LENGTHS = torch.tensor([3, 2, 3, 0, 2, 2, 0])


def check_both(
    data: torch.Tensor, reduce: str, lengths: torch.Tensor, axis: int, initial: float | None
) -> None:
    loose = {"rtol": 6e-2, "atol": 6e-2} if data.dtype is torch.bfloat16 else {}
    check(
        "aten.segment_reduce.default",
        data,
        reduce,
        lengths=lengths,
        axis=axis,
        initial=initial,
        **loose,
    )
    out = torch.segment_reduce(data, reduce, lengths=lengths, axis=axis, initial=initial)
    # Positive gradients: eager torch (2.13) divides only those among elements that share an
    # extremum.
    grad = torch.linspace(0.5, 2, out.numel()).reshape(out.shape).to(data.dtype)
    check(
        "aten._segment_reduce_backward.default",
        grad,
        out,
        data,
        reduce,
        lengths=lengths,
        axis=axis,
        initial=initial,
        **loose,
    )


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("initial", [None, 2.0, 0.0, NAN])
def test_lengths(reduce: str, initial: float | None) -> None:
    check_both(DATA, reduce, LENGTHS, 0, initial)


@pytest.mark.parametrize(
    ("dtype", "reduce"), crossed([torch.float32, torch.float64, torch.bfloat16], [*REDUCTIONS])
)
def test_several_rows(reduce: str, dtype: torch.dtype) -> None:
    data = torch.randint(-2, 3, (2, 12, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    check_both(data, reduce, torch.stack([LENGTHS, LENGTHS.flip(0)]), 1, None)
    check_both(data[0], reduce, LENGTHS.int(), 0, -3.0)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_offsets_and_nothing(reduce: str) -> None:
    check("aten.segment_reduce.default", DATA, reduce, offsets=torch.tensor([1, 4, 4, 9]))
    check(
        "aten.segment_reduce.default",
        DATA,
        reduce,
        offsets=torch.tensor([0, 4, 12]),
        lengths=torch.tensor([3]),
    )
    check("aten.segment_reduce.default", DATA, reduce, lengths=torch.tensor([1, 2]), unsafe=True)
    check("aten.segment_reduce.default", torch.zeros(0, 3), reduce, lengths=torch.tensor([0, 0]))
    check("aten.segment_reduce.default", torch.zeros(3, 0), reduce, lengths=torch.tensor([1, 2]))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_the_gradient_is_linear(reduce: str) -> None:
    """Negative gradients too are divided among tied elements, which eager torch (2.13) omits."""
    out = torch.segment_reduce(DATA, reduce, lengths=LENGTHS)
    outs = (registry.Out(tuple(DATA.shape), DATA.dtype),)
    up, down = (
        lower(
            "aten._segment_reduce_backward.default",
            (grad, out, DATA, reduce),
            {"lengths": LENGTHS},
            outs,
        )[0].tolist()
        for grad in (torch.ones(7), -torch.ones(7))
    )
    assert up == [-g for g in down]


def test_on_the_device() -> None:
    data = torch.rand(6, 2)
    mine, right = data.to("xla").requires_grad_(), data.clone().requires_grad_()
    lengths = torch.tensor([2, 0, 4])
    with spmd_core.strict():
        got = torch.segment_reduce(mine, "prod", lengths=lengths.to("xla"), initial=1.5)
        got.sum().backward()
    expected = torch.segment_reduce(right, "prod", lengths=lengths, initial=1.5)
    expected.sum().backward()
    torch.testing.assert_close(got.cpu(), expected)
    torch.testing.assert_close(mine.grad.cpu(), right.grad)
