"""The benchmarks' tables, samples and comparisons; no test needs a device."""

import json
from pathlib import Path

import pytest

from benchmarks.loss_agreement import largest_relative_difference
from benchmarks.memory import shard_bytes
from benchmarks.paired_steps import paired_ratio
from benchmarks.report import Samples, Table, publish

TABLE = Table("Title", ["name", "value"], [["a", "1"], ["b", "2"]], ["A note."])


def test_markdown() -> None:
    assert (
        TABLE.markdown()
        == "# Title\n\n| name | value |\n|---|---|\n| a | 1 |\n| b | 2 |\n\nA note.\n"
    )


def test_publish_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish("thing", TABLE, {"x": 1}, folder=tmp_path / "new")
    written = json.loads((tmp_path / "new" / "thing.json").read_text())
    assert written["x"] == 1
    assert written["environment"]["torch"].startswith("2.")
    assert (tmp_path / "new" / "thing.md").read_text() == TABLE.markdown()
    assert "Title" in capsys.readouterr().out


def test_no_cell_is_folded_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    folders = [c * 120 for c in "xy"]
    Table("Title", folders, [["gpt2, tiny", "1"]]).show()
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*folders, "gpt2, tiny"))


def test_samples() -> None:
    samples = Samples()
    for value in (3.0, 1.0, 2.0):
        samples.add(value)
    assert (samples.median, samples.min) == (2.0, 1.0)


def test_ratios_are_of_neighbours() -> None:
    # The machine became ten times slower half way: the ratio of medians would be 1.0 or 10, while
    # the ratio within pairs is 2.
    assert paired_ratio(Samples([2.0, 2.0, 20.0]), Samples([1.0, 1.0, 10.0]))["median"] == 2.0


def test_losses_of_different_length_are_an_error() -> None:
    assert largest_relative_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="got 1 and 2"):
        largest_relative_difference([1.0], [1.0, 2.0])


def test_bytes_on_one_device() -> None:
    sizes = [(16, 3), (7,)]
    assert shard_bytes(sizes, num_devices=8) == 4 * (6 + 7)
