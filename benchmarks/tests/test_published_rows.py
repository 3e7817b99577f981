"""Rows of the published plots: what the store keeps, resumes and refuses."""

import json
from pathlib import Path

import pytest

from benchmarks.published import rows
from benchmarks.published.rows import Place, Quantity, Row, Samples, Store, VersionError

HERE = Place("abc", {"torch": "2.13.0"}, {"cores": 2})


def nothing(folder: Path, seconds: float) -> Samples:
    return {}


def row(*, command: str = "-m x", rounds: int = 2) -> Row:
    return Row("gpt2", "tiny, FSDP", command.split(), nothing, {"preset": "tiny"}, rounds)


def test_median_and_spread() -> None:
    # By a table of Student's t: 4.303 for three samples, 12.706 for two.
    quantity = Quantity([1.0, 5.0, 2.0])
    assert quantity.median == 2.0
    assert quantity.spread == pytest.approx(4.303 * (13 / 3) ** 0.5 / 3**0.5, rel=1e-3)
    assert Quantity([1.0, 2.0]).spread == pytest.approx(12.706 / 2, rel=1e-3)
    assert Quantity([7.0]).spread == 0 and Quantity([3.0, 3.0]).spread == 0
    assert Quantity([7.0], drift=0.1).spread == pytest.approx(2 * 0.7)
    # What all quantities vary by counts as four samples: 2.776 for four, 2.447 for six of them.
    assert Quantity([7.0], noise=0.1).spread == pytest.approx(2.776 * 0.7, rel=1e-3)
    moderated = ((4 * 0.2**2 + 2 * 13 / 3) / 6 / 3) ** 0.5
    assert Quantity([1.0, 5.0, 2.0], noise=0.1).spread == pytest.approx(2.447 * moderated, rel=1e-3)
    by_samples = Quantity([1.0, 5.0, 2.0]).spread
    both = Quantity([1.0, 5.0, 2.0], drift=0.1)
    assert both.spread**2 == pytest.approx(by_samples**2 + (2 * 0.1 * 2.0) ** 2)
    # Tables and plots show what the samples say, without the machine's drift.
    assert both.interval == by_samples and Quantity([7.0], drift=0.1).interval == 0
    assert Quantity([1.0, 2.0], drift=0.1, is_measured=False).interval == 0


def test_the_drift_reaches_times_and_rates(tmp_path: Path) -> None:
    store = Store(tmp_path, HERE)
    for name, probe_s in (("a", 0.1), ("b", 0.11), ("c", 0.125), ("d", None)):
        measured = store.of(Row("gpt2", name, ["-m", "x"], nothing))
        samples = {"step_s": [2.0], "tokens_per_s": [10.0], "peak_bytes": [7.0], "ratio": [1.0]}
        measured.runs.append(
            {"started": "", "seconds": 1.0, "probe_s": probe_s, "samples": samples}
        )
        store.keep(measured)
    other = Store(tmp_path, Place("def", {}, {}))
    measured = other.of(Row("gpt2", "e", ["-m", "x"], nothing))
    measured.runs.append({"started": "", "seconds": 1.0, "probe_s": 9.0, "samples": samples})
    other.keep(measured)
    found = {row.name: row for row in rows.read(tmp_path)}
    # The middle 68% of 0.1, 0.11, 0.125: from 0.1032 to 0.1202.
    drift = (0.1202 - 0.1032) / 2 / 0.11
    for name in "abcd":
        spreads = {key: of.spread for key, of in found[name].quantities().items()}
        assert spreads.pop("step_s") == pytest.approx(2 * 2 * drift)
        assert spreads.pop("tokens_per_s") == pytest.approx(2 * 10 * drift)
        assert spreads == {"peak_bytes": 0, "ratio": 0}
    assert found["e"].drift == 0  # another commit, of one probe
    # More runs of a row average the speed.
    found["a"].runs *= 4
    averaged = found["a"]["step_s"]
    assert averaged.spread == pytest.approx(2 * 2 * drift / 4**0.5)


