"""Each test searches: what an earlier one has found is not taken."""

import pytest

from spmd_core.auto import searches


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What searches keep in memory; nothing is kept on disk."""
    found: dict[str, object] = {}
    monkeypatch.setattr(searches, "_kept", found)
    monkeypatch.setattr(searches, "_folder", lambda: None)
    return found
