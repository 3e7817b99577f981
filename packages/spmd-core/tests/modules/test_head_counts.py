"""The lines of torch's tutorial that divide head counts, before and after a plan."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import spmd_core as spmd

PLAN = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
}


class Attention(nn.Module):
    """As in torch's example of Llama: queries share keys, `head_dim` is of the whole model."""

    def __init__(self, width, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, width // n_heads
        self.n_rep = n_heads // n_kv_heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk, self.wv = (
            nn.Linear(width, n_kv_heads * self.head_dim, bias=False) for _ in range(2)
        )
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.n_heads, self.head_dim)
        k = self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(batch, length, self.n_kv_heads, -1)
        k, v = (t.repeat_interleave(self.n_rep, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width=64, n_heads=16, n_kv_heads=8):
        super().__init__()
        self.attention = Attention(width, n_heads, n_kv_heads)

    def forward(self, x):
        return x + self.attention(x)


def divide(attention, size):
    """The tutorial's lines."""
    attention.n_heads = attention.n_heads // size
    attention.n_kv_heads = attention.n_kv_heads // size


def block():
    torch.manual_seed(0)
    return Block()


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 16])
def test_the_tutorials_lines_run(num_devices, ours, kv_heads):
    torch.manual_seed(0)
    model, x = Block(n_kv_heads=kv_heads), torch.randn(2, 8, 64)
    expected = model(x)
    tp_mesh = init_device_mesh("xla", (num_devices,))
    divide(model.attention, tp_mesh.size())
    parallelize = spmd.dtensor.parallelize_module if ours else parallelize_module
    if num_devices == 1:
        parallelize(model, tp_mesh, PLAN)
    else:
        with pytest.warns(UserWarning, match=r"attention\.n_heads from 2 to 16, .*Remove") as seen:
            parallelize(model, tp_mesh, PLAN)
        assert len(seen) == 1 and seen[0].filename == __file__
    assert (model.attention.n_heads, model.attention.n_kv_heads) == (16, kv_heads)
    torch.testing.assert_close(model(x.to("xla")).cpu(), expected, rtol=1e-4, atol=1e-5)


class Short(nn.Module):
    """Names no width of a head; one layer computes queries, keys and values if `fused`."""

    def __init__(self, kept, fused):
        super().__init__()
        self.heads, self.fused = 16, fused
        vars(self).update(kept)
        self.qkv = nn.Linear(64, 192) if fused else nn.ModuleList()
        if not fused:
            self.wq, self.wk, self.wv = (nn.Linear(64, 64) for _ in range(3))
        self.wo, self.up = nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, x):
        parts = (
            self.qkv(x).view(*x.shape[:2], 3, 64).unbind(2)
            if self.fused
            else (self.wq(x), self.wk(x), self.wv(x))
        )
        q, k, v = (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in parts)
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.wo(out.flatten(2)) + self.up(x)[..., :64]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "kept",
    [
        {"head_size": 4},
        {"scale": 4**-0.5},
        {"config": types.SimpleNamespace(heads=16)},
        {"args": {"heads": 16}},
    ],
    ids=lambda kept: next(iter(kept)),
)
def test_the_width_of_a_head_is_found_where_modules_keep_it(num_devices, kept, fused):
    if num_devices == 1:
        return  # there is nothing to divide by
    torch.manual_seed(0)
    model, x = Short(kept, fused), torch.randn(2, 8, 64)
    expected = model(x)
    mesh = init_device_mesh("xla", (num_devices,))
    plan = {"up": ColwiseParallel(output_layouts=Replicate()), "wo": RowwiseParallel()}
    plan |= dict.fromkeys(["qkv"] if fused else ["wq", "wk", "wv"], ColwiseParallel())
    model.heads //= mesh.size()
    with pytest.warns(UserWarning, match="heads from 2 to 16"):
        parallelize_module(model, mesh, plan)
    torch.testing.assert_close(model(x.to("xla")).cpu(), expected, rtol=1e-4, atol=1e-5)
    parallelize_module(model, mesh, plan)  # whole now: warns of nothing
    assert model.heads == 16


def test_heads_of_layers_that_no_plan_splits_are_left_alone(num_devices):
    model = Short({"head_dim": 64 // num_devices}, fused=False)
    model.heads, model.up = num_devices, nn.Linear(64, 64 * num_devices)
    parallelize_module(model, init_device_mesh("xla", (num_devices,)), {"up": ColwiseParallel()})
    assert model.heads == num_devices  # and nothing was warned of


def test_whole_counts_and_other_modules_are_left_alone(num_devices):
    model = nn.ModuleDict({"block": block(), "mlp": nn.Linear(64, 64)})
    model.mlp.num_heads = model.mlp.head_dim = 1
    plan = {f"block.{name}": style for name, style in PLAN.items()}
    parallelize_module(model, init_device_mesh("xla", (num_devices,)), plan)  # warns of nothing
    assert (model.block.attention.n_heads, model.mlp.num_heads) == (16, 1)


def test_counts_that_are_divided_later_fail_in_the_view_with_the_cure(num_devices):
    if num_devices == 1:
        return  # there is nothing to divide by
    model, mesh = block(), init_device_mesh("xla", (num_devices,))
    parallelize_module(model, mesh, PLAN)
    divide(model.attention, mesh.size())
    with pytest.raises(RuntimeError, match="is invalid for input of size") as caught:
        model(torch.randn(2, 8, 64).to("xla"))
    advice = f"has {num_devices} times the elements of that view: do not divide its sizes, such as"
    assert advice in caught.value.__notes__[0]
