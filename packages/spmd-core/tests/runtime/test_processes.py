"""Processes, hosts and devices, with one process; system/test_several_processes.py has several."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.runtime import processes
from spmd_core.runtime.processes import get_1d_mesh

pytestmark = pytest.mark.one_device


def test_one_process(num_devices, monkeypatch):
    monkeypatch.delenv("PJRT_LOCAL_PROCESS_COUNT", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processes.process_index() == 0 and processes.process_count() == 1
    assert processes.local_process_count() == 1 and processes.host_index() == 0
    assert processes.is_master() and processes.is_master(local=True)
    assert processes.addressable_runtime_device_count() == num_devices
    assert processes.real_devices() == [f"CPU:{i}" for i in range(num_devices)]


def test_the_number_of_processes_on_a_host_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert processes.local_process_count() == 2
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "4")
    assert processes.local_process_count() == 4
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "none")
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"PJRT_LOCAL_PROCESS_COUNT is the number .* got 'none'. Correct it or unset it",
    ):
        processes.local_process_count()


def test_a_cpu_counts_no_memory(num_devices):
    for device in (None, 0, f"cpu:{num_devices - 1}", "xla:0", torch.device("xla")):
        with pytest.raises(
            spmd.errors.UnsupportedOpError,
            match=r"the cpu platform counts nothing.*metrics.programs\(\)",
        ):
            processes.memory_stats(device)
    with pytest.raises(
        ValueError, match=r"this process's devices, which are CPU:0.*got 'TPU:0'. Pass one of these"
    ):
        processes.memory_stats("TPU:0")


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    class Device:
        platform = "tpu"

        def __init__(self, used):
            self.used = used

        def memory_stats(self):
            return {
                "bytes_in_use": self.used,
                "bytes_limit": 100,
                "peak_bytes_in_use": self.used + 1,
                "num_allocs": 7,
            }

    monkeypatch.setattr(processes, "_local_devices", lambda: [Device(5), Device(8), Device(2)])
    monkeypatch.setattr(processes, "real_devices", lambda: ["TPU:4", "TPU:5", "TPU:6"])
    assert processes.memory_stats() == Device(8).memory_stats()
    assert processes.memory_stats(6) == processes.memory_stats("tpu:6") == Device(2).memory_stats()


def test_bfloat16():
    assert processes.is_bf16_supported()


def test_the_address_of_the_master(monkeypatch):
    for name in (
        "MASTER_ADDR",
        "JAX_COORDINATOR_ADDRESS",
        "TPU_PROCESS_ADDRESSES",
        "TPU_WORKER_HOSTNAMES",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"got none of MASTER_ADDR, .*Set MASTER_ADDR, or call spmd\.distributed\.initialize",
    ):
        processes.get_master_ip()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.1.2.3,10.1.2.4")
    assert processes.get_master_ip() == "10.1.2.3"
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "[::1]:8476,[::2]:8476")
    assert processes.get_master_ip() == "::1"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.1.2.5:1234")
    assert processes.get_master_ip() == "10.1.2.5"
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"the host that MASTER_ADDR names must have an address; got 'no such host'"
        r".*one that this host knows",
    ):
        processes.get_master_ip()


def test_one_axis_over_all_devices_or_some(num_devices):
    assert get_1d_mesh("data") == spmd.Mesh(range(num_devices), (num_devices,), ("data",))
    assert get_1d_mesh("data", 1) == spmd.Mesh([0], (1,), ("data",))
    assert get_1d_mesh() == spmd.Mesh(range(num_devices), (num_devices,))
