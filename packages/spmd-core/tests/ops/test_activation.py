"""Activation functions against eager torch on the CPU."""

import math
from typing import Any

import pytest
import torch

from oracle import check, lower
from spmd_core.ops import activation, registry  # noqa: F401  (registers the lowerings)

FLOATS = [torch.float32, torch.bfloat16]
SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 6.0, 30.0, -30.0, math.nan, math.inf, -math.inf]
)


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


# (name, the arguments after the input, or after grad and input; keyword arguments)
FORWARD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("celu", (), {}),
    ("celu", (0.7,), {}),
    ("elu", (), {}),
    ("elu", (1.5, 1.05, 0.5), {}),
    ("gelu", (), {}),
    ("gelu", (), {"approximate": "tanh"}),
    ("glu", (), {}),
    ("hardshrink", (0.7,), {}),
    ("hardsigmoid", (), {}),
    ("hardswish", (), {}),
    ("hardtanh", (), {}),
    ("hardtanh", (0.0, 6.0), {}),
    ("leaky_relu", (), {}),
    ("leaky_relu", (0.3,), {}),
    ("log_sigmoid_forward", (), {}),
    ("mish", (), {}),
    ("relu", (), {}),
    ("silu", (), {}),
    ("softplus", (), {}),
    ("softplus", (2, 3), {}),
    ("softshrink", (0.7,), {}),
    ("threshold", (0.5, -7.0), {}),
]
BACKWARD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("gelu_backward", (), {}),
    ("gelu_backward", (), {"approximate": "tanh"}),
    ("hardshrink_backward", (0.7,), {}),
    ("hardsigmoid_backward", (), {}),
    ("hardswish_backward", (), {}),
    ("hardtanh_backward", (-1.0, 1.5), {}),
    ("leaky_relu_backward", (0.3, False), {}),
    ("mish_backward", (), {}),
    ("silu_backward", (), {}),
    ("softplus_backward", (2, 3), {}),
    ("softshrink_backward", (0.7,), {}),
    ("threshold_backward", (0.5,), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), FORWARD)
def test_forward(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for dtype in FLOATS:
        check(f"aten.{op}.default", values(dtype, 3, 8), *args, **kwargs)
    # gelu(inf) and gelu(-inf) are inf * 1 and inf * 0 in torch's formulas: nan in some of its
    # kernels and in some versions of XLA.
    check(
        f"aten.{op}.default",
        SPECIAL if op != "gelu" else SPECIAL[SPECIAL.isfinite()],
        *args,
        **kwargs,
    )
    check(f"aten.{op}.default", torch.empty(0, 4), *args, **kwargs)
    if op != "glu":
        check(f"aten.{op}.default", values(torch.float32), *args, **kwargs)


@pytest.mark.parametrize(("op", "args", "kwargs"), BACKWARD)
def test_backward(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for dtype in FLOATS:
        check(
            f"aten.{op}.default", values(dtype, 3, 8, seed=1), values(dtype, 3, 8), *args, **kwargs
        )
    finite = SPECIAL[SPECIAL.isfinite()]
    check(f"aten.{op}.default", torch.ones_like(finite), finite, *args, **kwargs)
    check(f"aten.{op}.default", torch.empty(0, 4), torch.empty(0, 4), *args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_activations_of_integers(dtype: torch.dtype) -> None:
    x = torch.tensor([-3, 0, 5], dtype=dtype)
    check("aten.relu.default", x)
    check("aten.threshold.default", x, 1, 9)
    check("aten.hardtanh.default", x, -1, 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_from_the_result(dtype: torch.dtype) -> None:
    grad = values(dtype, 3, 8, seed=1)
    check("aten.tanh_backward.default", grad, values(dtype, 3, 8).tanh())
    check("aten.sigmoid_backward.default", grad, values(dtype, 3, 8).sigmoid())
    check("aten.leaky_relu_backward.default", grad, values(dtype, 3, 8), 0.3, True)
    for is_result in (False, True):
        check("aten.elu_backward.default", grad, 1.5, 1.05, 1, is_result, values(dtype, 3, 8))


def test_backward_of_complex_results() -> None:
    z, grad = (
        torch.complex(values(torch.float32, 5, seed=s), values(torch.float32, 5, seed=s + 1))
        for s in (0, 2)
    )
    check("aten.tanh_backward.default", grad, z)
    check("aten.sigmoid_backward.default", grad, z)
    check("aten.silu.default", z)


@pytest.mark.parametrize("dtype", FLOATS)
def test_log_sigmoid_backward(dtype: torch.dtype) -> None:
    x = values(dtype, 3, 8) * 10
    check(
        "aten.log_sigmoid_backward.default",
        values(dtype, 3, 8, seed=1),
        x,
        torch.ops.aten.log_sigmoid_forward(x)[1],
    )


def test_log_sigmoid_with_an_empty_buffer() -> None:
    outs = (registry.Out((4,), torch.float32), registry.Out((0,), torch.float32))
    assert [
        x.shape
        for x in lower("aten.log_sigmoid_forward.default", (values(torch.float32, 4),), {}, outs)
    ] == [(4,), (0,)]


@pytest.mark.parametrize("eps", [None, 1e-2])
def test_logit(eps: float | None) -> None:
    x = torch.tensor([0.0, 1.0, 0.5, 0.3, 0.005, 0.995, -0.2, 1.2, math.nan])
    check("aten.logit.default", x, eps)
    check("aten.logit.default", values(torch.bfloat16, 9).sigmoid(), eps)
    check("aten.logit_backward.default", torch.ones(8), x[:8], eps)


@pytest.mark.parametrize("dtype", FLOATS)
def test_prelu(dtype: torch.dtype) -> None:
    weight = values(dtype, 1, 4, 1, seed=2)
    check("aten._prelu_kernel.default", values(dtype, 2, 4, 3), weight)
    check(
        "aten._prelu_kernel_backward.default",
        values(dtype, 2, 4, 3, seed=1),
        values(dtype, 2, 4, 3),
        weight.expand(2, 4, 3),
    )


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_glu(dim: int) -> None:
    x = values(torch.float32, 4, 6)
    check("aten.glu.default", x, dim)
    check("aten.glu_backward.default", torch.ops.aten.glu(x, dim) + 1, x, dim)


def test_softshrink_refuses_each_negative_bound() -> None:
    """Also after calls of the same form with another bound."""
    x = torch.linspace(-1, 1, 5)
    for bound in (0.5, 0.25):
        got = torch.nn.functional.softshrink(x.to("xla"), bound)
        torch.testing.assert_close(got.cpu(), torch.nn.functional.softshrink(x, bound))
        with pytest.raises(RuntimeError, match="lambda must be in range"):
            torch.nn.functional.softshrink(x.to("xla"), -bound)
