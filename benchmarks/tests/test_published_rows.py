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
    quantity = Quantity([1.0, 5.0, 2.0])
    assert (quantity.median, quantity.spread) == (2.0, 3.0)
    assert Quantity([7.0]).spread == 0


def test_a_name_says_its_unit() -> None:
    names = ("step_s", "tokens_per_s", "peak_bytes", "6N_step_flops", "images", "add_us")
    assert [rows.unit(n) for n in names] == ["s", "tokens/s", "bytes", "flops", "images", "us"]


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path, HERE)
    measured = store.of(row())
    assert measured.status == "unfinished"
    measured.runs.append({"started": "", "seconds": 1.0, "samples": {"step_s": [2.0, 4.0]}})
    store.keep(measured)
    again = Store(tmp_path, HERE).of(row())
    assert again == measured and again.status == "unfinished"
    again.runs.append({"started": "", "seconds": 1.0, "samples": {"step_s": [9.0]}})
    store.keep(again)
    (written,) = json.loads((tmp_path / rows.FILE).read_text())["rows"]
    assert written["status"] == "done" and written["commit"] == "abc"
    assert written["quantities"]["step_s"] == {
        "unit": "s",
        "median": 4.0,
        "spread": 5.0,
        "samples": [2.0, 4.0, 9.0],
    }


def test_what_was_measured_otherwise_is_measured_again(tmp_path: Path) -> None:
    store = Store(tmp_path, HERE)
    measured = store.of(row(rounds=1))
    measured.runs.append({"started": "", "seconds": 1.0, "samples": {}})
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
        ('{"version": 0, "rows": []}', "must have results of version 1; got version 0 in"),
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
