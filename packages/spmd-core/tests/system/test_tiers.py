"""The list of slow tests: it names what there is, and is chosen by the mean time of the cases."""

import json
import runpy
from pathlib import Path

SCRIPTS = Path(__file__).parents[4] / "scripts"


def test_the_list_of_slow_tests_names_functions_that_exist():
    listed = json.loads((SCRIPTS / "slow_tests.json").read_text())
    assert listed
    missing = [
        f"{file}::{name}"
        for file, names in listed.items()
        for text in [
            (SCRIPTS.parent / file).read_text() if (SCRIPTS.parent / file).exists() else ""
        ]
        for name in names
        if f"def {name}(" not in text
    ]
    assert not missing, (
        f"moved or renamed, so the fast tier runs them; write the list again: {missing}"
    )


def test_the_slowest_are_left_out_until_the_others_are_fast(tmp_path):
    tests = runpy.run_path(str(SCRIPTS / "slow_tests.py"))
    report = tmp_path / "run.xml"
    cases = [("test_a[x::y]", 1.0), ("test_a[z[0]]", 3.0), ("test_b", 1.5), ("test_c", 0.1)]
    report.write_text(
        "<testsuites>"
        + "".join(f'<testcase classname="p.t" name="{n}" time="{s}"/>' for n, s in cases)
        + "</testsuites>"
    )
    seconds = tests["measured"](report)
    assert seconds["p/t.py", "test_a"] == [1.0, 3.0]
    assert tests["chosen"](seconds, 2.0) == [("p/t.py", "test_a")]
    assert tests["chosen"](seconds, 1.0) == [("p/t.py", "test_a"), ("p/t.py", "test_b")]
    assert tests["chosen"](seconds, 6.0) == []
