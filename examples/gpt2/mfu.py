"""Model FLOPs utilisation by the three formulas in use, each under its name, and the peaks that they are measured against.

Legend: N parameters (the tied token table once), L layers, d width, S sequence length. Recomputation never counts: that would be HFU.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import spmd_core as spmd

# bf16 dense peak of one chip in FLOP/s, from the makers' data sheets. Matched as the longest beginning of the device kind that the runtime reports,
# so "NVIDIA H100 80GB HBM3" takes the H100's, while the slower PCIe card keeps its own.
PEAK_FLOPS_BY_KIND = {
    "TPU v3": 123e12,  # a chip is two devices: see DEVICES_PER_CHIP
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,  # how some runtimes call v5p
    "TPU v6 lite": 918e12,  # v6e
    "TPU v6e": 918e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
}
DEVICES_PER_CHIP = {"TPU v3": 2}

_MATMUL_SIZES = (512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_S, _LONG_ENOUGH_FLOPS = (
    0.03,
    1e10,
)  # the second, as a busy machine makes even a small matmul slow


@dataclass(frozen=True)
class ModelSize:
    """The four numbers of a model that the formulas take."""

    num_params: int
    num_layers: int
    width: int
    seq: int


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device at its best, and where the number is from: "data sheet, bf16" or "measured, ..."."""

    flops_per_s: float
    source: str


def flops_per_token(size: ModelSize) -> dict[str, int]:
    """Forward and backward FLOPs for one token, by formula.

    - `6N`: the matrices only; what the PyTorch/XLA SPMD announcement reports.
    - `6N+12LdS`: and attention over the whole square; Chowdhery et al. 2022 (PaLM), appendix B; nanoGPT, torchtitan.
    - `6N+6LdS`: and attention over the causal half; llm.c, MaxText.

    Example:
        >>> flops_per_token(ModelSize(num_params=100, num_layers=2, width=3, seq=5))
        {'6N': 600, '6N+12LdS': 960, '6N+6LdS': 780}
    """
    matrices, square = 6 * size.num_params, 12 * size.num_layers * size.width * size.seq
    return {"6N": matrices, "6N+12LdS": matrices + square, "6N+6LdS": matrices + square // 2}


def mfu(
    size: ModelSize, *, tokens_per_s: float, num_devices: int, peak_flops: float
) -> dict[str, float]:
    """The share of the devices' peak that the model's own FLOPs use, by formula; `tokens_per_s` is over all devices."""
    return {
        name: flops * tokens_per_s / (num_devices * peak_flops)
        for name, flops in flops_per_token(size).items()
    }


def known_peak(device_kind: str) -> Peak | None:
    """The data sheet's peak of one device, or None for a kind that the table lacks."""
    matches = [kind for kind in PEAK_FLOPS_BY_KIND if device_kind.startswith(kind)]
    if not matches:
        return None
    kind = max(matches, key=len)
    return Peak(PEAK_FLOPS_BY_KIND[kind] / DEVICES_PER_CHIP.get(kind, 1), "data sheet, bf16")


def measured_peak(device: torch.device, mesh: spmd.Mesh | None, dtype: torch.dtype) -> Peak:
    """What the devices reach in one large matmul, each on its own rows of it; for kinds without a data sheet, such as a CPU.

    The size doubles until a matmul is long enough to time; the best rate of all sizes counts. Emulated devices share the cores of one machine, so
    each has its part of them; other work on the machine makes the peak too low and the MFU too high. Waits for the device.
    """
    num_devices = 1 if mesh is None else mesh.size()
    best, best_size = 0.0, 0
    for size in _MATMUL_SIZES:
        flops = 2.0 * size**3
        seconds = _matmul_seconds(device, mesh, dtype, rows=size * num_devices, size=size)
        if flops / seconds > best:
            best, best_size = flops / seconds, size
        if seconds > _LONG_ENOUGH_S and flops * num_devices > _LONG_ENOUGH_FLOPS:
            break
    return Peak(
        best, f"measured, {best_size}x{best_size} matmul in {str(dtype).removeprefix('torch.')}"
    )


def _matmul_seconds(
    device: torch.device, mesh: spmd.Mesh | None, dtype: torch.dtype, *, rows: int, size: int
) -> float:
    """The best of five runs, after one that compiles."""
    a, b = (
        torch.ones(rows, size, dtype=dtype).to(device),
        torch.ones(size, size, dtype=dtype).to(device),
    )
    if mesh is not None:
        spmd.mark_sharding(a, mesh, (tuple(mesh.shape()), None))
        spmd.mark_sharding(b, mesh, (None, None))

    def run() -> torch.Tensor:
        product = a @ b  # held until the sync: what nobody refers to is not computed
        if device.type == "xla":
            spmd.sync(wait=True)
        return product

    return min(_seconds(run) for _ in range(6))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
