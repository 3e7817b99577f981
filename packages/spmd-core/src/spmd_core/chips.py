"""The published figures of each kind of chip: peak FLOP/s, memory, and links; a pure table.

A device of the runtime is a chip or a part of one: `devices_per_chip`. All figures are per chip.
"""

from dataclasses import dataclass

from spmd_core.arguments import require_kind

# Of a process on its host's CPU: XLA takes the numbers from 2048 on for another process's.
MAX_EMULATED_DEVICES = 2048

_GIB = 2**30
_GB_PER_S = 1e9


@dataclass(frozen=True)
class Chip:
    """The published figures of one kind of chip. None: its maker publishes no such figure.

    Attributes:
        name: "TPU v4", "H200 SXM".
        kinds: the names that the runtime gives to a device of this kind. A TPU's is the whole name;
            a GPU's is the beginning of it, before the memory ("NVIDIA H100 80GB HBM3").
        peak_flops: bf16, dense, in FLOP/s.
        hbm_bytes: the memory. Makers write GB for GiB.
        usable_hbm_bytes: the part of it that a program can use, without what the runtime reserves.
        hbm_bytes_per_s: bandwidth of the memory.
        links: links to other chips: a TPU's neighbors in the torus (4 in two dims, 6 in three), a
            GPU's NVLinks.
        links_bytes_per_s: bandwidth of all links together, in one direction.
        dcn_bytes_per_s: a chip's share of its host's network to other slices, in one direction.
        devices_per_chip: how many devices of the runtime a chip is.
    """

    name: str
    kinds: tuple[str, ...]
    peak_flops: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    links: int
    links_bytes_per_s: float
    usable_hbm_bytes: int | None = None
    dcn_bytes_per_s: float | None = None
    devices_per_chip: int = 1


# Sources. TPUs: the page of each version in Google Cloud's documentation, which states interconnect
# in both directions together since v5e. TPU v3: Norrie et al., "The Design Process for Google's
# Training Chips", 2021, and Jouppi et al., "TPU v4", 2023, table 4. Network: v5e 2 x 100 Gb/s for a
# host of 4 chips, v5p 200 Gb/s for 4, v6e 4 x 200 Gb/s for 8; Austin et al., "How to Scale Your
# Model", 2025, has the same figures per chip. GPUs: NVIDIA's data sheets of H100 and H200, which
# state bf16 with sparsity (twice the dense figure) and NVLink in both directions. What network a
# GPU's host has is not NVIDIA's to state. Usable memory: the "available HBM" that libtpu 0.0.52
# names when a program is too large; of a v5p it is more than the 95 GB of that chip's page.
CHIPS = (
    Chip(
        name="TPU v3",
        kinds=("TPU v3",),
        peak_flops=123e12,
        hbm_bytes=32 * _GIB,
        hbm_bytes_per_s=900 * _GB_PER_S,
        usable_hbm_bytes=int(30.96 * _GIB),
        links=4,
        links_bytes_per_s=280 * _GB_PER_S,
        devices_per_chip=2,
    ),
    Chip(
        name="TPU v4",
        kinds=("TPU v4",),
        peak_flops=275e12,
        hbm_bytes=32 * _GIB,
        hbm_bytes_per_s=1200 * _GB_PER_S,
        usable_hbm_bytes=int(30.75 * _GIB),
        links=6,
        links_bytes_per_s=300 * _GB_PER_S,
    ),
    Chip(
        name="TPU v5e",
        kinds=("TPU v5 lite", "TPU v5e"),
        peak_flops=197e12,
        hbm_bytes=16 * _GIB,
        hbm_bytes_per_s=819 * _GB_PER_S,
        usable_hbm_bytes=int(15.75 * _GIB),
        links=4,
        links_bytes_per_s=200 * _GB_PER_S,
        dcn_bytes_per_s=6.25 * _GB_PER_S,
    ),
    Chip(
        name="TPU v5p",
        kinds=("TPU v5p", "TPU v5"),
        peak_flops=459e12,
        hbm_bytes=96 * _GIB,
        hbm_bytes_per_s=2765 * _GB_PER_S,
        usable_hbm_bytes=int(95.73 * _GIB),
        links=6,
        links_bytes_per_s=600 * _GB_PER_S,
        dcn_bytes_per_s=6.25 * _GB_PER_S,
    ),
    Chip(
        name="TPU v6e",
        kinds=("TPU v6 lite", "TPU v6e"),
        peak_flops=918e12,
        hbm_bytes=32 * _GIB,
        hbm_bytes_per_s=1640 * _GB_PER_S,
        usable_hbm_bytes=int(31.24 * _GIB),
        links=4,
        links_bytes_per_s=400 * _GB_PER_S,
        dcn_bytes_per_s=12.5 * _GB_PER_S,
    ),
    Chip(
        name="H100 SXM",
        kinds=("NVIDIA H100",),
        peak_flops=989e12,
        hbm_bytes=80 * _GIB,
        hbm_bytes_per_s=3350 * _GB_PER_S,
        links=18,
        links_bytes_per_s=450 * _GB_PER_S,
    ),
    Chip(
        name="H100 PCIe",
        kinds=("NVIDIA H100 PCIe",),
        peak_flops=756e12,
        hbm_bytes=80 * _GIB,
        hbm_bytes_per_s=2000 * _GB_PER_S,
        links=12,  # of the bridge to one other card
        links_bytes_per_s=300 * _GB_PER_S,
    ),
    Chip(
        name="H100 NVL",
        kinds=("NVIDIA H100 NVL",),
        peak_flops=835e12,
        hbm_bytes=94 * _GIB,
        hbm_bytes_per_s=3900 * _GB_PER_S,
        links=12,
        links_bytes_per_s=300 * _GB_PER_S,
    ),
    Chip(
        name="H200 SXM",
        kinds=("NVIDIA H200",),
        peak_flops=989e12,
        hbm_bytes=141 * _GIB,
        hbm_bytes_per_s=4800 * _GB_PER_S,
        links=18,
        links_bytes_per_s=450 * _GB_PER_S,
    ),
    Chip(
        name="H200 NVL",
        kinds=("NVIDIA H200 NVL",),
        peak_flops=835e12,
        hbm_bytes=141 * _GIB,
        hbm_bytes_per_s=4800 * _GB_PER_S,
        links=18,
        links_bytes_per_s=450 * _GB_PER_S,
    ),
)


def chip_of(kind: str) -> Chip | None:
    """The chip behind a device of this kind, or None for a kind that is not in the table.

    Args:
        kind: the runtime's name, as in `spmd.distributed.device_attributes()[0]["kind"]`.

    Example:
        >>> [chip_of(kind).name for kind in ("TPU v5 lite", "NVIDIA H100 80GB HBM3")]
        ['TPU v5e', 'H100 SXM']
        >>> chip_of("TPU v4 lite") is None  # another chip than the TPU v4
        True
    """
    require_kind("kind", kind, str, write="a device's kind, such as 'TPU v4'")
    found = {name: chip for chip in CHIPS for name in chip.kinds if _is_kind(kind, name)}
    return found[max(found, key=len)] if found else None


def _is_kind(kind: str, name: str) -> bool:
    return kind == name or (name.startswith("NVIDIA") and kind.startswith(f"{name} "))
