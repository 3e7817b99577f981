"""Tests torch_xla.experimental.scan_layers against layers that eager torch calls in turn."""

import copy
import inspect
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
import torch_xla
from torch_xla.experimental.scan_layers import scan_layers
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

WIDTH, HIDDEN = 6, 10


class Block(nn.Module):
    """A block with a tied weight, buffers of its own values, and an attribute that nobody reads."""

    def __init__(self, index=0):
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.again = self.down
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(HIDDEN), persistent=False)

    def forward(self, x):
        h = F.gelu(self.up(self.norm(x)) + self.shift)
        return x * self.scale + self.again(h) + self.down(h.sin())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x, state):
        y = self.inner(x)
        return y, {"sum": state["sum"] + y.mean(-1)}


def check(make, x, prepare=lambda layers, x: None, count=3, rtol=1e-4, atol=1e-5):
    """Compares the result and all gradients of a stack with eager torch's."""
    torch.manual_seed(0)
    right = [make(i) for i in range(count)]
    mine = [copy.deepcopy(layer).to("xla") for layer in right]
    result, given = x.clone().requires_grad_(), x.to("xla").requires_grad_()
    leaf = result
    prepared = prepare(mine, given) or mine
    for layer in right:
        result = layer(result)
    found = scan_layers(prepared, given)
    (result.square().mean() + result.sin().sum()).backward()
    (found.square().mean() + found.sin().sum()).backward()
    pairs = [(found, result), (given.grad, leaf.grad)]
    for a, b in zip(right, mine, strict=True):
        pairs += [(q.grad, p.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    torch_xla.sync()
    for actual, expected in pairs:
        torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=rtol, atol=atol)
    return mine


def test_layers_and_their_gradients():
    layers = check(Block, torch.randn(4, WIDTH))
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert type(layers[0]) is Block  # no guard is left
    names = [
        [line.split("(")[0] for line in text.splitlines() if "input" not in line.split(":")[0]]
        for text in (
            spmd.debugging.operations(scan_layers(some, torch.ones(4, WIDTH, device="xla")))
            for some in (layers, layers * 3)
        )
    ]
    assert names[0] == names[1] and sum("gelu" in name for name in names[0]) == 1


def test_recurrent_and_parametrized_layers():
    class Recurrent(nn.Module):
        def __init__(self, _):
            super().__init__()
            self.gru = nn.GRU(WIDTH, WIDTH)
            self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

        def forward(self, x):
            return x + self.linear(self.gru(x)[0])

    check(Recurrent, torch.randn(5, 2, WIDTH), count=2)


def test_checkpointed_layers_and_gradients_of_gradients():
    class Again(nn.Module):
        def __init__(self, _):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return checkpoint(lambda x: self.linear(x).sin() * x, x, use_reentrant=False)

    layers = check(Again, torch.randn(4, WIDTH))
    right = [copy.deepcopy(layer).cpu() for layer in layers]
    x = torch.randn(4, WIDTH)
    results = []
    for device, each in (("cpu", right), ("xla", layers)):
        given = x.to(device).requires_grad_()
        y = given
        if device == "cpu":
            for layer in each:
                y = layer(y)
        else:
            y = scan_layers(each, y)
        weights = [layer.linear.weight for layer in each]
        first = torch.autograd.grad(y.square().sum(), [given, *weights], create_graph=True)
        total = sum(g.square().sum() for g in first)
        results.append([g.cpu() for g in torch.autograd.grad(total, [given, *weights])])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert all(layer.linear.weight is w for layer, w in zip(layers, weights, strict=True))


def test_several_inputs_shared_tensors_and_no_tensors():
    blocks = [Pair() for _ in range(3)]
    for block in blocks[1:]:
        block.inner.norm = blocks[0].inner.norm  # shared
    x = torch.randn(4, WIDTH)
    right, state = x, {"sum": x.new_zeros(4)}
    for block in blocks:
        right, state = block(right, state)
    (right.sum() + state["sum"].square().sum()).backward()
    expected = blocks[0].inner.norm.weight.grad
    mine = nn.ModuleList(copy.deepcopy(nn.ModuleList(blocks))).to("xla")
    mine.zero_grad()
    found, state_found = scan_layers(mine, (x.to("xla"), {"sum": torch.zeros(4, device="xla")}))
    (found.sum() + state_found["sum"].square().sum()).backward()
    torch.testing.assert_close(found.detach().cpu(), right.detach())
    torch.testing.assert_close(state_found["sum"].detach().cpu(), state["sum"].detach())
    shared = mine[2].inner.norm.weight
    torch.testing.assert_close(shared.grad.cpu(), expected, rtol=1e-4, atol=1e-5)
    found = scan_layers(nn.Sequential(nn.Tanh(), nn.Tanh()), x.to("xla"))
    torch.testing.assert_close(found.cpu(), x.tanh().tanh())
    assert scan_layers([], x) is x


def test_another_mask_in_each_layer():
    x = torch.ones(1000, device="xla")

    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, xs):
            x, kept = xs
            return [self.drop(x), kept + (self.drop(torch.ones_like(x)) > 0)]

    _, kept = scan_layers([Kept() for _ in range(4)], [x, x * 0])
    assert set(kept.cpu().tolist()) == {0, 1, 2, 3, 4}
    assert 1900 < kept.sum().item() < 2100


