"""Whether two runs agree: medians within both spreads, and the rows that can be compared."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.published import agree
from benchmarks.published.rows import Place, Row, Store

HERE = Place("abc", {}, {})


def run(folder: Path, *, step_s: Sequence[float], peak: float, command: str = "-m x") -> Path:
    store = Store(folder, HERE)
    measured = store.of(Row("gpt2", "tiny", command.split(), lambda folder, seconds: {}))
    samples = {"step_s": list(step_s), "peak_bytes": [peak]}
    measured.runs.append({"started": "", "seconds": 1.0, "probe_s": None, "samples": samples})
    store.keep(measured)
    return folder


@pytest.mark.parametrize(
    ("step_s", "peak", "different"),
    [
        ([1.0, 1.1, 1.2], 7.0, []),
        ([1.2, 1.2, 1.2], 7.0, []),  # within the spread of the first
        ([1.4, 1.4, 1.4], 7.0, ["step_s"]),
        ([1.4, 1.4, 1.8], 7.0, []),  # within its own
        ([1.0, 1.1, 1.2], 8.0, ["peak_bytes"]),  # the compiler's figures have no spread
    ],
)
def test_two_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step_s: Sequence[float],
    peak: float,
    different: list[str],
) -> None:
    first = run(tmp_path / "a", step_s=[1.0, 1.1, 1.2], peak=7.0)
    second = run(tmp_path / "b", step_s=step_s, peak=peak)
    assert agree.main([str(first), str(second)]) == bool(different)
    text = capsys.readouterr().out
    assert f"{2 - len(different)} of 2 quantities agree" in text
    assert all(f"gpt2, tiny: {name}" in text for name in different)


def test_runs_without_a_common_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path / "a", step_s=[1.0], peak=7.0)
    second = run(tmp_path / "b", step_s=[1.0], peak=7.0, command="-m y")
    assert agree.main([str(first), str(second)]) == 2
    assert "by the rows that both have; got none in common of" in capsys.readouterr().err
    (second / "results.json").write_text("{")
    assert agree.main([str(first), str(second)]) == 2
    assert "must be one that this command wrote" in capsys.readouterr().err


def test_what_was_measured_once_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(tmp_path / "a", step_s=[1.0], peak=7.0)
    second = run(tmp_path / "b", step_s=[2.0, 2.1], peak=7.0 + 1e-10)
    assert agree.main([str(first), str(second)]) == 0
    assert "1 of 1 quantities agree" in capsys.readouterr().out


@pytest.mark.parametrize(("num_different", "code"), [(0, 0), (1, 0), (2, 0), (3, 1)])
def test_one_in_twenty_may_differ_by_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_different: int, code: int
) -> None:
    for folder, num in (("a", 0), ("b", num_different)):
        store = Store(tmp_path / folder, HERE)
        measured = store.of(Row("gpt2", "tiny", ["-m", "x"], lambda folder, seconds: {}))
        factors = [2.0] * num + [1.0] * (40 - num)
        samples = {f"{i}_s": [1.0 * f, 1.01 * f, 1.02 * f] for i, f in enumerate(factors)}
        measured.runs.append({"started": "", "seconds": 1.0, "probe_s": None, "samples": samples})
        store.keep(measured)
    assert agree.main([str(tmp_path / "a"), str(tmp_path / "b")]) == code
    said = f"{40 - num_different} of 40 quantities agree within their spread; 40 are measured, of"
    assert f"{said} which 2 may differ by chance" in capsys.readouterr().out
