"""Saves that something ended: what is restored is right, and the rest is refused."""

from pathlib import Path

import pytest

import spmd_core as spmd
from benchmarks import checkpoint_faults


def test_what_is_damaged_is_refused_or_right(tmp_path: Path, num_devices: int) -> None:
    if num_devices != 8:
        pytest.skip("the mesh has eight devices")
    spmd.use_spmd()
    found = checkpoint_faults.file_faults(tmp_path / "run", 20, seed=1)
    assert found.keys() == {"a byte changed", "half of a file gone", "a file removed"}
    for counted in found.values():
        assert set(counted) <= {"refused", "right"} and counted["refused"] >= 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_disk_that_is_full_or_read_only(tmp_path: Path, num_devices: int) -> None:
    if num_devices != 8:
        pytest.skip("the mesh has eight devices")
    if not checkpoint_faults.may_mount(tmp_path):
        pytest.skip("this process may not mount a file system")
    spmd.use_spmd()
    said = checkpoint_faults.full_and_read_only(tmp_path / "disk")
    assert said.keys() == {"a full disk", "a read-only folder"}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_no_kill_costs_a_step(count: int, tmp_path: Path) -> None:
    found = checkpoint_faults.kills(count, 4, 0, tmp_path)
    assert found["restores"] >= 1 and found["steps compared"] >= found["restores"]
