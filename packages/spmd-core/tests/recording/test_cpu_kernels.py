"""Calls that eager torch refuses are refused in its words, whatever the sizes; its strides hold."""

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import ones, raised, same_refusal
from tiers import exhaustive
from torch.nn import functional as F

from spmd_core.recording import cpu_kernels

f32, f64, f16, bf16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
i64, boolean, c64 = torch.int64, torch.bool, torch.complex64
REFUSED = {
    "mm of two dtypes": lambda d: ones(3, 3, device=d) @ ones(3, 3, dtype=f64, device=d),
    "linear of two dtypes": lambda d: F.linear(
        ones(2, 3, device=d), ones(4, 3, dtype=bf16, device=d)
    ),
    "conv2d of two dtypes": lambda d: F.conv2d(
        ones(1, 2, 5, 5, device=d), ones(3, 2, 3, 3, dtype=f16, device=d)
    ),
    "softmax of integers": lambda d: ones(3, dtype=i64, device=d).softmax(0),
    "gelu of integers": lambda d: F.gelu(ones(3, dtype=i64, device=d)),
    "integers times a fraction, in place": lambda d: ones(3, dtype=i64, device=d).mul_(1.5),
    "integers times floats, in place": lambda d: ones(3, dtype=i64, device=d).mul_(
        ones(3, device=d)
    ),
    "bool times 2, in place": lambda d: ones(3, dtype=boolean, device=d).mul_(2),
    "1 - bool": lambda d: 1 - ones(3, dtype=boolean, device=d),
    "float - bool": lambda d: ones(3, device=d) - ones(3, dtype=boolean, device=d),
    "clamp of complex numbers": lambda d: ones(3, dtype=c64, device=d).clamp(0, 1),
    "relu of bool": lambda d: ones(3, dtype=boolean, device=d).relu_(),
    "index_select into another dtype": lambda d: torch.index_select(
        ones(3, dtype=bf16, device=d), 0, torch.tensor([1], device=d), out=torch.empty(0, device=d)
    ),
    "gather at 32-bit indices": lambda d: ones(3, device=d).gather(
        0, torch.zeros(1, dtype=torch.int16, device=d)
    ),
    "a list of several dtypes": lambda d: torch.block_diag(ones(2, 2, device=d)).index_put_(
        (torch.tensor([0], device=d),), ones(2, dtype=f64, device=d)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_eager_torch_refuses(name: str) -> None:
    same_refusal(REFUSED[name])


def test_what_was_asked_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by calls of other numbers and other tensors, also of `out` forms and shared memory."""
    asked: list[Any] = []
    carry_out = cpu_kernels._carry_out
    monkeypatch.setattr(
        cpu_kernels, "_carry_out", lambda call: asked.append(call) or carry_out(call)
    )
    out = torch.empty(7, 11, device="xla")
    for step in range(3):
        x = torch.full((7, 11), float(step), device="xla")
        torch.mul(x, 1.5 + step, out=out)
        x.mul_(x)
        x[0].add_(x[1])
        x.clamp(step, step + 1)
        if step == 0:
            assert asked
            asked.clear()
    assert not asked


@pytest.mark.parametrize("function", [torch.softmax, torch.argsort])
def test_asking_keeps_no_tensor(function: Callable[..., Any]) -> None:
    """Neither the question nor an error does: what is kept is a result of the next program."""
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(3, 5, 7, dtype=i64, device="xla")
        with contextlib.suppress(NotImplementedError):
            function(x, 0)
        kept = weakref.ref(x._handle)
        del x
        assert kept() is None
    finally:
        gc.enable()


def test_an_error_of_the_kernel_keeps_no_tensor() -> None:
    """Smaller stand-ins do not fit each other in the gradient of a grouped convolution."""
    images = ones(8, 16, 31, 29, dtype=f64, device="xla")
    weight = ones(16, 1, 3, 3, dtype=f64, device="xla").requires_grad_()
    gc.collect()
    gc.disable()
    try:
        result = F.hardswish(F.conv2d(images, weight, stride=2, padding=1, groups=16))
        kept = [weakref.ref(t._handle) for t in (images, result)]
        result.sum().backward()
        del images, result
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def test_asking_draws_nothing_and_warns_of_nothing() -> None:
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cpu_kernels.refuse(torch.ops.aten.uniform_.default, (torch.ones(5, 3),), {})
        assert cpu_kernels.refuse(  # eager torch warns: bytes are deprecated as a mask
            torch.ops.aten.index.Tensor, (torch.ones(3), [torch.ones(3, dtype=torch.uint8)]), {}
        )
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_of_the_cpu_is_not_that_of_the_device() -> None:
    with torch.autocast("cpu", dtype=bf16):
        assert (ones(3, 13, device="xla") @ ones(13, 5, device="xla")).dtype is f32
        assert F.linear(ones(3, 13, device="xla"), ones(4, 13, device="xla")).dtype is f32


def test_values_are_no_reason_to_refuse() -> None:
    """A singular matrix, a division by zero, an index of a tensor whose values are pending."""
    z = torch.zeros(3, 3, dtype=i64, device="xla")
    assert (z // (z + 2)).tolist() == [[0] * 3] * 3
    assert (
        torch.linalg.solve(torch.eye(3, device="xla"), torch.ones(3, device="xla")).tolist()
        == [1.0] * 3
    )
    assert torch.histc(torch.arange(4.0, device="xla"), 2, min=0, max=3).tolist() == [2.0, 2.0]


def test_what_only_the_meta_kernel_refuses_is_accepted() -> None:
    x = torch.tensor([complex(float("nan"), 1.0), complex(float("inf"), -2.0)])
    got = x.to("xla").nan_to_num_(nan=3.0)
    assert torch.equal(got.cpu(), x.nan_to_num_(nan=3.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["layer", "group", "batch", "instance"])
def test_the_gradient_of_a_norm_takes_the_statistics_that_the_device_saved(norm, dtype):
    functions = {
        "layer": lambda x, w: F.layer_norm(x, (8,), w),
        "group": lambda x, w: F.group_norm(x, 2, w),
        "batch": lambda x, w: F.batch_norm(x, None, None, w, training=True),
        "instance": lambda x, w: F.instance_norm(x, None, None, w),
    }
    values = torch.randn(4, 8, 8)
    gradients = []
    for device in ("cpu", "xla"):
        x = values.to(device).to(dtype).requires_grad_()
        w = torch.ones(8).to(device).to(dtype).requires_grad_()
        (functions[norm](x, w) * torch.linspace(0, 1, 8).to(device)).sum().backward()
        gradients.append((x.grad.cpu(), w.grad.cpu()))
    for expected, got in zip(*gradients):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


NUMBERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "clamp": lambda x, n: x.clamp(max=n),
    "scatter": lambda x, n: x.scatter(0, torch.zeros(1, dtype=torch.int64, device=x.device), n),
    "scatter_": lambda x, n: x.scatter_(0, torch.zeros(1, dtype=torch.int64, device=x.device), n),
    "pad": lambda x, n: torch.nn.functional.pad(x, (1, 1), value=n),
    "addcmul": lambda x, n: x.addcmul(x, x, value=n),
    "add": lambda x, n: x + n,
    "mul_": lambda x, n: x.mul_(n),
    "//": lambda x, n: x // n,
    "//=": lambda x, n: x.floor_divide_(n),
    "%": lambda x, n: x % n,
    "fmod": lambda x, n: x.fmod(n),
    "n // x": lambda x, n: n // x,
    "foreach": lambda x, n: torch._foreach_clamp_max([x], n)[0],
    "==": lambda x, n: x == n,
    "pow": lambda x, n: x**n,
    "out": lambda x, n: torch.fmod(x, n, out=torch.zeros_like(x)),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, exhaustive(torch.uint8), exhaustive(torch.int32), torch.int64],
)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_refused_as_by_eager_torch(name: str, dtype: torch.dtype) -> None:
    # In one order and then in the other: what one call was told must not answer for another.
    values = [1, 0, 127, 128, -1, -128, -129, 255, 256, 2**31 - 1, 2**31, -(2**31) - 1]
    for value in [*values, *reversed(values)]:
        outcomes = []
        for device in ("cpu", "xla"):
            x = torch.tensor([3, 5, 7], dtype=dtype, device=device)
            try:
                outcomes.append(NUMBERS[name](x, value).cpu())
            except RuntimeError as error:
                outcomes.append(str(error))
        right, got = outcomes
        assert isinstance(got, str) == isinstance(right, str), (value, right, got)
        if isinstance(right, str):
            assert got == right
        else:
            assert torch.equal(got, right), value


def test_a_refused_number_leaves_the_tensor() -> None:
    x = torch.tensor([3, 5], device="xla")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x.floor_divide_(0)
    assert x.tolist() == [3, 5]


def test_numbers_of_one_class_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(5, device="xla", dtype=torch.int16)
    x + 3
    calls = []
    ask = cpu_kernels.ask
    monkeypatch.setattr(cpu_kernels, "ask", lambda *a, **k: calls.append(a) or ask(*a, **k))
    for number in range(1000):
        x + number
    assert len(calls) <= 10 + len(range(0, 1000, 256))


COMPLEX: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "fill_": lambda x, n: x.fill_(n),
    "an element": lambda x, n: x.__setitem__(0, n),
    "a mask": lambda x, n: x.__setitem__(x > 0, n),
    "full": lambda x, n: torch.full((2,), n, dtype=x.dtype, device=x.device),
    "full_like": torch.full_like,
    "scatter": lambda x, n: x.scatter(0, torch.zeros(1, dtype=torch.int64, device=x.device), n),
    "addcmul": lambda x, n: x.addcmul(x, x, value=n),
    "lerp": lambda x, n: x.lerp(x, n),
    "mul": lambda x, n: x * n,
    "mul_": lambda x, n: x.mul_(n),
}


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.float32, 1j), (torch.float32, 2 + 0j), (torch.float16, 1e6), (torch.float16, 7e4)],
)
@pytest.mark.parametrize("name", COMPLEX)
def test_numbers_that_a_float_cannot_hold(name: str, dtype: torch.dtype, number: Any) -> None:
    def call(device: str) -> Any:
        return COMPLEX[name](torch.ones(2, dtype=dtype, device=device), number)

    right, got = raised(call, "cpu"), raised(call, "xla")
    assert (type(got), str(got)) == (type(right), str(right))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.complex(x, x),
        lambda x: x * 1j,
        lambda x: x.to(torch.complex32),
        lambda x: x.to(torch.float8_e4m3fnuz),
    ],
)
def test_dtypes_that_the_device_lacks_are_refused_at_once(call: Callable[..., Any]) -> None:
    x = torch.ones(2, dtype=torch.float16, device="xla")
    with pytest.raises(NotImplementedError, match="must have one of the dtypes"):
        call(x)
    assert (x + 1).tolist() == [2, 2]
