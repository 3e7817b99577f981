"""How much of a test the tier runs: cases for releases alone, and examples of a property."""

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

TIER = os.environ.get("SPMD_TEST_TIER", "default")
_MOST_EXAMPLES = {"fast": 40, "default": 60}


def exhaustive(*values: Any, id: str | None = None) -> Any:
    """A case of `pytest.mark.parametrize` that only the tier `all` runs, as others are like it."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, id=id)


def crossed(*values: Sequence[Any], rounds: int = 1) -> list[Any]:
    """Cases of `pytest.mark.parametrize`: each combination of the values, most `exhaustive`.

    The other tiers run `rounds` cases for each value of the longest sequence. These have each value
    of the others about equally often, and as many pairs of values as so few cases can.

    Args:
        values: the values of each argument.
        rounds: at most the length of the second longest sequence.
    """
    every = list(itertools.product(*(range(len(x)) for x in values)))
    longest = max(range(len(values)), key=lambda at: len(values[at]))
    kept: list[tuple[int, ...]] = []
    pairs: set[tuple[tuple[int, int], ...]] = set()
    used: Counter[tuple[int, int]] = Counter()

    def cost(case: tuple[int, ...]) -> tuple[int, int]:
        own = set(itertools.combinations(enumerate(case), 2))
        return -len(own - pairs), sum(used[x] for x in enumerate(case))

    for _ in range(rounds):
        for i in range(len(values[longest])):
            case = min((c for c in every if c[longest] == i and c not in kept), key=cost)
            kept.append(case)
            pairs.update(itertools.combinations(enumerate(case), 2))
            used.update(enumerate(case))
    assert len(used) == sum(map(len, values)), "a value has no case"
    return [
        (pytest.param if case in kept else exhaustive)(*(x[i] for x, i in zip(values, case)))
        for case in every
    ]


def by_tier(default: Any, *, in_all: Any) -> Any:
    """What a test loops over: `in_all` in the tier `all`, and `default`, a part of it, else."""
    return in_all if TIER == "all" else default


def examples(number: int) -> int:
    """How many examples of a property to try: `number` in the tier `all`, few in the others."""
    return min(number, _MOST_EXAMPLES.get(TIER, number))
