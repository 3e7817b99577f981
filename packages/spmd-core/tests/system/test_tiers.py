"""What the tiers leave out.

The list of slow tests names what there is, and is chosen by the mean time of the cases. The cases
that only the tier `all` runs leave every value and many pairs to the others.
"""

import itertools
import json
import runpy
from pathlib import Path

import pytest
from tiers import crossed

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


def kept(*values, **options):
    cases = crossed(*values, **options)
    assert {case.values for case in cases} == set(itertools.product(*values))
    assert all(mark.name == "exhaustive" for case in cases for mark in case.marks)
    return {case.values for case in cases if not case.marks}


def test_few_cases_have_every_value_and_many_pairs():
    assert kept("ab", "12") == {("a", "1"), ("b", "2")}
    assert kept("ab", "12", rounds=2) == {*itertools.product("ab", "12")}
    found = kept("ab", "cd", "wxyz")
    assert len(found) == 4 and {x[2] for x in found} == {*"wxyz"}
    assert {x[:2] for x in found} == {*itertools.product("ab", "cd")}
    found = kept("abcdef", "xyz", "12", rounds=2)
    assert len(found) == 12
    assert {x[1:] for x in found} == {*itertools.product("xyz", "12")}
    with pytest.raises(AssertionError, match="a value has no case"):
        crossed("ab", "cd", rounds=0)
