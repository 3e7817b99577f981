"""auto/candidates.py: what the kinds of candidates may choose."""

import torch
import torch.nn.functional as F
from auto_steps import groups_of

from spmd_core.auto import candidates
from spmd_core.auto.batch import batch_classes
from spmd_core.auto.candidates import Kind
from spmd_core.auto.costs import NONE, CostModel
from spmd_core.auto.machine import Machine

_MACHINE = Machine("made up", 8, 1e9, 1e8, 1e7, 1e6, 1e-6, None, (0,) * 8)


def test_the_second_axis_splits_features_that_are_too_few_for_the_first():
    """Two heads, which an axis of 4 cannot split, and one of 2 can."""
    x, w = torch.ones(8, 16, 32).to("xla"), torch.ones(32, 32).to("xla")
    heads = (x @ w).view(8, 16, 2, 16).transpose(1, 2)
    groups = groups_of(F.scaled_dot_product_attention(heads, heads, heads))
    model = CostModel(groups, (4, 2), _MACHINE)
    ((number, operation),) = [
        (i, o) for i, o in enumerate(groups.step.operations) if "attention" in o.entry.name
    ]
    tie = groups.tie[groups.of_operation[number]]
    rows, head = (groups.factor_class[number, f] for (f,) in operation.rule.operands[0][:2])
    leaves = [t for t in groups.step.tensors if t.leaf is not None]
    batch = batch_classes(groups, [i for i, t in enumerate(leaves) if len(t.spec.shape) == 3])
    marks = candidates.fixed(groups, 2)
    first, second = candidates._allowed(model, marks, Kind.TENSOR, batch)
    assert first[tie] == (rows,)
    assert head in second[tie] and NONE in second[tie] and rows not in second[tie]
