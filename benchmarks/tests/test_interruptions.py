"""Interruptions at random moments, in a process of its own; the benchmark has more of them."""

from tiers import by_tier

from benchmarks import interruptions


def test_every_interruption_is_raised_once_and_changes_nothing() -> None:
    number = by_tier(5, in_all=40)
    result = interruptions.in_child(number)
    assert result["wrong"] == {} and result["printed"] == {}, result
    assert sum(result["hit"].values()) == number
