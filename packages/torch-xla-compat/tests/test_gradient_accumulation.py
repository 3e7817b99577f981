"""Tests torch_xla.experimental.gradient_accumulation against a loop of eager torch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
import torch_xla
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.scan_layers import scan_layers
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

STEPS, BATCH, WIDTH, HIDDEN = 3, 4, 6, 10


class Net(nn.Module):
    """Running statistics, a frozen parameter, one that is not used, and a loss that needs both."""

    def __init__(self, norm=True):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.unused = nn.Parameter(torch.ones(2))
        self.down.bias.requires_grad_(False)

    def forward(self, x):
        return checkpoint(
            lambda x: self.down(F.gelu(x)), self.norm(self.up(x)), use_reentrant=False
        )


def in_turn(train_step, tensors, carried):
    """What `gradient_accumulation` says that it computes."""
    total = 0
    for slices in zip(*tensors, strict=True):
        loss, *carried = train_step(*slices, *(t.detach() for t in carried))
        (loss / len(tensors[0])).backward()
        total = total + loss.detach() / len(tensors[0])
    return total, *carried


def check(make, prepare=lambda model, x, y: model, rounds=1):
    torch.manual_seed(0)
    right = make()
    mine = copy.deepcopy(right).to("xla")
    x, y = torch.randn(STEPS, BATCH, WIDTH), torch.randn(STEPS, BATCH, WIDTH)
    results = []
    for device, model in (("cpu", right), ("xla", mine)):
        given = [t.to(device) for t in (x, y)]
        call = model if device == "cpu" else prepare(model, *given)

        def train_step(x, y, first, second, call=call, model=model):
            # The weight is also read apart from the call of the model.
            loss = F.mse_loss(call(x) * first.cos(), y) + model.up.weight.square().mean()
            return loss, first + loss, second * 2 + first

        carried = [torch.full((1,), 0.5).to(device), torch.ones(2).to(device)]
        for _ in range(rounds):
            if device == "cpu":
                found = in_turn(train_step, given, carried)
            else:
                found = gradient_accumulation(train_step, given, call, *carried)
        gradients = [p.grad for p in model.parameters()]
        assert not found[0].requires_grad
        torch_xla.sync()
        results.append([*found, *gradients, *model.buffers()])
    for expected, actual in zip(*results, strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            torch.testing.assert_close(
                actual.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5
            )
    return mine


def test_gradients_losses_carried_tensors_and_statistics():
    model = check(Net, rounds=2)
    assert model.norm.num_batches_tracked.item() == 2 * STEPS
    assert model.unused.grad is None and model.down.bias.grad is None


SPLITS = {
    "tensor": ({"up.weight": ("b", "a"), "down.weight": ("a", "b"), "up.bias": ("a",)}, 2),
    "data": ({"x": (None, ("a", "b")), "y": (None, "a", "b"), "down.weight": (None, "a")}, 2),
    "steps": ({"x": ("x",), "up.weight": (None, "x"), "norm.weight": ("x",)}, 1),
}


@pytest.mark.parametrize("split", SPLITS)
def test_marked_models(split, num_devices):
    marks, num_axes = SPLITS[split]
    sizes = (num_devices // 2 or 1, min(2, num_devices)) if num_axes == 2 else (num_devices,)
    mesh = spmd.Mesh(range(num_devices), sizes, ("a", "b") if num_axes == 2 else ("x",))

    def prepare(model, x, y):
        tensors = {"x": x, "y": y, **dict(model.named_parameters())}
        for name, spec in marks.items():
            spmd.mark_sharding(tensors[name], mesh, spec)
        return model

    model = check(lambda: Net(norm=split == "steps"), prepare)
    for name, parameter in model.named_parameters():
        if name in marks:
            assert parameter.grad.sharding_spec == parameter.sharding_spec


def test_units_of_fsdp_and_layers_in_a_loop(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, x):
            x = self.up(x).sin()
            if x.device.type == "xla":
                return scan_layers(self.layers, x)
            for layer in self.layers:
                x = layer(x)
            return x

    def prepare(model, x, y):
        spmd.mark_sharding(x, mesh, (None, "fsdp", None))
        for i, layer in enumerate(model.layers):
            model.layers[i] = SpmdFullyShardedDataParallel(checkpoint_module(layer), mesh)
        return SpmdFullyShardedDataParallel(model, mesh)

    check(Stack, prepare)


def test_memory_is_that_of_one_step():
    temporaries = []
    for num_steps in (2, 8):
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1)).to("xla")
        x = torch.randn(num_steps, 256, WIDTH, device="xla")
        torch_xla.sync()
        gradient_accumulation(lambda x, model=model: model(x).square().mean(), (x,), model)
        torch_xla.sync()
        temporaries.append(spmd.metrics.programs()[-1].temp_bytes)
    assert temporaries[0] == temporaries[1] > 256 * 64 * 4


def test_hooks_of_parameters():
    model = nn.Linear(2, 2, bias=False).to("xla")
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    handle = model.weight.register_hook(lambda gradient: gradient.clamp(max=1))
    gradient_accumulation(lambda x: model(x).sum(), (x.to("xla"),), model)
    assert model.weight.grad.tolist() == [[0.5 + 1, 1 + 1]] * 2
    handle.remove()
    handle = model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match=r"Remove it, and call it after gradient_acc"):
        gradient_accumulation(lambda x: model(x).sum(), (x.to("xla"),), model)
    handle.remove()
    (loss,) = gradient_accumulation(lambda x: model(x).sum(), (x.to("xla"),), model)
    assert loss.shape == () and model.weight.grad.tolist() == [[1.5 + 2, 2 + 3]] * 2


def test_errors_of_iterable_tensors():
    model = nn.Linear(2, 2).to("xla")
    x = torch.ones(3, 2, device="xla")
    for tensors, message in (
        ((), "got none. Pass the parts of the batch"),
        ((x, [1, 2]), r"got a list. Convert it by torch\.tensor"),
        ((x, x[:0]), r"an empty one, of shape \(0, 2\). Pass at least one step"),
        ((x.sum(),), r"an empty one, of shape \(\)"),
        ((x, x[:2]), r"got shapes \[\(3, 2\), \(2, 2\)\]. Reshape each"),
    ):
        with pytest.raises(ValueError, match=message):
            gradient_accumulation(lambda *args: model(args[0]).sum(), tensors, model)


def test_errors_of_steps():
    model = nn.Linear(2, 2).to("xla")
    weight = model.weight
    x, outside = torch.ones(3, 2, device="xla"), torch.zeros((), device="xla")

    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def wrong(error, message, step):
        with pytest.raises(error, match=message):
            gradient_accumulation(step, (x,), model, outside.clone())
        assert weight.grad is None and model.weight is weight

    wrong(
        AssertionError, "in place to a slice.*to a clone", lambda x, c: (model(x.add_(1)).sum(), c)
    )
    wrong(AssertionError, "in place to a carried", lambda x, c: (model(x).sum(), c.add_(1)))
    wrong(
        RuntimeError, "to a tensor from outside", lambda x, c: (model(x).sum(), c + outside.add_(1))
    )
    wrong(ValueError, r"got 0 for 1\. Return \(loss", lambda x, c: model(x).sum())
    wrong(TypeError, "shapes and dtypes", lambda x, c: (model(x).sum(), c.double()))
    wrong(
        RuntimeError,
        r"Return the loss",
        lambda x, c: (model(x).sum(), c, model(x).sum().backward())[:2],
    )
    wrong(RuntimeError, "got weight, .* from the model", lambda x, c: (Read.apply(weight).sum(), c))
    wrong(RuntimeError, "read", lambda x, c: (model(x).sum() * model(x).sum().item(), c))
    _ = gradient_accumulation(
        lambda x, c: (Read.apply(model.weight).sum(), c), (x,), model, outside
    )
    assert weight.grad.tolist() == [[2, 2], [2, 2]] and outside.item() == 0
