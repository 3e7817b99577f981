"""Profiles: what a trace contains, and which calls are refused."""

import gzip
import json
import socket
from contextlib import suppress

import pytest
import torch

import spmd_core as spmd
from spmd_core.debugging import profiler


def test_a_trace_holds_operations_and_annotations(tmp_path):
    spmd.sync()
    x = torch.randn(17, 17).to("xla")

    @profiler.trace_me("my function")
    def function():
        return torch.mm(x, x)

    with profiler.trace(tmp_path):
        with profiler.StepTrace("train", step_num=7):
            with profiler.Trace("my phase", size=17):
                y = function()
            y = torch.tanh(y)
        assert y._handle.value.data is not None
    (folder,) = (tmp_path / "plugins" / "profile").iterdir()
    (json_file,), (xplane,) = folder.glob("*.trace.json.gz"), folder.glob("*.xplane.pb")
    events = json.loads(gzip.decompress(json_file.read_bytes()))["traceEvents"]
    by_name = {event.get("name"): event for event in events}
    assert {"train", "my phase", "my function"} <= by_name.keys()
    assert (
        by_name["train"]["args"]["step_num"] == "7" and by_name["my phase"]["args"]["size"] == "17"
    )
    # The device's events name the program, whose operations have the names of the recorded ones.
    assert any(
        event.get("args", {}).get("hlo_module", "").startswith("jit_spmd_2ops") for event in events
    )
    names = xplane.read_bytes()
    assert b"/aten::mm/" in names and b"/aten::tanh/" in names


def test_a_trace_is_started_and_stopped_once(tmp_path):
    with pytest.raises(
        spmd.errors.SpmdError, match=r"got a call without a trace. Call start_trace\(logdir\) first"
    ):
        profiler.stop_trace()
    (tmp_path / "file").touch()
    for below in ("file", "file/traces"):
        with pytest.raises(
            spmd.errors.SpmdError, match=r"is written into a folder; got .*file.*\. Name another"
        ):
            profiler.start_trace(tmp_path / below)
    profiler.start_trace(tmp_path)
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"one trace is recorded at a time; one into .* is running. Call stop_trace\(\) first",
    ):
        profiler.start_trace(tmp_path)
    profiler.stop_trace()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_trace_of_jaxs_own_is_respected(tmp_path):
    import jax  # noqa: PLC0415  # to start a trace that only jax can start

    jax.profiler.start_trace(tmp_path)
    try:
        with pytest.raises(
            spmd.errors.SpmdError, match=r"jax records one of its own: .*End that one first"
        ):
            profiler.start_trace(tmp_path)
    finally:
        jax.profiler.stop_trace()


def test_a_step_trace_ends_the_step_and_says_so():
    profiler.take_step_mark()
    x = torch.ones(3).to("xla")
    before = spmd.metrics.counter("steps")
    with profiler.StepTrace("step", step_num=0):
        y = x + 1
    assert y._handle.value.data is not None and spmd.metrics.counter("steps") == before + 1
    assert profiler.take_step_mark() and not profiler.take_step_mark()
    z = []
    with suppress(KeyError), profiler.StepTrace("step"):
        z.append(x + 2)
        raise KeyError
    assert z[0]._handle.value.data is None and not profiler.take_step_mark()


def test_a_decorated_function_may_call_itself():
    @profiler.Trace("count")
    def count(n):
        return n and 1 + count(n - 1)

    assert count(3) == 3


def test_the_server():
    with pytest.raises(
        spmd.errors.SpmdError, match=r"got a call without a server. Call start_server\(port\) first"
    ):
        profiler.stop_server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    profiler.start_server(port)
    try:
        with socket.create_connection(("localhost", port), timeout=30):
            pass
        with pytest.raises(
            spmd.errors.SpmdError,
            match=rf"a process has one profiler server; start_server\({port}\) came while it runs",
        ):
            profiler.start_server(port)
    finally:
        profiler.stop_server()


def test_other_processes_of_a_host_start_no_server(monkeypatch):
    monkeypatch.setattr("spmd_core.runtime.processes.is_master", lambda local: False)
    profiler.start_server(1)
    assert profiler._server is None


def test_a_profile_of_another_process_is_refused_with_the_reason():
    with pytest.raises(
        spmd.errors.UnsupportedOpError,
        match=r"which jaxlib does not have; got 'localhost:9012' for 500 ms"
        r".*jax.collect_profile PORT 500",
    ):
        profiler.trace_remote("localhost:9012", "folder", duration_ms=500)
