"""How much of a test the tier runs: cases for releases alone, and examples of a property."""

import os
from typing import Any

import pytest

TIER = os.environ.get("SPMD_TEST_TIER", "default")


def exhaustive(*values: Any, id: str | None = None) -> Any:
    """A case of `pytest.mark.parametrize` that only the tier `all` runs, as others are like it."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, id=id)


def examples(number: int) -> int:
    """How many examples of a property to try: `number`, and at most 40 in the fast tier."""
    return min(number, 40) if TIER == "fast" else number
