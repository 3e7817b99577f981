"""Tests small modules.

They are amp, functions, xla_builder, xla_env_vars, tpu, pjrt, utils, dlpack, xla_multiprocessing
and xla_backend.
"""

import os
import socket
import sys

import fresh
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.utils.utils as xu
from torch_xla._internal import tpu
from torch_xla.amp import GradScaler, autocast, syncfree
from torch_xla.core import functions, xla_env_vars
from torch_xla.experimental import pjrt
from torch_xla.utils import dlpack


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
    names = [name for name in dir(xla_env_vars) if name.isupper()]
    assert all(getattr(xla_env_vars, name).endswith(name) for name in names)


def test_no_tpu_here():
    assert tpu.num_available_devices() == tpu.num_available_chips() == 0
    with pytest.raises(OSError, match="a TPU generation is asked of a TPU; the device is 'no TPU'"):
        tpu.version()


def test_a_tpus_generation(monkeypatch):
    monkeypatch.setattr(
        "spmd_core.distributed.device_attributes",
        lambda: [{"name": "TPU:0", "kind": "TPU v5 lite", "coords": [0, 0, 0]}],
    )
    monkeypatch.setattr("spmd_core.distributed.device_type", lambda: "TPU")
    monkeypatch.setattr("spmd_core.runtime.processes.addressable_runtime_device_count", lambda: 1)
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


@pytest.mark.parametrize("backend", ["gloo", "xla"])
@pytest.mark.filterwarnings("ignore:c10d:UserWarning")
def test_a_process_group_of_one(backend):
    # Composer 0.32 makes its group like this, with "xla", after no more than `import torch_xla`.
    dist.init_process_group(backend, init_method="xla://")
    try:
        assert dist.get_world_size() == 1 and dist.get_rank() == 0
        assert dist.get_backend() == backend
        x, gathered = torch.ones(2, device="xla"), torch.zeros(2, device="xla")
        dist.all_gather([gathered], x)
        dist.barrier()
        assert gathered.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_two_programs_have_groups_on_one_host(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        dist.init_process_group("gloo", init_method="xla://")
        dist.destroy_process_group()


# What libraries ask of torch_xla in programs that use another device.


@pytest.mark.slow
def test_lightning_finds_no_tpu_and_starts_no_device():
    # Lightning 2.6, XLAAccelerator.auto_device_count: a distribution named torch_xla is not there,
    # so it takes the old paths. `is_available` catches ValueError, AssertionError and OSError.
    program = (
        "import os\n"
        "os.environ.pop('PJRT_DEVICE', None)\n"
        "from torch_xla.experimental import pjrt, tpu\n"
        "try:\n"
        "    {2: 8, 3: 8, 4: 4}.get(tpu.version(), 8)\n"
        "except OSError:\n"
        "    print('no TPU')\n"
        "from spmd_core.runtime import devices\n"
        "assert pjrt.using_pjrt()\n"
        "assert tpu.num_available_devices() == tpu.num_available_chips() == 0\n"
        "print(devices.is_started())\n"
    )
    ran = fresh.run(["-c", program], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert ran.stdout.split("\n") == ["no TPU", "False", ""], ran.stderr[-2000:]


def test_old_paths_of_names():
    # Lightning 2.6: XLAEnvironment.node_rank, XLAStrategy.setup_module.
    assert xu.getenv_as(xla_env_vars.HOST_ORDINAL, int, 0) == 0
    assert pjrt.broadcast_master_param is torch_xla.xm.broadcast_master_param
    assert pjrt.world_size() == 1 and pjrt.global_ordinal() == pjrt.local_ordinal() == 0


def test_collectives_with_gradients():
    # Lightning 2.6: XLAStrategy.all_gather.
    x = torch.ones(2, device="xla", requires_grad=True)
    (functions.all_gather(x) * functions.all_reduce("sum", x, scale=3.0)).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
    for name in ("nms", "distributed_mm"):
        with pytest.raises(NotImplementedError, match=f"functions.{name} .* is not available"):
            getattr(functions, name)()


def test_exchange_by_dlpack():
    x = torch.arange(3.0, device="xla")
    assert torch.equal(torch.from_dlpack(dlpack.to_dlpack(x + 1)), torch.arange(3.0) + 1)
    assert dlpack.from_dlpack(np.arange(3)).tolist() == [0, 1, 2]
    assert dlpack.from_dlpack(dlpack.to_dlpack(x)).device.type == "xla"
    with pytest.raises(BufferError, match=r"Pass tensor\.detach\(\)\.cpu\(\)"):
        np.from_dlpack(x)
    with pytest.raises(NotImplementedError, match=r"Copy the tensor: tensor\.cpu\(\)"):
        dlpack.from_xla_cuda_to_cuda(x)
