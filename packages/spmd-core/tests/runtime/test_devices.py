"""XLA's flags at the start of the devices."""

import os

import pytest

from spmd_core.runtime import devices

OFF = "--xla_enable_hlo_sharding_v3=false"


@pytest.mark.parametrize(
    ("flags", "release", "expected"),
    [
        ("", "0.10.2", ""),
        ("", "0.11.0", OFF),
        ("--a=1", "0.12.0.1", f"--a=1 {OFF}"),
        ("", "0.13.0", ""),
        ("--xla_enable_hlo_sharding_v3=true", "0.12.0", "--xla_enable_hlo_sharding_v3=true"),
    ],
)
def test_tested_releases_use_shardings_by_position(flags, release, expected):
    assert devices.with_positional_shardings(flags, release) == expected


def test_the_process_has_them():
    devices.all_devices()
    flags = os.environ.get("XLA_FLAGS", "")
    assert devices.with_positional_shardings(flags, devices.jaxlib.__version__) == flags
