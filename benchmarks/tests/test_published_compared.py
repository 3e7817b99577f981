"""How far a run of the published plots moved from another: by the fixed job's time, and exactly."""

from pathlib import Path

import pytest

from benchmarks import check
from benchmarks.published.compared import compare
from benchmarks.published.rows import Place, Row, Samples, Store

HERE = Place("abc", {"torch": "2.13.0"}, {"cores": 2})


def run(
    folder: Path,
    samples: Samples,
    *,
    probe_s: float | None = 0.1,
    command: str = "-m x",
    place: Place = HERE,
    name: str = "tiny",
) -> Path:
    """A folder with one more finished row of two equal runs."""
    store = Store(folder, place)
    measured = store.of(Row("gpt2", name, command.split(), lambda folder, s: {}, rounds=2))
    one = {"started": "", "seconds": 1.0, "probe_s": probe_s, "samples": samples}
    measured.runs += [one, one]
    store.keep(measured)
    return folder


SAMPLES: Samples = {
    "step_s": [1.0, 1.02, 1.04],
    "tokens_per_s": [9.0, 8.0, 7.0],
    "peak_bytes": [1000.0],
    "images": [100.0],
    "tried_images": [100.0],
    "ratio": [0.9, 0.92, 0.94],
    "last_loss": [3.0],
}


def moved(run: Path, baseline: Path) -> dict[str, tuple[float, bool]]:
    found = compare(run, baseline).movements
    return {
        m.figure.removeprefix("gpt2, tiny, "): (round(m.change, 3), m.is_worse)
        for m in found
        if m.is_beyond(0.1)
    }


def test_what_is_compared(tmp_path: Path) -> None:
    found = compare(run(tmp_path / "a", SAMPLES), run(tmp_path / "b", SAMPLES))
    names = {m.figure.removeprefix("gpt2, tiny, ") for m in found.movements}
    assert names == {"step_s", "peak_bytes", "images", "ratio"}
    assert not any(m.is_beyond(0) for m in found.movements)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"step_s": [1.5, 1.52, 1.54]}, {"step_s": (0.49, True)}),
        ({"step_s": [0.5, 0.52, 0.54]}, {"step_s": (-0.49, False)}),
        ({"step_s": [0.5, 1.5, 3.0]}, {}),  # its own noise is as large
        ({"peak_bytes": [1020.0]}, {"peak_bytes": (0.02, True)}),
        ({"peak_bytes": [1005.0]}, {}),  # less than a version's rounding
        ({"images": [90.0]}, {"images": (-0.1, True)}),
        ({"images": [110.0]}, {"images": (0.1, False)}),
        ({"ratio": [1.2, 1.22, 1.24]}, {"ratio": (0.326, True)}),
        ({"tokens_per_s": [1.0], "tried_images": [1.0], "last_loss": [1.0]}, {}),
    ],
)
def test_movements(tmp_path: Path, changed: Samples, found: dict[str, tuple[float, bool]]) -> None:
    baseline = run(tmp_path / "a", SAMPLES)
    assert moved(run(tmp_path / "b", SAMPLES | changed), baseline) == found


def test_a_machine_of_half_the_speed_has_the_same_ratios(tmp_path: Path) -> None:
    slow = {name: [2 * x if name == "step_s" else x for x in of] for name, of in SAMPLES.items()}
    baseline = run(tmp_path / "a", SAMPLES)
    assert moved(run(tmp_path / "b", slow, probe_s=0.2), baseline) == {}
    assert "step_s" in moved(run(tmp_path / "c", slow, probe_s=0.1), baseline)


def test_times_without_the_fixed_job_are_not_judged(tmp_path: Path) -> None:
    baseline = run(tmp_path / "a", SAMPLES, probe_s=None)
    found = compare(run(tmp_path / "b", SAMPLES), baseline)
    assert {m.figure for m in found.movements if m.noise is None} == {"gpt2, tiny, step_s"}


def test_other_rows_and_other_places_are_named(tmp_path: Path) -> None:
    baseline = run(tmp_path / "a", SAMPLES)
    run(baseline, SAMPLES, name="old")
    run(baseline, SAMPLES, name="other", command="-m y")
    there = Place("def", {"torch": "2.15.0"}, {"cores": 4})
    new = run(tmp_path / "b", SAMPLES, place=there)
    run(new, SAMPLES, name="other", command="-m z", place=there)
    found = compare(new, baseline)
    assert found.gone == ("gpt2, old", "gpt2, other") and found.new == ("gpt2, other",)
    assert found.versions == "torch 2.13.0 to 2.15.0, cores 2 to 4"


def test_the_command_compares_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline, new = run(tmp_path / "a", SAMPLES), run(tmp_path / "b", {"peak_bytes": [2000.0]})
    assert check.main([str(new), "--baseline", str(baseline)]) == 1
    assert "gpt2, tiny, peak_bytes" in capsys.readouterr().out
    assert check.main([str(baseline), "--baseline", str(new)]) == 0


def test_folders_that_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = run(tmp_path / "a", SAMPLES)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("{")
    other = run(tmp_path / "other", SAMPLES, command="-m y")
    for name, words in (
        ("empty", "has a results.json; got "),
        ("broken", "which cannot be read"),
        (other.name, "by the rows that both finished with the same command; got none in common"),
    ):
        assert check.main([str(tmp_path / name), "--baseline", str(good)]) == 2
        assert words in capsys.readouterr().err


def test_the_committed_run_is_a_baseline() -> None:
    found = compare(check.QUICK_RUN, check.QUICK_RUN)
    assert len(found.movements) > 100 and not any(m.is_beyond(0) for m in found.movements)
