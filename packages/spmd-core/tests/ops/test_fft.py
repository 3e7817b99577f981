"""Fourier transforms against eager torch on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import crossed, exhaustive

import spmd_core as spmd
from oracle import check
from spmd_core import metrics
from spmd_core.ops import fft, registry  # noqa: F401  (fft registers the lowerings)

REAL = [torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
NORMALIZATIONS = [0, 1, 2]


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_to_complex(dtype: torch.dtype, normalization: int) -> None:
    x = values(dtype, 3, 4, 5, 6)
    for dims in ([3], [1], [0, 2], [3, 0, 1], [0, 1, 2, 3], []):
        for forward in (True, False):
            check("aten._fft_c2c.default", x, dims, normalization, forward)


@pytest.mark.parametrize(
    ("dtype", "normalization", "onesided"), crossed([*REAL], [*NORMALIZATIONS], [True, False])
)
def test_real_to_complex(dtype: torch.dtype, normalization: int, onesided: bool) -> None:
    x = values(dtype, 3, 4, 5, 6)
    for dims in ([3], [2], [0, 2], [3, 0, 1], [0, 1, 2, 3]):
        check("aten._fft_r2c.default", x, dims, normalization, onesided)
    check("aten._fft_r2c.default", values(dtype, 1), [0], normalization, onesided)


@pytest.mark.parametrize(("dtype", "normalization"), crossed(COMPLEX, NORMALIZATIONS))
def test_complex_to_real(dtype: torch.dtype, normalization: int) -> None:
    x = values(dtype, 3, 4, 5, 6)
    for dims, sizes in (
        ([3], (10, 11, 6)),
        ([2], (8, 9, 5)),
        ([0, 2], (8, 9)),
        ([3, 0, 1], (6, 7)),
        ([0, 1, 2, 3], (10, 11)),
    ):
        for size in sizes:
            check("aten._fft_c2r.default", x, dims, normalization, size)


def test_an_empty_batch() -> None:
    # Eager torch's FFT library fails on an empty batch, so only shapes and dtype are checked.
    spectrum = torch.fft.fft(torch.zeros(0, 4, dtype=torch.complex64, device="xla"))
    assert (spectrum.shape, spectrum.dtype) == ((0, 4), torch.complex64)
    assert torch.fft.rfft(torch.zeros(0, 4, device="xla")).cpu().shape == (0, 3)
    assert torch.fft.irfft(spectrum).cpu().shape == (0, 6)


def on_device(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Asserts eager torch's values and gradients on the device, without host fallbacks."""
    here = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    there = [
        a.detach().to("xla").requires_grad_() if isinstance(a, torch.Tensor) else a for a in here
    ]
    before = metrics.host_fallbacks()
    right, got = function(*here, **kwargs), function(*there, **kwargs)
    assert got.dtype == right.dtype
    torch.testing.assert_close(got.detach().cpu(), right.detach(), rtol=2e-5, atol=2e-5)
    (right.abs() ** 2).sum().backward()
    (got.abs() ** 2).sum().backward()
    for a, b in zip(here, there):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=5e-5, atol=5e-5)
    assert metrics.host_fallbacks() == before


@pytest.mark.parametrize("norm", [exhaustive("backward"), "ortho", exhaustive("forward")])
def test_the_functions_of_torch_fft_and_their_gradients(norm: str) -> None:
    real, spectrum = values(torch.float32, 4, 6), values(torch.complex64, 4, 6)
    for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn"):
        on_device(getattr(torch.fft, name), spectrum, norm=norm)
        on_device(getattr(torch.fft, name), real, norm=norm)
    for name in ("rfft", "rfft2", "rfftn", "ihfft", "ihfft2", "ihfftn"):
        on_device(getattr(torch.fft, name), real, norm=norm)
    for name in ("irfft", "irfft2", "irfftn", "hfft", "hfft2", "hfftn"):
        on_device(getattr(torch.fft, name), spectrum, norm=norm)
    on_device(torch.fft.irfft, spectrum, 9, norm=norm)
    on_device(torch.fft.rfft, real, 9, norm=norm)


def test_too_few_points_are_refused_as_in_eager_mode() -> None:
    x = torch.zeros(3, dtype=torch.complex64)
    for tensor in (x, x.to("xla")):
        with pytest.raises(RuntimeError, match=r"Invalid number of data points \(0\) specified"):
            torch.fft.irfft(tensor, 0)


def test_a_split_batch(mesh_1d: spmd.Mesh) -> None:
    x = values(torch.float32, 8, 12)
    marked = spmd.mark_sharding(x.to("xla"), mesh_1d, ("x", None))
    torch.testing.assert_close(torch.fft.rfft(marked).cpu(), torch.fft.rfft(x))


def test_short_time_transform_and_back() -> None:
    x, window = values(torch.float32, 2, 64), torch.hann_window(16)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        w = window.to(x.device)
        spectrum = torch.stft(x, 16, hop_length=4, window=w, return_complex=True)
        assert spectrum.shape == (2, 9, 17)
        return torch.istft(spectrum * 2, 16, hop_length=4, window=w)

    torch.testing.assert_close(there_and_back(x.to("xla")).cpu(), 2 * x, rtol=1e-4, atol=1e-4)


@pytest.mark.one_device
@pytest.mark.parametrize("name", ["aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r"])
def test_tpus_leave_double_precision_to_the_host(name: str) -> None:
    lowering = registry.find_lowering(registry.resolve(f"{name}.default"))
    assert lowering is not None and lowering.host_when is not None
    for dtype in (*REAL, *COMPLEX):
        x = values(dtype, 4)
        double = dtype in (torch.float64, torch.complex128)
        assert lowering.host_when((x, [0], 0, True), {}, "tpu") == double
        assert not lowering.host_when((x, [0], 0, True), {}, "gpu")
