"""Model FLOPs utilisation (MFU): a transformer's FLOPs by three formulas, and a device's peak.

Legend: N parameters (the tied token table counts once), L layers, d width, S sequence length.
Recomputed activations do not count: with them, the figure would be the hardware utilisation (HFU).
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from spmd_core.arguments import checked, require_kind, require_number
from spmd_core.chips import chip_of
from spmd_core.marks.marking import mark_sharding, sync
from spmd_core.program import automatic
from spmd_core.runtime import agreement
from spmd_core.runtime.devices import device_attributes, is_abstract
from spmd_core.sharding.mesh import Mesh

_MATMUL_SIZES = (512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_S = 0.03
_LONG_ENOUGH_FLOPS = 8e9  # time alone is not enough: on a busy machine a small matmul is slow too


@checked(num_params=0, num_layers=0, width=0, seq=0, num_trained=0)
@dataclass(frozen=True)
class ModelSize:
    """The numbers of a transformer that the formulas need.

    `num_trained` counts the parameters that get a gradient; None: all. A frozen one takes 4 FLOPs
    for a token instead of 6.
    """

    num_params: int
    num_layers: int
    width: int
    seq: int
    num_trained: int | None = None


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one device, and its source: "data sheet, bf16" or "measured, ..."."""

    flops_per_s: float
    source: str


def flops_per_token(size: ModelSize) -> dict[str, int]:
    """A transformer's forward and backward FLOPs for one token, by formula.

    - `6N`: the matrices only. The PyTorch/XLA SPMD announcement uses this formula.
    - `6N+12LdS`: adds attention over the whole S x S square. Source: Chowdhery et al. 2022 (PaLM),
      appendix B; nanoGPT and torchtitan use it.
    - `6N+6LdS`: adds attention over the causal half of the square; llm.c and MaxText use it.

    Example:
        >>> flops_per_token(ModelSize(num_params=100, num_layers=2, width=3, seq=5))
        {'6N': 600, '6N+12LdS': 960, '6N+6LdS': 780}
    """
    require_kind("size", size, ModelSize, write="ModelSize(num_params=..., num_layers=..., ...)")
    trained = size.num_params if size.num_trained is None else size.num_trained
    matrices = 4 * size.num_params + 2 * trained
    square = 12 * size.num_layers * size.width * size.seq
    return {"6N": matrices, "6N+12LdS": matrices + square, "6N+6LdS": matrices + square // 2}


@checked()
def mfu(
    flops_per_item: Mapping[str, float],
    *,
    items_per_s: float,
    num_devices: int,
    peak_flops: float,
) -> dict[str, float]:
    """The model's FLOP/s as a fraction of the devices' peak, by formula.

    Args:
        flops_per_item: forward and backward FLOPs for one item (token, image), by formula.
        items_per_s: over all devices.
        num_devices: devices that compute.
        peak_flops: FLOP/s of one device.

    Raises:
        TypeError: `flops_per_item` is no dict of numbers.
        ValueError: no devices, or a peak that is not positive.

    Example:
        >>> mfu({"6N": 6e9}, items_per_s=1e4, num_devices=4, peak_flops=100e12)
        {'6N': 0.15}
    """
    require_kind("flops_per_item", flops_per_item, Mapping, write="what flops_per_token() gives")
    for name, flops in flops_per_item.items():
        require_number(f"flops_per_item[{name!r}]", flops)
    if num_devices < 1 or peak_flops <= 0:
        raise ValueError(
            "a utilisation is a share of the devices' peak; got "
            f"{num_devices} devices of {peak_flops} FLOP/s. Pass at least one device, and the "
            "peak that device_peak() gives."
        )
    return {
        name: flops * items_per_s / (num_devices * peak_flops)
        for name, flops in flops_per_item.items()
    }


def device_kind(device: torch.device) -> str:
    """The runtime's name for the kind of the device: "cpu", "TPU v4", "NVIDIA H200".

    Raises:
        TypeError: `device` is none.
    """
    require_kind("device", device, torch.device, write="torch.device('xla')")
    return str(device_attributes()[0]["kind"]) if device.type == "xla" else device.type


def device_peak(device: torch.device, mesh: Mesh | None = None, *, dtype: torch.dtype) -> Peak:
    """Peak of one device: from the maker's data sheet, or measured if there is none, as of a CPU.

    Waits for the device if it measures.

    Args:
        device: `xla`, or another of torch's devices.
        mesh: the devices that compute; None: one.
        dtype: of the products that are measured. A data sheet's figure is for bf16.
    """
    return known_peak(device_kind(device)) or measured_peak(device, mesh, dtype)


def known_peak(device_kind: str) -> Peak | None:
    """The data sheet's peak of one device, or None for a kind that `spmd_core.chips` lacks."""
    chip = chip_of(device_kind)
    if chip is None:
        return None
    return Peak(chip.peak_flops / chip.devices_per_chip, "data sheet, bf16")


def measured_peak(device: torch.device, mesh: Mesh | None, dtype: torch.dtype) -> Peak:
    """Peak of one device, measured with a large matmul; for kinds without a data sheet, as a CPU.

    Each device of the mesh multiplies its own rows. The size doubles until a matmul takes long
    enough to time, and the best rate over all sizes counts. Emulated devices share the cores of one
    machine, so the peak of each is its share of the cores. Other work on the machine makes the peak
    too low and the MFU too high. Waits for the device.
    """
    require_kind("device", device, torch.device, write="torch.device('xla')")
    require_kind("dtype", dtype, torch.dtype, write="for instance dtype=torch.float32")
    if mesh is not None:
        require_kind("mesh", mesh, Mesh, write="Mesh(device_ids, mesh_shape, axis_names), or None")
    if is_abstract():
        return Peak(math.nan, "not measured: nothing runs in a plan")
    num_devices = 1 if mesh is None else mesh.size()
    best, best_size = 0.0, 0
    for size in _MATMUL_SIZES:
        flops = 2.0 * size**3
        seconds = _matmul_seconds(device, mesh, dtype, rows=size * num_devices, size=size)
        # Whether another size follows must be the same in all processes.
        seconds = float(agreement.of_process_0("measured time of a matmul", repr(seconds)))
        if flops / seconds > best:
            best, best_size = flops / seconds, size
        if seconds > _LONG_ENOUGH_S and flops * num_devices > _LONG_ENOUGH_FLOPS:
            break
    return Peak(
        best, f"measured, {best_size}x{best_size} matmul in {str(dtype).removeprefix('torch.')}"
    )


def _matmul_seconds(
    device: torch.device, mesh: Mesh | None, dtype: torch.dtype, *, rows: int, size: int
) -> float:
    """Seconds of the fastest of six runs, the first of which compiles."""
    a, b = (
        torch.ones(rows, size, dtype=dtype).to(device),
        torch.ones(size, size, dtype=dtype).to(device),
    )
    if mesh is not None:
        mark_sharding(a, mesh, (tuple(mesh.shape()), None))
        mark_sharding(b, mesh, (None, None))

    def run() -> torch.Tensor:
        product = a @ b  # referenced until the sync: an unreferenced tensor is not computed
        if device.type == "xla":
            sync(wait=True)
        return product

    with automatic.paused():  # the mesh of a measurement is not the one that a search would choose
        return min(_seconds(run) for _ in range(6))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
