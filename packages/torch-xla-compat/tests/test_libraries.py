"""Libraries that choose by names what a tensor is, or whether PyTorch/XLA is there: small samples.

Each runs on the CPU and on the device, with the name torch_xla taken by this package.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spmd_core as spmd
import torch_xla
from spmd_core.runtime.processes import get_1d_mesh

DEVICES = ("cpu", "xla")


def both(function, *inputs):
    """Runs on the CPU and on the device, and compares the results and where they are."""
    on_cpu, on_device = (function(*(x.to(d) for x in inputs)) for d in DEVICES)
    assert (on_cpu.device.type, on_device.device.type) == DEVICES
    torch.testing.assert_close(on_device.cpu(), on_cpu, rtol=1e-5, atol=1e-6)


def test_the_name_of_a_tensors_module_begins_with_torch():
    tensors = [torch.ones(2, device="xla"), nn.Parameter(torch.ones(2, device="xla"))]
    tensors.append(spmd.mark_sharding(torch.ones(8, device="xla"), get_1d_mesh("x"), ("x",)))
    for tensor in tensors:
        cls = type(tensor)
        assert cls.__module__.split(".")[0] == "torch"
        assert getattr(torch.xla, cls.__qualname__) is cls is spmd.XLAShardedTensor


def test_opt_einsum():
    opt_einsum = pytest.importorskip("opt_einsum")
    x, y, z = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5, 2)
    both(lambda *tensors: opt_einsum.contract("ij,jk,kl->il", *tensors), x, y, z)
    expression = opt_einsum.contract_expression("ij,jk->ik", (3, 4), (4, 5))
    both(expression, x, y)
    leaf = x.to("xla").requires_grad_()
    opt_einsum.contract("ij,jk->", leaf, y.to("xla")).backward()
    torch.testing.assert_close(leaf.grad.cpu(), y.sum(1).expand(3, 4))


def test_einops():
    einops = pytest.importorskip("einops")
    x = torch.randn(2, 3, 4)
    both(lambda x: einops.rearrange(x, "a b c -> (a b) c"), x)
    both(lambda x: einops.reduce(x, "a b c -> a c", "mean"), x)
    both(lambda x: einops.repeat(x, "a b c -> a b c 2"), x)
    both(lambda x: einops.einsum(x, x, "a b c, a d c -> a b d"), x)


def test_array_api_compat():
    api = pytest.importorskip("array_api_compat")
    x = torch.randn(3, 4)

    def sample(x):
        assert api.is_torch_array(x) and not api.is_numpy_array(x) and not api.is_jax_array(x)
        assert api.device(x) == x.device
        assert api.to_device(x, "cpu").device.type == "cpu"
        xp = api.array_namespace(x)
        return xp.sum(xp.matmul(x, xp.matrix_transpose(x)), axis=0)

    both(sample, x)


def test_safetensors(tmp_path):
    safetensors_torch = pytest.importorskip("safetensors.torch")
    layer = nn.Linear(3, 2, device="xla")
    safetensors_torch.save_file(dict(layer.state_dict()), tmp_path / "layer.safetensors")
    for device in DEVICES:
        loaded = safetensors_torch.load_file(tmp_path / "layer.safetensors", device=device)
        assert loaded["weight"].device.type == device
        assert torch.equal(loaded["weight"].cpu(), layer.weight.cpu())


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator()
    assert accelerator.device.type == "xla"
    layer = nn.Linear(4, 2)
    expected = [p.detach().clone() for p in layer.parameters()]
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
    accelerator.backward(model(torch.ones(3, 4, device=accelerator.device)).sum())
    optimizer.step()
    for found, before, step in zip(model.parameters(), expected, (0.3, 0.3)):
        torch.testing.assert_close(found.detach().cpu(), before - step)


def test_peft():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"], r=2)
    )
    x = torch.randn(2, 4)
    expected = model(x)
    found = model.to("xla")(x.to("xla"))
    found.sum().backward()
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_torchmetrics():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports is deprecated in places
        metrics = pytest.importorskip("torchmetrics")
    scores, labels = torch.randn(10, 3), torch.arange(10) % 3

    def sample(scores, labels):
        metric = metrics.classification.MulticlassAccuracy(3).to(scores.device)
        metric.update(scores, labels)
        return metric.compute()

    both(sample, scores, labels)


def test_ignite():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        idist = pytest.importorskip("ignite.distributed")
        engine = pytest.importorskip("ignite.engine")
    assert idist.device() == torch.device(torch_xla._XLAC._xla_get_default_device())
    assert (idist.backend(), idist.get_world_size(), idist.get_rank()) == ("xla-tpu", 1, 0)
    data = [(torch.randn(8, 4), torch.arange(8) % 3)]

    def train(device):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = engine.create_supervised_trainer(
            model, optimizer, nn.functional.cross_entropy, device=device
        )
        trainer.run(data, max_epochs=2)
        return SimpleNamespace(weight=model.weight.detach().cpu())

    on_cpu, on_device = map(train, DEVICES)
    torch.testing.assert_close(on_device.weight, on_cpu.weight, rtol=1e-5, atol=1e-6)
