"""The rows, the verdicts, and what the benchmark does with results of an earlier run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hbm

ROW = hbm.Row("0.5B", fsdp=4)
assert ROW.bound is not None
BOUND = ROW.bound.total


def found(of_bound: float, of_reference: float, **more: Any) -> dict[str, Any]:
    peak = of_bound * BOUND
    return {
        "recipe": {"peak": peak, "parts": {}, "fits": True, "mfu_bound": 0.6, **more},
        "by default": {"peak": 1.2 * peak},
        "reference": {"peak": peak / of_reference},
    }


def verdict_of(row: hbm.Row, result: dict[str, Any]) -> str:
    (cells,) = hbm.table_of({row.name: {"by default": {}, **result}}).rows
    return cells[-1]


def test_names_and_topologies() -> None:
    assert hbm.Row("2B").name == "2B unsharded"
    assert hbm.Row("4B", 4, 2, batch=4).name == "4B fsdp=4,tensor=2 batch 4"
    assert (hbm.Row("2B").mesh, hbm.Row("2B", 16).topology) == ("data=1", "v4-32")
    assert len({row.name for row in hbm.ROWS}) == len(hbm.ROWS)


def test_a_row_reaches_both_targets_or_neither_counts() -> None:
    assert verdict_of(ROW, found(1.09, 1.02)) == "yes"
    assert verdict_of(ROW, found(1.11, 1.02)) == "NO"
    assert verdict_of(ROW, found(1.09, 1.04)) == "NO"


def test_both_alignments_are_shown() -> None:
    (cells,) = hbm.table_of({ROW.name: found(1.0, 0.5)}).rows
    assert cells[4:7] == ["1.000", "1.200", "0.500"]


def test_arguments_of_libtpu_follow_those_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--first")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "told.py").write_text(
        "import json, os, sys; json.dump(os.environ['LIBTPU_INIT_ARGS'], open(sys.argv[1], 'w'))"
    )
    output = tmp_path / "out.json"
    assert hbm.compiled(["told", str(output)], output, arguments=hbm.ALIGNED) == (
        f"--first {hbm.ALIGNED}"
    )


def test_a_larger_batch_has_to_fit_and_to_be_bound_by_products() -> None:
    (row,) = [row for row in hbm.ROWS if row.name == "4B fsdp=8 batch 4"]
    assert row.bound is not None
    result = {"recipe": {"peak": row.bound.total, "fits": True, "mfu_bound": 0.6}, "reference": {}}
    assert verdict_of(row, result) == "yes"
    result["recipe"]["mfu_bound"] = 0.4
    assert verdict_of(row, result) == "NO"


def test_a_failure_is_named() -> None:
    result = {"recipe": {"failed": "does not fit"}, "reference": {"failed": "no output"}}
    assert verdict_of(ROW, result) == "NO; recipe: does not fit; reference: no output"


def test_what_cannot_fit_is_told() -> None:
    oom = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (59.87G) exceeds "
    oom += "available HBM (30.75G). HLO module: jit_step.\nmore"
    result = {"recipe": {"failed": f"a program must fit\n{oom}"}, "reference": {"failed": "x\ny"}}
    said = verdict_of(hbm.Row("4B"), result)
    assert said == (
        "no program fits; recipe: total memory required for HLO temporaries (59.87G) exceeds "
        "available HBM (30.75G); reference: x"
    )


def test_finished_parts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def measure(row: hbm.Row, folder: Path) -> dict[str, Any]:
        made.append(row.name)
        return {"peak": 1.0, "parts": {}}

    monkeypatch.setattr(hbm, "MEASURED", dict.fromkeys(hbm.MEASURED, measure))
    arguments = ["hbm", "--out", str(tmp_path), "--only", "0.5B", "--only", "tensor"]
    for again in ([], [], ["--again"]):
        monkeypatch.setattr(sys, "argv", [*arguments, *again])
        hbm.main()
    assert made == ["0.5B fsdp=4,tensor=2"] * 6
    assert [*json.loads((tmp_path / "hbm.json").read_text())["rows"]] == ["0.5B fsdp=4,tensor=2"]


def test_the_end_of_a_complaint(tmp_path: Path) -> None:
    command = ["benchmarks.reference_jax_gpt2", "--mesh=data=2"]
    said = hbm.compiled(command, tmp_path / "x.json", arguments="")
    assert said.startswith("error: mesh axes must be among fsdp, tensor; got ['data']")


def test_rows_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["hbm", "--only", "3B"])
    with pytest.raises(SystemExit):
        hbm.main()
    assert "--only must be part of a row's name" in capsys.readouterr().err


def test_without_recomputation_there_is_no_bound() -> None:
    row = hbm.ROWS[-1]
    assert row.name == "2B unsharded without recomputation" and row.bound is None
    result = {"recipe": {"peak": 25e9}, "by default": {"peak": 25e9}, "reference": {"peak": 25e9}}
    (cells,) = hbm.table_of({row.name: result}).rows
    assert cells[1:6] == ["25.00", "", "25.00", "", ""] and cells[-1] == "yes"
