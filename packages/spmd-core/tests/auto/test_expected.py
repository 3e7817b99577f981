"""auto/expected.py: what is expected of a program before it is compiled, and what follows of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from auto_steps import groups_of

import spmd_core as spmd
from spmd_core.auto.candidates import Candidate, Kind
from spmd_core.auto.costs import NONE, CostModel
from spmd_core.auto.expected import are_twins, expected_s, may_be_better
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import shardings
from spmd_core.auto.solve import Solution, solve
from spmd_core.auto.tried import Tried

CHIP = Machine("chip", 4, 1e9, 1e12, 1e7, 1e6, 1e-6, 1 << 40, (0, 0, 0, 0), tile=1)
ROWS, INNER, COLUMNS = 64, 32, 16


@pytest.fixture
def product():
    """The groups of a product, with the candidate of least time over four devices."""
    x, w = torch.ones(ROWS, INNER).to("xla"), torch.ones(INNER, COLUMNS).to("xla")
    groups = groups_of(x @ w)
    # By the FLOPs alone, so that they are shared by all devices.
    model = CostModel(groups, (4,), replace(CHIP, flops=1.0))
    solution = solve(model)
    assert any(c != NONE for c in solution.choices[0])
    found = shardings(groups, solution, spmd.Mesh(range(4), (4,)))
    return groups, Tried(Candidate((4,), Kind.FREE, solution), found)


@pytest.mark.skipif("spmd.global_runtime_device_count() < 8")
@pytest.mark.parametrize("is_bound_by_memory", [False, True])
def test_the_roofline_and_the_collectives_after_it(product, is_bound_by_memory):
    groups, one = product
    machine = replace(CHIP, memory_bytes_per_s=1.0) if is_bound_by_memory else CHIP
    flops = 2 * ROWS * INNER * COLUMNS / 4
    read = sum(
        4 * shape[0] * shape[1] / (1 if sharding.is_replicated else 4)
        for shape, sharding in zip(((ROWS, INNER), (INNER, COLUMNS)), one.shardings.leaves)
    )
    roofline = read if is_bound_by_memory else flops / machine.flops
    assert expected_s(groups, one, machine, 0.25) == pytest.approx(roofline + 0.25)


@pytest.mark.skipif("spmd.global_runtime_device_count() < 8")
def test_on_emulated_devices_all_work_counts(product):
    groups, one = product
    emulated = replace(CHIP, memory_bytes=None)
    slow = replace(one.candidate, solution=replace(one.candidate.solution, work_s=7.0))
    found = replace(one, candidate=slow)
    assert expected_s(groups, found, emulated, 1.0) == pytest.approx(8.0)
    assert expected_s(groups, found, CHIP, 1.0) < 2.0


def propagated(number, mesh_shape, kind, seconds, sent, peak):
    solution = Solution(((number,),), seconds, 0.0, peak, ((0,),))
    one = Tried(Candidate(mesh_shape, kind, solution), None, propagated_s=seconds)
    return replace(one, sent=sent)


def tried(expected):
    made = SimpleNamespace(mesh_shape=(8,))
    return Tried(made, None, expected_s=expected)


@pytest.mark.parametrize(
    ("changed", "is_twin"),
    [
        ({}, True),
        ({"sent": 2.001, "peak": 9.001, "seconds": 1.0001}, True),
        ({"sent": 2.1}, False),
        ({"peak": 10.0}, False),
        ({"seconds": 1.1}, False),
        ({"mesh_shape": (4, 2)}, False),
    ],
)
def test_twins_send_and_hold_the_same(changed, is_twin):
    same = {"mesh_shape": (8,), "seconds": 1.0, "sent": 2.0, "peak": 9.0}
    one = propagated(0, kind=Kind.DATA, **same)
    other = propagated(1, kind=Kind.REPLICATED, **{**same, **changed})
    assert are_twins(one, other) is is_twin


def test_what_was_not_propagated_has_no_twin():
    assert not are_twins(tried(None), tried(None))


def test_a_candidate_that_cannot_be_better_than_a_program_is_not_compiled():
    best = replace(tried(9.0), seconds=10.0)
    assert may_be_better(tried(11.9), best)
    assert not may_be_better(tried(12.1), best)
    # Without a program, or a propagation, nothing is known.
    assert may_be_better(tried(99.0), None)
    assert may_be_better(tried(None), best)
    # What was expected of the best program was too much by as much.
    assert may_be_better(tried(14.0), replace(best, expected_s=12.0))
