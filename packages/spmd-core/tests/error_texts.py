"""What errors say, checked for what joining texts leaves behind."""

import re

import pytest

from spmd_core.errors import MeshError


def message_of(wrong, error=MeshError) -> str:
    """The text of the error that `wrong()` raises.

    Asserts that it ends with a period, and has no double space or unformatted placeholder.
    """
    with pytest.raises(error) as caught:
        wrong()
    text = str(caught.value)
    assert text.endswith(".")
    assert "  " not in text
    assert not re.search(r"\{[a-z]", text), "an f-string without its f"
    return text
