"""auto/planned_shardings.py: shardings of the plan that was searched, for the plan that runs."""

import functools

import torch

import spmd_core as spmd
from spmd_core.auto.marked_graph import Read, Shardings, marked
from spmd_core.auto.planned_shardings import of_same_program
from spmd_core.graph.recorders import lock
from spmd_core.graph.stacks import stacked_sharding
from spmd_core.program import chosen_runs, planning
from spmd_core.program.mark_names import MARK, MARK_SHARDING
from spmd_core.sharding.sharding import Sharding

LAYERS = 5


def test_marks_stay_with_their_operations_and_stacks_lie_as_their_rows(monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", True)
    monkeypatch.setattr(chosen_runs, "MIN_SAVED", 1)
    spmd.use_spmd()
    weights = [torch.randn(8, 8).to("xla") for _ in range(LAYERS)]
    scales = [torch.tensor(0.5 + i).to("xla") for i in range(LAYERS)]
    x = torch.randn(4, 8).to("xla")
    hidden = x
    for weight, scale in zip(weights, scales):
        hidden = scale * (hidden @ weight).tanh()
    for weight in weights:
        weight.mul_(0.5)
    with lock:
        plan = functools.partial(planning.plan, [t._handle for t in (hidden, *weights)])
        searched, planned = plan(one_by_one=True), plan()
    stacks = {stack.value for stack, _ in planned.stacked.rows.values()}
    assert len(searched.leaves) == 2 * LAYERS + 1 and len(planned.leaves) == 3
    assert len(planned.stacked.results) == 1 and not searched.stacked.rows

    mesh = spmd.Mesh(range(1), (1,))
    columns, rows = (Sharding.of(mesh, dims, 2) for dims in (((), (0,)), ((0,), ())))
    whole = Sharding.of(mesh, (), 0)
    leaves = [columns if leaf.spec.shape == (8, 8) else rows for leaf in searched.leaves]
    leaves = [x if leaf.spec.shape else whole for x, leaf in zip(leaves, searched.leaves)]
    # Of every third result, as a gradient of every sixth; and every product reads a marked weight.
    count = len(searched.leaves)
    firsts = {node: count + i for i, node in enumerate(searched.nodes)}  # each has one result
    some = [t for t in firsts.values() if t % 3 == 0]
    products = [i for i, node in enumerate(searched.nodes) if node.entry.name == "aten::mm"]
    assert len(products) == LAYERS
    found = Shardings(
        mesh,
        tuple(leaves),
        tuple((t, (columns, rows)[t % 2]) for t in some),
        frozenset(t for t in some if t % 6 == 0),
        reads=tuple(Read(((i, 1),), rows) for i in products),
        summed_over=tuple((t, (0,)) for t in some if t % 12 == 0),
    )
    assert of_same_program(found, searched, searched) == found
    same = of_same_program(found, searched, planned)
    for leaf, sharding in zip(planned.leaves, same.leaves, strict=True):
        if leaf in stacks:
            assert sharding is (stacked_sharding(columns) if len(leaf.spec.shape) == 3 else whole)
        else:
            assert leaf is x._handle.value and sharding is rows
    number = {node: i for i, node in enumerate(planned.nodes)}
    assert same.reads == tuple(Read(((number[searched.nodes[i]], 1),), rows) for i in products)
    before = {node: sum(len(n.entry.outs) for n in planned.nodes[:i]) for node, i in number.items()}
    now = {t: len(planned.leaves) + before[node] for node, t in firsts.items()}
    assert same.marks == tuple((now[t], sharding) for t, sharding in found.marks)
    assert same.gradients == {now[t] for t in found.gradients}
    assert same.summed_over == tuple((now[t], axes) for t, axes in found.summed_over)

    def marks(graph):
        return [n.entry.name for n in graph.nodes if n.entry.name in (MARK, MARK_SHARDING)]

    alone, together = (marked(p.graph(), s) for p, s in ((searched, found), (planned, same)))
    assert marks(alone) == marks(together) and len(marks(alone)) == len(some) + LAYERS
