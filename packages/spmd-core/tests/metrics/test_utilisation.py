"""The MFU formulas give the figures that others published; the peaks of known devices."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.metrics import (
    ModelSize,
    device_kind,
    device_peak,
    flops_per_token,
    known_peak,
    measured_peak,
    mfu,
)

# llm.c counts the padded vocabulary.
GPT2_124M = ModelSize(num_params=124_475_904, num_layers=12, width=768, seq=1024)
GPT2_1558M = ModelSize(num_params=1_557_611_200, num_layers=48, width=1600, seq=1024)


@pytest.mark.parametrize(
    ("size", "tokens_per_s", "published"),
    [(GPT2_124M, 468_000, 0.407), (GPT2_1558M, 49_900, 0.519)],
)
def test_published_rates_give_the_published_utilisation(
    size: ModelSize, tokens_per_s: float, published: float
) -> None:
    shares = mfu(flops_per_token(size), items_per_s=tokens_per_s, num_devices=1, peak_flops=989e12)
    assert shares["6N+12LdS"] == pytest.approx(published, abs=0.0005)


def test_the_formulas_differ_as_published() -> None:
    flops = flops_per_token(GPT2_124M)
    assert flops["6N+12LdS"] / flops["6N"] == pytest.approx(1.15, abs=0.005)
    assert flops["6N+6LdS"] - flops["6N"] == (flops["6N+12LdS"] - flops["6N"]) / 2


def test_frozen_parameters_get_no_gradient() -> None:
    size = ModelSize(num_params=100, num_layers=2, width=3, seq=5, num_trained=10)
    assert flops_per_token(size)["6N"] == 2 * 100 + 2 * 100 + 2 * 10  # forward, inputs, weights


def test_the_announcements_formula() -> None:
    # 6 * global_batch * seq_len * num_params / step_time / chips / peak, with a batch of 128 x 1024
    # tokens in 2 s on 8 chips of 275 TFLOP/s.
    size = ModelSize(num_params=4_000_000_000, num_layers=34, width=3072, seq=1024)
    shares = mfu(
        flops_per_token(size), items_per_s=128 * 1024 / 2.0, num_devices=8, peak_flops=275e12
    )
    assert shares["6N"] == pytest.approx(6 * 128 * 1024 * 4e9 / 2.0 / 8 / 275e12)


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("TPU v3", 61.5),  # a device is one of a chip's two cores
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
    ],
)
def test_known_peaks(kind: str, teraflops: float) -> None:
    peak = known_peak(kind)
    assert peak is not None
    assert peak.flops_per_s == pytest.approx(teraflops * 1e12)
    assert peak.source == "data sheet, bf16"


def test_an_unknown_kind_is_measured_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_peak("cpu") is None
    monkeypatch.setattr("spmd_core.metrics.utilisation._MATMUL_SIZES", (64, 128))
    peak = measured_peak(torch.device("cpu"), None, torch.float32)
    assert peak.flops_per_s > 0  # how much depends on what else the machine does
    assert peak.source.startswith("measured, ")
    assert peak.source.endswith(" matmul in float32")


def test_the_devices_of_a_mesh_are_measured_together(
    monkeypatch: pytest.MonkeyPatch, num_devices: int
) -> None:
    monkeypatch.setattr("spmd_core.metrics.utilisation._MATMUL_SIZES", (64,))
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("data",))
    device = torch.device("xla")
    assert device_kind(device) == "cpu"
    peak = device_peak(device, mesh, dtype=torch.float32)
    assert peak.flops_per_s > 0
    assert peak.source == "measured, 64x64 matmul in float32"


def test_a_device_with_a_data_sheet_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spmd_core.metrics.utilisation.device_attributes", lambda: [{"kind": "TPU v5 lite"}]
    )
    monkeypatch.setattr("spmd_core.metrics.utilisation.measured_peak", None)
    peak = device_peak(torch.device("xla"), dtype=torch.float32)
    assert (peak.flops_per_s, peak.source) == (197e12, "data sheet, bf16")


@pytest.mark.parametrize(("num_devices", "peak_flops"), [(0, 1e12), (1, 0.0)])
def test_without_a_peak_there_is_no_utilisation(num_devices: int, peak_flops: float) -> None:
    message = f"got {num_devices} devices of {peak_flops} FLOP/s. Pass at least one device"
    with pytest.raises(ValueError, match=message):
        mfu({"6N": 1.0}, items_per_s=1.0, num_devices=num_devices, peak_flops=peak_flops)
    peak = known_peak("TPU v4")  # or what device_peak() gives
    assert peak is not None
    assert mfu({"6N": 275e12}, items_per_s=1.0, num_devices=1, peak_flops=peak.flops_per_s) == {
        "6N": 1.0
    }
