"""planner/topology.py: devices of topologies that are not there."""

import children
import pytest

import spmd_core as spmd
from spmd_core.planner import topology

LIBTPU = pytest.mark.skipif(
    topology.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)


@pytest.mark.one_device
def test_emulated_devices(num_devices):
    found = topology.find_topology(f"cpu-{num_devices}")
    assert len(found.devices) == num_devices
    assert (found.name, found.chip, found.hbm_bytes) == (f"cpu-{num_devices}", None, None)
    assert found.peak_flops is None


@pytest.fixture
def refusing(monkeypatch):
    def set_error(text):
        def refuse(**_):
            raise RuntimeError(text)

        monkeypatch.setattr(topology._topologies, "get_topology_desc", refuse)

    return set_error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("JAX TPU support not installed; cannot generate TPU topology.", r"pip install 'spmd-core"),
        ("ABORTED: Internal error when accessing libtpu multi-process lockfile.", "Wait for that"),
        ("INVALID_ARGUMENT: not divisible by chips_per_host_bounds", "it refused v4:2x2x1"),
    ],
)
def test_what_libtpu_refuses_is_explained(refusing, text, message):
    refusing(text)
    with pytest.raises(spmd.errors.PlanError, match=message):
        topology.find_topology("v4-8")


@LIBTPU
def test_tpus():
    found = topology.find_topology("v4-16")
    assert len(found.devices) == 8
    assert (found.chip.name, found.hbm_bytes) == ("TPU v4", int(30.75 * 2**30))
    assert found.peak_flops == 275e12
    # A chip of v3 is two devices.
    assert len(topology.find_topology("v3-8").devices) == 8
    assert topology.find_topology("v3-8").hbm_bytes <= 16 * 2**30


@LIBTPU
def test_slices():
    found = topology.find_topology("v5e-4", num_slices=2)
    assert [device.slice_index for device in found.devices] == [0] * 4 + [1] * 4


@LIBTPU
def test_a_shape_that_no_host_has():
    with pytest.raises(spmd.errors.PlanError, match="it refused v4:3x5x1"):
        topology.find_topology("v4:3x5x1")


@LIBTPU
@pytest.mark.one_device
def test_libtpu_is_silent_where_there_is_no_tpu():
    """A program without a plan runs on the CPU, and no process disturbs another one."""
    program = """
import torch
from spmd_core.planner import topology
print([(torch.ones(3, device="xla") + 1).sum().item(), len(topology.find_topology("v4-8").devices)])
"""
    assert children.figures(program, warns=False) == [6.0, 4]


@pytest.mark.exhaustive
@LIBTPU
@pytest.mark.slow
def test_a_profile_after_a_plan_does_not_end_the_process(tmp_path):
    """libtpu's own profiler, as jax registers it, does where there is no TPU."""
    program = f"""
import json, torch
from spmd_core.debugging import profiler
from spmd_core.planner import topology
assert len(topology.find_topology("v4-8").devices) == 4
profiler.start_trace({str(tmp_path)!r})
values = (torch.ones(3, device="xla") + 1).tolist()
profiler.stop_trace()
print(json.dumps(values))
"""
    assert children.figures(program) == [2.0] * 3
    assert list(tmp_path.rglob("*.xplane.pb"))
