"""The ticks of a pipeline, followed from the first stage to the last, without a device."""

import pytest

from spmd_core.modules.pipeline_plan import PipelinePlan
from spmd_core.modules.pipeline_stages import Stacking

SIZES = [(p, m, v) for p in (1, 2, 4, 8) for m in (1, 2, 3, 5, 8, 16) for v in (1, 2, 3)]


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_each_microbatch_visits_all_chunks_in_order(p, m, v):
    plan = PipelinePlan(p, m, v)
    visited = {i: [] for i in range(m)}
    at = [None] * p  # the microbatch at each stage
    left = []
    for tick in plan.ticks():
        at = [at[-1], *at[:-1]]
        if tick.entering is not None:
            at[0] = tick.entering
        for stage, microbatch in enumerate(at):
            if microbatch is not None and microbatch not in left:
                round = tick.round if stage <= tick.last_ahead else tick.behind
                visited[microbatch].append(round * p + stage)
        if tick.leaving is not None:
            assert at[-1] == tick.leaving
            left.append(tick.leaving)
    assert left == list(range(m))
    assert all(chunks == list(range(p * v)) for chunks in visited.values())


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_the_bubble_is_that_of_the_formula(p, m, v):
    plan = PipelinePlan(p, m, v)
    assert len(list(plan.ticks())) == plan.num_ticks
    formula = (p - 1) / (v * m + p - 1)
    if v == 1 or m % p == 0:
        assert plan.bubble_fraction == pytest.approx(formula)
    else:
        assert plan.bubble_fraction > formula


def test_chunks_of_a_stage_do_not_follow_each_other():
    stacking = Stacking.of(8, PipelinePlan(2, 4, rounds=2))
    assert (stacking.num_slots, stacking.blocks_per_chunk) == (4, 2)
    assert [stacking.block_index(slot, 0) for slot in range(4)] == [0, 1, 4, 5]
    assert [stacking.block_index(slot, 1) for slot in range(4)] == [2, 3, 6, 7]
