"""Tests torch_xla.debug.profiler."""

import pytest
import torch

import spmd_core as spmd
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.distributed.parallel_loader as pl


def test_a_trace_is_written(tmp_path):
    xp.start_trace(str(tmp_path))
    with pytest.raises(RuntimeError, match="trace"):
        xp.start_trace(str(tmp_path))
    with xp.Trace("block"):
        (torch.ones(3, device="xla") + 1).tolist()
    xp.stop_trace()
    assert list(tmp_path.rglob("*.xplane.pb"))
    with pytest.raises(RuntimeError, match="trace"):
        xp.stop_trace()


def test_a_step_trace_ends_the_step_and_the_loader_does_not():
    loader = pl.MpDeviceLoader([torch.ones(2)] * 3, "xla")
    met.clear_all()
    for step, x in enumerate(loader):
        with xp.StepTrace("train", step_num=step):
            x += 1
    assert met.counter_value("MarkStep") == 3


def test_a_traced_function():
    @xp.trace_me("name")
    def add(x):
        return x + 1

    assert add(torch.ones(1, device="xla")).tolist() == [2.0] and torch_xla.device_count() == 1


def test_profiles_of_other_processes_are_refused():
    for trace in (xp.trace, xp.trace_detached):
        with pytest.raises(NotImplementedError, match="profile"):
            trace("localhost:9012", "logs", duration_ms=1000)


def test_a_server(tmp_path):
    xp.start_server(9712, only_on_master=True)
    with pytest.raises(RuntimeError, match="server"):
        xp.start_server(9713)
    spmd.debugging.profiler.stop_server()
