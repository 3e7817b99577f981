"""Trains small programs in the style of PyTorch/XLA's examples and compares them with eager torch.

The reference is the same program in eager torch on the CPU. Importing `torch_xla` and sharding a
few tensors must change only where the program runs: losses agree step by step.
"""

import argparse
import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiers import exhaustive
from torch import nn, optim

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)

N = xr.global_runtime_device_count()
# float32 sums in another order, over a few steps.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
VOCABULARY, WIDTH, LENGTH = 64, 32, 8


# A decoder.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        heads = [
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        ]
        x = x + self.out(
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList(Block() for _ in range(2)),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def decoder_on_host(model, ids, steps):
    optimizer, losses = optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class DecoderTrainer:
    """Trains the decoder on one device; a subclass shards the model and the loader over many."""

    def __init__(self, model, ids, steps):
        self.device = torch_xla.device()
        self.model = model.to(self.device)
        self.loader = pl.MpDeviceLoader(
            xu.SampleGenerator(data=ids, sample_count=steps), self.device, **self.loader_arguments()
        )
        self.model = self.sharded(self.model)
        self.optimizer = optim.Adam(self.model.parameters(), lr=1e-2)
        self.compiled_step = torch_xla.compile(self.step, full_graph=True, name="train_step")
        self.losses = []

    def loader_arguments(self):
        return {}

    def sharded(self, model):
        return model

    def run_optimizer(self):
        self.optimizer.step()

    def step(self, ids):
        self.optimizer.zero_grad()
        loss = decoder_loss(self.model(ids), ids)
        loss.backward()
        self.run_optimizer()
        return loss

    def train(self):
        tracker = xm.RateTracker()
        self.model.train()
        for ids in self.loader:
            loss = self.compiled_step(ids)
            tracker.add(ids.shape[0])
            xm.add_step_closure(lambda loss: self.losses.append(loss.item()), args=(loss,))
        xm.wait_device_ops()
        assert tracker.global_rate() > 0
        return self.losses


class FsdpTrainer(DecoderTrainer):
    """Trains with FSDP over the global mesh; each block is a unit."""

    def loader_arguments(self):
        xs.set_global_mesh(xs.Mesh(np.arange(N), (N, 1), ("fsdp", "model")))
        return {"input_sharding": xs.ShardingSpec(xs.get_global_mesh(), ("fsdp", None))}

    def sharded(self, model):
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        return FSDPv2(
            model,
            auto_wrap_policy=policy,
            auto_wrapper_callable=lambda m, *a, **k: FSDPv2(checkpoint_module(m), *a, **k),
        )


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [exhaustive(DecoderTrainer), FsdpTrainer])
def test_a_decoder(trainer, capsys):
    model, ids = Decoder(), torch.randint(VOCABULARY, (8, LENGTH))
    right = decoder_on_host(copy.deepcopy(model), ids, steps=4)
    training = trainer(model, ids, steps=4)
    met.clear_all()
    np.testing.assert_allclose(training.train(), right, **TOLERANCE)
    # Programs repeat from the first step on.
    assert met.counter_value("UncachedCompile") <= 3 and met.counter_value("ExecuteReplicated") >= 4
    if trainer is FsdpTrainer and N > 1:
        shards = {
            name: parameter.local_shards[0].data.numel() / parameter.numel()
            for name, parameter in training.model.named_parameters()
        }
        assert max(shards.values()) <= 1 / N * (1.01 + N / WIDTH), shards
    xm.master_print(met.short_metrics_report())
    assert "UncachedCompile" in capsys.readouterr().out


# A ResNet over a data axis.


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        Residual(8),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


