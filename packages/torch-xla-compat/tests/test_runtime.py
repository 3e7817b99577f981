"""Tests torch_xla.runtime: devices, processes, SPMD mode."""

import os

import pytest
import torch

import spmd_core.runtime.devices
import torch_xla
import torch_xla.runtime as xr


def test_counts_of_the_logical_device_and_of_the_physical_ones(num_devices):
    assert (
        xr.global_device_count()
        == xr.world_size()
        == xr.local_device_count()
        == xr.addressable_device_count()
        == 1
    )
    assert xr.global_ordinal() == xr.local_ordinal() == 0
    assert xr.global_runtime_device_count() == xr.addressable_runtime_device_count() == num_devices
    assert (
        xr.process_index() == xr.host_index() == 0
        and xr.process_count() == xr.local_process_count() == 1
    )


def test_attributes_of_devices(num_devices):
    rows = xr.global_runtime_device_attributes()
    assert [row["name"] for row in rows] == [f"CPU:{i}" for i in range(num_devices)]
    assert xr.runtime_device_attributes("CPU:0") == rows[0]
    with pytest.raises(
        RuntimeError, match=r"a device is named as in real_devices\(\).*got 'TPU:0'"
    ):
        xr.runtime_device_attributes("TPU:0")


def test_device_type_is_fixed_once_devices_are_used():
    assert xr.device_type() == "CPU"
    xr.set_device_type("CPU")
    with pytest.raises(
        RuntimeError, match="the device type is fixed when a device is first used; it is CPU"
    ):
        xr.set_device_type("TPU")


def test_bfloat16_is_tried():
    assert xr.is_bf16_supported() is True


def test_spmd_mode_is_told_to_child_processes(monkeypatch):
    monkeypatch.delenv("XLA_USE_SPMD", raising=False)
    xr.use_spmd()
    assert xr.is_spmd() and os.environ["XLA_USE_SPMD"] == "1"


def test_spmd_mode_by_the_variable_alone(monkeypatch):
    monkeypatch.setattr(spmd_core.runtime.devices._state, "spmd", False)
    monkeypatch.delenv("XLA_USE_SPMD", raising=False)
    assert not xr.is_spmd()
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    assert xr.is_spmd()


def test_automatic_sharding(monkeypatch):
    monkeypatch.setenv("XLA_USE_SPMD", "1")  # use_spmd sets it; taken back at the end
    xr.use_spmd(auto=True)
    assert torch_xla._XLAC._xla_get_auto_sharding()
    xr.use_spmd()
    assert not torch_xla._XLAC._xla_get_auto_sharding()


def test_master_ip_needs_somebody_to_tell(monkeypatch):
    for name in (
        "MASTER_ADDR",
        "JAX_COORDINATOR_ADDRESS",
        "TPU_PROCESS_ADDRESSES",
        "TPU_WORKER_HOSTNAMES",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="Set MASTER_ADDR"):
        xr.get_master_ip()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert xr.get_master_ip() == "127.0.0.1"


def test_the_cache_is_chosen_before_the_first_program(tmp_path):
    (torch.ones(2, device="xla") + 1).tolist()
    with pytest.raises(AssertionError, match="is chosen before the first one is compiled"):
        xr.initialize_cache(str(tmp_path))
    assert xr.get_num_cached_compilation_graph() > 0