def test_times_share_their_variance(tmp_path: Path) -> None:
    store = Store(tmp_path, HERE)
    many = {"a": [1.0, 1.2, 1.1], "b": [8.0, 10.0, 9.0], "c": [5.0], "d": [1.0, 9.0, 1.0]}
    for name, samples in many.items():
        measured = store.of(Row("gpt2", name, ["-m", "x"], nothing, rounds=1))
        found = {"step_s": samples, "peak_bytes": [1.0, 2.0], "ratio": [1.0, 2.0]}
        measured.runs.append({"started": "", "seconds": 1.0, "probe_s": None, "samples": found})
        store.keep(measured)
    for row in rows.read(tmp_path):
        assert row.noise == pytest.approx(1 / 9)  # of b: a varies less, and d has an outlier
        quantities = row.quantities()
        assert quantities["step_s"].noise == row.noise
        assert quantities["peak_bytes"].spread == 0  # a compiler's
        assert quantities["ratio"].spread == pytest.approx(12.706 / 2, rel=1e-3)


def test_a_name_says_its_unit() -> None:
    names = ("step_s", "tokens_per_s", "peak_bytes", "6N_step_flops", "images", "add_us")
    assert [rows.unit(n) for n in names] == ["s", "tokens/s", "bytes", "flops", "images", "us"]


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path, HERE)
    measured = store.of(row())
    assert measured.status == "unfinished"
    measured.runs.append(
        {"started": "", "seconds": 1.0, "probe_s": None, "samples": {"step_s": [2.0, 4.0]}}
    )
    store.keep(measured)
    again = Store(tmp_path, HERE).of(row())
    assert again == measured and again.status == "unfinished"
    again.runs.append(
        {"started": "", "seconds": 1.0, "probe_s": None, "samples": {"step_s": [9.0]}}
    )
    store.keep(again)
    (written,) = json.loads((tmp_path / rows.FILE).read_text())["rows"]
    assert written["status"] == "done" and written["commit"] == "abc"
    assert written["quantities"]["step_s"] == {
        "unit": "s",
        "median": 4.0,
        "interval": pytest.approx(2.447 * 13**0.5 / 3**0.5, rel=1e-3),
        "spread": pytest.approx(2.447 * 13**0.5 / 3**0.5, rel=1e-3),  # all vary as this one
        "samples": [2.0, 4.0, 9.0],
    }


def test_what_was_measured_otherwise_is_measured_again(tmp_path: Path) -> None:
    store = Store(tmp_path, HERE)
    measured = store.of(row(rounds=1))
    measured.runs.append({"started": "", "seconds": 1.0, "probe_s": None, "samples": {}})
    store.keep(measured)
    assert Store(tmp_path, HERE).of(row(rounds=1)).runs
    assert not Store(tmp_path, Place("def", HERE.versions, HERE.hardware)).of(row(rounds=1)).runs
    assert not Store(tmp_path, Place("abc", {"torch": "2.14.0"}, {})).of(row(rounds=1)).runs
    assert not Store(tmp_path, HERE).of(row(rounds=1, command="-m y")).runs
    assert not Store(tmp_path, HERE).of(row(rounds=3)).runs
    # For a report, what another commit measured by the same command is still known.
    assert Store(tmp_path, Place("def", {}, {})).known(row()) == measured
    assert Store(tmp_path, HERE).known(row(command="-m y")) is None


def test_a_failed_row_begins_anew(tmp_path: Path) -> None:
    store = Store(tmp_path, HERE)
    measured = store.of(row())
    measured.reason = "it did"
    store.keep(measured)
    assert measured.status == "failed"
    assert store.of(row()).status == "unfinished"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 1, "rows": []}', "must have results of version 2; got version 1 in"),
        ("{", "must be one that this command wrote; got"),
        ('{"rows": []}', r"which cannot be read \(KeyError\('version'\)\). Move it away"),
        ("[]", "which cannot be read"),
    ],
)
def test_a_folder_of_another_version(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / rows.FILE).write_text(text)
    with pytest.raises(VersionError, match=message):
        Store(tmp_path, HERE)


def test_where_rows_are_measured() -> None:
    place = rows.place("NVIDIA H200")
    assert place.hardware["accelerator"] == "NVIDIA H200" and place.hardware["cores"] >= 1
    assert set(place.versions) == {"python", "torch", "jax", "jaxlib", "transformers"}
    assert place == rows.place("NVIDIA H200")


def test_a_name_as_a_path() -> None:
    assert Row("hbm", "2B, fsdp=4,tensor=2", [], nothing).slug == "2B-fsdp=4-tensor=2"
