"""The table of chips: names of the runtime find their chip, and the figures fit each other."""

import pytest

from spmd_core.chips import CHIPS, Chip, chip_of


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v3", "TPU v3"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5e", "TPU v5e"),
        ("TPU v5", "TPU v5p"),  # some runtimes' name
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
    ],
)
def test_a_devices_kind_finds_its_chip(kind: str, name: str) -> None:
    found = chip_of(kind)
    assert found is not None and found.name == name


@pytest.mark.parametrize("kind", ["cpu", "", "TPU v4 lite", "TPU v55", "NVIDIA H1000", "TPU"])
def test_another_kind_is_not_taken_for_a_known_one(kind: str) -> None:
    assert chip_of(kind) is None


def test_names_and_kinds_are_distinct() -> None:
    names = [chip.name for chip in CHIPS]
    kinds = [kind for chip in CHIPS for kind in chip.kinds]
    assert len(set(names)) == len(names) and len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_units_are_as_stated(chip: Chip) -> None:
    """A figure in GB or TFLOP/s, or in bits, would lie outside."""
    assert 1e14 < chip.peak_flops < 1e15
    assert 16 * 2**30 <= chip.hbm_bytes <= 141 * 2**30
    assert chip.usable_hbm_bytes is None or 0.95 < chip.usable_hbm_bytes / chip.hbm_bytes < 1
    assert 8e11 < chip.hbm_bytes_per_s < 5e12
    # A link carries 25 GB/s (NVLink) to 100 GB/s in one direction.
    assert 25e9 <= chip.links_bytes_per_s / chip.links <= 100e9
    assert chip.dcn_bytes_per_s is None or 6e9 < chip.dcn_bytes_per_s < 13e9
    # FLOPs for a byte of memory.
    assert 100 < chip.peak_flops / chip.hbm_bytes_per_s < 600
    assert chip.devices_per_chip == (2 if chip.name == "TPU v3" else 1)
