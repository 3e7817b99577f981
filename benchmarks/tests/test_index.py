"""The table of all results, and where they come from; no test needs a device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import environment, index
from benchmarks.report import Table, publish


def test_the_committed_table_is_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["index", "--check"])
    assert index.main() == 0


def test_a_result_is_listed_as_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of = {"date": "2026-01-02", "commit": "abc", "cores": 2, "torch": "2.13.0", "jax": "0.10.2"}
    (tmp_path / "old.json").write_text(json.dumps({"environment": of}))
    (tmp_path / "old.md").write_text("# The old one\n\n| a |\n")
    (tmp_path / "other.json").write_text("[1]")  # not of a benchmark
    publish("new", Table("The new one", ["a"], [["1"]]), {}, folder=tmp_path)
    lines = (tmp_path / index.PAGE).read_text().splitlines()
    assert lines[-1] == "| [The old one](old.md) | 2026-01-02 | abc | 2 cores | 2.13.0, 0.10.2 |"
    here = environment.environment()
    assert lines[-2].startswith(f"| [The new one](new.md) | {here['date']} | {here['commit']} | ")
    assert f"{here['cpu']}, {here['cores']} cores, " in lines[-2]

    monkeypatch.setattr(index, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["index", "--check"])
    assert index.main() == 0
    (tmp_path / "old.md").write_text("# Renamed\n")
    assert index.main() == 1
    assert "is not of these results: run python -m benchmarks.index" in capsys.readouterr().out


def test_changes_that_are_not_committed_have_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.commit() == "unknown"

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for name in ("packages", "examples", "benchmarks/x.py", "constraints.txt"):
        (tmp_path / name).write_text("1")
    git("init")
    git("add", "-A")
    git("commit", "-m", "first")
    first = environment.commit()
    assert len(first) == 12 and "+" not in first
    (tmp_path / "benchmarks/results/x.json").write_text("{}")
    assert environment.commit() == first
    (tmp_path / "benchmarks/x.py").write_text("2")
    changed = environment.commit()
    assert changed.startswith(f"{first}+")
    (tmp_path / "benchmarks/new.py").write_text("3")
    assert environment.commit() != changed