SPLITS = {
    "tensor": ({"x": (None, None), "up.weight": ("b", "a"), "down.weight": ("a", "b")}, 2),
    "data": ({"x": (("a", "b"), None), "up.weight": ("a", None), "up.bias": ("a",)}, 2),
    "buffers": ({"x": ("b", "a"), "shift": ("a",), "scale": ("b",), "norm.weight": ("a",)}, 2),
    "one axis": ({"x": ("x", None), "up.weight": (None, "x"), "down.weight": ("x", None)}, 1),
}


@pytest.mark.parametrize("split", SPLITS)
def test_marked_layers(split, num_devices):
    marks, num_axes = SPLITS[split]
    sizes = (num_devices // 2 or 1, min(2, num_devices)) if num_axes == 2 else (num_devices,)
    mesh = spmd.Mesh(range(num_devices), sizes, ("a", "b") if num_axes == 2 else ("x",))

    def prepare(layers, x):
        spmd.mark_sharding(x, mesh, marks["x"])
        for layer in layers:
            tensors = dict((*layer.named_parameters(), *layer.named_buffers()))
            for name, spec in marks.items():
                if name != "x":
                    spmd.mark_sharding(tensors[name], mesh, spec)

    for name, parameter in check(Block, torch.randn(5, WIDTH), prepare)[2].named_parameters():
        if name in marks:
            assert parameter.grad.sharding_spec == parameter.sharding_spec


def test_no_device_has_a_whole_stack_of_marked_parameters(num_devices):
    if num_devices != 8:
        pytest.skip("names the sizes on 8 devices")
    mesh = spmd.Mesh(range(8), (4, 2), ("a", "b"))
    layers = [nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)).to("xla") for _ in range(3)]
    for layer in layers:
        spmd.mark_sharding(layer[0].weight, mesh, ("b", "a"))
        spmd.mark_sharding(layer[1].weight, mesh, ("a", "b"))
    x = spmd.mark_sharding(torch.randn(32, 64, device="xla"), mesh, ("a", None))
    scan_layers(layers, x).square().mean().backward()
    gradients = [p.grad for layer in layers for p in layer.parameters()]
    stacks = set(re.findall(r"f32\[3,\d+,\d+\]", spmd.debugging.hlo(*gradients)))
    assert {"f32[3,24,16]", "f32[3,16,24]"} <= stacks
    assert not stacks & {f"f32[3,{sizes}]" for sizes in ("48,64", "64,48", "24,64", "64,24")}


def test_units_of_fsdp(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))

    def prepare(layers, x):
        spmd.mark_sharding(x, mesh, ("fsdp", None))
        return [SpmdFullyShardedDataParallel(layer, mesh) for layer in layers]

    check(Block, torch.randn(num_devices, WIDTH), prepare)


def test_arguments_and_layers_that_differ():
    parameters = inspect.signature(scan_layers).parameters
    assert [*parameters] == ["layers", "input_data", "partition_fn", "is_layer_pure"]
    assert parameters["is_layer_pure"].default is False
    x = torch.zeros(4, device="xla")
    for others, message in (
        ([nn.Linear(4, 4, bias=False)], r"Layer 1 has mismatched keys\..*not \['bias'\]"),
        ([nn.Sequential(nn.Linear(4, 4))], r"Layer 1 has mismatched keys\..*\['0.bias', '0.w"),
        ([nn.Linear(4, 4), nn.Linear(4, 5)], r"Shape mismatch for 'weight'.*\(5, 4\) in layer 2"),
        (
            [nn.Linear(4, 4).double()],
            r"Dtype mismatch for 'weight'.*float64 in layer 1.*Build them alike",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            scan_layers([nn.Linear(4, 4), *others], x)
    with pytest.raises(ValueError, match="which is a ReLU in layer 1 and a Tanh in layer 0"):
        scan_layers([nn.Tanh(), nn.ReLU()], x)
    with pytest.raises(ValueError, match=r"read of 0\.training, which is False in layer 1"):
        scan_layers([nn.Sequential(nn.Dropout()), nn.Sequential(nn.Dropout()).eval()], x)
    with pytest.raises(AssertionError, match="Convert one of them, or return it as y"):
        scan_layers([nn.Linear(4, 5).to("xla")] * 2, x)
    with pytest.raises(RuntimeError, match="Move it first"):
        scan_layers([nn.Linear(4, 4), nn.Linear(4, 4)], x)
    with pytest.warns(UserWarning, match="inside of what the loop calls") as found:
        scan_layers([nn.Tanh()], x, partition_fn=lambda *args: None)
    assert found[0].filename == __file__


def test_layers_that_write_to_buffers():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return x

    x = torch.zeros(3, 4, device="xla")
    layers = [Counts().to("xla") for _ in range(2)]
    with pytest.raises(RuntimeError, match="an assignment to count"):
        scan_layers(layers, x)
    assert [layer.count.item() for layer in layers] == [0, 0]
    with pytest.raises(RuntimeError, match="a write in place to running_mean"):
        scan_layers([nn.BatchNorm1d(4).to("xla") for _ in range(2)], x)
    normed = [nn.BatchNorm1d(4).to("xla").eval() for _ in range(2)]
    assert scan_layers(normed, x).cpu().abs().sum() == 0
