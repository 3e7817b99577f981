"""Counters and program records, also after more programs than the list of records keeps."""

import pytest

from spmd_core import counters
from spmd_core.counters import ProgramRecord


@pytest.fixture(autouse=True)
def own_counters(monkeypatch):
    """Counters and records that only the current test writes."""
    monkeypatch.setattr(counters, "_counters", type(counters._counters)())
    monkeypatch.setattr(counters, "_fallbacks", type(counters._fallbacks)())
    monkeypatch.setattr(counters, "_programs", [])


def record(name: str) -> ProgramRecord:
    made = ProgramRecord(name=name, num_ops=1, num_leaves=1, num_outputs=1, num_devices=1)
    counters.record_program(made)
    return made


def test_programs_since_are_found_though_older_records_were_dropped(monkeypatch):
    monkeypatch.setattr(counters, "_MAX_PROGRAM_RECORDS", 3)
    for i in range(5):
        record(f"old {i}")
    before = counters.counter("compiles")
    assert before == 5 and [p.name for p in counters.programs()] == ["old 2", "old 3", "old 4"]
    assert counters.programs(since=before) == ()
    newest = [record("new 0"), record("new 1")]
    assert list(counters.programs(since=before)) == newest
    assert [p.name for p in counters.programs(since=before + 1)] == ["new 1"]
    assert [p.name for p in counters.programs()] == ["old 4", "new 0", "new 1"]


def test_reset_forgets_records_and_counts_alike():
    record("a")
    counters.reset()
    assert counters.programs() == () and counters.counter("compiles") == 0
    again = record("b")
    assert counters.programs(since=0) == (again,)


def test_a_fallback_is_counted_by_operation_and_line():
    assert counters.count_fallback("aten::special", "a.py:1")
    assert not counters.count_fallback("aten::special", "a.py:2")
    assert not counters.count_fallback("aten::special", "a.py:2")
    assert [(f.source, f.count) for f in counters.host_fallbacks()] == [
        ("a.py:2", 2),
        ("a.py:1", 1),
    ]
    assert "aten::special at a.py:2" in counters.report()
