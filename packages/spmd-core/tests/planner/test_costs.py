"""planner/costs.py: FLOPs as torch counts them, and bounds on time by arithmetic."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import spmd_core as spmd
from spmd_core import chips
from spmd_core.debugging.communication import Collective, Collectives
from spmd_core.planner import costs
from spmd_core.planner import topology as topology_of_tpus
from spmd_core.planner.buffer_text import Allocation, Buffers
from spmd_core.planner.topology import Topology


def _mlp():
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6, bias=False))
    return model, (torch.randn(8, 12),)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 5, 7))

    def forward(self, x):
        return torch.baddbmm(x.sum(), x, self.w).square() + torch.bmm(x, self.w)


CASES = {
    "linear": _mlp,
    "attention": lambda: (_Attention(), (torch.randn(2, 10, 16),)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.Conv2d(6, 3, 1)),
        (torch.randn(2, 4, 9, 9),),
    ),
    "transposed": lambda: (nn.ConvTranspose2d(4, 6, 3, stride=2), (torch.randn(2, 4, 5, 5),)),
    "batched": lambda: (_Products(), (torch.randn(3, 4, 5),)),
}


@pytest.fixture(scope="module")
def planned_flops():
    """The FLOPs of forward and backward of each case, all in one plan."""

    def steps() -> None:
        for make in CASES.values():
            model, inputs = make()
            on_device = model.to("xla")
            on_device(*(x.to("xla") for x in inputs)).sum().backward()
            grads = [p.grad for p in on_device.parameters()]
            spmd.sync()
            del grads

    made = spmd.plan(steps, topology=f"cpu-{spmd.global_runtime_device_count()}")
    found = [program.costs.model_flops for program in made.programs]
    return dict(zip(CASES, filter(None, found), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_flops_of_forward_and_backward_are_torchs(name, planned_flops):
    model, inputs = CASES[name]()
    # torch counts nothing for the CPU's fused attention. As products, its backward has one less
    # than the fused kernels that torch and this project count.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*inputs).sum().backward()
    expected = counter.get_total_flops() + (2 * (2 * 2 * 10) * 10 * 8 if name == "attention" else 0)
    assert planned_flops[name] == expected


@pytest.mark.one_device
@pytest.mark.parametrize("is_captured", [False, True])
def test_what_is_computed_again_is_counted_apart(is_captured, num_devices):
    model, (x,) = _mlp()
    block = spmd.checkpoint_module(model.to("xla"))

    def compute(x: torch.Tensor) -> None:
        block(x).square().sum().backward()

    def step() -> None:
        (spmd.compile(compute, capture=True) if is_captured else compute)(x.to("xla"))
        grads = [p.grad for p in block.parameters()]
        spmd.sync()
        del grads

    found = spmd.plan(step, topology=f"cpu-{num_devices}").largest.costs
    first, second = 2 * 8 * 12 * 20, 2 * 8 * 20 * 6
    # The input needs no gradient, so its layer has one product in backward. torch's checkpoint
    # stops the second run when it has what backward reads: before the last layer.
    assert found.model_flops == 2 * first + 3 * second
    assert found.recomputed_flops == first


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_loop_of_layers_is_counted_as_the_layers_are(recomputed, num_devices):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    def step(is_loop: bool) -> None:
        layers = nn.ModuleList(Block() for _ in range(3)).to("xla")
        x = torch.randn(4, 8).to("xla")
        if recomputed:
            layers = nn.ModuleList(map(spmd.checkpoint_module, layers))
        if is_loop:
            x = spmd.scan_layers(layers, x)
        else:
            for layer in layers:
                x = layer(x)
        x.square().sum().backward()
        grads = [p.grad for p in layers.parameters()]
        spmd.sync()
        del grads

    unrolled, loop = (
        spmd.plan(functools.partial(step, is_loop), topology=f"cpu-{num_devices}").largest.costs
        for is_loop in (False, True)
    )
    assert loop.model_flops > 0
    # A loop has one body: also the first layer's input gets a gradient, a product more.
    assert loop.model_flops == unrolled.model_flops + 2 * 4 * 8 * 16
    assert loop.recomputed_flops == unrolled.recomputed_flops == recomputed * 3 * 2 * 4 * 8 * 16


class _Graph:
    """What `costs_of` reads of a graph."""

    nodes = leaves = ()
    device_ids = (0, 1, 2, 3)


# An argument that a result takes over, and a product of 591 TFLOP.
BUFFERS = Buffers((Allocation(int(819e9), 0, True, False, ()),), {})
HLO = """\
HloModule f

ENTRY main {
  a = f32[591000000,1000]{1,0} parameter(0)
  b = f32[1000,500]{1,0} parameter(1)
  ROOT c = f32[591000000,500]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_bounds_follow_from_the_data_sheet():
    topology = Topology("t", (object(),) * 4, chips.chip_of("TPU v5 lite"))
    pairs = {False: ((0, 1), (2, 3)), True: ((0, 2), (1, 3))}  # inside of slices, and between
    moves = Collectives.of(
        [
            Collective("all-gather", int(400e9), int(200e9), ("x",), False, g, 2, (), "g", between)
            for between, g in pairs.items()
        ],
        "p",
    )
    found = costs.costs_of(_Graph, HLO, BUFFERS, moves, topology)
    assert found.compute_s == pytest.approx(3.0)
    assert found.memory_s == pytest.approx(2.0)
    # Twice half of 400 GB, at 200 GB/s over the links and 6.25 GB/s over the network.
    assert found.ici_s == pytest.approx(2.0)
    assert found.dcn_s == pytest.approx(400 / 6.25)
    assert found.bound_s == found.dcn_s
    assert found.mfu_bound == 0.0


def test_emulated_devices_have_no_bounds():
    topology = Topology("t", (object(),) * 4, None)
    found = costs.costs_of(_Graph, HLO, BUFFERS, Collectives.of([], "p"), topology)
    assert (found.compute_s, found.bound_s, found.mfu_bound) == (None, None, None)
    assert found.least_bytes == 2 * int(819e9)


@pytest.mark.slow
@pytest.mark.skipif(
    topology_of_tpus.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)
def test_a_loop_for_tpus_is_counted_as_often_as_it_runs():
    def step() -> None:
        spmd.use_spmd()
        mesh = spmd.Mesh(range(8), (8,), ("fsdp",))
        layers = [nn.Linear(256, 256).to("xla") for _ in range(3)]
        for layer in layers:
            spmd.mark_sharding(layer.weight, mesh, ("fsdp", None))
        x = torch.ones(64, 256, device="xla")
        spmd.mark_sharding(x, mesh, ("fsdp", None))
        spmd.scan_layers(layers, x).square().mean().backward()
        spmd.sync()

    collectives = spmd.plan(step, topology="v4-16").largest.collectives
    gathers = [c.executions for c in collectives if c.kind == "all-gather"]
    assert gathers == [3, 3]  # the weights, forward and backward
