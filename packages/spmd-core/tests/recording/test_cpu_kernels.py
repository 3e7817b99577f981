"""Calls that eager torch refuses are refused in its words, whatever the sizes; its strides hold."""

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import exhaustive
from torch.nn import functional as F

from spmd_core.recording import cpu_kernels, stand_ins


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def raised(call: Callable[[str], Any], device: str) -> Exception | None:
    try:
        call(device)
    except Exception as error:  # its type and its words are what is compared
        return error
    return None


def same_refusal(call: Callable[[str], Any]) -> None:
    """Asserts that both devices raise the same error."""
    right, mine = raised(call, "cpu"), raised(call, "xla")
    assert right is not None and mine is not None
    assert type(mine) is type(right) and str(mine) == str(right)


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


def square(device: str) -> torch.Tensor:
    return torch.arange(9.0, device=device).view(3, 3) + 1


def indices(device: str) -> torch.Tensor:
    return torch.tensor([1, 0, 2], device=device)


OVERLAPPING = {
    "a transpose as out": lambda x, d: torch.exp(x, out=x.t()),
    "the tensor's own rows": lambda x, d: x.__setitem__(indices(d), x),
    "a view of the tensor's own rows": lambda x, d: x.__setitem__(indices(d), x[:]),
    "indices written at themselves": lambda x, d: (lambda i: i.__setitem__(i, i))(indices(d)),
    "its transpose": lambda x, d: x.add_(x.t()),
    "a row of it": lambda x, d: x.mul_(x[0]),
    "shifted rows": lambda x, d: x[1:].add_(x[:-1]),
    "its transpose, copied": lambda x, d: x.copy_(x.t()),
    "scatter of itself": lambda x, d: x.scatter_(0, torch.zeros_like(x, dtype=i64), x),
    "index_copy of itself": lambda x, d: x.index_copy_(0, indices(d), x),
    "an expanded out": lambda x, d: torch.exp(
        torch.ones(3, 4, device=d), out=x[:, :1].expand(3, 4)
    ),
    "an expanded sum": lambda x, d: x[:, :1].expand(3, 4).add_(2.0),
    "an expanded copy": lambda x, d: x[:, :1].expand(3, 4).copy_(torch.ones(3, 4, device=d)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_shared_memory_that_eager_torch_refuses(name: str) -> None:
    same_refusal(lambda d: OVERLAPPING[name](square(d), d))


SHARED = {
    "itself": lambda x: x.add_(x),
    "itself as out": lambda x: torch.neg(x, out=x),
    "an element of it": lambda x: x.fill_(x[0, 0]),
    "a masked element of it": lambda x: x.masked_fill_(x > 5, x[0, 0]),
    "other rows of it": lambda x: x[:1].add_(x[1:2]),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_that_eager_torch_accepts(name: str) -> None:
    both = [square("cpu"), square("xla")]
    for x in both:
        SHARED[name](x)
    assert torch.equal(both[1].cpu(), both[0])


# The sizes of a large call differ on the two devices: the CPU's is small, and has the same error.
LARGE = {
    "mm": lambda d, n: ones(n, n + 2, device=d) @ ones(n + 2, n, dtype=f64, device=d),
    "softmax": lambda d, n: ones(n, n, dtype=i64, device=d).softmax(1),
    "conv2d": lambda d, n: F.conv2d(
        ones(n, 16, 20, 20, device=d), ones(32, 16, 3, 3, dtype=f16, device=d)
    ),
    "mul_": lambda d, n: ones(n, n, dtype=i64, device=d).mul_(1.5),
    "layer_norm": lambda d, n: F.layer_norm(
        ones(8, n, device=d), (n,), ones(n, dtype=f64, device=d)
    ),
}


@pytest.mark.parametrize("size", [200, 3000])
@pytest.mark.parametrize("name", LARGE)
def test_large_tensors_are_refused_alike(name: str, size: int) -> None:
    """With fewer elements than the limit for the call's own sizes, and with more."""
    right, mine = (
        raised(lambda d: LARGE[name](d, 12), "cpu"),
        raised(lambda d: LARGE[name](d, size), "xla"),
    )
    assert type(mine) is type(right) and str(mine) == str(right)


def test_large_calls_are_accepted_without_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of large tensors are small, if the sizes among the arguments allow it."""
    made: list[int] = []
    fill = stand_ins.ones_and_zeros
    monkeypatch.setattr(cpu_kernels, "ones_and_zeros", lambda t: made.append(t.numel()) or fill(t))
    x = torch.empty(5000, 3000, device="xla")
    assert (x @ x.t()).shape == (5000, 5000)
    assert F.layer_norm(x, (3000,)).stride() == (3000, 1)
    assert F.group_norm(torch.empty(64, 48, 81, 81, device="xla"), 6).shape == (64, 48, 81, 81)
    assert made and max(made) < 1000


NARROW = {
    "bessel_j0 of float16": lambda d, dtype: torch.special.bessel_j0(
        ones(3, dtype=dtype, device=d)
    ),
    "max of uint32": lambda d, dtype: ones(3, dtype=dtype, device=d).max(),
}


@pytest.mark.parametrize(
    ("name", "narrow", "wide"),
    [("bessel_j0 of float16", f16, f32), ("max of uint32", torch.uint32, i64)],
)
def test_a_kernel_that_only_the_cpu_lacks_refuses_nothing(
    name: str, narrow: torch.dtype, wide: torch.dtype
) -> None:
    assert isinstance(raised(lambda d: NARROW[name](d, narrow), "cpu"), NotImplementedError)
    got = NARROW[name]("xla", narrow)
    assert got.dtype is narrow
    assert torch.equal(got.cpu(), NARROW[name]("cpu", wide).to(narrow))


def test_a_kernel_that_the_wider_dtype_lacks_too_refuses() -> None:
    same_refusal(lambda d: ones(3, dtype=torch.uint32, device=d).softmax(0))


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


def test_strides_are_eager_torchs_whatever_the_size() -> None:
    for n in (4, 40, 400):
        shape = (2, n, n + 2)
        calls = (
            lambda x: torch.fft.rfftn(x),
            lambda x: x.transpose(1, 2) + 1,
            lambda x: torch.copysign(x.permute(2, 0, 1), torch.ones((), device=x.device)),
        )
        for call in calls:
            right = call(torch.ones(shape)).stride()
            assert call(torch.ones(shape, device="xla")).stride() == right


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
