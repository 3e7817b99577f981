"""Repetitions of a recorded graph: found whole, told from layers, and cut where little passes."""

from itertools import pairwise

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from tiers import examples

from spmd_core.graph import repetition
from spmd_core.graph.repetition import Repetition
from spmd_core.graph.values import Entry, OpResult, Spec, Value

SPEC = Spec.contiguous((4,), torch.float32)
BIG = Spec.contiguous((400,), torch.float32)
ENTRIES = {name: Entry(name, lambda *_: [], (SPEC,)) for name in "abcdefgh"}
ENTRIES |= {name.upper(): Entry(name, lambda *_: [], (BIG,)) for name in "abcdefgh"}


def chain(names: str) -> list[Value]:
    """Operations by the names of their entries, each of which reads the one before."""
    nodes: list[Value] = []
    for name in names:
        nodes.append(Value(ENTRIES[name], tuple(nodes[-1:]), ()))
    return nodes


def test_a_run_is_found_with_what_is_around_it():
    assert repetition.longest(chain("gh" + "abc" * 8 + "e")) == Repetition(2, 26, 3)
    assert repetition.longest(chain("a" * 9)) == Repetition(0, 9, 1)


def test_the_smallest_period_counts():
    assert repetition.longest(chain("aabaab" * 6)) == Repetition(0, 36, 3)


def test_fewer_than_four_repetitions_are_none():
    assert repetition.longest(chain("abcdef" * 2)) is None
    assert repetition.longest(chain("abcdefgh")) is None
    assert repetition.longest([]) is None


@settings(max_examples=examples(100), deadline=None)
@given(
    st.text("abcd", max_size=3),
    st.text("abcd", min_size=1, max_size=6),
    st.integers(12, 16),
    st.text("efgh", max_size=3),
)
def test_what_is_found_repeats_itself(before, body, times, after):
    names = before + body * times + after
    found = repetition.longest(chain(names))
    assert found is not None and len(body) % found.period == 0
    run = names[found.start : found.end]
    assert run[found.period :] == run[: -found.period]
    assert found.start <= len(before) and found.end >= len(before + body * times)


def test_runs_of_several_periods_are_found():
    items = "xy" + "abcab" * 5 + "z" + "de" * 4 + "f" * 6
    assert repetition.runs(items, 4) == [
        Repetition(36, 42, 1),
        Repetition(28, 36, 2),
        Repetition(2, 27, 5),
    ]
    assert repetition.runs("abcabcabc", 4) == [] == repetition.runs("", 4)


def test_a_run_may_begin_and_end_within_a_repetition():
    (run,) = repetition.runs("xcabcabcabcabcay", 4)
    assert run == Repetition(1, 15, 3)


@settings(max_examples=examples(100), deadline=None)
@given(st.text("ab", max_size=40), st.integers(2, 5))
def test_runs_are_those_that_a_plain_search_finds(items, least):
    expected = set()
    for period in range(1, len(items)):
        for start in range(len(items)):
            end = start + period
            while end < len(items) and items[end] == items[end - period]:
                end += 1
            is_longest = (
                start == 0 or items[start - 1] != items[start + period - 1 : start + period]
            )
            is_new = not any(
                s <= start and end <= e and period % shorter == 0 for s, e, shorter in expected
            )
            if end - start >= least * period and is_longest and is_new:
                expected.add((start, end, period))
    assert {(r.start, r.end, r.period) for r in repetition.runs(items, least)} == expected


def steps(number: int, *, reads_state: bool) -> tuple[list[Value], Value]:
    """Rounds of three operations; the last one updates a state from the round before."""
    state = Value.leaf(SPEC, object(), None, None)
    data = Value.leaf(SPEC, object(), None, None)
    nodes = []
    for _ in range(number):
        loss = Value(ENTRIES["a"], (state, data) if reads_state else (data,), ())
        gradient = Value(ENTRIES["b"], (loss,), ())
        state = Value(ENTRIES["c"], (state, gradient), ())
        nodes += [loss, gradient, state]
    return nodes, state


def test_steps_read_the_state_that_they_update():
    nodes, state = steps(8, reads_state=True)
    found = repetition.longest(nodes)
    assert found == Repetition(0, 24, 3) and repetition.has_steps(nodes, found, [state])


def test_sums_over_microsteps_are_no_steps():
    nodes, total = steps(8, reads_state=False)
    found = repetition.longest(nodes)
    assert found is not None and not repetition.has_steps(nodes, found, [total])


def test_layers_are_no_steps():
    nodes = chain("abc" * 8)
    found = repetition.longest(nodes)
    assert found is not None and not repetition.has_steps(nodes, found, [])
    assert not repetition.has_steps(nodes, found, [nodes[0]])  # no earlier state in the run


def test_a_run_is_cut_where_the_fewest_bytes_pass(monkeypatch):
    monkeypatch.setattr(repetition, "MIN_PIECE", 1)
    nodes = chain("ABc" * 8)  # only the result of `c` is small
    found = repetition.longest(nodes)
    assert found == Repetition(0, 24, 3)
    assert repetition.boundaries(nodes, found) == list(range(3, 25, 3))
    assert repetition.serials_between(nodes, found) == 3


def test_short_periods_are_cut_together():
    nodes = chain("ab" * 100)
    found = repetition.longest(nodes)
    positions = repetition.boundaries(nodes, found)
    assert repetition.piece_length(found) == repetition.MIN_PIECE
    assert {b - a for a, b in pairwise(positions)} == {repetition.MIN_PIECE}
    assert repetition.serials_between(nodes, found) == repetition.MIN_PIECE


def test_the_results_of_one_operation_are_told_apart():
    both = Entry("both", lambda *_: [], (SPEC, SPEC), structure=(0, 1))
    node = Value(both, (), ())
    assert repetition.result_of(OpResult(node, 1)) == (node, 1)
    assert repetition.result_of(node) == (node, 0)
