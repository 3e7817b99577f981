"""auto/pairwise.py: finds what trying all choices finds."""

import itertools

import numpy as np
import pytest

from spmd_core.auto import pairwise
from spmd_core.auto.pairwise import Limit, least


def problem(seed, num_elements, density):
    """Costs of elements with one to three choices, and of some of their pairs."""
    random = np.random.default_rng(seed)
    counts = random.integers(1, 4, num_elements)
    own = [random.random(n) for n in counts]
    between = {
        (a, b): random.random((counts[a], counts[b]))
        for a, b in itertools.combinations(range(num_elements), 2)
        if random.random() < density
    }
    return own, between


def cost(own, between, chosen):
    singles = sum(x[c] for x, c in zip(own, chosen))
    return singles + sum(x[chosen[a], chosen[b]] for (a, b), x in between.items())


def best_of_all(own, between, limits=()):
    choices = itertools.product(*(range(len(x)) for x in own))
    return min(
        (cost(own, between, c) for c in choices if all(limit.holds(c) for limit in limits)),
        default=None,
    )


# Where tables may have but one entry, density 0.3 has trees and rings, which elimination takes
# alone, and 0.9 leaves a program.
@pytest.mark.parametrize("most_entries", [1, pairwise._MOST_ENTRIES])
@pytest.mark.parametrize("density", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_any_graph(seed, density, most_entries, monkeypatch):
    monkeypatch.setattr(pairwise, "_MOST_ENTRIES", most_entries)
    own, between = problem(seed, 7, density)
    kept = [x.copy() for x in own]
    found = least(own, between)
    assert cost(own, between, found) == pytest.approx(best_of_all(own, between), rel=1e-3)
    assert all((x == y).all() for x, y in zip(own, kept))  # the caller's costs stay


def test_tables_of_a_moderate_size_need_no_program(monkeypatch):
    monkeypatch.setattr(pairwise, "_solved", None)
    own, between = problem(0, 9, 0.9)
    assert cost(own, between, least(own, between)) == pytest.approx(best_of_all(own, between))


@pytest.mark.parametrize("seed", range(4))
def test_limits_that_the_best_choices_break(seed):
    own, between = problem(seed, 6, 0.4)
    sizes = [np.arange(len(x), 0, -1.0) for x in own]
    free = least(own, between)
    most = sum(x[c] for x, c in zip(sizes, free)) - 1
    limits = [Limit(sizes, most)]
    expected = best_of_all(own, between, limits)
    found = least(own, between, limits)
    if expected is None:
        assert found is None
        return
    assert limits[0].holds(found)
    assert cost(own, between, found) == pytest.approx(expected, rel=1e-3)


def test_no_choice_keeps_the_limit():
    assert least([np.zeros(2)], {}, [Limit([np.array([3.0, 2.0])], 1.0)]) is None
