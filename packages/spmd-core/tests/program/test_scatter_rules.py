"""Gathers and scatters that XLA's partitioner gets wrong without the rules, against eager torch."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import axis, two_axes
from tiers import crossed, exhaustive

import spmd_core as spmd

Make = Callable[[torch.Tensor], torch.Tensor]


def written_through_a_reshape(x: torch.Tensor) -> torch.Tensor:
    y = x[:16].clone()
    y.view(4, 4, -1).mul_(2)
    return y


# How a tensor of 16 rows is computed from one of 20 in the same program.
COMPUTED: dict[str, Make] = {
    "slice": lambda x: x[:16].clone(),
    "cat": lambda x: torch.cat([x[:7], x[11:]]),
    "pad": lambda x: F.pad(x[:12], (0, 0, 1, 3)),
    "roll": lambda x: x[:16].roll(3, 0),
    "sort": lambda x: x[:16].sort(0, descending=True).values,
    "transposed copy": lambda x: x[:16].t().clone().t().contiguous(),
    "reshape": lambda x: x[:16].reshape(2, 8, -1).transpose(0, 1).reshape(16, -1),
    "written through a reshape": written_through_a_reshape,
}


def put(y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y[at] = 70.0
    return y


def add_in_place(y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y[at] += 70.0
    return y


def row(y: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((1, y.shape[1]), value, device=y.device)


# Writes at one index.
WRITTEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "put": put,
    "add in place": add_in_place,
    "index_add": lambda y, at: y.index_add(0, at, row(y, 3.0)),
    "index_copy": lambda y, at: y.index_copy(0, at, row(y, 3.0)),
    "index_fill": lambda y, at: y.index_fill(0, at, 4.0),
    "index_put, a 0-dim index": lambda y, at: y.index_put((at[0],), torch.tensor(5.0).to(y)),
    "scatter": lambda y, at: y.scatter(0, at[:, None].expand(1, y.shape[1]), 6.0),
    "index_reduce": lambda y, at: y.index_reduce(0, at, row(y, 3.0), "amax"),
    "two dims": lambda y, at: y.index_put((at, at * 0 + 1), torch.tensor(5.0).to(y)),
}


# Every way to compute with one way to write, and every way to write after a slice.
CASES = [
    (computed, written) if "slice" in computed or written == "put" else None
    for computed, written in itertools.product(COMPUTED, WRITTEN)
]


@pytest.mark.parametrize("count", [2, exhaustive(3), 4, exhaustive(8)])
@pytest.mark.parametrize(("computed", "written"), [case for case in CASES if case])
@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
def test_a_row_written_at_a_tensor_index(computed, written, count):
    mesh = axis(count)
    rows = torch.arange(40.0).view(20, 2)
    expected = WRITTEN[written](COMPUTED[computed](rows.clone()), torch.tensor([5]))
    results = []
    for marks_rows in (True, False):
        x = rows.to("xla")
        if marks_rows:
            spmd.mark_sharding(x, mesh, ("a",))
        y = COMPUTED[computed](x)
        if not marks_rows:
            spmd.mark_sharding(y, mesh, ("a",))
        results.append(WRITTEN[written](y, torch.tensor([5], device="xla")))
    for result in results:
        torch.testing.assert_close(result.cpu(), expected)


@pytest.mark.parametrize("count", [2, 4])
def test_a_cache_that_is_written_at_one_position_after_the_other(count):
    mesh = axis(count)
    x, eager = torch.arange(40.0).view(20, 2).to("xla"), torch.arange(40.0).view(20, 2)
    spmd.mark_sharding(x, mesh, ("a",))
    for position in range(7):
        for t in (x, eager):
            y = t[:16].clone()
            y[position] = 100.0 + position  # a number, which changes from program to program
            y[position : position + 2] += 1
            t[:16] = y
        torch.testing.assert_close(x.cpu(), eager)


def scatter_adds(device: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Operations that add up rows of the float tensor (n, 2) made from n indices."""
    table = torch.ones(12, 2, device=device, requires_grad=True)

    def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return lambda ids: torch.autograd.grad(function(ids).sum(), table)[0]

    def source(ids: torch.Tensor) -> torch.Tensor:
        return ids.to(torch.float32)[..., None].expand(*ids.shape, 2) * 1.0

    zeros = torch.zeros(12, 2, device=device)
    return {
        "embedding": gradient(lambda ids: F.embedding(ids, table)),
        "index": gradient(lambda ids: table[ids]),
        "index_select": gradient(lambda ids: table.index_select(0, ids.flatten())),
        "index_add": lambda ids: zeros.index_add(0, ids.flatten(), source(ids.flatten())),
        "scatter_add": lambda ids: zeros.scatter_add(
            0, ids.flatten()[:, None].expand(-1, 2), source(ids.flatten())
        ),
        "index_put": lambda ids: zeros.index_put((ids,), source(ids), accumulate=True),
        "index_reduce": lambda ids: zeros.index_reduce(
            0, ids.flatten(), source(ids.flatten()), "mean", include_self=False
        ),
    }


@pytest.mark.parametrize(
    ("name", "shape"), crossed([*scatter_adds("cpu")], [(6,), (6, 3), (5,), (1,), (8,)], rounds=2)
)
@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
def test_updates_that_are_split_unevenly_over_one_of_two_axes(name, shape, mesh_2d):
    ids = torch.arange(torch.Size(shape).numel()).view(shape) % 11 + 1  # none is 0
    expected = scatter_adds("cpu")[name](ids)
    marked = spmd.mark_sharding(ids.to("xla"), mesh_2d, ("a",))
    torch.testing.assert_close(scatter_adds("xla")[name](marked).cpu(), expected)


def test_updates_that_are_split_unevenly_along_a_later_dim(mesh_2d):
    source = torch.ones(4, 3) * 1
    index = torch.tensor([1, 2, 3])
    expected = torch.zeros(4, 4).index_add(1, index, source)
    marked = spmd.mark_sharding(source.to("xla") * 1, mesh_2d, (None, "a"))
    result = torch.zeros(4, 4, device="xla").index_add(1, index.to("xla"), marked)
    torch.testing.assert_close(result.cpu(), expected)


@pytest.mark.parametrize("reduce", ["sum", exhaustive("prod"), "amax", exhaustive("mean")])
@pytest.mark.parametrize(
    ("operand", "updates", "index"),
    [
        ((None, "x"), ("x", "y"), None),
        ((None, ("x", "y")), ("y", "x"), None),
        ((None, ("y", "x")), ("x", "y"), None),
        (("x", None), ("y", "x"), ("y", "x")),
        (("x", "y"), ("x", "y"), ("x", "y")),
    ],
)
@pytest.mark.parametrize("sizes", [(8, 8, 8), (10, 5, 3)])
def test_a_scatter_in_batches_over_two_axes(operand, updates, index, reduce, sizes):
    batch, size, number = sizes
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch, size, generator=generator) + 0.5
    source = torch.rand(batch, number, generator=generator) + 0.5
    at = torch.randint(0, size, (batch, number), generator=generator)
    tensors = [t.to("xla") for t in (x, at, source)]
    for t, spec in zip(tensors, (operand, index, updates)):
        if spec is not None:
            spmd.mark_sharding(t, two_axes(), spec)
    result = tensors[0].scatter_reduce(1, tensors[1], tensors[2], reduce)
    torch.testing.assert_close(result.cpu(), x.scatter_reduce(1, at, source, reduce))
