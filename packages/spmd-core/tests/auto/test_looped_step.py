"""auto/looped_step.py: loops over stacks compute what layers one by one do, and take as much."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from auto_steps import chosen, losses, training, words

import spmd_core as spmd
from spmd_core.auto import decide, looped_step
from spmd_core.auto.candidates import Kind, candidates
from spmd_core.auto.compiled import compiled
from spmd_core.auto.looped_step import LoopedStep, _stacks
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import marked, shardings
from spmd_core.auto.measure import _copy
from spmd_core.auto.propagated import propagated
from spmd_core.auto.step_graph import updated
from spmd_core.auto.tried import Tried
from spmd_core.graph.placement import Placement
from spmd_core.planner.topology import present
from spmd_core.program import ir, pipeline, start
from spmd_core.program.compilation import build
from spmd_core.program.lower import lower
from spmd_core.program.target import Target
from spmd_core.runtime.jax_sharding import replicated

EIGHT = pytest.mark.skipif("spmd.global_runtime_device_count() < 8")
DEPTH, BATCH = 6, 128
OF_A_BLOCK = 2 + 4  # the parameters of a norm and of two products


def mesh():
    return spmd.Mesh(range(8), (8,))


@EIGHT
def test_candidates_have_stacks_where_a_setting_asks_for_loops(monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", True)

    def read(recorded, groups, found):
        return LoopedStep(recorded.graph).as_run(marked(recorded.graph, found))

    looped = chosen(Kind.FSDP, mesh(), read, depth=DEPTH, fused=True)
    stacks = [rows for rows in looped.rows if len(rows) > 1]
    assert looped.graph.fold_layers and {*map(len, stacks)} == {DEPTH}
    assert len(stacks) == 4 * OF_A_BLOCK  # each parameter, its moments, and its number of steps


@EIGHT
@pytest.mark.parametrize("fused", [True, False])
def test_loops_compute_what_eager_layers_do(fused):
    model, batch = words(vocabulary=512, width=256, inner=1024, depth=DEPTH, batch=BATCH)
    eager = training(model, torch.optim.SGD, lr=0.1)
    expected = eager.step(*batch).item()
    results = [
        torch.stack([dict(block.named_parameters())[name].detach() for block in model.blocks])
        for name, _ in model.blocks[0].named_parameters()
    ]

    def read(recorded, groups, found):
        graph = marked(recorded.graph, found)
        looped, stacks = LoopedStep(recorded.graph).of(graph), _stacks(graph)
        loops = looped.graph
        assert [rows for rows in looped.rows if len(rows) > 1] == stacks
        assert len(stacks) == OF_A_BLOCK
        assert len(loops.leaves) == len(graph.leaves) - (DEPTH - 1) * len(stacks)
        rows = [
            np.asarray(_copy(value, value.spec, leaf.placement))
            for value, leaf in zip(recorded.inputs, graph.leaves)
        ]
        values = [
            rows[group[0]] if len(group) == 1 else np.stack([rows[i] for i in group])
            for group in looped.rows
        ]
        with jax.enable_x64(True):
            arrays = [
                jax.device_put(x, leaf.placement.device_sharding)
                for x, leaf in zip(values, loops.leaves)
            ]
        program = build(loops, "loops")
        assert program.record.loops
        return program.run(*start.by_kind(recorded.numbers), arrays)

    options = {"make": torch.optim.SGD, "lr": 0.1, "fused": fused}
    found = chosen(Kind.FSDP, mesh(), read, batch=BATCH, depth=DEPTH, is_recomputed=True, **options)
    found = [np.asarray(x) for x in found]
    (loss,) = [x for x in found if x.shape == ()]
    assert loss == pytest.approx(expected, rel=1e-5)
    assert len([x for x in found if x.shape[:1] == (DEPTH,)]) == OF_A_BLOCK
    for value in results:
        same = [x for x in found if x.shape == tuple(value.shape)]
        assert any(np.allclose(x, value, rtol=1e-4, atol=1e-5) for x in same)


@EIGHT
def test_state_lies_in_stacks_beside_its_parameters():
    def read(recorded, groups, found):
        graph = marked(recorded.graph, found)
        loops, stacks = LoopedStep(recorded.graph).of(graph).graph, _stacks(graph)
        kinds = [leaf.spec.shape for leaf in loops.leaves[-len(stacks) :]]
        before = ir.Graph.of(loops)
        passed = pipeline.run(before, Target.of(before), "step")
        updates = [op.entry for op in passed.ops if "_fused_adamw" in op.entry.name]
        return stacks, kinds, updates

    stacks, kinds, updates = chosen(
        Kind.FSDP, mesh(), read, batch=BATCH, depth=DEPTH, is_recomputed=True, fused=True
    )
    assert len(stacks) == OF_A_BLOCK * 4  # the parameter, two moments, and the number of steps
    assert kinds.count((DEPTH, 1024, 256)) == kinds.count((DEPTH, 256, 1024)) == 3
    assert kinds.count((DEPTH,)) == OF_A_BLOCK
    # One operation updates a parameter of all layers.
    assert len([x for x in updates if x.spec.shape[:1] == (DEPTH,)]) == OF_A_BLOCK
    assert len(updates) < 2 * OF_A_BLOCK


@EIGHT
def test_a_layer_that_is_placed_in_another_way_stays_apart():
    def read(recorded, groups, found):
        graph = marked(recorded.graph, found)
        apart = next(rows for rows in _stacks(graph) if graph.leaves[rows[0]].spec.shape[1:])[3]
        leaves = list(graph.leaves)
        leaves[apart] = replace(
            leaves[apart], placement=Placement.of(replicated(tuple(range(8))), None)
        )
        return apart, _stacks(replace(graph, leaves=tuple(leaves)))

    apart, stacks = chosen(
        Kind.FSDP, mesh(), read, batch=BATCH, depth=DEPTH, is_recomputed=True, fused=True
    )
    assert all(apart not in rows for rows in stacks)


@EIGHT
def test_stacks_are_found_once_unless_layers_are_placed_in_another_way(monkeypatch):
    def read(recorded, groups, found):
        loops, graph = LoopedStep(recorded.graph), marked(recorded.graph, found)
        loops.of(graph)
        searched = []
        monkeypatch.setattr(
            looped_step, "_stacks", lambda graph: searched.append(graph) or _stacks(graph)
        )
        alike = loops.of(graph).graph
        stack = next(rows for rows in _stacks(graph) if graph.leaves[rows[0]].spec.shape[1:])
        leaves = list(graph.leaves)
        whole = Placement.of(replicated(tuple(range(8))), None)
        leaves[stack[0]] = replace(leaves[stack[0]], placement=whole)
        num_searches = len(searched)
        other = loops.of(replace(graph, leaves=tuple(leaves))).graph
        return num_searches, len(searched), len(alike.leaves), len(other.leaves)

    before, after, num_alike, num_other = chosen(
        Kind.FSDP, mesh(), read, batch=BATCH, depth=DEPTH, is_recomputed=True, fused=True
    )
    assert (before, after) == (0, 1)
    assert num_other > num_alike  # one layer lies apart


@EIGHT
def test_loops_move_what_layers_move():
    def read(recorded, groups, found):
        graph = marked(recorded.graph, found)
        machine = Machine.of(present().devices)
        moved = []
        for form in (graph, LoopedStep(recorded.graph).of(graph).graph):
            before = ir.Graph.of(form)
            moved.append(propagated(lower(before, Target.of(before), "step"), machine))
        return moved

    flat, loops = chosen(
        Kind.DATA, mesh(), read, batch=BATCH, depth=DEPTH, is_recomputed=True, fused=True
    )
    assert sum(x.times for x in flat) > DEPTH * OF_A_BLOCK
    assert [(x.kind, x.times, x.bytes) for x in loops] == [
        (x.kind, x.times, pytest.approx(x.bytes)) for x in flat
    ]


@EIGHT
@pytest.mark.parametrize(
    ("kind", "setting", "has_loops"),
    [
        (Kind.FSDP, "auto", True),
        (Kind.DATA, "auto", False),
        (Kind.FSDP, False, False),
        (Kind.DATA, True, True),
    ],
)
def test_a_step_has_the_loops_that_its_program_will_have(monkeypatch, kind, setting, has_loops):
    def read(recorded, groups, found):
        monkeypatch.setattr(spmd.config, "fold_layers", setting)
        graph = marked(recorded.graph, found)
        return graph, LoopedStep(recorded.graph).as_run(graph)

    graph, form = chosen(kind, mesh(), read, batch=BATCH, depth=DEPTH, fused=True)
    assert form.graph.fold_layers == has_loops
    assert sorted(i for rows in form.rows for i in rows) == [*range(len(graph.leaves))]
    if has_loops:
        assert max(map(len, form.rows)) == DEPTH
    else:
        assert form.graph is graph


@EIGHT
@pytest.mark.parametrize("setting", ["auto", False])
def test_a_candidate_sends_what_its_program_sends(monkeypatch, setting):
    """With loops, which gather weights in forward and in backward; else once for both."""

    def read(recorded, groups, found):
        monkeypatch.setattr(spmd.config, "fold_layers", setting)
        machine, loops = Machine.of(present().devices), LoopedStep(recorded.graph)
        inputs = decide.inputs_of(groups, recorded.names)
        made = candidates(groups, machine, inputs, mesh=mesh(), memory=None)
        fsdp = next(x for x in made if x.kind is Kind.FSDP)
        own = shardings(groups, fsdp.solution, mesh(), recorded.markable)
        one = decide._Propagation(groups, machine, loops).of(Tried(fsdp, own), "step")
        graph = loops.as_run(marked(recorded.graph, own)).graph
        with decide._planned_on(present()):
            ((_, plan),) = compiled(
                [lambda: graph], present(), names=recorded.names, starting=lambda _: None
            )
        return one.sent, plan.costs.ici_bytes + plan.costs.dcn_bytes, graph.fold_layers

    got, sent, has_loops = chosen(Kind.FSDP, mesh(), read, batch=BATCH, depth=DEPTH, fused=True)
    assert has_loops == (setting == "auto")
    assert got == pytest.approx(sent, rel=0.01)


@EIGHT
def test_a_stack_is_updated_as_its_rows_are():
    def read(recorded, groups, found):
        graph = marked(recorded.graph, found)
        return graph, LoopedStep(recorded.graph).of(graph)

    graph, form = chosen(Kind.FSDP, mesh(), read, batch=BATCH, depth=DEPTH, fused=True)
    before, after = updated(graph), updated(form.graph)
    assert {i for rows in map(form.rows.__getitem__, after) for i in rows} == before.keys()
    for i, output in after.items():
        assert form.graph.outputs[output].spec.shape == form.graph.leaves[i].spec.shape
    assert {i for k in form.graph.donated for i in form.rows[k]} == {*graph.donated}


@EIGHT
def test_a_candidate_of_scanned_layers_takes_as_much_as_its_program():
    """Recorded one by one, with data parallelism, which has no loops without `scan_model`."""
    model, batch = words(vocabulary=512, width=64, inner=256, depth=DEPTH, batch=512)
    spmd.scan_model(model.to("xla"))
    own, inputs = training(model, fused=True), [x.to("xla") for x in batch]
    plan = spmd.auto_shard(own.step, *inputs, mesh=mesh(), candidates=1)
    assert not any(any(row.spec) for row in plan.parameters)
    known = len(spmd.metrics.programs())
    losses(own.step, inputs)
    ran = max(spmd.metrics.programs()[known:], key=lambda x: x.num_ops)
    assert plan.tried[0].program.peak_bytes == pytest.approx(ran.peak_bytes, rel=0.01)
