"""Results that other operations of a program read are computed once, on CPUs."""

import pytest
import torch
from recorded_graphs import graph_of, rewritten

import spmd_core as spmd
from spmd_core.ops.barrier import BARRIER
from spmd_core.program import compile_cache
from spmd_core.program.passes.stored_results import stored_results


def behind_barriers(*tensors: torch.Tensor, platform: str = "cpu") -> list[str]:
    """The operations whose results the pass puts behind barriers."""
    graph = rewritten(stored_results, graph_of(*tensors), platform)
    barriers = [op for op in graph.ops if op.entry.name == BARRIER]
    return [x.op.entry.name for op in barriers for x in op.operands]


def moments(device: str) -> list[torch.Tensor]:
    """An update as of AdamW: the moments, and a value that reads both."""
    torch.manual_seed(0)
    weight, grad, mean, square = (torch.rand(8, 16).to(device) for _ in range(4))
    mean = mean.lerp(grad, 0.1)
    square = (square * 0.9).addcmul(grad, grad, value=0.1)
    return [weight.addcdiv(mean, square.sqrt() + 1e-8, value=-0.01), mean, square]


def test_moments_are_computed_once() -> None:
    assert behind_barriers(*moments("xla")) == ["aten::lerp.Scalar", "aten::addcmul"]
    assert behind_barriers(*moments("xla"), platform="tpu") == []
    assert behind_barriers(moments("xla")[0]) == []  # whose moments are no results
    for mine, right in zip(moments("xla"), moments("cpu")):
        torch.testing.assert_close(mine.cpu(), right)


def test_what_is_no_computed_result() -> None:
    x = torch.rand(8, 8).to("xla")
    product, moved, scalar = x @ x, x.flip(0), x.sum()
    assert behind_barriers(product, product + 1) == []  # is in memory in any case
    assert behind_barriers(moved, moved + 1) == []
    assert behind_barriers(scalar, x * scalar) == []


@pytest.mark.parametrize("size", [16, 13])
def test_an_optimizer_over_two_axes(num_devices: int, size: int) -> None:
    """The values of eager torch; each new moment is computed once."""

    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(size, size)
        layer.to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        x = torch.rand(8, size).to(device)
        if device == "xla":
            shape = (num_devices // 2, 2) if num_devices > 1 else (1, 1)
            mesh = spmd.Mesh(range(num_devices), shape, ("a", "b"))
            spmd.mark_sharding(layer.weight, mesh, ("b", "a"))
            spmd.mark_sharding(layer.bias, mesh, ("a",))
            spmd.mark_sharding(x, mesh, ("a", None))
        for _ in range(3):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
            spmd.sync()
        state = optimizer.state[layer.weight]
        return [*layer.parameters(), state["exp_avg"], state["exp_avg_sq"]]

    found = [x.detach().cpu() for x in trained("xla")]
    hlo = compile_cache.newest().compiled.as_text()
    sums = [x for x in hlo.splitlines() if "aten::addcmul/add" in x and " add(" in x]
    assert len(sums) == 2  # of the weight and of the bias
    for mine, right in zip(found, trained("cpu")):
        torch.testing.assert_close(mine, right.detach(), rtol=1e-5, atol=1e-5)
