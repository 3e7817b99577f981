"""auto/decide.py: which candidates are compiled, and by which figures the best one is chosen."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from spmd_core.auto import decide
from spmd_core.auto.candidates import Candidate, Kind
from spmd_core.auto.machine import Machine
from spmd_core.auto.solve import Solution
from spmd_core.auto.tried import Tried, best_of, hidden_work, program_seconds


def tried(number, modelled_s, propagated_s=None, work_s=0.0):
    solution = Solution(((number,),), modelled_s, work_s, 1.0, ((0,),))
    return Tried(Candidate((8,), Kind.FREE, solution), None, propagated_s=propagated_s)


def test_what_was_not_propagated_is_no_rival_of_what_was():
    kind_model = [tried(0, 1.0), tried(1, 1.1)]
    good, fair, bad = tried(2, 1.2, 2.0), tried(3, 1.3, 2.9), tried(4, 1.4, 3.1)
    assert decide._worth_compiling([good, *kind_model, fair, bad]) == [good, fair]


def test_without_propagation_the_model_decides():
    good, fair, bad = tried(0, 2.0), tried(1, 2.9), tried(2, 3.1)
    assert decide._worth_compiling([good, fair, bad]) == [good, fair]
    assert decide._worth_compiling([]) == []


def propagated(number, mesh_shape, kind, seconds, *, expected_s=1.0, sent=1.0, peak=1.0):
    solution = Solution(((number,),), seconds, 0.0, peak, ((0,),))
    one = Tried(Candidate(mesh_shape, kind, solution), None, propagated_s=seconds)
    return replace(one, expected_s=expected_s, sent=sent)


def test_the_best_that_is_expected_and_the_best_of_each_kind_are_compiled():
    best = propagated(0, (8,), Kind.SHARDED, 1.0, expected_s=1.0)
    wide = propagated(1, (4, 2), Kind.DATA, 1.2, expected_s=1.1)
    tensor = propagated(2, (4, 2), Kind.TENSOR, 1.3, expected_s=1.2)
    data = propagated(3, (8,), Kind.DATA, 1.4, expected_s=1.1)
    lean = propagated(4, (2, 4), Kind.SHARDED, 1.5, expected_s=0.9)
    made = [best, wide, tensor, data, lean]
    assert decide._diverse(made, 3) == [best, lean, data]
    assert decide._diverse(made, 9) == [best, lean, data, tensor, wide]


def test_the_best_of_several_meshes_are_propagated():
    best = propagated(0, (8, 2), Kind.FREE, 1.0)
    turned = propagated(1, (2, 8), Kind.FREE, 1.01)
    other = propagated(2, (4, 4), Kind.FREE, 1.02)
    plain = propagated(3, (16,), Kind.FSDP, 1.5)
    assert decide._diverse([best, turned, other, plain], 3, meshes=2) == [best, other, plain]


def test_what_is_near_to_the_best_takes_the_place_of_what_is_not_worth_it():
    best, near = propagated(0, (8, 2), Kind.FREE, 1.0), propagated(1, (2, 8), Kind.FREE, 1.019)
    far = propagated(2, (4, 4), Kind.FREE, 1.03)
    fsdp, data = propagated(3, (16,), Kind.FSDP, 1.2), propagated(4, (16,), Kind.DATA, 1.4)
    made = [best, near, far, fsdp, data]
    assert decide._to_compile(made, 3, "time") == [best, fsdp, data, near]
    assert decide._to_compile(made, 3, "memory") == [best, fsdp, data]


def test_of_a_long_program_the_best_is_propagated_with_what_experts_use():
    sizes = (100, 1_500, 5_000, 10_000, 10_001)
    counts = [decide._most_propagated(n, in_loops=False) for n in sizes]
    assert counts == [10, 6, 3, 3, 0]
    in_loops = [decide._most_propagated(n, in_loops=True) for n in (10_000, 25_000, 200_000)]
    assert in_loops == [10, 6, 0]
    best, other = propagated(0, (8, 2), Kind.FREE, 1.0), propagated(1, (4, 4), Kind.FREE, 1.1)
    fsdp, data = propagated(2, (16,), Kind.FSDP, 1.5), propagated(3, (16,), Kind.DATA, 1.6)
    made = [best, other, fsdp, data]
    assert decide._diverse(made, 3, meshes=1) == [best, fsdp, data]


def test_of_twins_one_is_compiled():
    one, twin = propagated(0, (8,), Kind.DATA, 1.0), propagated(1, (8,), Kind.REPLICATED, 1.0001)
    other = propagated(2, (8,), Kind.REPLICATED, 1.1)
    assert decide._diverse([one, twin, other], 3) == [one, other]


CHIP = Machine("chip", 8, 10.0, 100.0, 4.0, 2.0, 0.5, 1000, (0,) * 8)


def program(flops, least_bytes, moved_bytes, peak_bytes=1):
    moves = SimpleNamespace(
        moved_bytes=moved_bytes, executions=3, kind="all-gather", is_between_slices=False
    )
    costs = SimpleNamespace(compiler_flops=flops, least_bytes=least_bytes)
    return SimpleNamespace(costs=costs, collectives=[moves], peak_bytes=peak_bytes)


@pytest.mark.parametrize(("flops", "least_bytes"), [(50.0, 0), (0.0, 500)])
def test_a_roofline_and_the_collectives_after_it(flops, least_bytes):
    expected = 5.0 + 3 * (8.0 / 4.0 + 0.5)
    assert program_seconds(program(flops, least_bytes, 8.0), CHIP) == pytest.approx(expected)


def test_on_chips_the_figures_by_which_shardings_by_hand_are_compared_decide():
    """The work by the model, which a roofline may hide, counts on emulated devices alone."""
    one = tried(0, 1.0, work_s=7.0)
    emulated = replace(CHIP, memory_bytes=None)
    assert [hidden_work(one.candidate.solution, x) for x in (CHIP, emulated)] == [0.0, 7.0]
    made = program(50.0, 0, 8.0)
    assert program_seconds(made, emulated, 7.0) == program_seconds(made, CHIP) + 2.0


def test_the_best_one_fits():
    fast = replace(tried(0, 1.0), program=program(1, 1, 1, peak_bytes=9), seconds=1.0)
    small = replace(tried(1, 1.0), program=program(1, 1, 1, peak_bytes=5), seconds=2.0)
    refused = replace(tried(2, 1.0), refusal="too large")
    both = [refused, small, fast]
    assert best_of(both, 9, "time") is fast and best_of(both, 8, "time") is small
    assert best_of(both, None, "memory") is small and best_of(both, 4, "time") is None


def test_of_equal_times_the_least_memory_is_the_best():
    fast, equal, slower = (
        replace(tried(i, 1.0), program=program(1, 1, 1, peak_bytes=peak), seconds=seconds)
        for i, (seconds, peak) in enumerate([(1.0, 9), (1.004, 5), (1.006, 1)])
    )
    assert best_of([fast, equal, slower], None, "time") is equal
