"""auto/groups.py and auto/step_graph.py: which dims of a step are split alike."""

import itertools

import torch
from auto_steps import groups_of
from torch import nn

import spmd_core as spmd
from spmd_core.auto.step_graph import StepGraph


def class_of(groups, leaf, dim):
    """The group of a graph input, and the class of one of its dims."""
    return groups.of_tensor[leaf], groups.tensor_class[leaf, dim]


def product(groups, number):
    """The number-th matrix product."""
    return [i for i, x in enumerate(groups.step.operations) if x.flops][number]


def test_an_elementwise_chain_is_one_group_and_products_are_their_own():
    x, y = torch.ones(8, 6).to("xla"), torch.ones(6, 4).to("xla")
    groups = groups_of(torch.tanh(x * 2 + 1).transpose(0, 1).contiguous().relu().T @ y)
    operations = groups.step.operations
    chain = {groups.of_operation[i] for i, o in enumerate(operations) if not o.flops}
    (matmul,) = [i for i, o in enumerate(operations) if o.flops]
    assert chain == {groups.of_tensor[0]} and groups.of_operation[matmul] not in chain
    # The rows of x are the columns of its transpose, and rows again at the end.
    last = operations[matmul].operands[0][0]
    assert groups.tensor_class[last, 0] == groups.tensor_class[0, 0]
    assert groups.tensor_class[last, 1] == groups.tensor_class[0, 1]
    assert len(groups.groups[groups.of_operation[matmul]].sizes) == 3  # rows, columns, summed


def test_a_view_that_joins_dims_keeps_the_major_one():
    x = torch.ones(8, 6, 4).to("xla")
    groups = groups_of(x.view(48, 4).sigmoid())
    joined = groups.step.operations[-1].results[0][0]
    assert groups.tensor_class[joined, 0] == groups.tensor_class[0, 0]
    own = groups.groups[groups.of_tensor[0]]
    assert groups.tensor_class[0, 1] in own.fixed and groups.tensor_class[0, 0] not in own.fixed
    assert 8 in own.sizes[groups.tensor_class[0, 0]]  # 16 shards would cut the 48 in another place


def test_parts_of_a_fused_projection_can_be_split_and_a_cut_off_row_cannot():
    x = torch.ones(4, 24).to("xla")
    q, k, v = (x * 2).split(8, dim=1)
    groups = groups_of(q + k * v)
    assert groups.tensor_class[0, 1] not in groups.groups[groups.of_tensor[0]].fixed
    groups = groups_of((x * 2)[:-1].exp())
    rows = groups.tensor_class[0, 0]
    assert rows in groups.groups[groups.of_tensor[0]].fixed


def test_a_fused_optimizer_is_one_operation_for_each_parameter():
    parameters = [nn.Parameter(torch.ones(n, 4, device="xla")) for n in (8, 6)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for p in parameters:
        p.grad = torch.ones_like(p)
    spmd.sync()
    optimizer.step()
    groups = groups_of(*parameters)
    fused = [o for o in groups.step.operations if o.entry.name.endswith("_fused_adamw")]
    with_dims = [o for o in fused if o.factors]
    assert len(with_dims) == 2
    assert {tuple(groups.step.tensors[t].spec.shape for t, _ in o.results) for o in with_dims} == {
        ((8, 4),) * 4,
        ((6, 4),) * 4,
    }
    (first,) = {groups.of_tensor[t] for t, _ in with_dims[0].dims}  # with its gradient and moments
    (second,) = {groups.of_tensor[t] for t, _ in with_dims[1].dims}
    assert first != second


def test_equal_layers_are_tied_and_others_are_not():
    def stack(widths):
        x = torch.ones(4, widths[0]).to("xla")
        for a, b in itertools.pairwise(widths):
            x = torch.relu(x @ torch.ones(a, b).to("xla"))
        return x

    groups = groups_of(stack([8] * 9))
    products = [i for i, o in enumerate(groups.step.operations) if o.flops]
    ties = [groups.tie[groups.of_operation[i]] for i in products]
    assert ties[3] == ties[4]  # those near the ends have other surroundings
    groups = groups_of(stack([8, 8, 8, 8, 8, 16, 16, 16, 16, 16]))
    ties = [groups.tie[groups.of_operation[product(groups, i)]] for i in range(9)]
    assert ties[2] != ties[7]


def test_sums_are_partial_and_softmax_keeps_its_dim():
    x = torch.ones(8, 4).to("xla")
    groups = groups_of(x.sum(0))
    (total,) = groups.step.operations
    rows = total.rule.operands[0][0][0]
    assert not total.is_light and total.partial(0, rows)
    groups = groups_of(x.softmax(0))
    (softmax,) = [o for o in groups.step.operations if "softmax" in o.entry.name]
    assert softmax.is_light and not softmax.partial(0, softmax.rule.results[0][0][0])


def test_what_replaces_what():
    x = torch.ones(8, 4, device="xla")
    spmd.sync()
    x.mul_(3)
    groups = groups_of(x, x.sum())
    assert isinstance(groups.step, StepGraph)
    ((leaf, output),) = groups.step.updated.items()
    assert groups.step.tensors[leaf].spec.shape == (8, 4)
    assert groups.step.tensors[groups.step.outputs[output]].spec.shape == (8, 4)
