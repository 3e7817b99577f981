"""runtime/devices.py: XLA's flags and threads at the start of the devices."""

import os
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("emulated", "environment", "expected"),
    [
        (40, {}, "80"),
        (-1, {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=50"}, "100"),
        (1, {}, None),  # no collectives
        (-1, {"XLA_FLAGS": ""}, None),
        (40, {"NPROC": "3"}, None),
        (40, {"PJRT_NPROC": "3"}, "3"),
    ],
)
def test_emulated_devices_get_threads_for_two_collectives_each(
    emulated, environment, expected, monkeypatch
):
    for name in devices._THREADS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "_num_cores", lambda: 2)
    jax = SimpleNamespace(config=SimpleNamespace(values={"jax_num_cpu_devices": emulated}))
    monkeypatch.setattr(devices, "jax", jax)
    with devices._enough_threads():
        assert os.environ.get("PJRT_NPROC") == expected
    assert os.environ.get("PJRT_NPROC") == environment.get("PJRT_NPROC")


def test_the_process_has_these_threads():
    count, tasks = len(devices.all_devices()), Path("/proc/self/task")
    if not tasks.is_dir() or any(name in os.environ for name in devices._THREADS):
        pytest.skip("this system does not list threads, or their number is given")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
    assert names.count("tf_XLAEigen") >= (2 * count if count > 1 else 1)
