"""GPT-2's recipe compiles one program for its steps, and would compile two."""

import pytest
from tiers import by_tier

from benchmarks.compile_once import INPUT, RECORDED, run


@pytest.mark.exhaustive  # the recipe's own tests count its programs
@pytest.mark.slow
def test_the_recipe_compiles_its_step_once() -> None:
    """What it compiles as it is, `examples/gpt2/tests/test_train.py` counts in the default tier."""
    kinds = by_tier((RECORDED,), in_all=(INPUT, RECORDED))
    found = {kind: run(kind, "smoke", 2) for kind in kinds}
    assert {kind: of["programs"] for kind, of in found.items()} == {
        kind: 1 if kind == INPUT else 2 for kind in kinds
    }
    assert len({tuple(of["losses"]) for of in found.values()}) == 1
