"""Tests small modules.

They are amp, xla_builder, xla_env_vars, tpu, utils, xla_multiprocessing and xla_backend.
"""

import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.xla_backend
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.utils.utils as xu
from torch_xla._internal import tpu
from torch_xla.amp import GradScaler, autocast, syncfree
from torch_xla.core import xla_env_vars


def test_autocast():
    x = torch.randn(4, 4, device="xla")
    with autocast(torch_xla.device()):
        low = x @ x
    with autocast(torch_xla.device(), dtype=torch.bfloat16, enabled=False):
        full = x @ x
    assert low.dtype == torch.bfloat16 and full.dtype == torch.float32


def test_scaled_gradients():
    layer = torch.nn.Linear(4, 1).to("xla")
    before = layer.weight.detach().cpu()
    scaler, optimizer = GradScaler(init_scale=8.0), syncfree.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(2, 4, device="xla")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(layer.weight.detach().cpu(), before - 0.2)
    assert syncfree.Adam is torch.optim.Adam and syncfree.AdamW is torch.optim.AdamW


def test_jax_functions():
    x = torch.arange(4.0, device="xla", requires_grad=True)
    y = xb.call_jax(
        lambda a, b, scale: jnp.sin(a) * scale + b,
        (x, torch.ones(4, device="xla")),
        {"scale": 2.0},
        name="f",
        override_hash="1",
    )
    y.sum().backward()
    torch.testing.assert_close(y.detach().cpu(), torch.sin(torch.arange(4.0)) * 2 + 1)
    torch.testing.assert_close(x.grad.cpu(), torch.cos(torch.arange(4.0)) * 2)


@pytest.mark.parametrize(
    "name", ["create_computation", "create_placeholder_tensor", "xla_computation_as_func"]
)
def test_computations_by_hand_are_refused(name):
    with pytest.raises(
        NotImplementedError,
        match=f"{name} builds PyTorch/XLA's own computations.*call it with call_jax",
    ):
        getattr(xb, name)("name")


def test_names_of_variables():
    assert all(getattr(xla_env_vars, name) == name for name in dir(xla_env_vars) if name.isupper())


def test_no_tpu_here():
    assert tpu.num_available_devices() == tpu.num_available_chips() == 0
    with pytest.raises(RuntimeError, match="a TPU generation is asked of a TPU"):
        tpu.version()


def test_a_tpus_generation(monkeypatch):
    monkeypatch.setattr(
        "spmd_core.device_attributes",
        lambda: [{"name": "TPU:0", "kind": "TPU v5 lite", "coords": [0, 0, 0]}],
    )
    monkeypatch.setattr("spmd_core.device_type", lambda: "TPU")
    monkeypatch.setattr("spmd_core.addressable_runtime_device_count", lambda: 1)
    assert tpu.version() == 5 and tpu.num_available_devices() == tpu.num_available_chips() == 1


def test_samples():
    data = (torch.ones(2), torch.zeros(1))
    loader = xu.SampleGenerator(data=data, sample_count=3)
    assert len(loader) == 3 and all(sample is data for sample in loader) and len(list(loader)) == 3


def test_variables_as_values(monkeypatch):
    monkeypatch.setenv("XU_TEST", "7")
    assert (
        xu.getenv_as("XU_TEST", int) == 7
        and xu.getenv_as("XU_TEST", bool) is True
        and xu.getenv_as("XU_TEST_NOT", int, 5) == 5
    )
    monkeypatch.setenv("XU_TEST", "false")
    assert xu.getenv_as("XU_TEST", bool) is False


def test_several_processes_are_refused():
    with pytest.raises(
        NotImplementedError, match=r"xmp\.spawn starts a process for each device \(nprocs=4\)"
    ):
        xmp.spawn(print, nprocs=4)
    wrapped = xmp.MpModelWrapper(torch.nn.Linear(2, 2))
    assert (
        wrapped.to(torch_xla.device()).weight.device.type == "xla"
        and xmp.MpSerialExecutor().run(lambda: 3) == 3
    )


def test_a_process_group_of_one(monkeypatch):
    assert torch_xla.distributed.xla_backend is not None
    monkeypatch.setenv("MASTER_PORT", "0")
    dist.init_process_group("gloo", init_method="xla://")
    try:
        assert dist.get_world_size() == 1 and dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
