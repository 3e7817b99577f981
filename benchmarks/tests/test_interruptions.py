"""Interruptions at random moments, in a process of its own; the benchmark has more of them."""

from benchmarks import interruptions


def test_every_interruption_is_raised_once_and_changes_nothing() -> None:
    result = interruptions.in_child(40)
    assert result["wrong"] == {} and result["printed"] == {}, result
    assert sum(result["hit"].values()) == 40
