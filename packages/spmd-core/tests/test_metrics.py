"""Counters and program records, also after more programs than the list of records keeps."""

import pytest

from spmd_core import metrics
from spmd_core.metrics import ProgramRecord


@pytest.fixture(autouse=True)
def own_counters(monkeypatch):
    """Counters and records that only the current test writes."""
    monkeypatch.setattr(metrics, "_counters", type(metrics._counters)())
    monkeypatch.setattr(metrics, "_fallbacks", type(metrics._fallbacks)())
    monkeypatch.setattr(metrics, "_programs", [])


def record(name: str) -> ProgramRecord:
    made = ProgramRecord(name=name, num_ops=1, num_leaves=1, num_outputs=1, num_devices=1)
    metrics.record_program(made)
    return made


def test_programs_since_are_found_though_older_records_were_dropped(monkeypatch):
    monkeypatch.setattr(metrics, "_MAX_PROGRAM_RECORDS", 3)
    for i in range(5):
        record(f"old {i}")
    before = metrics.counter("compiles")
    assert before == 5 and [p.name for p in metrics.programs()] == ["old 2", "old 3", "old 4"]
    assert metrics.programs(since=before) == ()
    newest = [record("new 0"), record("new 1")]
    assert list(metrics.programs(since=before)) == newest
    assert [p.name for p in metrics.programs(since=before + 1)] == ["new 1"]
    assert [p.name for p in metrics.programs()] == ["old 4", "new 0", "new 1"]


def test_reset_forgets_records_and_counts_alike():
    record("a")
    metrics.reset()
    assert metrics.programs() == () and metrics.counter("compiles") == 0
    again = record("b")
    assert metrics.programs(since=0) == (again,)


def test_a_fallback_is_counted_by_operation_and_line():
    assert metrics.count_fallback("aten::special", "a.py:1")
    assert not metrics.count_fallback("aten::special", "a.py:2")
    assert not metrics.count_fallback("aten::special", "a.py:2")
    assert [(f.source, f.count) for f in metrics.host_fallbacks()] == [("a.py:2", 2), ("a.py:1", 1)]
    assert "aten::special at a.py:2" in metrics.report()
