"""auto/decide.py: which candidates are compiled, and by which figures the best one is chosen."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from spmd_core.auto import decide
from spmd_core.auto.candidates import Candidate, Kind
from spmd_core.auto.machine import Machine
from spmd_core.auto.solve import Solution
from spmd_core.auto.tried import Tried, best_of, program_seconds


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
    assert [decide._hidden_work(one, x) for x in (CHIP, emulated)] == [0.0, 7.0]
    made = program(50.0, 0, 8.0)
    assert program_seconds(made, emulated, 7.0) == program_seconds(made, CHIP) + 2.0


def test_the_best_one_fits():
    fast = replace(tried(0, 1.0), program=program(1, 1, 1, peak_bytes=9), seconds=1.0)
    small = replace(tried(1, 1.0), program=program(1, 1, 1, peak_bytes=5), seconds=2.0)
    refused = replace(tried(2, 1.0), refusal="too large")
    both = [refused, small, fast]
    assert best_of(both, 9, "time") is fast and best_of(both, 8, "time") is small
    assert best_of(both, None, "memory") is small and best_of(both, 4, "time") is None
