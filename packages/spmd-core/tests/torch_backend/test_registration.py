"""Importing has no side effects, and the device module has the methods that torch calls."""

import json
import os
from pathlib import Path

import fresh
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import spmd_core as spmd

SOURCE = Path(spmd.__file__).parent


def run(code, **environment):
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent), **environment}
    return fresh.run(["-c", code], env)


def test_import_has_no_side_effects():
    code = """
import json, os
before = dict(os.environ)
import jax
flags = dict(jax.config.values)
import spmd_core, jax._src.xla_bridge as bridge
after = dict(jax.config.values)
same = [before == dict(os.environ), flags == {k: after[k] for k in flags}]
print(json.dumps([*same, len(bridge._backends)]))
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [True, True, 0]


def test_the_device_module():
    assert (
        torch.xla.is_available()
        and torch.xla.device_count() == 1
        and torch.xla.current_device() == 0
    )
    torch.xla.synchronize()
    assert spmd.device() == torch.device("xla:0")
    assert len(spmd.distributed.device_attributes()) == spmd.global_runtime_device_count()
    assert spmd.distributed.device_attributes()[0]["name"] == "CPU:0"
    state = torch.xla.get_rng_state()
    a = torch.rand(2, device="xla").tolist()
    torch.xla.set_rng_state(state)
    assert torch.rand(2, device="xla").tolist() == a


def test_a_loaded_optimizer_state_is_sharded_like_its_parameter(mesh_1d):
    parameters = [torch.nn.Parameter(torch.ones(16, 2, device=d)) for d in ("cpu", "xla")]
    spmd.mark_sharding(parameters[1], mesh_1d, ("x",))
    trained, loaded = (torch.optim.AdamW([p]) for p in parameters)
    parameters[0].grad = torch.ones(16, 2)
    trained.step()
    loaded.load_state_dict(trained.state_dict())
    state = loaded.state[parameters[1]]
    assert state["exp_avg"].sharding is parameters[1].sharding is not None
    assert state["exp_avg_sq"].sharding is parameters[1].sharding
    torch.testing.assert_close(state["exp_avg"].cpu(), trained.state[parameters[0]]["exp_avg"])


def test_simulate_comes_first():
    with pytest.raises(ValueError, match=r"from 1 to 2048; got 0\..*simulate\(8\)"):
        spmd.simulate(0)
    spmd.simulate(spmd.global_runtime_device_count())  # the same count again is harmless
    with pytest.raises(spmd.errors.SpmdError, match="top of the program"):
        spmd.simulate(77)


def test_marks_need_spmd_mode():
    code = """
import torch, spmd_core as spmd
spmd.simulate(2)
try:
    spmd.mark_sharding(torch.ones(2, device="xla"), spmd.Mesh(range(2), (2,), ("x",)), ("x",))
except spmd.errors.NotInSpmdModeError as error:
    print(error)
print((torch.ones(2, device="xla") + 1).tolist(), spmd.is_spmd())
"""
    result = run(code)
    assert "Call spmd.use_spmd() first" in result.stdout and "[2.0, 2.0] False" in result.stdout, (
        result.stderr
    )


def test_an_unknown_platform_is_refused():
    result = run(
        "import torch, spmd_core; torch.ones(2, device='xla').cpu()", PJRT_DEVICE="QUANTUM"
    )
    assert "PJRT_DEVICE must be one of" in result.stderr and "got 'QUANTUM'" in result.stderr


@pytest.mark.exhaustive  # test_startup.py
def test_the_persistent_cache_is_used(tmp_path):
    code = (
        "import torch, spmd_core as s; s.simulate(2); "
        "x = torch.ones(64, 64, device='xla'); print((x @ x).sum().item())"
    )
    for _ in range(2):
        result = run(code, SPMD_CACHE_DIR=str(tmp_path / "cache"))
        assert result.stdout.strip() == "262144.0", result.stderr
    assert list((tmp_path / "cache").rglob("*"))


@pytest.mark.parametrize("args", [(5,), (5, False), (6, True, 3.0), (1,), (0,)])
def test_kaiser_windows_are_made_on_the_host(args):
    made = torch.kaiser_window(*args, device="xla")
    assert made.device.type == "xla"
    torch.testing.assert_close(made.cpu(), torch.kaiser_window(*args))
    wide = torch.kaiser_window(*args, dtype=torch.float64, device="xla")
    torch.testing.assert_close(wide.cpu(), torch.kaiser_window(*args, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_traced_functions_may_read_tensors_of_the_device():
    def results(device):
        c, x = torch.arange(3.0, device=device), torch.full((3,), 5.0, device=device)
        traced = make_fx(torch.func.grad(lambda t: (t * c).sin().sum()))(torch.zeros_like(x))
        _, slope = torch.func.linearize(torch.sin, x)
        return make_fx(lambda t: c * t)(torch.zeros_like(x))(x), traced(x), slope(c)

    for mine, right in zip(results("xla"), results("cpu")):
        torch.testing.assert_close(mine.cpu(), right)


def test_clipping_by_lists():
    def clipped(device):
        parameters = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (2, 3)]
        for parameter in parameters:
            parameter.grad = parameter.detach() * 4
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        return [norm.cpu(), *(p.grad.cpu() for p in parameters)]

    torch.testing.assert_close(clipped("xla"), clipped("cpu"))
