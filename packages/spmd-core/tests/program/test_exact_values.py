"""Values that are compared exactly are computed once."""

import math

import pytest
import torch
import torch.nn.functional as F
from recorded_graphs import graph_of, rewritten
from tiers import exhaustive

import spmd_core as spmd
from spmd_core.program.passes.exact_values import exact_values


def _sources(x):
    return F.gelu(x), F.silu(x), x.tanh(), x * 1.3 + 0.2


CHOICES = {
    "amax": lambda y: y.amax(0),
    "max": lambda y: y.max(),
    "max of a dim": lambda y: y.max(1)[0][:, None],
    "aminmax": lambda y: y.aminmax()[1],
    "median": lambda y: y.median(),
    "infinite norm": lambda y: y.norm(math.inf),
    "of a view": lambda y: y[:3].T.max(),
    "topk": lambda y: y.topk(2, 1)[0][:, -1:],
    "kthvalue": lambda y: y.kthvalue(2, 1)[0][:, None],
    "cummax": lambda y: y.cummax(1)[0],
    "sort": lambda y: y.sort(1)[0][:, 1:2],
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("split", [exhaustive(False), True])
def test_an_element_that_was_chosen_is_found_again(choice, split, mesh_1d):
    """By `==` in the program and in the gradient."""
    x = torch.randn(8, 6, dtype=torch.float64)

    def found(x, mark):
        x = x.detach().requires_grad_()
        results = []
        for y in _sources(mark(x)):
            y = y - x.mean(1, keepdim=True)
            chosen = CHOICES[choice](y)
            results.append((y.abs() == chosen.abs()).sum())
            results.extend(torch.autograd.grad((y * chosen).sin().sum(), x, retain_graph=True))
        return results

    def mark(x):
        return spmd.mark_sharding(x * 1, mesh_1d, ("x", None)) if split else x

    try:
        expected = found(x, lambda x: x)
    except RuntimeError as error:
        if "derivative" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__}: {error}")
    for mine, right in zip(found(x.to("xla"), mark), expected):
        torch.testing.assert_close(mine.cpu(), right)


def test_a_value_equals_itself_wherever_it_is_read():
    x = torch.randn(8, 6, dtype=torch.float64)
    y = F.silu(x.to("xla")) - x.to("xla").mean(1, keepdim=True)
    equal = (y[:, None] == y[None]).sum(), (y == torch.cat([y[:3], y[3:].clone()])).all()
    assert equal[0].item() == 48 and equal[1].item()


def _num_stored(result):
    return spmd.debugging.stablehlo(result).count("optimization_barrier")


@pytest.mark.parametrize(
    ("compute", "num"),
    [
        (lambda y: y.amax(), 1),
        (lambda y: y[1:].T.amax(), 1),
        (lambda y: y == y.T, 1),
        (lambda y: y.norm(math.inf), 1),
        (lambda y: y.norm(2), 0),
        (lambda y: y > 1, 0),
        (lambda y: y.sum(), 0),
        (lambda y: (y > 0).to(torch.int64).amax(), 0),
    ],
)
def test_only_such_values_are_stored(compute, num):
    assert _num_stored(compute(torch.randn(4, 4, device="xla") * 2)) == num


def test_what_is_given_is_stored_already():
    x = torch.randn(4, 4).to("xla")
    assert _num_stored(x.amax() + x.T.median()) == 0


def stored(*tensors):
    """The operations whose results are stored."""
    ops = rewritten(exact_values, graph_of(*tensors)).ops
    return [op.source.name for op in ops if op.entry.name == "spmd::store"]


def test_what_is_stored():
    x = torch.randn(4, 6).to("xla")
    assert stored((x * 2).t().amax(0)) == ["aten::mul.Tensor"]  # and not the view
    assert stored((x * 2) == x.sin()) == ["aten::mul.Tensor", "aten::sin"]
    assert stored((x * 2).norm(2), (x.cos()).norm(math.inf)) == ["aten::cos"]
    assert stored(x.amax(0), (x * 2 > 1), (x > 1).amax(0)) == []
