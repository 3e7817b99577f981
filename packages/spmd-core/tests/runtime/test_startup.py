"""Settings that must come before the first use of the devices, mostly in separate processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import spmd_core as spmd
from spmd_core.runtime import startup

SOURCE = str(Path(spmd.__file__).parent.parent)


def run(code, **environment):
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_DEVICE", "WORLD_SIZE", "RANK", "MASTER_ADDR", "JAX_PLATFORMS")
    }
    env |= {"PYTHONPATH": SOURCE, **environment}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_device_type_is_set_before_the_first_use(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")  # the CPU devices are in use already
    assert startup.device_type() == "CPU"
    with pytest.raises(
        spmd.SpmdError,
        match=r"it is CPU and set_device_type\('TPU'\) came later. Call set_device_type at the top",
    ):
        startup.set_device_type("tpu")
    with pytest.raises(ValueError, match=r"one of CPU, TPU, CUDA, ROCM; got 'QUANTUM'. Pass one"):
        startup.set_device_type("QUANTUM")
    startup.set_device_type("CPU")
    assert os.environ["PJRT_DEVICE"] == "CPU"


def test_the_device_type_decides_the_platform():
    code = """
from spmd_core.runtime import devices, startup
startup.set_device_type("TPU")
print(startup.device_type(), devices.is_started())
startup.set_device_type("CPU")
print(startup.device_type(), devices.is_started(), devices.platform(), startup.device_type())
"""
    assert run(code).splitlines() == ["TPU False", "CPU False cpu CPU"]


def test_processes_join_before_the_first_use():
    with pytest.raises(
        spmd.SpmdError,
        match=r"the devices are in use and initialize\(\) came later. Call it at the top",
    ):
        startup.initialize("localhost:1", 1, 0)


def test_who_joins_is_checked_first(monkeypatch):
    monkeypatch.setattr("spmd_core.runtime.devices.is_started", lambda: False)
    with pytest.raises(
        ValueError, match=r"'host:port'; got 'localhost'. Write for instance '10.0.0.1:12355'"
    ):
        startup.initialize("localhost", 2, 0)
    with pytest.raises(
        ValueError, match=r"got process 2 of 2. Give each process its own number, from 0"
    ):
        startup.initialize("localhost:1", 2, 2)
    monkeypatch.setattr(
        "jax.distributed.initialize",
        lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("nobody answers")),
    )
    with pytest.raises(
        spmd.SpmdError,
        match=r"got coordinator localhost:1, process 1 of 2: nobody answers. Give all three",
    ):
        startup.initialize("localhost:1", 2, 1)


def test_torchrun_says_who_joins(monkeypatch):
    seen = []
    monkeypatch.setattr("spmd_core.runtime.devices.is_started", lambda: False)
    monkeypatch.setattr(startup, "_coordinator", None)
    monkeypatch.setattr(
        "jax.distributed.initialize", lambda *args, **kwargs: seen.append((args, kwargs))
    )
    for name, value in {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "77",
        "WORLD_SIZE": "4",
        "RANK": "3",
    }.items():
        monkeypatch.setenv(name, value)
    startup.initialize(timeout_s=5)
    assert (
        seen
        == [(("10.0.0.1:77", 4, 3), {"initialization_timeout": 5, "heartbeat_timeout_seconds": 30})]
        and startup.coordinator_address() == "10.0.0.1:77"
    )


CACHED = """
import sys, torch, spmd_core as spmd
from spmd_core.runtime import startup
spmd.simulate(2)
spmd.global_runtime_device_count()
startup.initialize_cache(sys.argv[1], readonly={readonly})
print(((torch.ones(3, device="xla") * {number}).sin().sum() + 1).item() != 0)
"""


def cached(folder, number, readonly):
    return run(
        "import sys; sys.argv = ['', "
        + repr(str(folder))
        + "]\n"
        + CACHED.format(number=number, readonly=readonly),
        SPMD_CACHE_DIR="",
    )


def test_the_folder_of_compiled_programs(tmp_path):
    assert cached(tmp_path, 2, readonly=False) == "True\n"
    written = {p.name for p in tmp_path.rglob("*-cache")}
    assert written
    # True instead of 2 makes another program; a read-only folder does not get it.
    assert cached(tmp_path, True, readonly=True) == "True\n"
    assert {p.name for p in tmp_path.rglob("*-cache")} == written
    assert cached(tmp_path, True, readonly=False) == "True\n"
    assert {p.name for p in tmp_path.rglob("*-cache")} > written


def test_the_folder_is_chosen_before_the_first_program(tmp_path):
    spmd.sync()
    import torch  # noqa: PLC0415  # only this test runs a program here

    torch.ones(2, device="xla").tolist()
    with pytest.raises(
        spmd.SpmdError,
        match=r"a program has run and initialize_cache\(.*\) came later. Call it at the top",
    ):
        startup.initialize_cache(tmp_path)
