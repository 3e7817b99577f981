"""Table, files and failures of a comparison, with a recipe that only writes a report."""

import json
from pathlib import Path

import pytest

from examples.training.compare import CompareError, Variant, compare, difference, rows, sent

RECIPE = """
import json, sys
from pathlib import Path
values = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if values["--devices"] == "3":
    sys.exit("no mesh of 3")
losses = [2.0, 1.0 + float(values["--error"])]
collective = {"kind": "all-reduce", "axes": "data", "number": 2, "moved_bytes": 3 * 2**20}
report = dict(
    losses=losses, step_time_s=0.25, program_flops=3e9, peak_bytes=2**21, argument_bytes=None,
    collectives=[collective] * (values["--devices"] != "1"),
)
path = Path(values["--results"])
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(report))
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "recipe_of_a_test.py").write_text(RECIPE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "recipe_of_a_test"


def variant(name: str, devices: int) -> Variant:
    return Variant(name, ["--devices", str(devices)])


def test_reports_are_compared_with_the_first(recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    reports = compare(
        recipe,
        [variant("one", 1), variant("two", 2)],
        common=["--error", "0.5"],
        folder=folder,
    )
    assert [sent(report) for report in reports.values()] == [0, 3 * 2**20]
    assert json.loads((folder / "compare.json").read_text()) == reports
    assert (folder / "compare.png").stat().st_size > 1000
    lines = (folder / "compare.md").read_text().splitlines()
    assert lines[-1] == (
        "| two | 1.5000 | 0e+00 | 250 ms | 3.00 | 2.0 MiB | - | 3.0 MiB "
        "| 2 all-reduce data 3.0 MiB |"
    )
    assert lines[-2].endswith("| none |")
    reports["two"]["losses"] = [2.0, 3.0]
    assert rows(reports)[1][2] == "1e+00"


def test_a_failed_run_ends_the_comparison(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(
        CompareError,
        match=r"every run of a comparison must succeed; got exit code 1 of python -m recipe_of_a",
    ):
        compare(recipe, [variant("three", 3)], common=["--error", "0"], folder=tmp_path)


def test_the_largest_relative_difference() -> None:
    assert difference([2.0, 4.0], [2.0, 5.0]) == 0.25