@pytest.mark.slow
def test_a_resnet_over_a_data_axis():
    model = resnet()
    reference = copy.deepcopy(model)
    image, label = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
    right, optimizer = (
        [],
        optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss()(reference(image), label)
        loss.backward()
        optimizer.step()
        right.append(loss.item())

    mesh = xs.Mesh(np.array(range(N)), (N,), ("data",))
    device = torch_xla.device()
    loader = pl.MpDeviceLoader(
        xu.SampleGenerator(data=(image, label), sample_count=3),
        device,
        input_sharding=xs.ShardingSpec(mesh, ("data", None, None, None)),
    )
    model = model.to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    losses = []

    def report(step, loss):
        losses.append(loss.item())
        xm.master_print(f"step {step} loss {losses[-1]:.3f}", flush=True)

    model.train()
    for step, (data, target) in enumerate(loader):
        assert data.partition_spec == ("data", None, None, None)
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss()(model(data), target)
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.add_step_closure(report, args=(step, loss))
    xm.wait_device_ops()
    np.testing.assert_allclose(losses, right, **TOLERANCE)
    for (name, mine), its in zip(model.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(
            mine.cpu(), its, rtol=1e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


# A linear model, sharded as the command line says.


class SimpleLinear(nn.Module):
    def __init__(self, width, labels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 4), nn.Linear(4, labels)
        )

    def forward(self, x):
        return self.layers(x)


def train_linear(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--sharding", choices=["batch", "fsdp", "megatron-lm"], nargs="*", default=[]
    )
    parser.add_argument("--use_gradient_checkpointing", action="store_true")
    flags = parser.parse_args(arguments)
    torch.manual_seed(42)
    batch, width, labels = 16, 32, 3
    data, target = torch.randn(batch, width), torch.randint(labels, (batch,))
    model = SimpleLinear(width, labels)
    reference = copy.deepcopy(model)

    device = torch_xla.device()
    model = model.to(device)
    model_axis = 2 if N % 2 == 0 and "megatron-lm" in flags.sharding else 1
    mesh = xs.Mesh(np.arange(N), (N // model_axis, model_axis))
    spec = None
    if "batch" in flags.sharding:
        spec = xs.ShardingSpec(mesh, (0, None))
    for i, layer in enumerate(model.layers):
        if not isinstance(layer, nn.Linear):
            continue
        if "fsdp" in flags.sharding and "megatron-lm" not in flags.sharding:
            xs.mark_sharding(layer.weight, mesh, (0, None))
        if "megatron-lm" in flags.sharding and i == 0:
            xs.mark_sharding(layer.weight, mesh, (1, 0 if "fsdp" in flags.sharding else None))
        if "megatron-lm" in flags.sharding and i == 2:
            xs.mark_sharding(layer.weight, mesh, (0 if "fsdp" in flags.sharding else None, 1))
    if flags.use_gradient_checkpointing:
        model.layers[0] = checkpoint_module(model.layers[0])
    loader = pl.MpDeviceLoader(xu.SampleGenerator((data, target), 4), device, input_sharding=spec)

    def losses_of(net, batches):
        optimizer, found = optim.SGD(net.parameters(), lr=0.2), []
        for x, y in batches:
            x = x.requires_grad_(flags.use_gradient_checkpointing)
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(net(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return [loss.item() for loss in found]

    return losses_of(model, loader), losses_of(reference, [(data, target)] * 4), model


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        exhaustive(["--sharding", "batch"]),
        exhaustive(["--sharding", "fsdp"]),
        ["--sharding", "batch", "fsdp", "--use_gradient_checkpointing"],
        exhaustive(["--sharding", "megatron-lm"]),
        ["--sharding", "batch", "fsdp", "megatron-lm"],
    ],
    ids=" ".join,
)
def test_a_linear_model(arguments):
    losses, right, model = train_linear(arguments)
    np.testing.assert_allclose(losses, right, **TOLERANCE)
    assert losses[-1] < losses[0]
    if "fsdp" in arguments and N > 1:
        assert "devices=" in torch_xla._XLAC._get_xla_sharding_spec(model.layers[2].weight)


def test_eager_mode_with_a_sharded_loader():
    mesh = xs.get_1d_mesh("data")
    layer = nn.Linear(4, 2)
    right = layer(torch.ones(8, 4)).detach()
    with torch_xla.experimental.eager_mode_context(True):
        layer = layer.to("xla")
        for x in pl.MpDeviceLoader(
            [torch.ones(8, 4)] * 2, "xla", input_sharding=xs.ShardingSpec(mesh, ("data", None))
        ):
            torch.testing.assert_close(layer(x).detach().cpu(), right, **TOLERANCE)
