"""FLOPs by torch's formulas, in a mode and of a program, and by XLA's cost analysis."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spmd_core as spmd
from spmd_core.metrics import ModelSize, count_flops, flops_per_token

Run = Callable[[str], torch.Tensor]


def leaf(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape).to(device).requires_grad_()


def product(device: str) -> torch.Tensor:
    return leaf(4, 32, device=device) @ leaf(32, 16, device=device)


def linear(device: str) -> torch.Tensor:
    return nn.Linear(32, 16).to(device)(leaf(4, 6, 32, device=device))


def without_grad_of_input(device: str) -> torch.Tensor:
    return nn.Linear(32, 16).to(device)(torch.randn(4, 32).to(device))


def einsum(device: str) -> torch.Tensor:
    return torch.einsum("bij,bkj->bik", leaf(2, 4, 8, device=device), leaf(2, 6, 8, device=device))


def added_product(device: str) -> torch.Tensor:
    x = torch.randn(2, 4, 6).to(device)
    return torch.baddbmm(x, leaf(2, 4, 8, device=device), leaf(2, 8, 6, device=device))


def convolution(device: str) -> torch.Tensor:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 3))
    result: torch.Tensor = model.to(device)(leaf(2, 3, 16, 16, device=device))
    return result


def grouped_convolution(device: str) -> torch.Tensor:
    return nn.Conv1d(4, 8, 3, groups=2).to(device)(leaf(2, 4, 16, device=device))


def perceptron(device: str) -> torch.Tensor:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    result: torch.Tensor = model.to(device)(leaf(4, 8, device=device))
    return result


def recomputed(device: str) -> torch.Tensor:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
    result: torch.Tensor = checkpoint(model, leaf(4, 8, device=device), use_reentrant=False)
    return result


MODELS = (
    product,
    linear,
    without_grad_of_input,
    einsum,
    added_product,
    convolution,
    grouped_convolution,
    perceptron,
    recomputed,
)


def counted(run: Run, device: str) -> int:
    """FLOPs of forward and backward, by `FlopCounterMode`."""
    with FlopCounterMode(display=False) as counter:
        run(device).square().sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("run", MODELS)
def test_a_mode_counts_as_on_the_cpu(run: Run) -> None:
    assert counted(run, "xla") == counted(run, "cpu") > 0


def ran(run: Run) -> spmd.metrics.FlopCount:
    """The count of the program that computes a loss and the gradients of all leaves."""
    spmd.sync()
    loss = run("xla").square().sum()
    gradients = torch.autograd.grad(loss, list(leaves_of(loss.grad_fn)))
    before = {id(p): p.executions for p in spmd.metrics.programs()}
    spmd.sync()
    (program,) = (p for p in spmd.metrics.programs() if p.executions != before.get(id(p), 0))
    del gradients
    return count_flops(program)


def leaves_of(node: Any) -> Iterator[torch.Tensor]:
    """The tensors at the end of an autograd graph, each as often as it is reached."""
    if hasattr(node, "variable"):
        yield node.variable
    for before, _ in node.next_functions:
        if before is not None:
            yield from leaves_of(before)


@pytest.mark.parametrize("run", MODELS)
def test_a_program_counts_as_a_mode_on_the_cpu(run: Run) -> None:
    assert ran(run).by_torch == counted(run, "cpu")


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_as_torchs_fused_kernels(key_heads: int, is_causal: bool) -> None:
    query, key, value = (2, 4, 16, 8), (2, key_heads, 24, 8), (2, key_heads, 24, 5)

    def run(device: str) -> torch.Tensor:
        q, k, v = (leaf(*shape, device=device) for shape in (query, key, value))
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=key_heads != 4
        )

    # With a head of keys for each of the queries', as torch 2.11's formula wants them.
    shapes = (query, (2, 4, 24, 8), (2, 4, 24, 5))
    forward = flop_counter.sdpa_flop_count(*shapes)
    both = forward + flop_counter.sdpa_backward_flop_count((2, 4, 16, 5), *shapes)
    assert counted(run, "xla") == both
    with sdpa_kernel(SDPBackend.MATH):  # which computes no scores twice
        scores = 2 * 2 * 4 * 16 * 24 * 8
        assert counted(run, "cpu") == both - scores
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run("xla")
    assert counter.get_total_flops() == forward
    assert ran(run).by_torch == both


def test_attention_without_some_gradients() -> None:
    def flops(*wanted: str) -> int:
        named = {name: torch.randn(1, 2, 16, 8).to("xla") for name in ("q", "k", "v")}
        for name in wanted:
            named[name].requires_grad_()
        out = F.scaled_dot_product_attention(named["q"], named["k"], named["v"])
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        return int(counter.get_total_flops())

    one = 2 * 2 * 16 * 16 * 8  # each of the products
    assert flops("v") == 2 * one  # the scores again, and the gradient of the values
    assert flops("q") == flops("k") == 3 * one
    assert flops("q", "k", "v") == 5 * one


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_loss_without_logits_counts_them_twice(num_chunks: int) -> None:
    def run(device: str) -> torch.Tensor:
        hidden, weight = leaf(9, 8, device=device), leaf(32, 8, device=device)
        target = torch.randint(0, 32, (9,)).to(device)
        return spmd.linear_cross_entropy(hidden, weight, target, num_chunks=num_chunks)

    logits = 2 * 9 * 8 * 32
    assert counted(run, "cpu") == 3 * logits
    assert counted(run, "xla") == 4 * logits
    assert ran(run).by_torch == 4 * logits


def test_the_program_under_a_mode_computes_the_same() -> None:
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    with FlopCounterMode(display=False), torch.no_grad():
        result = F.scaled_dot_product_attention(q.to("xla"), k.to("xla"), v.to("xla"))
    torch.testing.assert_close(result.cpu(), expected)


def split_product(num_devices: int) -> spmd.metrics.FlopCount:
    """A product whose rows the devices share."""
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("data",))
    a, b = torch.randn(64, 24).to("xla"), torch.randn(24, 16).to("xla")
    spmd.mark_sharding(a, mesh, ("data", None))
    spmd.mark_sharding(b, mesh, (None, None))
    spmd.sync()
    product = a @ b
    spmd.sync()
    found = count_flops(spmd.metrics.programs()[-1])
    assert product.shape == (64, 16)
    return found


def test_a_split_product_counts_once_on_any_number_of_devices(num_devices: int) -> None:
    found = split_product(num_devices)
    flops = 2 * 64 * 24 * 16
    assert found.by_operation == {"aten.mm": flops} and found.num_jax_calls == 0
    assert found.by_compiler == pytest.approx(flops, rel=0.01)


def test_the_counts_stand_side_by_side() -> None:
    found = spmd.metrics.FlopCount("step", {"aten.mm": 1_500_000}, None, num_jax_calls=2)
    size = ModelSize(num_params=1000, num_layers=2, width=4, seq=8)
    formulas = {name: flops * 200.0 for name, flops in flops_per_token(size).items()}
    assert found.table(formulas).splitlines() == [
        "FLOPs of step                  FLOPs  ratio",
        "6N                           1.2e+06  1.000",
        "6N+12LdS                   1.354e+06  1.128",
        "6N+6LdS                    1.277e+06  1.064",
        "torch.utils.flop_counter     1.5e+06  1.250",
        "XLA's cost analysis          unknown      -",
        "torch.utils.flop_counter leaves out 2 jax calls",
    ]
    assert str(found).splitlines()[1] == "torch.utils.flop_counter     1.5e+06  1.000"


def test_a_manual_region_counts_each_device(num_devices: int) -> None:
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("data",))
    x, w = torch.randn(32, 6).to("xla"), torch.randn(6, 10).to("xla")
    spmd.sync()
    product = spmd.shard_map(torch.mm, mesh, (("data", None), (None, None)), ("data", None))(x, w)
    spmd.sync()
    found = count_flops(spmd.metrics.programs()[-1])
    assert found.by_torch == 2 * 32 * 6 * 10  # each device multiplies its rows
    assert product.shape == (32, 10)


def test_a_jax_function_is_xlas_to_count(num_devices: int) -> None:
    x = torch.randn(12, 12).to("xla")
    spmd.sync()
    result = spmd.call_jax(lambda a: a @ a, x)
    spmd.sync()
    found = count_flops(spmd.metrics.programs()[-1])
    assert (found.by_torch, found.num_jax_calls) == (0, 1)
    # Nothing is split: every device computes all of it.
    assert found.by_compiler == pytest.approx(num_devices * 2 * 12**3, rel=0.01)
    assert result.shape == (12, 12)


def test_the_repetitions_of_a_loop_count(num_devices: int) -> None:
    hidden, weight = leaf(40, 8, device="xla"), leaf(16, 8, device="xla")
    target = torch.randint(0, 16, (40,)).to("xla")
    spmd.sync()
    loss = spmd.linear_cross_entropy(hidden, weight, target, num_chunks=5)
    spmd.sync()
    found = count_flops(spmd.metrics.programs()[-1])
    record = spmd.metrics.programs()[-1]
    assert found.by_compiler is not None and loss.shape == ()
    products = 2 * 40 * 8 * 16
    assert found.by_compiler - record.flops == num_devices * products * 4 / 5


def test_a_users_formula_counts() -> None:
    packet = torch.ops.aten.mv
    flop_counter.register_flop_formula(packet)(lambda m, v, **_: 2 * m[0] * m[1])
    try:
        matrix, vector = torch.randn(7, 9).to("xla"), torch.randn(9).to("xla")
        spmd.sync()
        result = torch.mv(matrix, vector)
        spmd.sync()
        assert count_flops(spmd.metrics.programs()[-1]).by_operation == {"aten.mv": 2 * 7 * 9}
        assert result.shape == (7,)
    finally:
        del flop_counter.flop_registry[packet]
