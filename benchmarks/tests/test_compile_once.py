"""GPT-2's recipe compiles one program for its steps, and would compile two."""

import pytest

from benchmarks.compile_once import INPUT, RECORDED, run


@pytest.mark.slow
def test_the_recipe_compiles_its_step_once() -> None:
    found = {kind: run(kind, "smoke", 2) for kind in (INPUT, RECORDED)}
    assert [found[kind]["programs"] for kind in (INPUT, RECORDED)] == [1, 2]
    assert found[INPUT]["losses"] == found[RECORDED]["losses"]
