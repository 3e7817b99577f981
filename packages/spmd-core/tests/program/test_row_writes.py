"""Tests spmd_core.program.passes.row_writes: a write at indices of a row is one to the stack."""

import pytest
import torch
from recorded_graphs import graph_of, names, rewritten

import spmd_core as spmd
from spmd_core.modules.layer_stacks import row_of, with_row
from spmd_core.program.passes.row_writes import row_writes

SHAPE = (3, 4, 5, 6)


def numbers(*shape, most):
    return torch.randint(most, shape)


def put(*key):
    def write(row, values):
        indices = [k.to(row.device) if isinstance(k, torch.Tensor) else k for k in key]
        row[tuple(indices)] = values[: row[tuple(indices)].numel()].view_as(row[tuple(indices)])

    return write


def broadcast(row, values):
    row[:, torch.tensor([1, 2], device=row.device)] = values[:6]


def negative(row, values):
    row[torch.tensor([-1, 0], device=row.device)] = values[:60].view(2, 5, 6)


def copied(dim):
    def write(row, values):
        index = torch.tensor([2, 0, 3], device=row.device)
        shape = [3 if d == dim % 3 else n for d, n in enumerate(SHAPE[1:])]
        row.index_copy_(dim, index, values[: torch.Size(shape).numel()].view(shape))

    return write


MERGED = {
    "first": put(torch.tensor([2, 0])),
    "last": put(slice(None), slice(None), torch.tensor([5, 1])),
    "middle": put(slice(None), torch.tensor([[4, 1], [0, 2]])),
    "adjacent": put(slice(None), torch.tensor([4, 1]), torch.tensor([[0], [3]])),
    "apart": put(torch.tensor([3, 1]), slice(None), torch.tensor([5, 0])),
    "all": put(torch.tensor([3, 1]), torch.tensor([2, 2]), torch.tensor([5, 0])),
    "broadcast": broadcast,
    "negative": negative,
    **{f"copied along {dim}": copied(dim) for dim in (0, 1, -1)},
}


def added(row, values):
    row.index_put_((torch.tensor([1, 1], device=row.device),), values[0], accumulate=True)


def masked(row, values):
    row[row > 0.5] = 2.0


def twice(row, values):
    put(torch.tensor([2, 0]))(row, values)
    put(torch.tensor([1, 2]))(row, values * 2)


def elsewhere(row, values):
    row.mul_(2)


OTHERS = {"added": added, "masked": masked, "twice": twice, "elsewhere": elsewhere}


def run(write, mesh=None, spec=()):
    """The stack and a row before and after, for a write to row 1; and the same in eager torch."""
    torch.manual_seed(0)
    stack, values = torch.randn(SHAPE), torch.randn(200)
    expected = stack.clone()
    write(expected[1], values)
    mine = stack.to("xla")
    if mesh is not None:
        spmd.mark_sharding(mine, mesh, spec)
    index = torch.tensor(1).to("xla")
    row = row_of(mine, index)
    write(row, values.to("xla"))
    return [with_row(mine, index, row), row + 1], [expected, expected[1] + 1]


@pytest.mark.parametrize("write", MERGED)
def test_writes_that_are_merged(write, mesh_1d, mesh_2d):
    for mesh, spec in (
        (None, ()),
        (mesh_1d, (None, None, None, "x")),
        (mesh_1d, (None, "x")),
        (mesh_2d, (None, None, "a", "b")),
    ):
        found, expected = run(MERGED[write], mesh, spec)
        made = rewritten(row_writes, graph_of(*found))
        assert "put_in_row" in names(made) and "with_row" not in names(made)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("write", OTHERS)
def test_writes_that_stay(write):
    found, expected = run(OTHERS[write])
    graph = graph_of(*found)
    assert rewritten(row_writes, graph) is graph
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_a_row_that_is_read_before_or_a_stack_that_is_read_after():
    torch.manual_seed(0)
    stack, index = torch.randn(SHAPE).to("xla"), torch.tensor(2).to("xla")
    for reads in ("row", "stack"):
        row = row_of(stack, index)
        before = row.sum() if reads == "row" else None
        put(torch.tensor([2, 0]))(row, torch.ones(200).to("xla"))
        changed = with_row(stack, index, row)
        other = before if before is not None else stack.sum((1, 2, 3))
        graph = graph_of(changed, other)
        assert rewritten(row_writes, graph) is graph
        expected = stack.cpu().clone()
        expected[2, [2, 0]] = 1
        assert torch.equal(changed.cpu(), expected)
        total = stack.cpu()[2].sum() if reads == "row" else stack.cpu().sum((1, 2, 3))
        torch.testing.assert_close(other.cpu(), total)


def test_an_index_outside_is_found():
    found, _ = run(put(torch.tensor([2, 0])))
    assert found[0].shape == SHAPE
    stack, index = torch.zeros(SHAPE).to("xla"), torch.tensor(1).to("xla")
    row = row_of(stack, index)
    row[torch.tensor([0, 9]).to("xla") * 1] = torch.ones(2, *SHAPE[2:]).to("xla")
    with pytest.raises(IndexError, match="index_put"):
        with_row(stack, index, row).sum().item()
