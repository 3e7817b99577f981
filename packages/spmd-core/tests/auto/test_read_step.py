"""The tensors and operations of loops' bodies and of manual regions, as a search sees them."""

import pytest
import torch
from auto_steps import groups_of

import spmd_core as spmd
from spmd_core.auto import candidates
from spmd_core.auto.costs import NONE

LENGTH, BATCH, WIDTH = 6, 16, 8


def recurrent(x, weight):
    def step(state, x):
        state = torch.tanh(state @ weight + x)
        return state, state * 2

    return spmd.scan(step, torch.zeros(BATCH, WIDTH, device="xla"), x)


@pytest.fixture
def scanned():
    x = torch.randn(LENGTH, BATCH, WIDTH, device="xla")
    weight = torch.randn(WIDTH, WIDTH, device="xla", requires_grad=True)
    spmd.sync()
    state, outs = recurrent(x, weight)
    return groups_of(state, outs), x, weight


def tensors_of(groups, shape):
    return [t for t, x in enumerate(groups.step.tensors) if x.spec.shape == shape]


def test_a_loops_body_is_read_once_and_runs_as_often_as_the_loop(scanned):
    groups, *_ = scanned
    step = groups.step
    (product,) = [x for x in step.operations if x.flops]
    assert product.times == LENGTH and product.flops == 2 * BATCH * WIDTH * WIDTH
    assert {x.times for x in step.operations if x.entry.name == "aten::tanh"} == {LENGTH}
    assert not [x for x in step.operations if x.entry.name == "spmd::scan"]
    inside = {t for t, _ in product.results}
    assert inside <= set(step.places) and all(step.places[t][0] >= 0 for t in inside)


def test_what_is_carried_and_rows_are_split_as_what_is_around_the_loop(scanned):
    groups, *_ = scanned
    states, stacks = (tensors_of(groups, s) for s in ((BATCH, WIDTH), (LENGTH, BATCH, WIDTH)))
    of_stacks = {groups.of_tensor[t] for t in stacks}
    # The product reads the state, and its result is added to a row.
    assert len({groups.of_tensor[t] for t in states} | of_stacks) <= 3
    for t in stacks:
        group = groups.groups[groups.of_tensor[t]]
        assert groups.tensor_class[t, 0] in group.fixed  # no device splits the iterations
        assert groups.tensor_class[t, 1] not in group.fixed


def test_the_body_of_a_loop_in_a_loop():
    def outer(total, row):
        inner, _ = spmd.scan(lambda s, x: (s + x @ x.T, None), total, row)
        return inner, inner.sum()

    x = torch.randn(3, 5, 4, 4, device="xla")
    groups = groups_of(*spmd.scan(outer, torch.zeros(4, 4, device="xla"), x))
    (product,) = [x for x in groups.step.operations if x.flops]
    assert product.times == 15
    assert len(groups.step.places[product.results[0][0]]) == 3


def test_the_axes_of_a_region_split_what_its_borders_say():
    if spmd.global_runtime_device_count() < 8:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(8), (4, 2), ("rows", "others"))
    x = torch.randn(16, 8, device="xla")
    weight = torch.randn(8, 6, device="xla")
    spmd.sync()

    def function(block, weight):
        return spmd.manual.all_gather(block @ weight, "rows", dim=1)

    mapped = spmd.shard_map(function, mesh, [("rows",), ()], ("rows",), axis_names=["rows"])
    groups = groups_of(mapped(x, weight))
    step = groups.step
    assert all(x.manual is not None and x.manual.axes == (0,) for x in step.operations)
    (product,) = [i for i, x in enumerate(step.operations) if x.flops]
    assert step.operations[product].flops == 2 * 4 * 8 * 6  # of one device's rows
    of_rows, of_others = candidates.fixed(groups, 2)
    entered, whole, *_, left = range(len(step.operations))
    tie = [groups.tie[g] for g in groups.of_operation]
    assert of_rows[tie[entered]] == groups.factor_class[entered, 0]
    assert of_rows[tie[whole]] == of_rows[tie[product]] == NONE
    assert of_rows[tie[left]] == groups.factor_class[left, 0]
    assert not of_others
    # Rows pass the border, the collective keeps them, and its other dim is no longer the product's.
    (gather,) = [x for x in step.operations if x.entry.name == "spmd::all_gather"]
    ((rows, before),), ((same, after),) = gather.rule.operands, gather.rule.results
    assert rows == same and before != after and gather.rule.replicated == {*before, *after}
