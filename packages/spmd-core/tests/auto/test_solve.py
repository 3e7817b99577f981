"""auto/solve.py and auto/costs.py: the integer program finds what trying everything finds."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from auto_steps import groups_of

from spmd_core.auto.costs import NONE, CostModel
from spmd_core.auto.machine import Machine
from spmd_core.auto.solve import evaluate, memory_of, sent, solve

_MACHINE = Machine("made up", 4, 1e9, 1e8, 1e7, 1e6, 1e-6, None, (0, 0, 0, 0))


def two_products():
    x, a, b = (torch.ones(n, m).to("xla") for n, m in ((64, 16), (16, 32), (32, 8)))
    return groups_of((torch.relu(x @ a) @ b).sum(0))


def best_of_all(model, fits=lambda choices: True):
    """The least cost of all choices of one axis."""
    options = model.options(0, [[NONE] * model.num_elements])
    costs = model.axis_costs(0, [[NONE] * model.num_elements])
    choices = itertools.product(*options)
    return min((costs.total(c), c) for c in choices if fits([c]))


@pytest.mark.parametrize("machine", [_MACHINE, dataclasses.replace(_MACHINE, flops=1e6)])
def test_one_axis_is_solved_as_by_trying_all_choices(machine):
    model = CostModel(two_products(), (4,), machine)
    cost, _ = best_of_all(model)
    found = solve(model)
    assert found.seconds == pytest.approx(cost, rel=1e-3)
    assert found.seconds == pytest.approx(evaluate(model, found.choices))


def test_memory_is_a_constraint():
    model = CostModel(two_products(), (4,), _MACHINE)
    most = memory_of(model, [[NONE] * model.num_elements])
    free = solve(model)
    limit = 0.9 * free.bytes
    cost, _ = best_of_all(model, lambda choices: memory_of(model, choices) <= limit)
    found = solve(model, memory=limit)
    assert found.bytes <= limit < most and found.seconds == pytest.approx(cost, rel=1e-3)
    assert solve(model, memory=most / 100) is None


def test_a_batch_that_a_mask_lacks_is_no_dim_of_a_matrix():
    """Each device has a quarter of the work; a dim of a matrix would be padded to a whole tile."""
    q = torch.ones(8, 2, 16, 8).to("xla")
    mask = torch.ones(1, 2, 16, 16).to("xla")
    groups = groups_of(F.scaled_dot_product_attention(q, q, q, attn_mask=mask))
    model = CostModel(groups, (4,), _MACHINE)
    ((number, operation),) = [
        (i, o) for i, o in enumerate(groups.step.operations) if "attention" in o.entry.name
    ]
    batch = groups.factor_class[number, operation.rule.operands[0][0][0]]
    nothing = [[NONE] * model.num_elements]
    (whole, part) = model.plain_work(number, operation, 0, nothing, (NONE, batch))
    assert part == pytest.approx(whole / 4)


def test_rows_and_columns_are_a_matrix_dim_with_the_batch_for_a_kernel_of_one():
    """Each device has a quarter of the work: it is not a batch of 2 padded to a whole tile."""
    images, kernel = torch.ones(8, 16, 16, 16).to("xla"), torch.ones(32, 16, 1, 1).to("xla")
    groups = groups_of(F.conv2d(images, kernel))
    model = CostModel(groups, (4,), dataclasses.replace(_MACHINE, memory_bytes_per_s=1e15))
    ((number, operation),) = [(i, o) for i, o in enumerate(groups.step.operations) if o.flops]
    batch = groups.factor_class[number, operation.rule.operands[0][0][0]]
    nothing = [[NONE] * model.num_elements]
    (whole, part) = model.plain_work(number, operation, 0, nothing, (NONE, batch))
    assert part == pytest.approx(whole / 4)


def test_statistics_of_a_batch_are_one_for_each_channel():
    """Two all-reduces of the statistics, and not of an image."""
    images = torch.ones(8, 4, 16, 16).to("xla")
    weight, bias = torch.ones(4).to("xla"), torch.ones(4).to("xla")
    groups = groups_of(F.batch_norm(images, None, None, weight, bias, training=True))
    links = dataclasses.replace(_MACHINE, links_bytes_per_s=1.0, latency_s=0.0)
    model = CostModel(groups, (4,), links)
    ((number, operation),) = [
        (i, o) for i, o in enumerate(groups.step.operations) if "batch_norm" in o.entry.name
    ]
    batch = groups.factor_class[number, operation.rule.operands[0][0][0]]
    arguments = (number, operation, 0, [[NONE] * model.num_elements], (NONE, batch))
    (_, plain) = model.plain_work(*arguments)
    (_, whole) = model._worked(*arguments)
    assert whole - plain == pytest.approx(2 * (2 * 4 * 4 * 3 / 4), rel=1e-3)  # bytes over the ring


def test_compute_decides_where_it_is_slow_and_links_where_they_are():
    groups = two_products()
    slow = solve(CostModel(groups, (4,), dataclasses.replace(_MACHINE, flops=1e5)))
    products = [i for i, o in enumerate(groups.step.operations) if o.flops]
    assert all(slow.choices[0][groups.tie[groups.of_operation[i]]] != NONE for i in products)
    no_links = dataclasses.replace(
        _MACHINE, flops=math.inf, memory_bytes_per_s=1e15, links_bytes_per_s=1.0
    )
    model = CostModel(groups, (4,), no_links)
    assert sent(model, solve(model).choices) <= 8 * 4 * 2  # at most the reduction of the result


def test_axes_share_what_is_split():
    groups = two_products()
    model = CostModel(groups, (2, 2), _MACHINE)
    found = solve(model)
    assert found.seconds <= evaluate(model, [found.choices[0], [NONE] * model.num_elements])
    both = [[NONE] * model.num_elements for _ in range(2)]
    assert found.seconds < evaluate(model, both)
    assert memory_of(model, found.choices) < memory_of(model, both)


def test_allowed_choices_are_kept():
    groups = two_products()
    model = CostModel(groups, (4,), _MACHINE)
    tie = groups.tie[groups.of_tensor[0]]
    rows = groups.tensor_class[0, 0]
    assert solve(model, allowed=[{tie: (rows,)}]).choices[0][tie] == rows
    assert solve(model, allowed=[{tie: (NONE,)}]).choices[0][tie] == NONE


def test_bytes_of_collectives_are_those_of_rings():
    x, w = torch.ones(64, 16).to("xla"), torch.ones(16, 32).to("xla")
    groups = groups_of(x @ w)
    model = CostModel(groups, (4,), _MACHINE)
    choice = [NONE] * model.num_elements

    def put(tensor, dim):
        choice[groups.tie[groups.of_tensor[tensor]]] = groups.tensor_class[tensor, dim]

    (matmul,) = range(len(groups.step.operations))
    rows, summed, columns = (groups.factor_class[matmul, f] for f in _factors(groups, matmul))
    tie = groups.tie[groups.of_operation[matmul]]
    result = groups.step.operations[matmul].results[0][0]
    put(0, 0)
    put(result, 0)
    choice[tie] = rows
    assert sent(model, [choice]) == 0
    choice[tie] = summed  # x is exchanged; the sum is scattered over rows
    assert sent(model, [choice]) == 64 * 16 * 4 * 3 / 16 + 64 * 32 * 4 * 3 / 4
    put(0, 1)
    choice[groups.tie[groups.of_tensor[result]]] = NONE
    assert sent(model, [choice]) == 2 * 64 * 32 * 4 * 3 / 4
    choice[tie] = columns  # x and the result are gathered
    assert sent(model, [choice]) == (64 * 16 + 64 * 32) * 4 * 3 / 4


def _factors(groups, number):
    """The factors of a product: rows, summed, columns."""
    operation = groups.step.operations[number]
    (rows,), (summed,) = operation.rule.operands[0]
    return rows, summed, operation.rule.operands[1][1][0]


def test_axes_between_slices_are_found_by_their_devices():
    machine = dataclasses.replace(_MACHINE, slices=(0, 0, 1, 1))
    assert machine.crossing((2, 2), range(4)) == (True, False)
    assert machine.crossing((2, 2), (0, 2, 1, 3)) == (False, True)
    assert machine.crossing((4,), range(4)) == (True,)
    # The axis between slices is slow wherever it stands: an axis has the costs of its links.
    groups = two_products()
    slow = dataclasses.replace(machine, network_bytes_per_s=1e3)
    first, second = (CostModel(groups, (2, 2), slow, ids) for ids in (range(4), (0, 2, 1, 3)))
    none = [NONE] * first.num_elements
    split = [options[-1] for options in first.options(0, [none, none])]
    outer, inner = evaluate(first, [split, none]), evaluate(first, [none, split])
    assert outer > 10 * inner
    assert evaluate(second, [split, none]) == pytest.approx(inner)
    assert evaluate(second, [none, split]) == pytest.approx(outer)
