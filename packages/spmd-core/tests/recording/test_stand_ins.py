"""Stand-ins share memory as the tensors do, are small, and have dtypes that the CPU computes."""

import pytest
import torch
from refusals import ones, raised, same_refusal, square
from torch.nn import functional as F

from spmd_core.recording import cpu_kernels, stand_ins

f32, f64, f16, i64 = torch.float32, torch.float64, torch.float16, torch.int64


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
