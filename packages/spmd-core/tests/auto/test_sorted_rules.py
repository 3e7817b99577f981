"""The dims of operations on sorted rows, as a search sees them."""

import pytest
import torch
from grouped_experts import experts, gradients, tensors

import spmd_core as spmd
from spmd_core.auto import sorted_rules
from spmd_core.auto.read_step import read_step
from spmd_core.graph.recorders import lock
from spmd_core.program.planning import plan


def recorded(*found):
    with lock:
        return plan([t._handle for t in found]).graph()


def test_rows_and_what_is_summed():
    found = [t + 0 for t in gradients(experts, [t.to("xla") for t in tensors()])]
    step = read_step(recorded(*found))
    of_products = [x for x in step.operations if x.entry.name == "aten::_grouped_mm"]
    assert len(of_products) == 6 and {x.node for x in of_products} <= {
        *sorted_rules.rules(step.recorded)
    }
    for each in of_products:
        rule, ((result, _),) = each.rule, each.results
        is_sum = len(step.tensors[result].spec.shape) == 3
        (rows,) = rule.operands[0][1 if is_sum else 0]
        assert rows not in rule.replicated
        assert (rows in rule.sums[0]) == is_sum
        assert is_sum or rule.results[0][0] == (rows,)
        assert {*rule.operands[2][0]} <= rule.replicated  # each device has the ends of all groups
    for each in step.operations:
        if each.entry.name == "aten::index_put":
            assert not each.rule.replicated
            sizes = [[each.rule.sizes[f] for f in dims] for (dims, *_) in each.rule.operands]
            assert sizes in ([[64], [64, 2], [64, 2]], [[128]] * 3)


def test_a_search_splits_the_tokens(num_devices):
    if num_devices == 1:
        pytest.skip("nothing is split")
    given = tensors(batch=16, length=32)
    leaves = [t.to("xla") for t in given]
    for t in leaves[1:4]:
        t.requires_grad_()
    optimizer = torch.optim.SGD(leaves[1:4], lr=1e-2)

    def step():
        loss = experts(*leaves).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
        return loss

    made = spmd.auto_shard(step)
    split = [row.spec for row in made.inputs if row.spec and row.spec[0]]
    assert len(split) == 1
    found = [step().item() for _ in range(2)]
    own = [t.clone().requires_grad_(1 <= i <= 3) for i, t in enumerate(given)]
    optimizer = torch.optim.SGD(own[1:4], lr=1e-2)
    for loss in found:
        right = experts(*own).square().mean()
        right.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, right.item(), rtol=1e-4, atol=1e-4)
