"""Which indices of a graph must be checked, and which an earlier check covers."""

import pytest
import torch
from recorded_graphs import graph_of

import spmd_core as spmd
from spmd_core.program import index_ranges


@pytest.mark.parametrize(("sizes", "count"), [((8, 4), 2), ((4, 8), 1), ((4, 4), 1)])
def test_a_check_counts_for_dims_that_are_as_long(sizes: tuple[int, int], count: int) -> None:
    ids = torch.tensor([0, 3]).to("xla")
    tables = [torch.ones(size, 3).to("xla") for size in sizes]
    spmd.sync()
    graph = graph_of(*(table.index_select(0, ids) for table in tables))
    assert len(index_ranges.needed(graph)) == count
